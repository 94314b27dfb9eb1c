"""Cut points of a model, and the assignment of nodes to pipeline stages.

`cut_points` lists the places at which stages may begin. `place` assigns every node to a stage.

The stage of a forward node is determined by its position. Forward nodes that depend on no parameter
(masks, positions, numbers of labels) are *copied*: every stage that needs such a node computes it
from the batch. Backward runs from the last stage to the first. At each boundary, a backward node is
*late* (in a later stage) or *early*. A node that reads a forward value that is available on one
side only is on that side. The gradient of a parameter is computed in the stage of the parameter.
The remaining nodes add and reshape gradients. A minimum cut places them so that the fewest bytes
cross the boundary.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import fx

from autopar.capture.trace import Trace
from autopar.errors import EmissionError
from autopar.rules import where_of

# --------------------------------------------------------------------------------------------------
# Cut points: before the first node of every layer and of every other part of the model.
#
# If there are too few such points, modules within layers are used, one more level of nesting at a
# time, and finally the first use of each parameter.

_DEEPER = 6  # number of levels of modules within a layer


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place at which a stage may begin.

    Attributes:
        position: an index of a forward node. A cut puts this node and all later ones into a later
            stage.
        module: the path of the layer or module that begins there.
    """

    position: int
    module: str


def forward_nodes(trace: Trace) -> list[fx.Node]:
    """Return the compute nodes of forward, in order."""
    return [
        n for n in trace.graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"
    ]


