"""Comparison of Python values between a capture and a call.

Two values are the same only if a program that was compiled for one of them is valid for the other.
Numbers are compared with their type and by their bits, so ``-0.0`` differs from ``0.0``, and NaN
equals the same NaN. Enum members and objects of all other classes are compared by identity, since
the `__eq__` of a class may ignore a part that forward reads.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Any

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


def is_plain(value: Any) -> bool:
    """Return whether a value is compared by its contents, or is the only object with its name."""
    return isinstance(value, (*PLAIN, Enum))


def is_same(now: Any, was: Any) -> bool:
    """Return whether a program that was compiled for one of two values is valid for the other."""
    if now is was:
        return True
    if type(now) is not type(was) or not isinstance(was, PLAIN) or isinstance(was, Enum):
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
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__
