"""JSON from files that anyone may have written: read only where it is no deeper and no larger than what autopar writes."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MOST_LEVELS = 100
_BITS = 64
_MOST_DIGITS = 20  # of an integer of so many bits
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]+|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_json(text: str) -> Any:
    """Read JSON of a file that is not to be trusted.

    Args:
        text: what the file holds.

    Returns:
        What the text says, as `json.loads` gives it.

    Raises:
        ValueError: where it is no JSON, is nested more than `MOST_LEVELS` deep, or holds a number
            that is infinite, none, or an integer of more than 64 bits.
    """
    _check_depth(text)
    return json.loads(
        text,
        parse_int=_read_integer,
        parse_float=_read_number,
        parse_constant=_refuse_constant,
    )


def _check_depth(text: str) -> None:
    """Count brackets outside of texts.

    Args:
        text: JSON, whole or not.

    Raises:
        ValueError: where more than `MOST_LEVELS` lists and objects are open at once.
    """
    depth = 0
    for found in _TEXT_OR_BRACKET.finditer(text):
        depth += _STEPS.get(found[0], 0)
        if depth > MOST_LEVELS:
            where = f"line {text.count(chr(10), 0, found.start()) + 1}"
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep: {where}")


def _read_integer(digits: str) -> int:
    """Read an integer.

    Args:
        digits: as it is written, with its sign.

    Returns:
        The integer.

    Raises:
        ValueError: where it has more than 64 bits.
    """
    num_digits = len(digits.lstrip("-"))
    if num_digits > _MOST_DIGITS or abs(int(digits)) >= 2**_BITS:
        raise ValueError(f"the integer {digits[:12]}… of {num_digits} digits has over {_BITS} bits")
    return int(digits)


def _read_number(digits: str) -> float:
    """Read a number that is written with a point or an exponent.

    Args:
        digits: as it is written, with its sign.

    Returns:
        The nearest number of 64 bits.

    Raises:
        ValueError: where it is larger than any of them.
    """
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits:.24} is too large")
    return number


def _refuse_constant(name: str) -> Any:
    """Refuse what Python writes for numbers that JSON does not have.

    Args:
        name: ``NaN``, ``Infinity`` or ``-Infinity``.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} is no number of JSON")