def layer_of(module: str) -> str:
    """Return the path of a module up to its first layer index; without an index, up to its second
    part."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:2])


def cut_points(trace: Trace, at_least: int = 1) -> tuple[CutPoint, ...]:
    """Return the cut points of a model, in order. All of them are after the first read of a
    parameter.

    Args:
        trace: the trace of the model.
        at_least: the requested number of cut points. The coarsest level with this many is returned;
            if there is none, the finest level.
    """
    points: tuple[CutPoint, ...] = ()
    for points in levels(trace):
        if len(points) >= at_least:
            break
    return points


def most_parts(trace: Trace) -> int:
    """Return the largest number of parts into which a model can be cut."""
    return max(map(len, levels(trace))) + 1


def levels(trace: Trace) -> Iterator[tuple[CutPoint, ...]]:
    """Yield the cut points between layers, then those between increasingly fine parts of the model.

    Each level has more cut points than the previous one.
    """
    names = {p.node: p.name for p in trace.parameters}

    def first_parameter(node: fx.Node) -> str:
        """Return the name of the first parameter that a node reads; "" if it reads none."""
        return next(
            (names[operand.name] for operand in node.all_input_nodes if operand.name in names), ""
        )

    nodes, num = _nodes_on_parameters(trace), -1
    for depth in range(_DEEPER + 1):

        def part_at_depth(node: fx.Node, depth: int = depth) -> str:
            """Return the path of the part that contains a node, `depth` levels within its layer."""
            return _part_of(node.meta["module"], depth)

        points = tuple(_points(nodes, part_at_depth))
        if len(points) > num:
            yield points
        num = max(num, len(points))
    points = tuple(_points(nodes, first_parameter))
    if len(points) > num:
        yield points


def _part_of(module: str, deeper: int) -> str:
    """Return the path of the layer of a module, or of the module `deeper` levels within that
    layer."""
    layer = layer_of(module)
    return ".".join([layer, *module[len(layer) + 1 :].split(".")[:deeper]]).rstrip(".")


def _nodes_on_parameters(trace: Trace) -> list[tuple[int, fx.Node]]:
    """Return the forward nodes whose values depend on parameters, with their positions."""
    on_parameters, nodes = {p.node for p in trace.parameters}, []
    for position, node in enumerate(forward_nodes(trace)):
        if any(operand.name in on_parameters for operand in node.all_input_nodes):
            on_parameters.add(node.name)
            nodes.append((position, node))
    return nodes


def _points(
    nodes: Iterable[tuple[int, fx.Node]], part_of: Callable[[fx.Node], str]
) -> Iterator[CutPoint]:
    earlier_parts: set[str] = set()
    for position, node in nodes:
        part = part_of(node)
        if part not in earlier_parts and part:
            if earlier_parts:
                yield CutPoint(position, part)
            earlier_parts.add(part)


_add = torch.ops.aten.add.Tensor
_NO_CARRIER = 2**60  # more bytes than any possible set of crossing tensors
_Kind = tuple[tuple[int, ...], torch.dtype | None]


class CutError(EmissionError):
    """Raised if the model cannot be cut at a position. The message names the op that prevents it.
    The caller adds the remedy."""


@dataclass(frozen=True, slots=True)
class Placing:
    """The stage of each node.

    Attributes:
        stage: the stage of each node, by name. Tangents are included; copied nodes and other
            placeholders are not.
        returning: the stage that returns each output of the model, by the name of its node.
        copied: the nodes that every stage computes if it needs them.
        homes: the stage of each forward node according to its position, including copied nodes.
        holders: the stages that read each parameter, by name.
        terms: the nodes whose sum is the gradient, for each parameter that several stages hold, by
            name.
        dropped: the additions of these terms. No stage runs them.
    """

    stage: Mapping[str, int]
    returning: Mapping[str, int]
    copied: frozenset[str]
    homes: Mapping[str, int]
    holders: Mapping[str, tuple[int, ...]]
    terms: Mapping[str, tuple[fx.Node, ...]]
    dropped: frozenset[str]


def place(trace: Trace, positions: Sequence[int]) -> Placing:
    """Assign all nodes to stages, for cuts at `positions`.

    Args:
        trace: the whole trace.
        positions: indices of forward nodes, in any order.

    Raises:
        CutError: if a value would have to be sent against the order of stages.
    """
    return _Placer(trace, sorted(positions)).run()


@dataclass(frozen=True, slots=True)
class _Sides:
    """Constraints on the stage of each backward node. It is late at all boundaries before
    `late_before`, and early at all boundaries from `early_from` on."""

    late_before: dict[str, int]
    early_from: dict[str, int]


@dataclass
class _Placer:
    trace: Trace
    positions: Sequence[int]
    stage: dict[str, int] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    # forward node → latest stage that reads it in forward
    last_reader: dict[str, int] = field(default_factory=dict)
    # forward node, including copied ones → stage according to its position
    homes: dict[str, int] = field(default_factory=dict)
    # boundary → kinds of forward values that cross it
    _carriers: dict[int, set[_Kind]] = field(default_factory=dict)

    def run(self) -> Placing:
        """Place the nodes of forward, then those of backward from the last boundary to the first,
        and check the result."""
        self._forward()
        holders = self._holders()
        returning = self._assign_outputs(holders)
        self.stage.update({o.tangent: returning[o.node] for o in self.trace.differentiable})
        terms, dropped = self._terms(holders)
        backward = [
            n
            for n in self._calls("backward")
            if n.name not in dropped and n.name not in self.copied
        ]
        pinned = self._pin_gradients(holders, terms)
        self._record_carriers()
        sides = self._sides(backward, pinned)
        late: set[str] = set()
        stages: dict[str, int] = {n.name: 0 for n in backward}
        for boundary in reversed(range(len(self.positions))):
            late = self._late(backward, boundary, late, sides)
            for name in late:
                stages[name] = max(stages[name], boundary + 1)
        self._check_parameters(stages, holders)
        self._check_buffers(self.stage | stages)
        return Placing(
            self.stage | stages,
            returning,
            frozenset(self.copied),
            self.homes,
            holders,
            terms,
            frozenset(dropped),
        )

    def _calls(self, phase: str) -> list[fx.Node]:
        return [
            n
            for n in self.trace.graph.nodes
            if n.op == "call_function" and n.meta["phase"] == phase
        ]

    def _forward(self) -> None:
        outside = {p.node for p in self.trace.parameters} | {
            o.tangent for o in self.trace.differentiable
        }
        for node in self.trace.graph.nodes:
            if node.op == "call_function" and any(
                operand.name in outside for operand in node.all_input_nodes
            ):
                outside.add(node.name)
            elif node.op == "call_function":
                self.copied.add(node.name)
        for position, node in enumerate(forward_nodes(self.trace)):
            self.homes[node.name] = bisect_right(self.positions, position)
            if node.name in self.copied:
                continue
            together = node.target is operator.getitem
            self.stage[node.name] = (
                self.stage[node.args[0].name] if together else self.homes[node.name]
            )
        for node in forward_nodes(self.trace):
            for operand in node.all_input_nodes:
                if node.name in self.stage and operand.name in self.stage:
                    self.last_reader[operand.name] = max(
                        self.last_reader.get(operand.name, 0), self.stage[node.name]
                    )

    def _holders(self) -> dict[str, tuple[int, ...]]:
        """Return the stages that read each parameter in forward, by name. A parameter that no stage
        reads is in the first stage."""
        nodes = {n.name: n for n in self.trace.graph.nodes}
        holders = {}
        for p in self.trace.parameters:
            reading = {
                self.stage[user.name] for user in nodes[p.node].users if user.name in self.stage
            }
            holders[p.name] = tuple(sorted(reading)) or (0,)
        return holders

    def _assign_outputs(self, holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the stage that returns each output, by the name of its node. This is the stage
        that computes it, the last stage that holds it if it is a parameter, or otherwise the last
        stage."""
        last, at = len(self.positions), {p.node: holders[p.name][-1] for p in self.trace.parameters}
        return {o.node: self.stage.get(o.node, at.get(o.node, last)) for o in self.trace.outputs}

    def _terms(
        self, holders: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, tuple[fx.Node, ...]], set[str]]:
        results = next(iter(reversed(self.trace.graph.nodes))).args[0]
        terms: dict[str, tuple[fx.Node, ...]] = {}
        dropped: set[str] = set()
        for p in self.trace.parameters:
            if len(holders[p.name]) > 1 and p.gradient is not None:
                terms[p.name] = tuple(_addends(results[p.gradient], dropped))
        return terms, dropped

    def _pin_gradients(
        self, holders: Mapping[str, Sequence[int]], terms: Mapping[str, Sequence[fx.Node]]
    ) -> dict[str, int]:
        """Return the stage of each gradient of a parameter and each backward reader of a parameter,
        by node name.

        These nodes run in the stage of the parameter. If several stages hold the parameter, they
        run in the stage whose forward reader belongs to the same module. A module that several
        stages call gives no stage; the forward values that a node reads do.
        """
        nodes = {n.name: n for n in self.trace.graph.nodes}
        results = next(iter(reversed(self.trace.graph.nodes))).args[0]
        pinned = {}
        for p in self.trace.parameters:
            readers: dict[str, set[int]] = {}
            for user in nodes[p.node].users:
                if user.name in self.stage:
                    readers.setdefault(user.meta["module"], set()).add(self.stage[user.name])
            bound = [
                u
                for u in nodes[p.node].users
                if u.op != "output" and u.meta["phase"] == "backward" and u.name not in self.copied
            ]
            bound += (
                terms[p.name]
                if p.name in terms
                else [results[p.gradient]]
                if p.gradient is not None
                else []
            )
            for node in bound:
                stages = {*holders[p.name]}
                if len(stages) > 1:
                    stages = readers.get(node.meta["module"], stages)
                if len(stages) == 1:
                    pinned[node.name] = min(stages)
        return pinned

    def _check_parameters(
        self, stages: Mapping[str, int], holders: Mapping[str, Sequence[int]]
    ) -> None:
        names = {p.node: p.name for p in self.trace.parameters}
        for node in self.trace.graph.nodes:
            for operand in node.all_input_nodes if node.name in stages else ():
                if operand.name in names and stages[node.name] not in holders[names[operand.name]]:
                    message = (
                        f"{node.meta['key']} would read {names[operand.name]!r} in a stage that"
                        " does not hold it"
                    )
                    raise CutError(message, where=where_of(node))

    def _check_buffers(self, stages: Mapping[str, int]) -> None:
        """Check that no buffer is updated by one stage and read by another, whose copy would not
        change."""
        nodes, results = (
            {n.name: n for n in self.trace.graph.nodes},
            next(iter(reversed(self.trace.graph.nodes))).args[0],
        )
        buffers = {b.name: nodes[b.node] for b in self.trace.buffers}
        for name, index in self.trace.mutated.items():
            value = results[index]
            if value.name not in stages:
                continue
            others = sorted(self._stages_reading(buffers[name], stages) - {stages[value.name]})
            if others:
                message = (
                    f"buffer {name!r} is read in stage {others[0]} but updated in stage"
                    f" {stages[value.name]}"
                )
                raise CutError(message, where=where_of(value))

    def _stages_reading(self, node: fx.Node, stages: Mapping[str, int]) -> set[int]:
        """Return the stages that read the result of a node, directly or through copied nodes."""
        reading, pending, visited = set[int](), [node], set[fx.Node]()
        while pending:
            for user in pending.pop().users:
                reading |= {stages[user.name]} if user.name in stages else set()
                if user.name in self.copied and user not in visited:
                    visited.add(user)
                    pending.append(user)
        return reading

    def _late(
        self, backward: Sequence[fx.Node], boundary: int, after: set[str], sides: _Sides
    ) -> set[str]:
        """Return the backward nodes that are late at a boundary, including `after`, those that are
        late at the next boundary."""
        late = after | {n.name for n in backward if boundary < sides.late_before[n.name]}
        early = {n.name for n in backward if boundary >= sides.early_from[n.name]}
        for node in backward if late & early else ():
            if node.name in late and node.name in early:
                message = (
                    f"{node.meta['key']} needs values from both sides of a cut, against the order"
                    " of backward"
                )
                raise CutError(message, where=where_of(node))
        free = [n for n in backward if n.name not in late and n.name not in early]
        behind = {o.tangent for o in self.trace.differentiable if self.stage[o.tangent] > boundary}
        return late | _cheapest(
            free,
            late | behind,
            sides.early_from.keys() | behind,
            self._carriers.get(boundary, set()),
        )

    def _record_carriers(self) -> None:
        """Record the shapes and dtypes of the forward values that cross each boundary."""
        for node in forward_nodes(self.trace):
            stage = self.stage.get(node.name)
            for boundary in (
                range(stage, self.last_reader.get(node.name, 0)) if stage is not None else ()
            ):
                self._carriers.setdefault(boundary, set()).add(_kind(node))

    def _sides(self, backward: Sequence[fx.Node], pinned: Mapping[str, int]) -> _Sides:
        """Return the constraints on backward nodes. Operands of a late node are late; readers of an
        early node, or of the tangent of an early output, are early."""
        sides = _Sides(
            {n.name: 0 for n in backward}, {n.name: len(self.positions) + 1 for n in backward}
        )
        late_before, early_from = sides.late_before, sides.early_from
        for node in backward:
            operand_stages = [self.stage[o.name] for o in self._stage_operands(node)]
            read = [
                self.last_reader.get(o.name, self.stage[o.name]) for o in self._stage_operands(node)
            ]
            at = [pinned[node.name]] if node.name in pinned else []
            late_before[node.name] = max([0, *operand_stages, *at])
            before = [early_from[o.name] for o in node.all_input_nodes if o.name in early_from]
            before += [
                self.stage[o.name]
                for o in node.all_input_nodes
                if o.op == "placeholder" and o.name in self.stage
            ]  # tangents
            early_from[node.name] = min([early_from[node.name], *read, *at, *before])
        for node in reversed(backward):
            for operand in node.all_input_nodes:
                if operand.name in late_before:
                    late_before[operand.name] = max(
                        late_before[operand.name], late_before[node.name]
                    )
        return sides

    def _stage_operands(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands of a backward node that forward computes. A getitem has no such
        operands, since it runs in the stage of its operand.
        """
        operands = () if node.target is operator.getitem else node.all_input_nodes
        return [o for o in operands if o.name in self.stage and o.op != "placeholder"]


def _addends(node: fx.Node, dropped: set[str]) -> Iterable[fx.Node]:
    """Yield the terms of a sum of gradients, and add the names of the additions to `dropped`."""
    plain = (
        node.target is _add and all(isinstance(a, fx.Node) for a in node.args) and not node.kwargs
    )
    if plain and all(a.meta.get("phase") == "backward" for a in node.args) and len(node.users) <= 1:
        dropped.add(node.name)
        for addend in node.args:
            yield from _addends(addend, dropped)
    else:
        yield node


def _cheapest(
    free: Sequence[fx.Node], late: set[str], all_names: set[str], carriers: set[_Kind]
) -> set[str]:
    """Return the late nodes among those that may be on either side, chosen so that the fewest bytes
    cross the boundary.

    In the flow graph, each node is an edge whose capacity is the size of its result in bytes. The
    edge is cut if the result crosses the boundary. This requires that a forward value of the same
    shape and dtype also crosses. No late node reads an early node.
    """
    graph = nx.DiGraph()
    undecided = {n.name for n in free}
    around = {
        n.name: n
        for node in free
        for n in (node, *node.all_input_nodes, *node.users)
        if n.name in all_names
    }
    around |= {u.name: u for n in list(around.values()) for u in n.users if u.name in all_names}
    for name, node in around.items():
        into, out = (name, "in"), (name, "out")
        graph.add_edge(into, out, capacity=_bytes(node) if _kind(node) in carriers else _NO_CARRIER)
        if name in late:
            graph.add_edge("late", into)
        elif name not in undecided:
            graph.add_edge(into, "early")
        for operand in node.all_input_nodes:
            if operand.name in around:
                graph.add_edge((operand.name, "out"), into)
                graph.add_edge(into, (operand.name, "in"))
    if "late" not in graph:
        return set()
    if "early" not in graph:
        return {n.name for n in free}
    _, (behind, _) = nx.minimum_cut(graph, "late", "early")
    return {n.name for n in free if (n.name, "in") in behind}


def _kind(node: fx.Node) -> _Kind:
    value = node.meta["val"]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else ((), None)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
