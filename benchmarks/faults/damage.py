"""Ways to damage a file: its bytes, the structure of its JSON, and single values in it."""

from __future__ import annotations

import gzip
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
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    HUGE,
    2**63,
    "",
    "x",
    "x" * 10_000,
    "{0:>1500000000}",
    "%s%n",
    "\x1b[31mred\x1b[0m",
    "\ud800",
    "../../etc/passwd",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"x": {"x": {}}},
)
MARK = "a value of its own"
DANGEROUS = (
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "9" * 5000,
    "1" + "0" * 30,
    str(2**64 - 1),
    "1e-320",
    '"\\u001b[31mred"',
    '"\\u009b31mred"',
    '"\\u001b]8;;http://x\\u0007link"',
    '"\\u0007\\u0008\\u0000"',
    '"line\\nline"',
    '"\\u202egnp.exe"',
    '"\\ud800"',
    '"%s%s%n"',
    '"{0:>1500000000}"',
    '"{0.__class__}"',
    '"{}"',
    '"{x}"',
    '"{0}{1}{2}"',
    '"[bold red]x[/]"',
    '"[/]"',
    '"<script>alert(1)</script>"',
    '"$\\\\frac"',
    '"../../etc/passwd"',
    '"/dev/zero"',
    '"' + "x" * 100_000 + '"',
    '"' + "[" * 1000 + '"',
    '"' + "a." * 5000 + '"',
    "[" * 90 + "]" * 90,
    "[" * DEPTH + "]" * DEPTH,
    "[" + "0," * 50_000 + "0]",
    "true",
    "null",
    "{}",
    "[]",
)
"""Dangerous values, as JSON text."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A damaged text, and a description of the damage."""

    text: str
    how: str
    path: Path = ()

    @property
    def data(self) -> bytes:
        """The bytes that are written to the file."""
        return self.text.encode(errors="surrogateescape")


