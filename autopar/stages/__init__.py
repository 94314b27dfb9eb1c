"""Pipeline stages. One trace is cut into several traces.

A *cut* is a position in the order of forward nodes. Nodes before it belong to an earlier stage.
Every stage is a `Trace` whose inputs and outputs include the tensors that it receives from and
sends to its neighbors. Pricing, planning, emission, the interpreter and the prediction of memory
therefore process a stage like a whole trace.
"""

from autopar.stages.cutting import (
    NO_PIPELINE,
    Cut,
    Seams,
    cut_trace,
    find_refusal,
    seams,
    usable_points,
)
from autopar.stages.placing import CutPoint, cut_points

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
