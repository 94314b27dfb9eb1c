"""The places at which a model can be cut, and where stages are sewn together there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.trace import Trace
from autopar.errors import ConstraintError
from autopar.stages.crossing import boundaries
from autopar.stages.placing import CutError, Placing, place
from autopar.stages.points import CutPoint, levels

NO_PIPELINE = "leave out constraints.pipeline(): without it the axis is used for data or tensor parallelism"


def usable_points(trace: Trace, at_least: int = 1) -> tuple[tuple[CutPoint, ...], Placing]:
    """The places at which the model can be cut, and where everything is if it is cut at all of them.

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
    raise ConstraintError(f"the model has no place to cut it into stages{why}", where=where, remedy=NO_PIPELINE)


def _legal(trace: Trace, points: Sequence[CutPoint]) -> tuple[tuple[CutPoint, ...], CutError | None]:
    """Those at which the model can be cut, each alone, and all placed together; why not at all."""
    refusal = find_refusal(trace, [p.position for p in points]) if points else None
    if refusal is None:
        return tuple(points), None
    alone, legal = [p for p in points if find_refusal(trace, [p.position]) is None], list[CutPoint]()
    if alone and _placed(trace, alone):
        return tuple(alone), refusal
    for point in alone:  # each alone can be cut, but not all together
        if _placed(trace, [*legal, point]):
            legal.append(point)
    return tuple(legal), refusal


def _placed(trace: Trace, points: Sequence[CutPoint]) -> bool:
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
        apart: nodes that read what another stage, or each stage for itself, makes. exposed: nodes whose results another stage reads.
    """

    apart: frozenset[str]
    exposed: frozenset[str]


def seams(trace: Trace, placing: Placing) -> Seams:
    """Of a trace that is cut so."""

    def side(node: fx.Node) -> object:
        if node.name in placing.copied:
            return "copied"
        return "dropped" if node.name in placing.dropped else placing.stage.get(node.name, "outside")

    apart, exposed = set[str](), set[str]()
    for node in trace.graph.nodes:
        for operand in node.all_input_nodes if node.op == "call_function" else ():
            if side(operand) not in (side(node), "outside"):
                apart.add(node.name)
                exposed.add(operand.name)
    return Seams(frozenset(apart), frozenset(exposed - placing.copied - placing.dropped))
