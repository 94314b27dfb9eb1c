"""What a plan says about each module."""

from autopar.breakdown.grouping import CROSSING, INPUTS, owner
from autopar.breakdown.parts import Part, Transfer, Weight, breakdown, copies_of
from autopar.breakdown.words import PARALLELISMS, in_words, label, over

__all__ = [
    "CROSSING", "INPUTS", "PARALLELISMS", "Part", "Transfer", "Weight", "breakdown", "copies_of", "in_words", "label", "over", "owner",
]  # fmt: skip
