"""The least step over all ways to cut units into stages, where units and borders say what a stage takes at least.

    stage of units u … w takes at least   τ = max(0, behind(border of u) + Σ least of u … w + before(border behind w))
    step                                  (M − 1) · max τ + Σ τ

At each border one pair (before, behind) is chosen: for a layout of what crosses, what it costs the stage before and the stage behind.
All cuts and all pairs are compared, exactly: the shortest Σ τ is found with every τ below a limit (dynamic programming over borders and
pairs), the limit is lowered below the slowest stage of the answer, and so on, until no answer can be better than the best.
"""

from __future__ import annotations

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
    """What a microbatch takes at least.

    Attributes:
        units: seconds per unit. borders: the pairs before each unit but the first; they may be negative.
    """

    units: tuple[float, ...]
    borders: tuple[tuple[Pair, ...], ...]


@dataclass(frozen=True, slots=True)
class Least:
    """The least step, and cuts that take it: indices of the units that begin later stages."""

    step_s: float
    cuts: tuple[int, ...]


def front(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Pairs such that each given one is at least one of these in both; those given, where they are few."""
    kept: list[Pair] = []
    for before, behind in sorted(pairs):
        if not kept or behind < kept[-1][1]:
            kept.append((before, behind))
    while len(kept) > _MOST:  # the least of both of neighbours stands for them
        odd = kept[len(kept) // 2 * 2 :]
        kept = [(a[0], b[1]) for a, b in zip(kept[::2], kept[1::2], strict=False)] + odd
    return tuple(kept)


def joined(one: Iterable[Pair], other: Sequence[Pair]) -> tuple[Pair, ...]:
    """Of two things that cross, each with its own pairs."""
    return front((a + c, b + d) for a, b in one for c, d in other)


def least_step(parts: Parts, num_stages: int, num_microbatches: int, allowed: Collection[int] | None = None) -> Least:
    """The least step; see the module.

    Args:
        allowed: units that may begin a later stage; by default all but the first.
    """
    table = _Table(parts, num_stages, allowed)
    more = num_microbatches - 1
    best, limit = Least(np.inf, ()), np.inf
    while True:
        found = table.shortest(limit)
        if found is None:
            return best
        times, cuts = found
        limit = max(times)
        step = more * limit + sum(times)
        best = Least(step, cuts) if step < best.step_s else best
        if more * table.fastest() + sum(times) >= best.step_s:  # less for the slowest stage only makes the sum longer
            return best


class _Table:
    """Stages between all borders, the ends of the model among them, with their pairs: a *place* is a border and one of its pairs."""

    def __init__(self, parts: Parts, num_stages: int, allowed: Collection[int] | None) -> None:
        num = len(parts.units)
        places = [(0, 0.0, 0.0)]
        places += [(p, *pair) for p in range(1, num) if allowed is None or p in allowed for pair in parts.borders[p - 1]]
        places.append((num, 0.0, 0.0))
        self.at = np.array([p for p, _, _ in places])
        before, behind = np.array([b for _, b, _ in places]), np.array([b for _, _, b in places])
        sums = np.concatenate([[0.0], np.cumsum(parts.units)])
        times = sums[self.at][None, :] - sums[self.at][:, None] + behind[:, None] + before[None, :]
        self.times = np.where(self.at[:, None] < self.at[None, :], np.maximum(times, 0.0), np.inf)  # from, to
        self.num_stages = num_stages
        self._fastest: float | None = None

    def shortest(self, limit: float) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
        """Times of stages and cuts with the least sum and all times below the limit."""
        times = np.where(self.times < limit, self.times, np.inf)
        reach, how = times[0], list[NDArray[np.int64]]()
        for _ in range(self.num_stages - 1):
            through = reach[:, None] + times
            how.append(through.argmin(axis=0))
            reach = through[how[-1], np.arange(len(reach))]
        if not np.isfinite(reach[-1]):
            return None
        path = [len(reach) - 1]
        for step in reversed(how):
            path.insert(0, int(step[path[0]]))
        edges = [0, *path]
        found = tuple(float(times[a, b]) for a, b in zip(edges, path, strict=False))
        return found, tuple(int(self.at[place]) for place in path[:-1])

    def fastest(self) -> float:
        """The least time of a slowest stage."""
        if self._fastest is None:
            reach = self.times[0]
            for _ in range(self.num_stages - 1):
                reach = np.maximum(reach[:, None], self.times).min(axis=0)
            self._fastest = float(reach[-1])
        return self._fastest
