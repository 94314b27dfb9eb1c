"""Cut one trace into the traces of its pipeline stages.

`cut_trace` builds one `Trace` per stage from the assignment of nodes (`autopar.stages.placing`) and
the tensors that cross between stages (`autopar.stages.seams`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.capture.graphs import TERM
from autopar.capture.trace import Input, Output, Parameter, Trace
from autopar.stages.placing import Placing, place
from autopar.stages.seams import Boundary, boundaries

_add = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A trace in stages.

    Attributes:
        stages: one trace per stage. Equal nodes have the names and keys that they have in the whole
            trace.
        boundaries: the tensors that cross from each stage to the next.
        shared: parameter name → the stages that hold it, for parameters that several stages hold.
            Each stage computes a part of the gradient. The gradient is their sum, taken once per
            step.
    """

    stages: tuple[Trace, ...]
    boundaries: tuple[Boundary, ...]
    shared: dict[str, tuple[int, ...]]


def cut_trace(trace: Trace, positions: Sequence[int]) -> Cut:
    """Cut a trace into pipeline stages.

    Args:
        positions: indices of forward nodes, distinct. Each of these nodes begins a new stage.
            Without any, the whole trace is the only stage.

    Raises:
        CutError: if the model cannot be cut there. The error names the op that prevents it.
    """
    if not positions:
        return Cut((trace,), (), {})
    placing = place(trace, positions)
    crossing = boundaries(trace, placing, len(positions) + 1)
    stages = tuple(
        _StageNodes(trace, placing, crossing, s, tuple(positions)).build()
        for s in range(len(positions) + 1)
    )
    return Cut(
        stages, crossing, {name: held for name, held in placing.holders.items() if len(held) > 1}
    )


