"""What a plan says about each module."""

from autopar.breakdown.grouping import CROSSING, INPUTS, owner
from autopar.breakdown.memory import peak_kinds, rank_memory
from autopar.breakdown.parts import Part, Transfer, Weight, breakdown, copies_of
from autopar.breakdown.step import WAITING, StepParts, receiving_s, step_parts
from autopar.breakdown.words import PARALLELISMS, in_words, label, over

__all__ = [
    "CROSSING", "INPUTS", "PARALLELISMS", "WAITING", "Part", "StepParts", "Transfer", "Weight", "breakdown", "copies_of", "in_words",
    "label", "over", "owner", "peak_kinds", "rank_memory", "receiving_s", "step_parts",
]  # fmt: skip
