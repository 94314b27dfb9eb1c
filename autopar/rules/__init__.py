"""Sharding rules: which placements of an op's operands give which placements of its results.

A rule is written for one mesh axis in factor notation (`notation`). The `table` has one row per op.
`expansion` combines rules over all mesh axes. `localization` returns the call that one rank makes.
`law` checks a rule numerically.
"""

from __future__ import annotations

from autopar.rules.call import Call, Operand, TensorInfo, call_of, call_on, operands_of, where_of
from autopar.rules.dispatch import EXCHANGES, num_senders, own_moves
from autopar.rules.expansion import cuts_alike
from autopar.rules.knowledge import (
    axis_options,
    is_discovered,
    is_fallback,
    is_strategy,
    strategies,
    why_replicated,
)
from autopar.rules.localization import localize
from autopar.rules.notation import AxisOption
from autopar.rules.registration import register, unregister
from autopar.rules.site import Length, Local, Start, Starts

__all__ = [
    "EXCHANGES",
    "AxisOption",
    "Call",
    "Length",
    "Local",
    "Operand",
    "Start",
    "Starts",
    "TensorInfo",
    "axis_options",
    "call_of",
    "call_on",
    "cuts_alike",
    "is_discovered",
    "is_fallback",
    "is_strategy",
    "localize",
    "num_senders",
    "operands_of",
    "own_moves",
    "register",
    "strategies",
    "unregister",
    "where_of",
    "why_replicated",
]