def places(data: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value in JSON data, except its root."""
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
    """Return the value at a path."""
    for key in path:
        data = data[key]
    return data


def pattern_of(path: Path) -> str:
    """Return a path without indices, by which findings are grouped."""
    return ".".join("*" if isinstance(key, int) else key for key in path)


def differences(one: Any, other: Any, unordered: Collection[str] = ()) -> list[Path]:
    """Return the paths at which two JSON documents differ.

    Args:
        one: the first document.
        other: the second document.
        unordered: names of lists, as by `names_of`, whose order has no meaning. They are sorted and
            their equal entries are removed. The other entries are compared in turn. Indices are
            those of the sorted lists of the first document.
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
    """Return the keys of a path without indices. The path of a plan's stage is like that of a
    plan."""
    names = [key for key in path if isinstance(key, str)]
    return ".".join(names[2:] if names[:2] == ["pipeline", "stages"] else names)


def is_unordered(path: Path, unordered: Collection[str]) -> bool:
    """Return whether a path is that of a list with one of these names, and not of a list inside
    one."""
    return bool(path) and isinstance(path[-1], str) and names_of(path) in unordered


def in_one_order(data: Any, unordered: Collection[str], path: Path = ()) -> Any:
    """Return the document with the lists of these names sorted."""
    if isinstance(data, dict):
        return {key: in_one_order(data[key], unordered, (*path, key)) for key in sorted(data)}
    if not isinstance(data, list):
        return data
    inner = [in_one_order(value, unordered, (*path, i)) for i, value in enumerate(data)]
    return sorted(inner, key=json.dumps) if is_unordered(path, unordered) else inner


def without_equal(entries: list[Any], other: list[Any]) -> list[tuple[int, Any]]:
    """Return entries with their indices, without those that have equal entries in the other
    list."""
    left, found = Counter(map(json.dumps, other)), []
    for index, entry in enumerate(entries):
        if left[text := json.dumps(entry)]:
            left[text] -= 1
        else:
            found.append((index, entry))
    return found


def random_place(data: Any, rng: random.Random) -> Path:
    """Return a random path. Fields at all depths are equally likely, regardless of the number of
    entries of lists."""
    by_pattern: dict[str, list[Path]] = {}
    for path in places(data):
        by_pattern.setdefault(pattern_of(path), []).append(path)
    return rng.choice(by_pattern[rng.choice(sorted(by_pattern))])


def damage_bytes(text: str, rng: random.Random) -> Damaged:
    """Change, remove or add one to four bytes, or remove the end."""
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
    """Remove a value, replace it by one of another type, or duplicate, rename, swap or nest it."""
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
    """Return the text with a value in lists that are nested too deeply for most readers."""
    at(data, path[:-1])[path[-1]] = MARK
    return json.dumps(data).replace(json.dumps(MARK), "[" * DEPTH + "]" * DEPTH)


def falsify(text: str, rng: random.Random) -> Damaged:
    """Replace a value by another plausible one: another number, flag, or word of the same field."""
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
    """Return another value of the same kind."""
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


def replace_value(text: str, rng: random.Random) -> Damaged:
    """Replace a value or a key by a text or a number that is dangerous to show, to format or to
    store."""
    data = json.loads(text)
    path = random_place(data, rng)
    parent, key, raw = at(data, path[:-1]), path[-1], rng.choice(DANGEROUS)
    is_key = isinstance(key, str) and raw[:1] == '"' and rng.random() < 0.3
    if is_key:
        parent[MARK] = parent.pop(key)
    else:
        parent[key] = MARK
    where = f"{pattern_of(path)}{' as a key' if is_key else ''}"
    return Damaged(json.dumps(data).replace(json.dumps(MARK), raw), f"{raw[:40]} at {where}", path)


def double_key(text: str, rng: random.Random) -> Damaged:
    """Duplicate a key of an object, with the same value or another one."""
    data = json.loads(text)
    path = random_place(data, rng)
    while not isinstance(path[-1], str):
        path = path[:-1]
    parent, key = at(data, path[:-1]), path[-1]
    first = rng.random() < 0.5
    entries = dict(parent)
    parent.clear()
    parent |= {MARK: rng.choice((entries[key], None, 1, []))} if first else {}
    parent |= entries
    parent |= {MARK: rng.choice((entries[key], None, 1, []))} if not first else {}
    text = json.dumps(data).replace(json.dumps(MARK), json.dumps(key))
    return Damaged(text, f"twice {pattern_of(path)}", path)


def replace_file(text: str, rng: random.Random) -> Damaged:
    """Make the file empty, not JSON, JSON of something else, or use another encoding."""
    whole = text.encode()
    data = rng.choice(
        (
            b"",
            b" \n",
            b"null",
            b"[]",
            b"{}",
            b"0",
            b'""',
            b"\xef\xbb\xbf" + whole,
            text.encode("utf-16"),
            gzip.compress(whole, mtime=0),
            whole + whole,
            b"[" + whole + b"]",
            whole[:-3],
            b"\0" * 4096,
            b"\x80\x04.",
            b"PK\x03\x04",
            rng.randbytes(256),
            whole.replace(b'"', b"'"),
            whole.replace(b"{", b"[").replace(b"}", b"]"),
            b"[" * 200_000,
            b'{"a":' * 200_000,
            b"#!/bin/sh\n",
            b"9" * 100_000,
            b'"' + b"x" * 1_000_000,
        )
    )
    return Damaged(
        data.decode(errors="surrogateescape"), f"a file of {len(data)} bytes: {data[:12]!r}"
    )


def other_version(text: str, rng: random.Random) -> Damaged:
    """Change the version or the format that the file states."""
    data = json.loads(text)
    name = rng.choice([name for name in ("version", "format") if name in data] or sorted(data))
    old = data[name]
    numbers = (old - 1, old + 1, 2**63, old + 0.5) if isinstance(old, int) else (f"{old}2",)
    value = rng.choice((*numbers, str(old) + "x", None, True, [old], {}, "\x1b[31m4", "{0}"))
    data[name] = value
    return Damaged(json.dumps(data), f"{name} {json.dumps(value)}", (name,))


WAYS: dict[str, Callable[[str, random.Random], Damaged]] = {
    "bytes": damage_bytes,
    "structure": damage_structure,
    "falsified": falsify,
}
FURTHER_WAYS = {
    **WAYS,
    "value": replace_value,
    "double key": double_key,
    "file": replace_file,
    "version": other_version,
}
"""Further ways for files that commands read, so that the seeds of `WAYS` do not change."""
