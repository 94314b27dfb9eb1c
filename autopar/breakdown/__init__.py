"""What a plan says about each module."""

from autopar.breakdown.parts import (
    CROSSING,
    INPUTS,
    PARALLELISMS,
    Part,
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
    "Part",
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
