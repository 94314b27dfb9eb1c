"""Describe each module of a plan."""

from autopar.breakdown.module_parts import (
    CROSSING,
    INPUTS,
    PARALLELISMS,
    ModulePart,
    Transfer,
    Weight,
    breakdown,
    copies_of,
    in_words,
    label,
    over,
    owner,
)
from autopar.breakdown.step import (
    WAITING,
    StepParts,
    peak_kinds,
    rank_memory,
    receiving_s,
    step_parts,
)

__all__ = [
    "CROSSING",
    "INPUTS",
    "PARALLELISMS",
    "WAITING",
    "ModulePart",
    "StepParts",
    "Transfer",
    "Weight",
    "breakdown",
    "copies_of",
    "in_words",
    "label",
    "over",
    "owner",
    "peak_kinds",
    "rank_memory",
    "receiving_s",
    "step_parts",
]
