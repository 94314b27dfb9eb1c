"""Comparison of Python values between a capture and a call.

Two values are the same only if a program that was compiled for one of them is valid for the other.
Numbers are compared with their type and by their bits, so ``-0.0`` differs from ``0.0``, and NaN
equals the same NaN. Enum members and objects of all other classes are compared by identity, since
the `__eq__` of a class may ignore a part that forward reads. NumPy scalars are compared with their
dtype, which decides how NumPy rounds.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any

import numpy
import torch

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
# NumPy scalars that torch reads as Python numbers or texts. It would drop the imaginary part of
# complex64 and the precision of longdouble.
NUMPY = (
    numpy.bool_,
    *(numpy.dtype(code).type for code in "bBhHiIlLqQefdD"),
    numpy.str_,
    numpy.bytes_,
)


def is_plain(value: Any) -> bool:
    """Return whether a value is compared by its contents, or is the only object with its name."""
    return isinstance(value, (*PLAIN, Enum)) or is_numpy(value)


def is_numpy(value: Any) -> bool:
    """Return whether a value is a NumPy scalar that torch reads as a Python number or text."""
    return type(value) in NUMPY


def is_same(now: Any, was: Any) -> bool:
    """Return whether a program that was compiled for one of two values is valid for the other."""
    if now is was:
        return True
    if type(now) is not type(was):
        return False
    if is_numpy(was):
        return is_same(now.item(), was.item())
    if not isinstance(was, PLAIN) or isinstance(was, Enum):
        return False
    if isinstance(was, float):
        return struct.pack("d", now) == struct.pack("d", was)
    if isinstance(was, complex):
        return struct.pack("dd", now.real, now.imag) == struct.pack("dd", was.real, was.imag)
    return bool(now == was)


def text_of(value: Any) -> str:
    """Return a text of a value for messages. Texts of plain values are equal in all processes for
    equal values; the text of any other object is the name of its class."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name or value.value}"
    return repr(value) if isinstance(value, PLAIN) or is_numpy(value) else type(value).__name__
