"""The budget rows: the memory that is live at each point of the step, compared with a device's.

    (6) start of backward   Σ static·x + Σ count·bytes(l)·k[v,l]                            ≤ budget
    (7) end of backward     Σ (static + gradient)·x                                         ≤ budget
    (8) each moment         Σ static·x + Σ held·bytes(l)·k[v,l] + Σ live·x + Σ again·rc + reserve  ≤
                            budget
        plus bytes(l)·h[v,l] of versions on the hosts while they are fetched

With f microbatches in flight, f − 1 of them are held in full in (8), and f in (6). If gradients are
added to sums, the sums are held in all three rows, and a gradient is freed once it is added.

Without reserves and values fetched from the hosts, each row counts only the bytes that are live in
every plan, so that no plan whose peak fits is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from autopar.core.problem import MemoryPoint, Problem

KEPT_ROW, GRADIENT_ROW = "start of backward", "end of backward"


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One row: the numbers of held instances per variant, the bytes per strategy of some ops and of
    some recomputed ops, and a constant."""

    name: str
    kept: tuple[tuple[int, int], ...]
    live: tuple[tuple[int, tuple[int, ...]], ...]
    reserve_bytes: int
    recomputed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    fetched: tuple[tuple[int, int], ...] = ()

    def size(
        self,
        static_bytes: int,
        strategies: Sequence[int],
        recomputed: Mapping[int, int],
        held_bytes: Mapping[int, int],
        stored_bytes: Mapping[int, int] = MappingProxyType({}),
    ) -> int:
        """Compute the left side of the row for given choices, in bytes.

        Args:
            static_bytes: bytes held all the time.
            strategies: strategy index by op.
            recomputed: recomputed op → strategy index.
            held_bytes: variant → bytes that one instance keeps on the device.
            stored_bytes: variant → bytes that one instance stores on the hosts.
        """
        kept_bytes = sum(num * held_bytes.get(v, 0) for v, num in self.kept) + sum(
            num * stored_bytes.get(v, 0) for v, num in self.fetched
        )
        again = sum(sizes[recomputed[op]] for op, sizes in self.recomputed if op in recomputed)
        return (
            static_bytes
            + kept_bytes
            + sum(sizes[strategies[op]] for op, sizes in self.live)
            + again
            + self.reserve_bytes
        )

    def strategy_bytes(self, problem: Problem) -> Iterator[tuple[int, int, int]]:
        """Yield (op, strategy, bytes) with bytes > 0: the coefficients of x."""
        live: dict[int, list[tuple[int, ...]]] = {}
        for n, sizes in self.live:
            live.setdefault(n, []).append(sizes)
        for n, op in enumerate(problem.ops):
            for s, strategy in enumerate(op.strategies):
                size = op.count * strategy.static_bytes + sum(sizes[s] for sizes in live.get(n, ()))
                if size:
                    yield n, s, size


def unsure_bytes(problem: Problem, row: BudgetRow) -> int:
    """Return an upper bound of the bytes of a row that some plan need not hold: its reserve, and
    the values fetched from the hosts."""
    values = {v: problem.values[problem.variants[v].value] for v, _ in row.fetched}
    back = {
        v: sum(size for size, s in zip(x.graph.bytes, x.away_s, strict=True) if s < math.inf)
        for v, x in values.items()
    }
    return row.reserve_bytes + sum(num * back[v] for v, num in row.fetched)


def budget_rows(problem: Problem) -> tuple[BudgetRow, ...]:
    """List all budget rows: (6), (7), then one per moment."""
    others = problem.num_in_flight - 1
    kept_factors = tuple(
        (v, variant.count * (1 + others)) for v, variant in enumerate(problem.variants)
    )
    gradients = tuple(
        (index, tuple(op.count * s.gradient_bytes for s in op.strategies))
        for index, op in enumerate(problem.ops)
        if any(s.gradient_bytes for s in op.strategies)
    )
    sums = gradients if problem.accumulates else ()
    moments = (
        BudgetRow(
            m.key,
            _instances_held(problem, m, others),
            (*m.live, *sums),
            m.reserve_bytes,
            m.recomputed,
            m.fetched,
        )
        for m in problem.moments
    )
    return (
        BudgetRow(KEPT_ROW, kept_factors, sums, 0),
        BudgetRow(GRADIENT_ROW, (), gradients, 0),
        *moments,
    )


def _instances_held(
    problem: Problem, moment: MemoryPoint, others: int
) -> tuple[tuple[int, int], ...]:
    """Count the instances held at a moment, with those of the other microbatches in flight."""
    if not others:
        return moment.kept
    now = dict(moment.kept)
    return tuple(
        (v, now.get(v, 0) + variant.count * others) for v, variant in enumerate(problem.variants)
    )
