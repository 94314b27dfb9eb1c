"""The facts against which claims are checked: the tensors of the traced model and their readers,
and the claims of a plan by key."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.analysis.gradients import only_widened
from autopar.capture.trace import Trace
from autopar.constraints import read_constraint
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced
from autopar.emit.context import buffer_key, input_key, output_key, parameter_key
from autopar.plans import Communication, Plan
from autopar.program.executor import ReturnedOutputs
from autopar.program.schedule import Action
from autopar.rules import operands_of
from autopar.sharding import Forced, classes_of, resolve

TensorKey = tuple[str, int]  # (node key, index of the result)


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Operand `operand` of node `key`, which runs in `phase`."""

    key: str
    operand: int
    phase: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the traced model.

    Attributes:
        key, result: the node that computes it, and the index of its result.
        phase: the phase of that node.
        shape: the global shape.
        dtype: the dtype.
        resident: whether it is a parameter, a buffer or an input, and not a copy of one.
        readers: its readers.
        given: whether it exists when the step begins: resident tensors and copies of them, but not
            gradients from another stage.
        sum_dtype: the dtype in which its partial sums are reduced: fp32 for gradients of 16-bit
            parameters, the dtype of the gradient for a tensor that is cast to one, else its own.
    """

    key: str
    result: int
    phase: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sum_dtype: torch.dtype
    resident: bool
    readers: tuple[TensorReader, ...]
    given: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """A traced model.

    Attributes:
        tensors: (node key, index of the result) → tensor.
        nodes: key → compute node.
        names: name of a node of the graph → its key.
        keys: all keys that a plan must list.
        needed: forward nodes whose results backward or another stage reads, directly or through
            other such nodes. If backward recomputes an op, it runs only these of its nodes.
    """

    tensors: Mapping[TensorKey, Tensor]
    nodes: Mapping[str, fx.Node]
    names: Mapping[str, str]
    keys: frozenset[str]
    needed: frozenset[str] = frozenset()

    @staticmethod
    def of(trace: Trace, *, accumulates: bool = False) -> Facts:
        """Collect the tensors of a traced model and the readers of each.

        Args:
            trace: the trace of one call of the model, or of a stage.
            accumulates: whether a step has several microbatches, which get parameters in the dtype
                that they read.

        Returns:
            One `Tensor` per result of each node that the plan must list, with the shape of the
            whole tensor.
        """
        origins = _Origins.of(trace, accumulates=accumulates)
        nodes = {n.meta["key"]: n for n in trace.graph.nodes if n.op == "call_function"}
        names = {**origins.keys, **{node.name: key for key, node in nodes.items()}}
        readers: dict[TensorKey, list[TensorReader]] = {}
        for ref, reader in (*_reads(nodes), *_results(trace)):
            readers.setdefault(ref, []).append(reader)
        cast_to, tensors = only_widened(trace), dict[TensorKey, Tensor]()
        for node in trace.graph.nodes:
            for result, value in _values_of(node) if node.name in names else ():
                tensor_readers = tuple(readers.get((node.name, result), ()))
                tensors[names[node.name], result] = Tensor(
                    key=names[node.name],
                    result=result,
                    phase=origins.phase_of(node),
                    shape=tuple(int(n) for n in value.shape),
                    dtype=value.dtype,
                    sum_dtype=_choose_sum_dtype(
                        value.dtype, tensor_readers, cast_to.get(node.name, value.dtype)
                    ),
                    resident=node.name in origins.resident,
                    readers=tensor_readers,
                    given=node.name in origins.given,
                )
        leaving = {names[o.node] for o in trace.outputs if o.crosses and o.node in names}
        keys = frozenset(names.values()) | {r.key for _, r in _results(trace)}
        return Facts(tensors, nodes, names, keys, _find_needed(tensors.values(), leaving))


@dataclass(frozen=True, slots=True)
class _Origins:
    """Values that no op of the traced graph computes: parameters, buffers, inputs and gradients of
    outputs, by the names of their nodes.

    Attributes:
        keys: node name → the key under which plans list it.
        tangents: gradients of outputs, which arrive in backward.
        given: the values that exist when the step begins, without inputs and gradients from another
            stage.
        resident: the values that exist during the whole step, without copies in a narrower dtype
            and values from the previous stage.
    """

    keys: Mapping[str, str]
    tangents: frozenset[str]
    given: frozenset[str]
    resident: frozenset[str]

    @staticmethod
    def of(trace: Trace, *, accumulates: bool) -> _Origins:
        """Collect the values that are given to a traced graph.

        Args:
            trace: the trace of one call of the model, or of a stage.
            accumulates: whether a step has several microbatches.
        """
        parameters = {p.node: parameter_key(p.name) for p in trace.parameters}
        buffers = {b.node: buffer_key(b.name) for b in trace.buffers}
        inputs = {i.node: input_key(i.path) for i in trace.inputs}
        tangents = {
            o.tangent: output_key(o.path) if o.is_answered else input_key("tangent")
            for o in trace.differentiable
        }
        keys = {**parameters, **buffers, **inputs, **tangents}
        crossing = {i.node for i in trace.inputs if i.crosses}  # stored like results of forward
        returning = {o.tangent for o in trace.differentiable if o.is_answered}
        copied = {p.node for p in trace.parameters if p.is_narrowed and not accumulates}
        there = frozenset(keys) - crossing
        return _Origins(keys, frozenset(tangents), there - returning, there - copied)

    def phase_of(self, node: fx.Node) -> str:
        """Return the phase in which a node's results first exist."""
        return "backward" if node.name in self.tangents else str(node.meta.get("phase", "forward"))


