"""Describe each module of a plan."""

from autopar.breakdown.module_parts import (
    CROSSING,
    INPUTS,
    ModulePart,
    Transfer,
    Weight,
    breakdown,
    copies_of,
    label,
    owner,
)
from autopar.breakdown.parallelism import PARALLELISMS, in_words, over
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
