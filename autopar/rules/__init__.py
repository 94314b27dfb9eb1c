"""Op knowledge: which placements of an op's operands give which placements of its results.

A rule speaks of one mesh axis, in factor notation (`notation`); the `table` has one row per op;
`expansion` takes the product over axes; `localization` says what one rank then calls; `law` proves
a rule by numbers.
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
