"""Plans and their parts."""

from autopar.plans.load import load_of, moved_load
from autopar.plans.parts import (
    Communication,
    Crossed,
    Entry,
    Fingerprint,
    Kept,
    NodeChoice,
    Overlap,
    Potential,
    Prediction,
    Proof,
    RunnerUp,
)
from autopar.plans.plan import FORMAT, VERSION, Pipeline, Plan

__all__ = [
    "FORMAT",
    "VERSION",
    "Communication",
    "Crossed",
    "Entry",
    "Fingerprint",
    "Kept",
    "NodeChoice",
    "Overlap",
    "Pipeline",
    "Plan",
    "Potential",
    "Prediction",
    "Proof",
    "RunnerUp",
    "load_of",
    "moved_load",
]
