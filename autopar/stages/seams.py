"""Legal cut points of a model, the tensors that cross between stages, and the nodes next to a cut.

`boundaries` lists what crosses, `usable_points` the cut points that are legal, `seams` the nodes
that read or make tensors of other stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.capture.trace import Trace
from autopar.errors import ConstraintError
from autopar.rules import where_of
from autopar.stages.placing import CutError, CutPoint, Placing, levels, place

# --------------------------------------------------------------------------------------------------
# What crosses each boundary between stages.
#
# A forward value crosses every boundary from the stage that makes it to the last one that reads
# it; stages between pass it on. A gradient crosses in the opposite direction. It is paired with a
# forward value of its shape and dtype, and crosses in the layout of that value, which mostly is the
# value that it is the gradient of.


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses from one stage to the next, by names of nodes in the whole trace.

    Attributes:
        values: forward values.
        gradients: the gradient that comes back for each value, ``""`` if none does.
    """

    values: tuple[str, ...]
    gradients: tuple[str, ...]


def boundaries(trace: Trace, placing: Placing, num_stages: int) -> tuple[Boundary, ...]:
    """List what crosses each boundary between stages, in order.

    Args:
        trace: the whole trace.
        placing: the stage of each node.
        num_stages: number of stages; there is one boundary less.

    Raises:
        CutError: if a gradient crosses and no forward value of its shape and dtype does, or if a
            node with several results would cross.
    """
    nodes = {n.name: n for n in trace.graph.nodes}
    forward = _spans(trace, placing, "forward")
    backward = _spans(trace, placing, "backward")
    found: list[Boundary] = []
    carried: dict[str, str] = {}  # gradient → the value it is paired with at the next boundary
    for boundary in reversed(range(num_stages - 1)):
        values = [name for name, (first, last) in forward.items() if first <= boundary < last]
        gradients = [name for name, (first, last) in backward.items() if last <= boundary < first]
        carried = _carriers([nodes[n] for n in values], [nodes[n] for n in gradients], carried)
        riding = {value: gradient for gradient, value in carried.items()}
        found.append(Boundary(tuple(values), tuple(riding.get(name, "") for name in values)))
    return tuple(reversed(found))


def _spans(trace: Trace, placing: Placing, phase: str) -> dict[str, tuple[int, int]]:
    """Node name → the stage that makes it and the farthest stage that reads it, if these differ."""
    spans: dict[str, tuple[int, int]] = {}
    for node in trace.graph.nodes:
        made = placing.stage.get(node.name)
        backward = node.meta.get("phase") == "backward" or node.op == "placeholder"
        if made is None or node.name in placing.dropped or backward != (phase == "backward"):
            continue
        reading = [
            placing.stage[u.name]
            for u in node.users
            if u.name in placing.stage and u.name not in placing.dropped
        ]
        farthest = max(reading, default=made) if phase == "forward" else min(reading, default=made)
        if farthest != made:
            _check_plain(node)
            spans[node.name] = made, farthest
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
    """Gradient → the forward value that it is paired with.

    A gradient keeps the value of the next boundary (`before`) if that value crosses here too. The
    others are paired in the order in which backward makes them, which is the reversed order of
    their values.
    """
    free = {v.name: v for v in values if v.meta["val"].is_floating_point()}
    riding: dict[str, str] = {}
    for gradient in gradients:
        if before.get(gradient.name) in free:
            riding[gradient.name] = free.pop(before[gradient.name]).name
    for gradient in gradients:
        if gradient.name in riding:
            continue
        fitting = [name for name, value in free.items() if _alike(value, gradient)]
        if not fitting:
            what = (
                f"{gradient.meta['key']} of shape {tuple(gradient.meta['val'].shape)} would cross a"
                " cut without a matching activation"
            )
            raise CutError(what, where=where_of(gradient))
        riding[gradient.name] = free.pop(fitting[-1]).name
    return riding


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype


NO_PIPELINE = "remove constraints.pipeline(): the axis is then used for data or tensor parallelism"


def usable_points(trace: Trace, at_least: int = 1) -> tuple[tuple[CutPoint, ...], Placing]:
    """Find the legal cut points, and the assignment of nodes if the model is cut at all of them.

    Each point is legal on its own. `find_refusal` tells whether several are legal together.

    Args:
        at_least: number of points wanted. The coarsest level with so many legal points is used, or
            the level with the most.

    Raises:
        ConstraintError: if the model has no legal cut point.
    """
    found: tuple[CutPoint, ...] = ()
    refusal: CutError | None = None
    for points in levels(trace):
        legal, refused = _legal(trace, points)
        refusal = refusal or refused
        if len(legal) > len(found):
            found = legal
        if len(found) >= at_least:
            break
    if found:
        return found, place(trace, [p.position for p in found])
    why, where = ("", None) if refusal is None else (f": {refusal.what}", refusal.where)
    raise ConstraintError(
        f"the model cannot be cut into stages{why}", where=where, remedy=NO_PIPELINE
    )


def _legal(
    trace: Trace, points: Sequence[CutPoint]
) -> tuple[tuple[CutPoint, ...], CutError | None]:
    """The points at which the model can be cut one at a time and that can be placed together, and
    the error of cutting at all points, if there is one."""
    refusal = find_refusal(trace, [p.position for p in points]) if points else None
    if refusal is None:
        return tuple(points), None
    alone, legal = (
        [p for p in points if find_refusal(trace, [p.position]) is None],
        list[CutPoint](),
    )
    if alone and _can_place(trace, alone):
        return tuple(alone), refusal
    for point in alone:  # each alone can be cut, but not all together
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
    """Return the error of cutting the model at all these positions, or None if it can be cut."""
    try:
        boundaries(trace, place(trace, positions), len(positions) + 1)
    except CutError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class Seams:
    """The nodes next to the boundaries of a cut.

    Attributes:
        apart: nodes that read a result of another stage, or one that each stage computes for
            itself.
        exposed: nodes whose results another stage reads.
    """

    apart: frozenset[str]
    exposed: frozenset[str]


def seams(trace: Trace, placing: Placing) -> Seams:
    """Find the nodes of a trace that lie next to the boundaries of a cut."""

    def side(node: fx.Node) -> object:
        """The stage of a node, or the reason why it has none."""
        if node.name in placing.copied:
            return "copied"
        return (
            "dropped" if node.name in placing.dropped else placing.stage.get(node.name, "outside")
        )

    apart, exposed = set[str](), set[str]()
    for node in trace.graph.nodes:
        for operand in node.all_input_nodes if node.op == "call_function" else ():
            if side(operand) not in (side(node), "outside"):
                apart.add(node.name)
                exposed.add(operand.name)
    return Seams(frozenset(apart), frozenset(exposed - placing.copied - placing.dropped))
