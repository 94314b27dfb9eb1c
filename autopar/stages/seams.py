"""The places at which a model can be cut, and where stages are sewn together there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.capture.trace import Trace
from autopar.errors import ConstraintError
from autopar.stages.placing import CutError, Placing, place
from autopar.stages.points import CutPoint, cut_points


def usable_points(trace: Trace) -> tuple[tuple[CutPoint, ...], Placing]:
    """The places at which the model can be cut, and where everything is if it is cut at all of them.

    Raises:
        ConstraintError: where there is none.
    """
    points = list(cut_points(trace))
    tried, refusal = False, None
    while points:
        try:
            return tuple(points), place(trace, [p.position for p in points])
        except CutError as error:
            refusal = error
            if tried:  # each alone can be cut, but not all together
                points = points[::2] if len(points) > 1 else []
            else:
                points, tried = [p for p in points if _cuttable(trace, p)], True
    why, where = ("", None) if refusal is None else (f": {refusal.what}", refusal.where)
    what = f"the model has no place to cut it into stages{why}"
    raise ConstraintError(what, where=where, remedy="use the axis for data or tensor parallelism")


def _cuttable(trace: Trace, point: CutPoint) -> bool:
    try:
        place(trace, [point.position])
    except CutError:
        return False
    return True


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
