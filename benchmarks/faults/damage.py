"""Ways to damage a file: bytes, the structure of JSON, and single facts in it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
DEPTH = 5000
HUGE = int("9" * 400)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, float("nan"), float("inf"), HUGE, 2**63, "", "x",
    "x" * 10_000, "{0:>1500000000}", "%s%n", "\x1b[31mred\x1b[0m", "\ud800", "../../etc/passwd",
    [], {}, [[]], [None], {"": None}, {"x": {"x": {}}},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Damaged:
    """A damaged text, and how it was made."""

    text: str
    how: str
    path: Path = ()


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value in JSON data, its root left out."""
    entries = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(data: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        data = data[key]
    return data


def pattern_of(path: Path) -> str:
    """A path without indices, by which findings are grouped."""
    return ".".join("*" if isinstance(key, int) else key for key in path)


def differences(one: Any, other: Any, unordered: Collection[str] = ()) -> list[Path]:
    """The paths at which two JSON data differ.

    Args:
        unordered: names of lists, by `names_of`, whose order has no meaning: they are sorted,
            their equal entries left out, and the others compared in turn. Indices are of the
            sorted lists of the first.
    """
    sort = [in_one_order(each, unordered) for each in (one, other)]
    return list(_differences(sort[0], sort[1], frozenset(unordered), ()))


def _differences(one: Any, other: Any, unordered: frozenset[str], path: Path) -> Iterator[Path]:
    if isinstance(one, dict) and isinstance(other, dict):
        yield from ((*path, key) for key in one.keys() ^ other.keys())
        for key in one.keys() & other.keys():
            yield from _differences(one[key], other[key], unordered, (*path, key))
    elif isinstance(one, list) and isinstance(other, list):
        is_set = is_unordered(path, unordered)
        left = without_equal(one, other) if is_set else list(enumerate(one))
        right = without_equal(other, one) if is_set else list(enumerate(other))
        if len(left) != len(right):
            yield path
        for (index, a), (_, b) in zip(left, right, strict=False):
            yield from _differences(a, b, unordered, (*path, index))
    elif one != other or type(one) is not type(other):
        yield path


def names_of(path: Path) -> str:
    """The keys of a path without indices; of a plan's stage as of a plan."""
    names = [key for key in path if isinstance(key, str)]
    return ".".join(names[2:] if names[:2] == ["pipeline", "stages"] else names)


def is_unordered(path: Path, unordered: Collection[str]) -> bool:
    """Whether a path is that of a list of these names, and not of a list in one."""
    return bool(path) and isinstance(path[-1], str) and names_of(path) in unordered


def in_one_order(data: Any, unordered: Collection[str], path: Path = ()) -> Any:
    """The same with the lists of these names sorted."""
    if isinstance(data, dict):
        return {key: in_one_order(data[key], unordered, (*path, key)) for key in sorted(data)}
    if not isinstance(data, list):
        return data
    inner = [in_one_order(value, unordered, (*path, i)) for i, value in enumerate(data)]
    return sorted(inner, key=json.dumps) if is_unordered(path, unordered) else inner


def without_equal(entries: list[Any], other: list[Any]) -> list[tuple[int, Any]]:
    """Entries with their indices, without as many equal ones as the other list has."""
    left, found = Counter(map(json.dumps, other)), []
    for index, entry in enumerate(entries):
        if left[text := json.dumps(entry)]:
            left[text] -= 1
        else:
            found.append((index, entry))
    return found


def random_place(data: Any, rng: random.Random) -> Path:
    """A path: fields of any depth are as likely, however many entries lists have."""
    by_pattern: dict[str, list[Path]] = {}
    for path in places(data):
        by_pattern.setdefault(pattern_of(path), []).append(path)
    return rng.choice(by_pattern[rng.choice(sorted(by_pattern))])


def damage_bytes(text: str, rng: random.Random) -> Damaged:
    """One to four bytes changed, removed or added; or the end is missing."""
    data = bytearray(text.encode())
    if rng.random() < 0.2:
        end = rng.randrange(len(data))
        return Damaged(data[:end].decode(errors="replace"), f"cut at byte {end}")
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        change = rng.choice(("flip", "remove", "add"))
        if change == "flip":
            data[place] ^= 1 << rng.randrange(7)
        elif change == "remove":
            del data[place]
        else:
            data.insert(place, rng.randrange(32, 127))
    return Damaged(data.decode(errors="surrogateescape"), "bytes")


def damage_structure(text: str, rng: random.Random) -> Damaged:
    """A value is removed, replaced by one of another form, doubled, renamed, swapped or nested."""
    data = json.loads(text)
    path = random_place(data, rng)
    parent, key, value = at(data, path[:-1]), path[-1], at(data, path)
    change = rng.choice(
        ("remove", "replace", "replace", "replace", "double", "rename", "swap", "nest")
    )
    if change == "remove":
        del parent[key]
    elif change == "replace":
        parent[key] = rng.choice(VALUES)
    elif change == "double" and isinstance(parent, list):
        parent.append(value)
    elif change == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif change == "nest":
        return Damaged(nested(text, data, path), f"nest {DEPTH} deep at {pattern_of(path)}", path)
    elif isinstance(parent, dict):
        parent[rng.choice(("x", f"{key}_", str(key).upper()))] = parent.pop(key)
    return Damaged(json.dumps(data), f"{change} at {pattern_of(path)}", path)


def nested(text: str, data: Any, path: Path) -> str:
    """The text with a value in lists that are nested too deep for most readers."""
    mark = "a value of its own"
    at(data, path[:-1])[path[-1]] = mark
    return json.dumps(data).replace(json.dumps(mark), "[" * DEPTH + "]" * DEPTH)


def falsify(text: str, rng: random.Random) -> Damaged:
    """A plausible other value in one place: another number, flag, or word of the same field."""
    data = json.loads(text)
    for _ in range(100):
        path = random_place(data, rng)
        old = at(data, path)
        new = other_value(data, path, old, rng)
        if new != old or type(new) is not type(old):
            at(data, path[:-1])[path[-1]] = new
            how = f"{pattern_of(path)}: {json.dumps(old)[:80]} → {json.dumps(new)[:80]}"
            return Damaged(json.dumps(data), how, path)
    return Damaged(text, "nothing")


def other_value(data: Any, path: Path, old: Any, rng: random.Random) -> Any:
    """Another value of that kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, old * 2, old // 2))
    if isinstance(old, float):
        return old * rng.choice((0.5, 2.0, 0.999, 1.01))
    if isinstance(old, str):
        field = pattern_of(path)
        alike = [at(data, p) for p in places(data) if pattern_of(p) == field]
        words = sorted({word for word in alike if isinstance(word, str)} - {old})
        return rng.choice(words) if words else f"{old}x"
    return old


WAYS: dict[str, Callable[[str, random.Random], Damaged]] = {
    "bytes": damage_bytes,
    "structure": damage_structure,
    "falsified": falsify,
}