@dataclass
class _StageNodes:
    """The trace of one stage while it is built."""

    trace: Trace
    placing: Placing
    crossing: tuple[Boundary, ...]
    number: int
    positions: tuple[int, ...]
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[str, fx.Node] = field(default_factory=dict)  # name in the whole trace → node here
    results: list[fx.Node] = field(default_factory=list)

    def build(self) -> Trace:
        """Build the stage: placeholders, its own and copied nodes, and the outputs."""
        nodes = {n.name: n for n in self.trace.graph.nodes}
        flat = next(iter(reversed(self.trace.graph.nodes))).args[0]
        before = self.crossing[self.number - 1] if self.number else Boundary((), ())
        after = self.crossing[self.number] if self.number < len(self.crossing) else Boundary((), ())
        self._needed = self._find_needed(nodes, flat, after, before)
        self._placeholders(nodes, before, after)
        for node in self.trace.graph.nodes:
            if (
                node.op == "call_function"
                and node.name in self._needed
                and node.name not in self.env
            ):
                self._copy(node)
        return self._finish(nodes, flat, before, after)

    def _mine(self, name: str) -> bool:
        return self.placing.stage.get(name) == self.number

    def _find_needed(
        self, nodes: dict[str, fx.Node], flat: Sequence[fx.Node], after: Boundary, before: Boundary
    ) -> set[str]:
        """Names of the nodes that this stage runs: its own, and the copied nodes that its own
        nodes, its outputs and its buffers read."""
        arriving = {*before.values, *after.gradients} - {""}
        needed = {n for n in nodes if self._mine(n)} - arriving
        needed |= {
            o.node
            for o in self.trace.outputs
            if self._returns(o.node) and o.node in self.placing.copied
        }
        read = self._add_copied_operands(nodes, needed, sorted(needed))
        for name, index in self.trace.mutated.items():  # the stage of a buffer makes its new value
            buffer = next(b.node for b in self.trace.buffers if b.name == name)
            value = flat[index].name
            home = self.placing.homes.get(value) == self.number and _leads_to(
                nodes[buffer], nodes[value], self.placing.copied
            )
            if value in self.placing.copied and value not in needed and (home or buffer in read):
                needed.add(value)
                read |= self._add_copied_operands(nodes, needed, [value])
        return needed

    def _add_copied_operands(
        self, nodes: dict[str, fx.Node], needed: set[str], stack: list[str]
    ) -> set[str]:
        """Add to `needed` the copied nodes that the nodes on the stack read, directly or
        indirectly.

        Returns:
            All nodes that are read.
        """
        read: set[str] = set()
        while stack:
            for operand in nodes[stack.pop()].all_input_nodes:
                read.add(operand.name)
                if operand.name in self.placing.copied and operand.name not in needed:
                    needed.add(operand.name)
                    stack.append(operand.name)
        return read

    def _held_placeholders(self, nodes: dict[str, fx.Node]) -> set[str]:
        """Placeholders that belong to this stage even if none of its nodes reads them.

        These are its parameters, inputs that it returns as outputs, the buffers that it updates,
        and, in the last stage, the buffers that nothing reads.
        """
        held = {
            p.node for p in self.trace.parameters if self.number in self.placing.holders[p.name]
        }
        flat = next(iter(reversed(self.trace.graph.nodes))).args[0]
        held |= {
            name
            for name, stage in self.placing.returning.items()
            if stage == self.number and nodes[name].op == "placeholder"
        }
        changed = {
            name for name, index in self.trace.mutated.items() if flat[index].name in self._needed
        }
        held |= {b.node for b in self.trace.buffers if b.name in changed}
        if self.number == len(self.positions):
            held |= {
                b.node
                for b in self.trace.buffers
                if not nodes[b.node].users and b.name not in self.trace.mutated
            }
        return held

    def _placeholders(self, nodes: dict[str, fx.Node], before: Boundary, after: Boundary) -> None:
        """Create the placeholders of the stage, in the order in which a trace has them."""
        held = self._held_placeholders(nodes)
        read = {o.name for name in self._needed for o in nodes[name].all_input_nodes}
        read -= {p.node for p in self.trace.parameters}  # read by a stage only if it holds them
        for entries in (self.trace.parameters, self.trace.buffers, self.trace.inputs):
            for entry in entries:
                if entry.node in held or entry.node in read:
                    self._placeholder(nodes[entry.node])
        for name in before.values:
            self._placeholder(nodes[name])
        for o in self.trace.differentiable:
            if self._mine(o.tangent):
                self._placeholder(nodes[o.tangent])
        for name in after.gradients:
            if name:
                self._placeholder(nodes[name])

    def _placeholder(self, node: fx.Node) -> None:
        here = self.graph.create_node("placeholder", node.name, name=node.name)
        here.meta = dict(node.meta)
        self.env[node.name] = here

    def _copy(self, node: fx.Node) -> None:
        here = self.graph.node_copy(node, lambda operand: self.env[operand.name])
        assert here.name == node.name, "names are unique in the whole trace"
        self.env[node.name] = here

    def _finish(
        self, nodes: dict[str, fx.Node], flat: Sequence[fx.Node], before: Boundary, after: Boundary
    ) -> Trace:
        outputs = [
            o
            for i, o in enumerate(self.trace.outputs)
            if flat[i].name in self.env and self._returns(flat[i].name)
        ]
        self.results = [self.env[o.node] for o in outputs]
        for name, gradient in zip(after.values, after.gradients, strict=True):
            shape, dtype = tuple(nodes[name].meta["val"].shape), nodes[name].meta["val"].dtype
            outputs.append(
                Output(_key(nodes[name]), name, shape, dtype, False, gradient, crosses=True)
            )
            self.results.append(self.env[name])
        parameters = tuple(
            self._parameter(p, flat) for p in self.trace.parameters if p.node in self.env
        )
        mutated = {
            name: self._add_result(flat[i].name)
            for name, i in self.trace.mutated.items()
            if flat[i].name in self.env
        }
        inputs = [i for i in self.trace.inputs if i.node in self.env]
        for name, gradient in zip(before.values, before.gradients, strict=True):
            shape, dtype = tuple(nodes[name].meta["val"].shape), nodes[name].meta["val"].dtype
            index = self._add_result(gradient) if gradient else None
            inputs.append(
                Input(_key(nodes[name]), name, shape, dtype, crosses=True, gradient=index)
            )
        self.graph.output(tuple(self.results))
        text = f"{self.trace.fingerprint} stage {self.number} of cuts {self.positions}"
        return Trace(
            graph=self.graph,
            parameters=parameters,
            buffers=tuple(b for b in self.trace.buffers if b.node in self.env),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            mutated=mutated,
            in_spec=self.trace.in_spec,
            out_spec=self.trace.out_spec,
            constants=self.trace.constants,
            settings=self.trace.settings,
            fingerprint=hashlib.sha256(text.encode()).hexdigest(),
            folding=self.trace.folding,
        )

    def _returns(self, name: str) -> bool:
        """Whether this stage returns an output of the model, given by its node."""
        return self.placing.returning[name] == self.number

    def _add_result(self, name: str) -> int:
        self.results.append(self.env[name])
        return len(self.results) - 1

    def _parameter(self, p: Parameter, flat: Sequence[fx.Node]) -> Parameter:
        index = None
        if p.name in self.placing.terms:
            own = [self.env[t.name] for t in self.placing.terms[p.name] if self._mine(t.name)]
            for term in own:
                term.meta[TERM] = True
            index = self._sum(own) if own else None
        elif p.gradient is not None:
            index = self._add_result(flat[p.gradient].name)
        return replace(p, gradient=index)

    def _sum(self, terms: Sequence[fx.Node]) -> int:
        """Add up gradients; returns the index of the sum among the results."""
        total = terms[0]
        for ordinal, term in enumerate(terms[1:]):
            like = total
            total = self.graph.call_function(_add, (total, term))
            total.meta = {
                **like.meta,
                "key": f"{like.meta['module']}/add/backward/{ordinal} of {terms[0].name}",
            }
        self.results.append(total)
        return len(self.results) - 1


def _leads_to(node: fx.Node, value: fx.Node, among: Collection[str]) -> bool:
    """Whether every path from a node ends at `value` and passes only through nodes in `among`."""
    left, seen = [node], {value}
    while left:
        here = left.pop()
        if here not in seen:
            seen.add(here)
            if not here.users or any(user.name not in among for user in here.users):
                return False
            left += here.users
    return True


def _key(node: fx.Node) -> str:
    return str(node.meta["key"])
