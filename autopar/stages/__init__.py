"""A trace cut into the traces of pipeline stages.

A *cut* is a position in the order of forward nodes: what comes before belongs to an earlier stage.
Every stage is a `Trace` of its own, with what crosses to and from its neighbours as inputs and
outputs, so that all that is done with a trace (pricing, planning, emission, the lockstep
interpreter, the prediction of memory) is done with a stage.
"""

from autopar.stages.cutting import Cut, cut_trace
from autopar.stages.placing import CutPoint, cut_points
from autopar.stages.seams import NO_PIPELINE, Seams, find_refusal, seams, usable_points

__all__ = [
    "NO_PIPELINE",
    "Cut",
    "CutPoint",
    "Seams",
    "cut_points",
    "cut_trace",
    "find_refusal",
    "seams",
    "usable_points",
]
