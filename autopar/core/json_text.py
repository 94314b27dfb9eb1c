"""JSON from untrusted files: limits of depth and size while it is read."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

MOST_LEVELS = 100
_BITS = 64
_MOST_DIGITS = 20  # digits of the longest integer of 64 bits
_TEXT_OR_BRACKET = re.compile(r'"(?:[^"\\]+|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_ESCAPE = re.compile(r"\\[ubfr]")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_json(text: str, *, without: re.Pattern[str] | None = None) -> Any:
    """Read JSON from an untrusted file.

    Args:
        text: contents of the file.
        without: characters that no text or key may contain, for example `autopar.errors.CONTROL`
            for data that terminals and pictures show.

    Returns:
        The data, as `json.loads` returns them.

    Raises:
        ValueError: if it is no JSON, is nested more than `MOST_LEVELS` deep, repeats a key of an
            object, or contains a number that is not finite, an integer of more than 64 bits, or a
            text with one of the characters `without`.
    """
    _check_depth(text)
    data = json.loads(
        text,
        parse_int=_read_integer,
        parse_float=_read_number,
        parse_constant=_refuse_constant,
        object_pairs_hook=_read_object,
    )
    if without is not None and (_ESCAPE.search(text) or without.search(text)):
        _check_texts(data, without)
    return data


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from its keys and values.

    Args:
        pairs: keys and values, in the order of the text.

    Returns:
        Key → value.

    Raises:
        ValueError: if a key occurs twice. `json.loads` would use the last value.
    """
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = next(key for key, num in Counter(key for key, _ in pairs).items() if num > 1)
        raise ValueError(f"the key {twice!r:.80} occurs twice in one object")
    return data


def _check_texts(data: Any, without: re.Pattern[str]) -> None:
    """Refuse texts with certain characters.

    Args:
        data: the data that were read.
        without: the characters.

    Raises:
        ValueError: if a text or key has one.
    """
    if isinstance(data, dict):
        for key in data:
            _check_texts(key, without)
        data = list(data.values())
    if isinstance(data, list):
        for value in data:
            _check_texts(value, without)
    elif isinstance(data, str) and (match := without.search(data)):
        raise ValueError(f"the text {data!a:.80} contains the control character {match[0]!a}")


def _check_depth(text: str) -> None:
    """Count brackets outside of texts.

    Args:
        text: JSON, whole or not.

    Raises:
        ValueError: if more than `MOST_LEVELS` lists and objects are open at once.
    """
    depth = 0
    for match in _TEXT_OR_BRACKET.finditer(text):
        depth += _STEPS.get(match[0], 0)
        if depth > MOST_LEVELS:
            line = f"line {text.count(chr(10), 0, match.start()) + 1}"
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep: {line}")


def _read_integer(digits: str) -> int:
    """Read an integer.

    Args:
        digits: the text of the integer, with its sign.

    Returns:
        The integer.

    Raises:
        ValueError: if it has more than 64 bits.
    """
    num_digits = len(digits.lstrip("-"))
    if num_digits > _MOST_DIGITS or abs(int(digits)) >= 2**_BITS:
        raise ValueError(
            f"the integer {digits[:12]}… with {num_digits} digits has more than {_BITS} bits"
        )
    return int(digits)


def _read_number(digits: str) -> float:
    """Read a number that is written with a point or an exponent.

    Args:
        digits: the text of the number, with its sign.

    Returns:
        The nearest number of 64 bits.

    Raises:
        ValueError: if it is larger than any of them.
    """
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits:.24} is too large")
    return number


def _refuse_constant(name: str) -> Any:
    """Refuse the names of numbers that Python reads but JSON does not have.

    Args:
        name: ``NaN``, ``Infinity`` or ``-Infinity``.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{name} is not a JSON number")
