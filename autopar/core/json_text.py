"""JSON from untrusted files: limits of depth and size while it is read, and checks that the data
have the types of their annotations."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MOST_LEVELS = 100
_BITS = 64
_MOST_DIGITS = 20  # of an integer of so many bits
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
    """Make an object of its keys and values.

    Args:
        pairs: in the order of the text.

    Returns:
        Key → value.

    Raises:
        ValueError: where a key stands there twice. `json.loads` would take the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, num in Counter(key for key, _ in pairs).items() if num > 1)
        raise ValueError(f"the key {twice!r:.80} occurs twice in one object")
    return found


def _check_texts(data: Any, without: re.Pattern[str]) -> None:
    """Refuse texts with certain characters.

    Args:
        data: what was read.
        without: these characters.

    Raises:
        ValueError: where a text or key has one.
    """
    if isinstance(data, dict):
        for key in data:
            _check_texts(key, without)
        data = list(data.values())
    if isinstance(data, list):
        for value in data:
            _check_texts(value, without)
    elif isinstance(data, str) and (found := without.search(data)):
        raise ValueError(f"the text {data!a:.80} contains the control character {found[0]!a}")


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
        raise ValueError(
            f"the integer {digits[:12]}… with {num_digits} digits has more than {_BITS} bits"
        )
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
    raise ValueError(f"{name} is not a JSON number")


def unread(said: Any, read: Any, path: str = "") -> str:
    """Find data that a reader ignored or changed.

    Args:
        said: the data of a file, as `read_json` returns them.
        read: the data that would be written for the object that was made from `said`; they may have
            further keys.
        path: path of both, for the message.

    Returns:
        The first difference of `said` and `read` in words; empty if there is none.
    """
    if isinstance(said, dict) and isinstance(read, dict):
        unknown = next((key for key in said if key not in read), None)
        if unknown is not None:
            return f"{path or 'it'} has the unknown field {unknown!r:.80}"
        parts = ((said[key], read[key], f"{path}.{key}" if path else key) for key in said)
    elif isinstance(said, list) and isinstance(read, list) and len(said) == len(read):
        parts = ((a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(said, read, strict=True)))
    else:
        return "" if said == read else f"{path} is {said!r:.80}, but is read as {read!r:.80}"
    return next(filter(None, (unread(*part) for part in parts)), "")


# --------------------------------------------------------------------------------------------------
# Types of untrusted data: whether a value and all its parts have the types of their annotations.

_hints = cache(get_type_hints)


def mismatch(value: Any, hint: Any, trusted: tuple[type, ...] = (), path: str = "") -> str:
    """Find where and how a value differs from its annotation.

    Args:
        value: the value.
        hint: the annotation.
        trusted: classes whose instances are not looked into.
        path: path of the value, for the message.

    Returns:
        The first difference in words, as ``entries[3].time_s is 'x', not float``; empty if there is
        none.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        found = [mismatch(value, arg, trusted, path) for arg in args]
        return "" if "" in found else found[0]
    kind = {None: hint, Literal: object}.get(origin, origin)
    if not (value in args if origin is Literal else _is_instance(value, kind)):
        return f"{path.lstrip('.')} is {value!r:.60}, not {_type_name(kind, origin, args)}"
    if isinstance(value, float) and math.isnan(value):
        return f"{path.lstrip('.')} is not a number"
    if kind is Any or isinstance(value, trusted):
        return ""
    parts = _parts(value, args)
    differences = (mismatch(part, inner, trusted, path + step) for part, inner, step in parts)
    return next(filter(None, differences), "")


def _is_instance(value: Any, kind: Any) -> bool:
    """As `isinstance`. But in Python a bool is an int, and an int is no float; in files it is the
    other way round."""
    if kind is Any:
        return True
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _type_name(kind: Any, origin: Any, args: tuple[Any, ...]) -> str:
    """An annotation in the words of messages."""
    if kind is NoneType:
        return "nothing"
    return " or ".join(map(repr, args)) if origin is Literal else kind.__name__


def _parts(value: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, Any, str]]:
    """(part, its annotation, how to get to it) of a dataclass, mapping or tuple."""
    if is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        yield from ((getattr(value, f.name), hints[f.name], f".{f.name}") for f in fields(value))
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key, args[0], f" key {key!r}"
            yield part, args[1], f"[{key!r}]"
    elif isinstance(value, tuple) and args[-1:] == (...,):
        yield from ((part, args[0], f"[{i}]") for i, part in enumerate(value))
    elif isinstance(value, tuple):
        yield len(value), Literal[len(args)], " length"
        yield from (
            (part, arg, f"[{i}]") for i, (part, arg) in enumerate(zip(value, args, strict=False))
        )
