"""A row of the rules' table that is a notation text."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.rules.call import Call
from autopar.rules.notation import Factors, parse

FIRST, EITHER, BOTH = ((0,),), ((0,), (1,)), ((0, 1),)
"""Sets of slots in which an op is linear together."""


@dataclass(frozen=True, slots=True)
class Row:
    """A notation text with its linear slot sets and the reduce op of its partial results."""

    text: str
    linear: tuple[tuple[int, ...], ...] = ()
    reduce_op: str = "sum"

    def __call__(self, call: Call) -> Factors:
        return parse(self.text, call, self.linear, self.reduce_op)
