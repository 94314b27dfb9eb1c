"""The places at which a model can be cut, and where stages are sewn together there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.trace import Trace
from autopar.errors import ConstraintError
from autopar.stages.crossing import boundaries
from autopar.stages.placing import CutError, Placing, place
from autopar.stages.points import CutPoint, cut_points


def usable_points(trace: Trace) -> tuple[tuple[CutPoint, ...], Placing]:
    """The places at which the model can be cut, and where everything is if it is cut at all of them.

    Each place is legal on its own. Several together need not be: `find_refusal` says.

    Raises:
        ConstraintError: where there is none.
    """
    points = list(cut_points(trace))
    refusal = find_refusal(trace, [p.position for p in points]) if points else None
    if refusal is not None:
        points = [p for p in points if find_refusal(trace, [p.position]) is None]
    while points:
        try:
            return tuple(points), place(trace, [p.position for p in points])
        except CutError as error:  # each alone can be cut, but not all together
            refusal, points = error, points[::2] if len(points) > 1 else []
    why, where = ("", None) if refusal is None else (f": {refusal.what}", refusal.where)
    what = f"the model has no place to cut it into stages{why}"
    raise ConstraintError(what, where=where, remedy="use the axis for data or tensor parallelism")


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