def _values_of(node: fx.Node) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the traced tensors that a node computes, with the index of each among its results."""
    value = node.meta.get("val")
    for result, item in enumerate(value if isinstance(value, tuple | list) else (value,)):
        if isinstance(item, torch.Tensor):
            yield result, item


def _choose_sum_dtype(
    dtype: torch.dtype, readers: Collection[TensorReader], cast_to: torch.dtype
) -> torch.dtype:
    """Return the dtype in which partial sums are reduced (see `Tensor.sum_dtype`).

    Args:
        dtype: the dtype of the tensor.
        readers: the readers of the tensor.
        cast_to: dtype of the gradient that the tensor is cast to; `dtype` if there is none.
    """
    is_gradient = any(r.key.endswith("/parameter") for r in readers)
    return (
        torch.float32 if is_gradient and dtype.is_floating_point and dtype.itemsize < 4 else cast_to
    )


def _find_needed(tensors: Collection[Tensor], leaving: set[str]) -> frozenset[str]:
    """Return the forward nodes whose results backward or another stage reads (see `Facts`).

    Args:
        tensors: the tensors of the traced model.
        leaving: keys of values that other stages read.
    """
    makers: dict[str, list[str]] = {}
    pending = sorted(leaving)
    for tensor in tensors:
        for reader in tensor.readers if tensor.phase == "forward" else ():
            makers.setdefault(reader.key, []).append(tensor.key)
            pending += [tensor.key] if reader.phase == "backward" else []
    needed = set[str]()
    while pending:
        key = pending.pop()
        if key not in needed:
            needed.add(key)
            pending += makers.get(key, ())
    return frozenset(needed)


def _reads(nodes: Mapping[str, fx.Node]) -> Iterator[tuple[tuple[str, int], TensorReader]]:
    for key, node in nodes.items():
        part = int(node.args[1]) if node.target is operator.getitem else 0
        for operand, source in enumerate(operands_of(node)):
            yield (source.name, part), TensorReader(key, operand, node.meta["phase"])


def _results(trace: Trace) -> Iterator[tuple[tuple[str, int], TensorReader]]:
    """Yield each result of the graph and its reader: outputs of the model, new values of buffers,
    and gradients, which their parameters read."""
    outputs = next(iter(reversed(trace.graph.nodes))).args[0]
    results = [(i, output_key(o.path), "forward") for i, o in enumerate(trace.outputs)]
    results += [(i, output_key(name), "forward") for name, i in trace.mutated.items()]
    results += [
        (p.gradient, parameter_key(p.name), "backward")
        for p in trace.parameters
        if p.gradient is not None
    ]
    results += [
        (i.gradient, input_key(i.path), "backward") for i in trace.inputs if i.gradient is not None
    ]
    for position, key, phase in results:
        yield (outputs[position].name, 0), TensorReader(key, 0, phase)


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a plan, by instance.

    Attributes:
        chosen, recomputed: node key → its strategy, and the strategy of its recomputation.
        steps: tensor and phase → its collectives.
        kept: tensor → layouts kept for backward.
        inner_steps: node key and phase → the collectives inside the node.
    """

    chosen: Mapping[str, Strategy]
    recomputed: Mapping[str, Strategy]
    steps: Mapping[tuple[TensorKey, str], tuple[Communication, ...]]
    kept: Mapping[TensorKey, tuple[Layout, ...]]
    inner_steps: Mapping[tuple[str, str], tuple[Communication, ...]]

    @staticmethod
    def of(plan: Plan) -> Claims:
        """Collect the claims of a plan by node and tensor. Claims about nodes that the model does
        not have are reported later."""
        steps: dict[tuple[TensorKey, str], tuple[Communication, ...]] = {}
        inner_steps: dict[tuple[str, str], tuple[Communication, ...]] = {}
        for node, step in plan.steps():
            if step.own:
                inner_steps[node, step.phase] = (*inner_steps.get((node, step.phase), ()), step)
                continue
            place = ((node, step.result), step.phase)
            steps[place] = (*steps.get(place, ()), step)
        kept_layouts: dict[TensorKey, tuple[Layout, ...]] = {}
        for k in plan.kept:
            for indices in k.instances:
                here = k.node.format(*indices), k.result
                kept_layouts[here] = (*kept_layouts.get(here, ()), *k.layouts)
        return Claims(
            plan.node_choices(), plan.recomputed_choices(), steps, kept_layouts, inner_steps
        )


