"""The minimum step over all ways to cut units into stages, given lower bounds of units and borders.

    stage of units u … w    τ ≥ max(0, behind(border of u) + Σ bounds of u … w +
                                before(border behind w))
    step                    (M − 1) · max τ + Σ τ

One pair (before, behind) is chosen at each border. It is the cost of a layout of the crossing
tensors for the stage before the border and for the stage behind it. If stages have unequal devices,
the bounds of units are those of the stage's device, and pairs are those of the two devices at the
border.

The minimum over all cuts and pairs is exact. Dynamic programming over borders and pairs finds the
least Σ τ with every τ below a limit. The limit is then lowered to the slowest stage of that
solution, and so on, until no solution can be better than the best.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pair = tuple[float, float]
"""Seconds of the stage before a border, and of the stage behind it."""

_MAX_PAIRS = 8  # pairs at a border


@dataclass(frozen=True, slots=True)
class Parts:
    """Lower bounds of the seconds that a microbatch takes.

    Attributes:
        units: seconds per unit.
        borders: the pairs before each unit but the first; seconds may be negative.
    """

    units: tuple[float, ...]
    borders: tuple[tuple[Pair, ...], ...]


@dataclass(frozen=True, slots=True)
class LeastStep:
    """The minimum step, and cuts that attain it: indices of the first units of all stages but the
    first."""

    step_s: float
    cuts: tuple[int, ...]


def pareto_front(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Reduce pairs to at most `_MAX_PAIRS` pairs such that each given pair is dominated by one of
    them, or equal to it. If the Pareto frontier is small enough, it is the result."""
    front: list[Pair] = []
    for before, behind in sorted(pairs):
        if not front or behind < front[-1][1]:
            front.append((before, behind))
    while len(front) > _MAX_PAIRS:  # the componentwise minimum replaces two neighbours
        odd = front[len(front) // 2 * 2 :]
        front = [(a[0], b[1]) for a, b in zip(front[::2], front[1::2], strict=False)] + odd
    return tuple(front)


def join_pairs(one: Iterable[Pair], other: Sequence[Pair]) -> tuple[Pair, ...]:
    """Combine the pairs of two crossing tensors: the sums of all combinations."""
    return pareto_front((a + c, b + d) for a, b in one for c, d in other)


def least_step(
    parts: Parts | Sequence[Parts],
    num_stages: int,
    num_microbatches: int,
    allowed: Collection[int] | None = None,
) -> LeastStep:
    """Find the minimum step over all cuts (see the module).

    Args:
        parts: the parts of all stages, or the parts of each stage: its units, and the borders
            between it and the next stage.
        num_stages: stages of the pipeline.
        num_microbatches: M.
        allowed: units that may begin a later stage; by default all but the first.
    """
    stage_parts = [parts] * num_stages if isinstance(parts, Parts) else list(parts)
    num = len(stage_parts[0].units)
    places: list[list[tuple[int, float, float]]] = [
        [(0, 0.0, 0.0)]
    ]  # the places between stages: a border and one of its pairs
    for part in stage_parts[:-1]:
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
        for part, around in zip(stage_parts, itertools.pairwise(places), strict=True)
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
    """Compute τ of a stage for each place before it and each place behind it."""
    sums = np.concatenate([[0.0], np.cumsum(units)])
    first, last = np.array([p for p, _, _ in begins], int), np.array([p for p, _, _ in ends], int)
    behind, before = np.array([b for _, _, b in begins]), np.array([b for _, b, _ in ends])
    times = sums[last][None, :] - sums[first][:, None] + behind[:, None] + before[None, :]
    return np.where(first[:, None] < last[None, :], np.maximum(times, 0.0), np.inf)


def fastest_path(tables: Sequence[Floats], num_microbatches: int) -> tuple[float, tuple[int, ...]]:
    """Find the minimum of (M − 1) · max τ + Σ τ over all paths.

    Args:
        tables: per stage, τ from each place before it to each place behind it. There is one place
            before the first stage and one behind the last.
        num_microbatches: M.

    Returns:
        The minimum, infinite if there is no path, and the places on a path that attains it.
    """
    num_further, best_s, best, limit = num_microbatches - 1, np.inf, tuple[int, ...](), np.inf
    slowest = tables[0][0]
    for table in tables[1:]:
        slowest = np.maximum(slowest[:, None], table).min(axis=0, initial=np.inf)
    while True:
        solution = _shortest(tables, limit)
        if solution is None:
            return best_s, best
        times, path = solution
        limit = max(times)
        step_s = num_further * limit + sum(times)
        if step_s < best_s:
            best_s, best = step_s, path
        if (
            num_further * float(slowest[-1]) + sum(times) >= best_s
        ):  # a lower limit only increases the sum
            return best_s, best


def _shortest(
    tables: Sequence[Floats], limit: float
) -> tuple[tuple[float, ...], tuple[int, ...]] | None:
    """Find the path with the least sum whose times are all below the limit. Return its times and
    places."""
    within = [np.where(table < limit, table, np.inf) for table in tables]
    reach, predecessors = within[0][0], list[NDArray[np.int64]]()
    for table in within[1:]:
        if not len(reach):
            return None
        through = reach[:, None] + table
        predecessors.append(through.argmin(axis=0))
        reach = through[predecessors[-1], np.arange(len(predecessors[-1]))]
    if not np.isfinite(reach[-1]):
        return None
    path = [0]
    for step in reversed(predecessors):
        path.insert(0, int(step[path[0]]))
    edges = zip(within, (0, *path[:-1]), path, strict=True)
    return tuple(float(table[a, b]) for table, a, b in edges), tuple(path[:-1])
