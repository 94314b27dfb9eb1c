"""Whether a value has the type that its annotation names, all the way down: what was read from a file is not to be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_hints = cache(get_type_hints)


def mismatch(value: Any, hint: Any, trusted: tuple[type, ...] = (), path: str = "") -> str:
    """Where and how `value` differs from the annotation `hint`, as in ``entries[3].time_s is 'x', not float``; else empty.

    Args:
        trusted: classes whose instances are not looked into.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        found = [mismatch(value, arg, trusted, path) for arg in args]
        return "" if "" in found else found[0]
    kind = {None: hint, Literal: object}.get(origin, origin)
    # A bool is an int to Python and an int no float, but not to those who write files.
    fits = value in args if origin is Literal else kind is Any or isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind in (int, float)):
        name = "nothing" if kind is NoneType else " or ".join(map(repr, args)) if origin is Literal else kind.__name__
        return f"{path.lstrip('.')} is {value!r:.60}, not {name}"
    if isinstance(value, float) and math.isnan(value):
        return f"{path.lstrip('.')} is no number"
    if kind is Any or isinstance(value, trusted):
        return ""
    return next(filter(None, (mismatch(part, inner, trusted, path + step) for part, inner, step in _parts(value, args))), "")


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
        yield from ((part, arg, f"[{i}]") for i, (part, arg) in enumerate(zip(value, args, strict=False)))
