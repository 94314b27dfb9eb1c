"""What functions of scores read of places and of captured tensors.

Terms. A *coordinate* is ``b``, ``h``, ``q`` or ``k``: the batch entry, query head, query or key of
a score. A dim of a captured tensor is *indexed by* a coordinate where every use of the tensor is an
index, and has this very coordinate there. Then a part of the tensor along the dim serves a part of
the scores, and the part is indexed from its own beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autopar.ops.elementwise import (
    COORDINATES,
    INDEX,
    Function,
    coordinate_of,
    read_function,
    references,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What functions read.

    Attributes:
        indexed: tensor → the coordinate of each dim, None where it has none.
        free: coordinates that they read other than as the index of such a dim.
    """

    indexed: Mapping[int, tuple[str | None, ...]]
    free: frozenset[str]


@lru_cache(maxsize=1024)
def reading(texts: tuple[str, ...], ranks: tuple[int, ...]) -> Reading:
    """What functions read of captured tensors with so many dims."""
    uses: dict[int, list[tuple[str | None, ...]]] = {}
    for text in texts:
        function = read_function(text)
        for tensor, places in _uses(function, ranks):
            uses.setdefault(tensor, []).append(places)
    indexed = {
        tensor: tuple(_same(each) for each in zip(*found, strict=True))
        for tensor, found in uses.items()
    }
    free = frozenset(name for text in texts for name in _free(read_function(text), indexed))
    return Reading(indexed, free)


def _same(coordinates: Sequence[str | None]) -> str | None:
    first = coordinates[0]
    return first if all(each == first for each in coordinates) and first != "k" else None


def _uses(function: Function, ranks: Sequence[int]) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """Each use of a captured tensor, and the coordinate by which it indexes each dim."""
    for name, args, kwargs in function.does:
        is_index = name == INDEX and "t" in args[0]
        if is_index:
            number = args[0]["t"]
            places = [coordinate_of(index, function) for index in args[1]]
            yield number, tuple(places + [None] * (ranks[number] - len(places)))
        for kind, number in references(args[1:] if is_index else (*args, *kwargs.values())):
            if kind == "t":
                yield number, (None,) * ranks[number]
    if "t" in function.gives:
        yield function.gives["t"], (None,) * ranks[function.gives["t"]]


def _free(function: Function, indexed: Mapping[int, tuple[str | None, ...]]) -> Iterator[str]:
    """Coordinates that are read other than as an index of a dim that is indexed by them; casts of
    coordinates read nothing by themselves.
    """

    def named(reference: Any) -> Iterator[str]:
        for kind, name in references(reference):
            if kind == "c" and name in COORDINATES:
                yield name
            elif kind == "v" and (found := coordinate_of({"v": name}, function)):
                yield found

    for number, (name, args, kwargs) in enumerate(function.does):
        if coordinate_of({"v": number}, function):
            continue
        if name == INDEX and "t" in args[0]:
            dims = indexed[args[0]["t"]]
            yield from (
                found
                for dim, index in enumerate(args[1])
                if dims[dim] is None
                for found in named(index)
            )
        else:
            yield from named((*args, *kwargs.values()))
    yield from named(function.gives)


def captures(text: str) -> bool:
    """Whether a function reads a captured tensor."""
    return any(kind == "t" for kind, _ in _all_references(text))


def reads(text: str, coordinate: str) -> bool:
    """Whether a function depends on a coordinate, be it as an index."""
    return ("c", coordinate) in _all_references(text)


def _all_references(text: str) -> set[tuple[str, Any]]:
    function = read_function(text)
    given = [value for _, args, kwargs in function.does for value in (*args, *kwargs.values())]
    return set(references([*given, function.gives]))
