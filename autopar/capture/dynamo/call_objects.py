"""Refuse arguments that are neither tensors nor constants of the program."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable
from typing import Any

import numpy
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.exc import UserError, UserErrorType
from torch._dynamo.utils import common_constant_types

from autopar.capture.call_constants import is_constant
from autopar.errors import CaptureError

_REMEDY = (
    "pass its plain values, or a frozen dataclass of them (`@dataclass(frozen=True)`); or store the"
    " object as an attribute of the model in __init__"
)
_REMEDIES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (
        numpy.ndarray,
        "pass it as a tensor, `torch.as_tensor(array)`, or as a number, `array.item()`",
    ),
    ((numpy.datetime64, numpy.timedelta64), "pass it as an integer: `x.astype(int).item()`"),
    (numpy.longdouble, "pass it as a Python number: `float(x)`"),
    (numpy.clongdouble, "pass it as a Python number: `complex(x)`"),
    (numpy.generic, "pass it as a Python number: `x.item()`"),
    (numbers.Number, "pass it as a Python number, such as `float(x)`"),
    (os.PathLike, "pass it as a string: `str(path)`"),
    (nn.Module, "store it as a submodule of the model in __init__"),
    ((set, frozenset, range, Iterable), "pass a tuple or a list of its elements: `tuple(x)`"),
)


def refuse_other_objects(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raise CaptureError at the first argument that is neither a tensor nor a constant, and that a
    graph does not accept.

    Args:
        leaves: (name, value) of each leaf of the call.
    """
    for name, value in leaves:
        if isinstance(value, Tensor) or is_constant(value) or _is_of_graphs(value):
            continue
        kind = type(value)
        shown = (
            kind.__name__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}"
        )
        raise CaptureError(
            f"the argument {name!r} has type {shown}, which a program does not accept",
            remedy=next((text for kinds, text in _REMEDIES if isinstance(value, kinds)), _REMEDY),
        )


def _is_of_graphs(value: Any) -> bool:
    """Return whether torch accepts an object, such as a generator of random numbers, as an input of
    a graph."""
    try:
        eval_frame.check_user_input_output([value], UserErrorType.INVALID_INPUT)
    except UserError:
        return False
    return not isinstance(value, tuple(common_constant_types))
