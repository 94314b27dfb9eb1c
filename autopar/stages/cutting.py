"""Cutting of one trace into the traces of its pipeline stages.

`cut_trace` builds one `Trace` per stage from the assignment of nodes (`autopar.stages.placing`) and
the tensors that cross between stages (`boundaries`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.capture.graphs import TERM
from autopar.capture.trace import Input, Output, Parameter, Trace
from autopar.core.fx_nodes import add_call, copy_node
from autopar.errors import ConstraintError
from autopar.rules import where_of
from autopar.stages.placing import CutError, CutPoint, Placing, levels, place

# --------------------------------------------------------------------------------------------------
# Legal cut points of a model, the tensors that cross between stages, and the nodes next to a cut.
#
# `boundaries` lists the tensors that cross, `usable_points` the legal cut points, and `seams` the
# nodes that read or compute tensors of other stages.


# --------------------------------------------------------------------------------------------------
# The tensors that cross each boundary between stages.
#
# A forward value crosses every boundary from the stage that computes it to the last stage that
# reads it; stages in between pass it on. A gradient crosses in the opposite direction. It is paired
# with a forward value of the same shape and dtype, and crosses in the layout of that value. Usually
# this is the value whose gradient it is.


@dataclass(frozen=True, slots=True)
class Boundary:
    """The tensors that cross from one stage to the next, as names of nodes in the whole trace.

    Attributes:
        values: the forward values.
        gradients: the gradient that is paired with each value; ``""`` if there is none.
    """

    values: tuple[str, ...]
    gradients: tuple[str, ...]


def boundaries(trace: Trace, placing: Placing, num_stages: int) -> tuple[Boundary, ...]:
    """Return the tensors that cross each boundary between stages, in order.

    Args:
        trace: the whole trace.
        placing: the stage of each node.
        num_stages: the number of stages; there is one boundary less.

    Raises:
        CutError: if a gradient crosses but no forward value of the same shape and dtype does, or if
            a node with several results would cross.
    """
    nodes = {n.name: n for n in trace.graph.nodes}
    forward = _spans(trace, placing, "forward")
    backward = _spans(trace, placing, "backward")
    reversed_boundaries: list[Boundary] = []
    carried: dict[str, str] = {}  # gradient → the value it is paired with at the next boundary
    for boundary in reversed(range(num_stages - 1)):
        values = [name for name, (first, last) in forward.items() if first <= boundary < last]
        gradients = [name for name, (first, last) in backward.items() if last <= boundary < first]
        carried = _carriers([nodes[n] for n in values], [nodes[n] for n in gradients], carried)
        paired = {value: gradient for gradient, value in carried.items()}
        reversed_boundaries.append(
            Boundary(tuple(values), tuple(paired.get(name, "") for name in values))
        )
    return tuple(reversed(reversed_boundaries))


def _spans(trace: Trace, placing: Placing, phase: str) -> dict[str, tuple[int, int]]:
    """Return, for each node that crosses a boundary, the stage that computes it and the farthest
    stage that reads it, by node name."""
    spans: dict[str, tuple[int, int]] = {}
    for node in trace.graph.nodes:
        stage = placing.stage.get(node.name)
        backward = node.meta.get("phase") == "backward" or node.op == "placeholder"
        if stage is None or node.name in placing.dropped or backward != (phase == "backward"):
            continue
        reading = [
            placing.stage[u.name]
            for u in node.users
            if u.name in placing.stage and u.name not in placing.dropped
        ]
        farthest = (
            max(reading, default=stage) if phase == "forward" else min(reading, default=stage)
        )
        if farthest != stage:
            _check_plain(node)
            spans[node.name] = stage, farthest
    return spans


def _check_plain(node: fx.Node) -> None:
    if not isinstance(node.meta["val"], torch.Tensor):
        raise CutError(
            f"{node.meta['key']} has several results, which cannot cross a cut",
            where=where_of(node),
        )


def _carriers(
    values: Sequence[fx.Node], gradients: Sequence[fx.Node], before: Mapping[str, str]
) -> dict[str, str]:
    """Return the forward value with which each gradient is paired.

    A gradient is paired with the same value as at the next boundary (`before`) if that value also
    crosses this boundary. Other gradients are paired in the order in which backward computes them,
    which is the reverse order of their values.
    """
    free = {v.name: v for v in values if v.meta["val"].is_floating_point()}
    paired: dict[str, str] = {}
    for gradient in gradients:
        if before.get(gradient.name) in free:
            paired[gradient.name] = free.pop(before[gradient.name]).name
    for gradient in gradients:
        if gradient.name in paired:
            continue
        fitting = [name for name, value in free.items() if _has_same_form(value, gradient)]
        if not fitting:
            message = (
                f"{gradient.meta['key']} of shape {tuple(gradient.meta['val'].shape)} would cross a"
                " cut without a matching activation"
            )
            raise CutError(message, where=where_of(gradient))
        paired[gradient.name] = free.pop(fitting[-1]).name
    return paired


def _has_same_form(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype


NO_PIPELINE = "remove constraints.pipeline(): the axis is then used for data or tensor parallelism"


def usable_points(trace: Trace, at_least: int = 1) -> tuple[tuple[CutPoint, ...], Placing]:
    """Find the legal cut points, and the assignment of nodes if the model is cut at all of them.

    Each point alone is legal. `find_refusal` checks whether several points are legal together.

    Args:
        trace: the whole trace.
        at_least: the requested number of points. The coarsest level with this many legal points is
            used; if there is none, the level with the most legal points.

    Raises:
        ConstraintError: if the model has no legal cut point.
    """
    usable: tuple[CutPoint, ...] = ()
    refusal: CutError | None = None
    for points in levels(trace):
        legal, refused = _legal(trace, points)
        refusal = refusal or refused
        if len(legal) > len(usable):
            usable = legal
        if len(usable) >= at_least:
            break
    if usable:
        return usable, place(trace, [p.position for p in usable])
    why, refused_at = ("", None) if refusal is None else (f": {refusal.what}", refusal.where)
    raise ConstraintError(
        f"the model cannot be cut into stages{why}", where=refused_at, remedy=NO_PIPELINE
    )


def _legal(
    trace: Trace, points: Sequence[CutPoint]
) -> tuple[tuple[CutPoint, ...], CutError | None]:
    """Return the points at which the model can be cut one at a time and for which all nodes can be
    placed together, and the error of cutting at all points, or None."""
    refusal = find_refusal(trace, [p.position for p in points]) if points else None
    if refusal is None:
        return tuple(points), None
    alone, legal = (
        [p for p in points if find_refusal(trace, [p.position]) is None],
        list[CutPoint](),
    )
    if alone and _can_place(trace, alone):
        return tuple(alone), refusal
    for point in alone:  # each point is legal alone, but not all together
        if _can_place(trace, [*legal, point]):
            legal.append(point)
    return tuple(legal), refusal


def _can_place(trace: Trace, points: Sequence[CutPoint]) -> bool:
    try:
        place(trace, [p.position for p in points])
    except CutError:
        return False
    return True


def find_refusal(trace: Trace, positions: Sequence[int]) -> CutError | None:
    """Return the error of cutting the model at all these positions; None if it can be cut."""
    try:
        boundaries(trace, place(trace, positions), len(positions) + 1)
    except CutError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class Seams:
    """The nodes next to the boundaries of a cut.

    Attributes:
        readers: the nodes that read a result of another stage, or of a copied node.
        exposed: the nodes whose results another stage reads.
    """

    readers: frozenset[str]
    exposed: frozenset[str]


def seams(trace: Trace, placing: Placing) -> Seams:
    """Find the nodes of a trace that are next to the boundaries of a cut."""

    def side(node: fx.Node) -> object:
        """Return the stage of a node, or the reason why it has no stage."""
        if node.name in placing.copied:
            return "copied"
        return (
            "dropped" if node.name in placing.dropped else placing.stage.get(node.name, "outside")
        )

    beside_boundary, exposed = set[str](), set[str]()
    for node in trace.graph.nodes:
        for operand in node.all_input_nodes if node.op == "call_function" else ():
            if side(operand) not in (side(node), "outside"):
                beside_boundary.add(node.name)
                exposed.add(operand.name)
    return Seams(frozenset(beside_boundary), frozenset(exposed - placing.copied - placing.dropped))


# --------------------------------------------------------------------------------------------------


_add = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A trace in stages.

    Attributes:
        stages: one trace per stage. Nodes have the same names and keys as in the whole trace.
        boundaries: the tensors that cross from each stage to the next.
        shared: the stages that hold each parameter that several stages hold, by name. Each stage
            computes one term of the gradient. The terms are summed once per step.
    """

    stages: tuple[Trace, ...]
    boundaries: tuple[Boundary, ...]
    shared: dict[str, tuple[int, ...]]


