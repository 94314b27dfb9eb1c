"""Plans and their parts."""

from autopar.plans.parts import (
    Communication,
    Crossed,
    Entry,
    Fingerprint,
    Kept,
    NodeChoice,
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
    "Pipeline",
    "Plan",
    "Potential",
    "Prediction",
    "Proof",
    "RunnerUp",
]
