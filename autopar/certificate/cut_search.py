"""The least step over all cuts, given what each unit takes and what is at each border."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

Pairs = list[tuple[float, float]]
_PAIRS = 8  # at a border; of more, neighbours are replaced by the least of both


def few(pairs: Iterable[tuple[float, float]]) -> Pairs:
    """Pairs of which each given one is at least one in both."""
    found: Pairs = []
    for pair in sorted(pairs):
        if not found or pair[1] < found[-1][1]:
            found.append(pair)
    while len(found) > _PAIRS:
        halves = [(found[i][0], found[i + 1][1]) for i in range(0, len(found) - 1, 2)]
        found = halves + found[2 * len(halves) :]
    return found


def least_over_cuts(
    units: Sequence[float], borders: Sequence[Pairs], num_stages: int, num_microbatches: int, allowed: Collection[int] | None
) -> float:  # fmt: skip
    """The least step over all cuts before units that are `allowed`, and all pairs at borders.

    With every τ below a limit, the shortest Σ τ by dynamic programming, one stage after another; then with a lower limit.
    """
    sums = np.concatenate([[0.0], np.cumsum(units)])
    ends = [(0, 0.0, 0.0)]
    ends += [(b, *pair) for b, pairs in enumerate(borders, 1) if allowed is None or b in allowed for pair in pairs]
    ends.append((len(units), 0.0, 0.0))
    at, before, behind = (np.array(column) for column in zip(*ends, strict=True))
    taus = np.maximum(sums[at] + before - (sums[at] - behind)[:, None], 0.0)
    taus[at[:, None] >= at] = np.inf
    slowest = taus[0]
    for _ in range(num_stages - 1):
        slowest = np.maximum(slowest[:, None], taus).min(axis=0)
    least, limit = np.inf, np.inf
    while True:
        within = np.where(taus < limit, taus, np.inf)
        total, worst = within[0], within[0]
        for _ in range(num_stages - 1):
            ways = total[:, None] + within
            chosen = ways.argmin(axis=0), np.arange(len(at))
            total, worst = ways[chosen], np.maximum(worst[:, None], within)[chosen]
        least = min(least, float((num_microbatches - 1) * worst[-1] + total[-1]))
        if (num_microbatches - 1) * slowest[-1] + total[-1] >= least:  # less for the slowest only makes the sum longer
            return least
        limit = worst[-1]
