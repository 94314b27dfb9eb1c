"""The places at which a model can be cut, and where stages are sewn together there."""

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
# it: stages between pass it on. A gradient goes the other way, on the back of a forward value of
# its shape and dtype, in whose layout it crosses: mostly the one that it is the gradient of.


@dataclass(frozen=True, slots=True)
class Boundary:
    """What crosses from one stage to the next, by names of nodes in the whole trace.

    Attributes:
        values: forward values. gradients: what comes back for each, ``""`` where nothing does.
    """

    values: tuple[str, ...]
    gradients: tuple[str, ...]


def boundaries(trace: Trace, placing: Placing, num_stages: int) -> tuple[Boundary, ...]:
    """All boundaries, in order.

    Raises:
        CutError: where a gradient finds no value to ride on.
    """
    nodes = {n.name: n for n in trace.graph.nodes}
    forward = _spans(trace, placing, "forward")
    backward = _spans(trace, placing, "backward")
    found: list[Boundary] = []
    carried: dict[str, str] = {}  # gradient → the value it rode on at the boundary behind
    for boundary in reversed(range(num_stages - 1)):
        values = [name for name, (first, last) in forward.items() if first <= boundary < last]
        gradients = [name for name, (first, last) in backward.items() if last <= boundary < first]
        carried = _carriers([nodes[n] for n in values], [nodes[n] for n in gradients], carried)
        riding = {value: gradient for gradient, value in carried.items()}
        found.append(Boundary(tuple(values), tuple(riding.get(name, "") for name in values)))
    return tuple(reversed(found))


def _spans(trace: Trace, placing: Placing, phase: str) -> dict[str, tuple[int, int]]:
    """Node name → the stage that makes it and the farthest that reads it, where these differ."""
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
            f"{node.meta['key']} has several results and would cross a cut", where=where_of(node)
        )


def _carriers(
    values: Sequence[fx.Node], gradients: Sequence[fx.Node], before: Mapping[str, str]
) -> dict[str, str]:
    """Gradient → the value that it rides on. One that came over the boundary behind stays where it
    is if it can; the others ride in the order in which backward makes them, which is that of their
    values reversed."""
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
                " cut, and no activation like it does"
            )
            raise CutError(what, where=where_of(gradient))
        riding[gradient.name] = free.pop(fitting[-1]).name
    return riding


def _alike(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.shape == y.shape and x.dtype == y.dtype


NO_PIPELINE = (
    "leave out constraints.pipeline(): without it the axis is used for data or tensor parallelism"
)


def usable_points(trace: Trace, at_least: int = 1) -> tuple[tuple[CutPoint, ...], Placing]:
    """The places at which the model can be cut, and where everything is if it is cut at all of
    them.

    Each place is legal on its own. Several together need not be: `find_refusal` says.

    Args:
        at_least: of the coarsest parts that have so many such places; else of those that have most.

    Raises:
        ConstraintError: where there is none.
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
        f"the model has no place to cut it into stages{why}", where=where, remedy=NO_PIPELINE
    )


def _legal(
    trace: Trace, points: Sequence[CutPoint]
) -> tuple[tuple[CutPoint, ...], CutError | None]:
    """Those at which the model can be cut, each alone, and all placed together; why not at all."""
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
    """Why the model cannot be cut at these positions together; None where it can."""
    try:
        boundaries(trace, place(trace, positions), len(positions) + 1)
    except CutError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class Seams:
    """What lies at the borders of a cut.

    Attributes:
        apart: nodes that read what another stage, or each stage for itself, makes. exposed: nodes
            whose results another stage reads.
    """

    apart: frozenset[str]
    exposed: frozenset[str]


def seams(trace: Trace, placing: Placing) -> Seams:
    """Of a trace that is cut so."""

    def side(node: fx.Node) -> object:
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
