"""What a plan is held against: the traced model's tensors and who reads them; and what the plan says of each, looked up."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.analysis.gradients import cast_alone
from autopar.capture.trace import Trace
from autopar.emit.choices import buffer_key, input_key, output_key, parameter_key
from autopar.layout import Layout, Strategy
from autopar.plans import Communication, Plan
from autopar.rules import operands_of

TensorKey = tuple[str, int]  # node key, result


@dataclass(frozen=True, slots=True)
class Reader:
    """Operand `operand` of node `key`, which runs in `phase`."""

    key: str
    operand: int
    phase: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the traced model.

    Attributes:
        key, result: what makes it. phase: when. resident: it is a parameter, a buffer or an input, there all the time; no copy of one.
        given: it is there when the step begins: the same with copies, without gradients that come from another stage.
        sum_dtype: what its partial sums are reduced in: gradients of 16-bit parameters in fp32, what is cast to a gradient in the dtype of
            that, all else in its own dtype.
    """

    key: str
    result: int
    phase: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sum_dtype: torch.dtype
    resident: bool
    readers: tuple[Reader, ...]
    given: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """A traced model: tensors by what makes them, compute nodes by key, the key of each node of the graph by its name, every
    key a plan has to speak of, and which nodes of forward `asked` for: what they make backward reads, or another stage, or what such nodes
    make of it. Where backward runs an op again it runs these of its nodes."""

    tensors: Mapping[TensorKey, Tensor]
    nodes: Mapping[str, fx.Node]
    names: Mapping[str, str]
    keys: frozenset[str]
    asked: frozenset[str] = frozenset()

    @staticmethod
    def of(trace: Trace, *, accumulates: bool = False) -> Facts:
        """Args: accumulates: whether a step has several microbatches, which get parameters in the dtype that they read."""
        named = {p.node: parameter_key(p.name) for p in trace.parameters}
        named |= {b.node: buffer_key(b.name) for b in trace.buffers} | {i.node: input_key(i.path) for i in trace.inputs}
        tangents = {o.tangent: output_key(o.path) if o.is_answered else input_key("tangent") for o in trace.differentiable}
        named |= tangents
        passing = {i.node for i in trace.inputs if i.crosses}  # held like what forward makes
        returning = {o.tangent for o in trace.differentiable if o.is_answered}
        nodes = {n.meta["key"]: n for n in trace.graph.nodes if n.op == "call_function"}
        names = named | {node.name: key for key, node in nodes.items()}
        readers: dict[tuple[str, int], list[Reader]] = {}
        for ref, reader in (*_reads(nodes), *_results(trace)):
            readers.setdefault(ref, []).append(reader)
        gradients = {ref for ref, found in readers.items() if any(r.key.endswith("/parameter") for r in found)}
        copied = {p.node for p in trace.parameters if p.is_narrowed and not accumulates}
        only_cast, tensors = cast_alone(trace), {}
        for node in trace.graph.nodes:
            value = node.meta.get("val")
            for result, each in enumerate(value if isinstance(value, tuple | list) else (value,)):
                if node.name in names and isinstance(each, torch.Tensor):
                    phase = "backward" if node.name in tangents else node.meta.get("phase", "forward")
                    here = (node.name, result)
                    narrow = here in gradients and each.dtype.is_floating_point and each.dtype.itemsize < 4
                    wide = torch.float32 if narrow else only_cast.get(node.name, each.dtype)
                    shape, key = tuple(int(n) for n in each.shape), names[node.name]
                    found = tuple(readers.get(here, ()))
                    there = node.name in named and node.name not in passing
                    given, resident = there and node.name not in returning, there and node.name not in copied
                    tensors[key, result] = Tensor(key, result, phase, shape, each.dtype, wide, resident, found, given)
        leaving = {names[o.node] for o in trace.outputs if o.crosses and o.node in names}
        keys = frozenset(names.values()) | {r.key for _, r in _results(trace)}
        return Facts(tensors, nodes, names, keys, _asked(tensors.values(), leaving))


def _asked(tensors: Collection[Tensor], leaving: set[str]) -> frozenset[str]:
    """See `Facts`. Args: leaving: keys of what other stages read."""
    makers: dict[str, list[str]] = {}
    left = sorted(leaving)
    for tensor in tensors:
        for reader in tensor.readers if tensor.phase == "forward" else ():
            makers.setdefault(reader.key, []).append(tensor.key)
            left += [tensor.key] if reader.phase == "backward" else []
    found = set[str]()
    while left:
        key = left.pop()
        if key not in found:
            found.add(key)
            left += makers.get(key, ())
    return frozenset(found)


def _reads(nodes: Mapping[str, fx.Node]) -> Iterator[tuple[tuple[str, int], Reader]]:
    for key, node in nodes.items():
        part = int(node.args[1]) if node.target is operator.getitem else 0  # type: ignore[arg-type]
        for operand, source in enumerate(operands_of(node)):
            yield (source.name, part), Reader(key, operand, node.meta["phase"])


def _results(trace: Trace) -> Iterator[tuple[tuple[str, int], Reader]]:
    """What the model returns, new values of buffers, and gradients, which their parameters read."""
    made = next(iter(reversed(trace.graph.nodes))).args[0]
    wanted = [(i, output_key(o.path), "forward") for i, o in enumerate(trace.outputs)]
    wanted += [(i, output_key(name), "forward") for name, i in trace.mutated.items()]
    wanted += [(p.gradient, parameter_key(p.name), "backward") for p in trace.parameters if p.gradient is not None]
    wanted += [(i.gradient, input_key(i.path), "backward") for i in trace.inputs if i.gradient is not None]
    for position, key, phase in wanted:
        yield (made[position].name, 0), Reader(key, 0, phase)  # type: ignore[index, union-attr]


@dataclass(frozen=True, slots=True)
class Claims:
    """What a plan says, instance by instance.

    Attributes:
        chosen, again: node key → strategy, and the one with which backward runs it again.
        steps: tensor and phase → its collectives. kept: tensor → layouts kept for backward.
        own: node key and phase → the collectives that the node does by itself.
    """

    chosen: Mapping[str, Strategy]
    again: Mapping[str, Strategy]
    steps: Mapping[tuple[TensorKey, str], tuple[Communication, ...]]
    kept: Mapping[TensorKey, tuple[Layout, ...]]
    own: Mapping[tuple[str, str], tuple[Communication, ...]]

    @staticmethod
    def of(plan: Plan) -> Claims:
        steps: dict[tuple[TensorKey, str], tuple[Communication, ...]] = {}
        own: dict[tuple[str, str], tuple[Communication, ...]] = {}
        for node, step in plan.steps():
            if step.own:
                own[node, step.phase] = (*own.get((node, step.phase), ()), step)
                continue
            where = ((node, step.result), step.phase)
            steps[where] = (*steps.get(where, ()), step)
        kept: dict[TensorKey, tuple[Layout, ...]] = {}
        for k in plan.kept:
            for indices in k.instances:
                here = k.node.format(*indices), k.result
                kept[here] = (*kept.get(here, ()), *k.layouts)
        return Claims(plan.node_choices(), plan.recomputed_choices(), steps, kept, own)
