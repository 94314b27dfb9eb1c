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
    units: Sequence[Sequence[float]], borders: Sequence[Sequence[Pairs]], num_microbatches: int, allowed: Collection[int] | None
) -> float:  # fmt: skip
    """The least step over all cuts before units that are `allowed`, and all pairs at borders.

    With every τ below a limit, the shortest Σ τ by dynamic programming, one stage after another; then with a lower limit.

    Args:
        units: per stage, what each unit takes on its devices. borders: per pair of neighbouring stages, the pairs before each unit but the
            first.
    """
    num = len(units[0])
    ends = [[(0, 0.0, 0.0)]]
    for pairs in borders:
        ends.append([(b, *pair) for b, each in enumerate(pairs, 1) if allowed is None or b in allowed for pair in each])
    ends.append([(num, 0.0, 0.0)])
    if not all(ends):
        return float(np.inf)
    taus = [_taus(stage, ends[n], ends[n + 1]) for n, stage in enumerate(units)]
    slowest = taus[0][0]
    for tau in taus[1:]:
        slowest = np.maximum(slowest[:, None], tau).min(axis=0)
    least, limit = np.inf, np.inf
    while True:
        within = [np.where(tau < limit, tau, np.inf) for tau in taus]
        total, worst = within[0][0], within[0][0]
        for tau in within[1:]:
            ways = total[:, None] + tau
            chosen = ways.argmin(axis=0), np.arange(ways.shape[1])
            total, worst = ways[chosen], np.maximum(worst[:, None], tau)[chosen]
        least = min(least, float((num_microbatches - 1) * worst[-1] + total[-1]))
        if (num_microbatches - 1) * slowest[-1] + total[-1] >= least:  # less for the slowest only makes the sum longer
            return least
        limit = worst[-1]


def _taus(units: Sequence[float], begins: Sequence[tuple[int, float, float]], ends: Sequence[tuple[int, float, float]]) -> np.ndarray:
    """What a stage takes at least from each place that it may begin at to each that it may end at."""
    sums = np.concatenate([[0.0], np.cumsum(units)])
    (first, _, behind), (last, before, _) = ((np.array(column) for column in zip(*each, strict=True)) for each in (begins, ends))
    taus = np.maximum(sums[last] + before - (sums[first] - behind)[:, None], 0.0)
    taus[first[:, None] >= last] = np.inf
    found: np.ndarray = taus
    return found
