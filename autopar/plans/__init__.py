"""Plans and their parts."""

from autopar.plans.flip import COMPUTE, Flip
from autopar.plans.load import forward_load, load_of, moved_load
from autopar.plans.parts import (
    Communication,
    Crossed,
    Entry,
    Fingerprint,
    InKernel,
    Kept,
    NodeChoice,
    Overlap,
    Potential,
    Prediction,
    Proof,
    RunnerUp,
    Version,
)
from autopar.plans.plan import FORMAT, VERSION, Pipeline, Plan

__all__ = [
    "COMPUTE",
    "FORMAT",
    "VERSION",
    "Communication",
    "Crossed",
    "Entry",
    "Fingerprint",
    "Flip",
    "InKernel",
    "Kept",
    "NodeChoice",
    "Overlap",
    "Pipeline",
    "Plan",
    "Potential",
    "Prediction",
    "Proof",
    "RunnerUp",
    "Version",
    "forward_load",
    "load_of",
    "moved_load",
]
