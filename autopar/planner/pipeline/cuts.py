"""The least step over all ways to cut units into stages, given lower bounds of units and borders.

    stage of units u … w takes at least   τ = max(0, behind(border of u) + Σ least of u … w +
                                          before(border behind w))
    step                                  (M − 1) · max τ + Σ τ

At each border one pair (before, behind) is chosen: for a layout of what crosses, what it costs the
stage before and the stage behind. Where stages have unequal devices, units take on each what they
take there, and pairs are those of the two devices at the border. All cuts and all pairs are
compared, exactly: the shortest Σ τ is found with every τ below a limit (dynamic programming over
borders and pairs), the limit is lowered below the slowest stage of the answer, and so on, until no
answer can be better than the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pair = tuple[float, float]
"""Seconds for the stage before a border, and for the stage behind it."""

_MOST = 8  # pairs at a border


@dataclass(frozen=True, slots=True)
class Parts:
    """Lower bounds of the seconds that a microbatch takes.

    Attributes:
        units: seconds per unit. borders: the pairs before each unit but the first; they may be
            negative.
    """

    units: tuple[float, ...]
    borders: tuple[tuple[Pair, ...], ...]


@dataclass(frozen=True, slots=True)
class LeastStep:
    """The least step, and cuts that take it: indices of the units that begin later stages."""

    step_s: float
    cuts: tuple[int, ...]


def front(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Reduce pairs to few, such that each given pair is at least one of them in both parts. If
    there are few, only dominated pairs are removed."""
    kept: list[Pair] = []
    for before, behind in sorted(pairs):
        if not kept or behind < kept[-1][1]:
            kept.append((before, behind))
    while len(kept) > _MOST:  # the least of both of neighbours stands for them
        odd = kept[len(kept) // 2 * 2 :]
        kept = [(a[0], b[1]) for a, b in zip(kept[::2], kept[1::2], strict=False)] + odd
    return tuple(kept)


def join_pairs(one: Iterable[Pair], other: Sequence[Pair]) -> tuple[Pair, ...]:
    """Combine the pairs of two tensors that cross: their sums."""
    return front((a + c, b + d) for a, b in one for c, d in other)


def least_step(
    parts: Parts | Sequence[Parts],
    num_stages: int,
    num_microbatches: int,
    allowed: Collection[int] | None = None,
) -> LeastStep:
    """Find the least step over all cuts (see the module).

    Args:
        parts: of all stages alike, or per stage its units, and the borders between it and the next.
        num_stages: of the pipeline.
        num_microbatches: M.
        allowed: units that may begin a later stage; by default all but the first.
    """
    each = [parts] * num_stages if isinstance(parts, Parts) else list(parts)
    num = len(each[0].units)
    places: list[list[tuple[int, float, float]]] = [
        [(0, 0.0, 0.0)]
    ]  # around stages: a border and one of its pairs
    for part in each[:-1]:
        places.append(
            [
                (p, *pair)
                for p in range(1, num)
                if allowed is None or p in allowed
                for pair in part.borders[p - 1]
            ]
        )
    places.append([(num, 0.0, 0.0)])
    tables = [
        _times(part.units, *around)
        for part, around in zip(each, itertools.pairwise(places), strict=True)
    ]
    step_s, path = fastest_path(tables, num_microbatches)
    return LeastStep(
        step_s, tuple(places[number][place][0] for number, place in enumerate(path, 1))
    )


def _times(
    units: Sequence[float],
    begins: Sequence[tuple[int, float, float]],
    ends: Sequence[tuple[int, float, float]],
) -> Floats:
    """Of a stage between places."""
    sums = np.concatenate([[0.0], np.cumsum(units)])
    first, last = np.array([p for p, _, _ in begins], int), np.array([p for p, _, _ in ends], int)
    behind, before = np.array([b for _, _, b in begins]), np.array([b for _, b, _ in ends])
    times = sums[last][None, :] - sums[first][:, None] + behind[:, None] + before[None, :]
    return np.where(first[:, None] < last[None, :], np.maximum(times, 0.0), np.inf)


def fastest_path(tables: Sequence[Floats], num_microbatches: int) -> tuple[float, tuple[int, ...]]:
    """Find the least (M − 1) · max τ + Σ τ over all paths, infinite if there is none, and the
    places on one such path.

    Args:
        tables: per stage τ from each place before it to each place behind it, of which the first
            and the last have one.
    """
    more, best_s, best, limit = num_microbatches - 1, np.inf, tuple[int, ...](), np.inf
    slowest = tables[0][0]
    for table in tables[1:]:
        slowest = np.maximum(slowest[:, None], table).min(axis=0, initial=np.inf)
    while True:
        found = _shortest(tables, limit)
        if found is None:
            return best_s, best
        times, path = found
        limit = max(times)
        step_s = more * limit + sum(times)
        if step_s < best_s:
            best_s, best = step_s, path
        if (
            more * float(slowest[-1]) + sum(times) >= best_s
        ):  # less for the slowest stage only makes the sum longer
            return best_s, best


def _shortest(
    tables: Sequence[Floats], limit: float
) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    """Find the path with the least sum whose times are all below the limit: its times and
    places."""
    within = [np.where(table < limit, table, np.inf) for table in tables]
    reach, how = within[0][0], list[NDArray[np.int64]]()
    for table in within[1:]:
        if not len(reach):
            return None
        through = reach[:, None] + table
        how.append(through.argmin(axis=0))
        reach = through[how[-1], np.arange(len(how[-1]))]
    if not np.isfinite(reach[-1]):
        return None
    path = [0]
    for step in reversed(how):
        path.insert(0, int(step[path[0]]))
    edges = zip(within, (0, *path[:-1]), path, strict=True)
    return tuple(float(table[a, b]) for table, a, b in edges), tuple(path[:-1])