# --------------------------------------------------------------------------------------------------
# The context of a plan: its constraints and, for a stage, its neighbours and schedule.


@dataclass(frozen=True, slots=True)
class Context:
    """The context of a plan.

    Attributes:
        forced: the resolved constraints.
        crossing: how tensors cross to a stage's neighbours.
        num_microbatches: number of microbatches of a step.
        num_in_flight: largest number of microbatches whose saved values the stage holds.
        schedule: name of the schedule, ``""`` for a plan without stages.
        batch_bytes: bytes of the whole batch, which is live during a step of several microbatches.
        returned: the values that calls of a pipeline return.
        stage: index of the stage.
        actions: the actions of its rank, if the rank has several stages.
    """

    forced: Forced
    crossing: Crossing = field(default_factory=Crossing)
    num_microbatches: int = 1
    num_in_flight: int = 1
    schedule: str = ""
    batch_bytes: int = 0
    returned: ReturnedOutputs | None = None
    stage: int = 0
    actions: tuple[Action, ...] = ()

    @property
    def accumulates(self) -> bool:
        """Whether gradients are added to sums, and parameters may be gathered for a whole step."""
        return self.num_microbatches > 1 or self.forced.named.holds

    @staticmethod
    def of(trace: Trace, plan: Plan) -> Context:
        """Return the context of a plan without stages, under the constraints that it records.

        Args:
            trace: the traced call of the model.
            plan: its recorded constraints are read.

        Raises:
            ConstraintError: if a constraint cannot hold.
        """
        constraints = [read_constraint(data) for data in plan.options.get("constraints", ())]
        return Context(replace(resolve(trace, constraints, plan.mesh), starts=plan.starts))

    def problem(self, trace: Trace, plan: Plan, profile: HardwareProfile) -> Priced:
        """State the optimization problem that the plan claims to solve.

        Args:
            trace: the traced model or stage.
            plan: its mesh, budget and optimizer are read.
            profile: the hardware that prices are for.
        """
        classes = classes_of(trace, plan.mesh.shape, self.forced)
        budget, optimizer = int(plan.options.get("memory_bytes", 0)), str(plan.options["optimizer"])
        return price(
            trace,
            classes,
            plan.mesh,
            profile,
            budget_bytes=budget,
            optimizer=optimizer,
            forced=self.forced,
            crossing=self.crossing,
            num_microbatches=self.num_microbatches,
            num_in_flight=self.num_in_flight,
        )