def cut_trace(trace: Trace, positions: Sequence[int]) -> Cut:
    """Cut a trace into pipeline stages.

    Args:
        trace: the whole trace.
        positions: distinct indices of forward nodes. Each of these nodes begins a new stage.
            Without positions, the whole trace is the only stage.

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
        stages,
        crossing,
        {name: holders for name, holders in placing.holders.items() if len(holders) > 1},
    )


@dataclass
class _StageNodes:
    """The builder of the trace of one stage."""

    trace: Trace
    placing: Placing
    crossing: tuple[Boundary, ...]
    number: int
    positions: tuple[int, ...]
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[str, fx.Node] = field(default_factory=dict)  # name in the whole trace → new node
    results: list[fx.Node] = field(default_factory=list)

    def build(self) -> Trace:
        """Build the stage: placeholders, nodes of the stage, copied nodes, and outputs."""
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
        """Return the names of the nodes that this stage runs: the nodes of the stage, and the
        copied nodes that its nodes, outputs and buffers read."""
        arriving = {*before.values, *after.gradients} - {""}
        needed = {n for n in nodes if self._mine(n)} - arriving
        needed |= {
            o.node
            for o in self.trace.outputs
            if self._returns(o.node) and o.node in self.placing.copied
        }
        read = self._add_copied_operands(nodes, needed, sorted(needed))
        # the stage of a buffer computes its new value
        for name, index in self.trace.mutated.items():
            buffer = next(b.node for b in self.trace.buffers if b.name == name)
            value = flat[index].name
            home = self.placing.homes.get(value) == self.number and _all_paths_reach(
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
        """Return the placeholders that belong to this stage even if none of its nodes reads them.

        These are its parameters, inputs that it returns as outputs, buffers that it updates and, in
        the last stage, buffers that no node reads.
        """
        names = {
            p.node for p in self.trace.parameters if self.number in self.placing.holders[p.name]
        }
        flat = next(iter(reversed(self.trace.graph.nodes))).args[0]
        names |= {
            name
            for name, stage in self.placing.returning.items()
            if stage == self.number and nodes[name].op == "placeholder"
        }
        changed = {
            name for name, index in self.trace.mutated.items() if flat[index].name in self._needed
        }
        names |= {b.node for b in self.trace.buffers if b.name in changed}
        if self.number == len(self.positions):
            names |= {
                b.node
                for b in self.trace.buffers
                if not nodes[b.node].users and b.name not in self.trace.mutated
            }
        return names

    def _placeholders(self, nodes: dict[str, fx.Node], before: Boundary, after: Boundary) -> None:
        """Create the placeholders of the stage, in the order of a trace."""
        held_names = self._held_placeholders(nodes)
        read = {o.name for name in self._needed for o in nodes[name].all_input_nodes}
        # a stage reads a parameter only if it holds it
        read -= {p.node for p in self.trace.parameters}
        for entries in (self.trace.parameters, self.trace.buffers, self.trace.inputs):
            for entry in entries:
                if entry.node in held_names or entry.node in read:
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
        here = copy_node(self.graph, node, lambda operand: self.env[operand.name])
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
        """Return whether this stage returns an output of the model, given by the node's name."""
        return self.placing.returning[name] == self.number

    def _add_result(self, name: str) -> int:
        self.results.append(self.env[name])
        return len(self.results) - 1

    def _parameter(self, p: Parameter, flat: Sequence[fx.Node]) -> Parameter:
        index = None
        if p.name in self.placing.terms:
            own_terms = [self.env[t.name] for t in self.placing.terms[p.name] if self._mine(t.name)]
            for term in own_terms:
                term.meta[TERM] = True
            index = self._sum(own_terms) if own_terms else None
        elif p.gradient is not None:
            index = self._add_result(flat[p.gradient].name)
        return replace(p, gradient=index)

    def _sum(self, terms: Sequence[fx.Node]) -> int:
        """Sum gradients. Return the index of the sum among the results."""
        total = terms[0]
        for ordinal, term in enumerate(terms[1:]):
            example = total
            total = add_call(self.graph, _add, (total, term))
            total.meta = {
                **example.meta,
                "key": f"{example.meta['module']}/add/backward/{ordinal} of {terms[0].name}",
            }
        self.results.append(total)
        return len(self.results) - 1


def _all_paths_reach(node: fx.Node, value: fx.Node, among: Collection[str]) -> bool:
    """Return whether every path from a node ends at `value` and passes only through nodes in
    `among`."""
    pending, visited = [node], {value}
    while pending:
        here = pending.pop()
        if here not in visited:
            visited.add(here)
            if not here.users or any(user.name not in among for user in here.users):
                return False
            pending += here.users
    return True


def _key(node: fx.Node) -> str:
    return str(node.meta["key"])
