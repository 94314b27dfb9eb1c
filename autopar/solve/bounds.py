"""The bound and the best plan of a search: the proven bound with its duals, and the values of the
columns that give better plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from autopar.core.solution import Multipliers, Solution
from autopar.core.streams import COMPUTE_BOUND, OverlapWeights
from autopar.errors import LayoutError
from autopar.solve.evaluate import evaluate, fits
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.greedy import Quick
from autopar.solve.highs import Engine, Point, Relaxation
from autopar.solve.lazy_rows import IncomingRows
from autopar.solve.lp import Floats, Rows
from autopar.solve.memory_rows import unsure_bytes
from autopar.solve.multipliers import multipliers, quickest

# --------------------------------------------------------------------------------------------------
# Equal ops with different decisions in a relaxation.


def find_mixed(
    program: Formulation, engine: Engine, values: Floats
) -> dict[int, tuple[float, ...]]:
    """Return op → shares of its instances with the same decision, for ops with several instances.

    A decision is a strategy, a kept version or recomputation. Ops are included if at least one
    share is neither 0 nor 1. Two strategies for two thirds and one third give both shares.

    Args:
        program: the program.
        engine: the arrays of the program.
        values: the values of the columns.
    """
    problem = program.problem
    shares_by_op: dict[int, list[float]] = {}
    for n, variable in _decisions(program):
        share, num = float(values[engine.column[variable]]), problem.ops[n].count
        if 0.5 <= share * num <= num - 0.5:
            shares_by_op.setdefault(n, []).append(share)
    return {n: tuple(shares) for n, shares in sorted(shares_by_op.items())}


def _decisions(program: Formulation) -> Iterator[tuple[int, str]]:
    """List (op, name of the variable). Keeping a value is a decision of the op that computes it."""
    for n, row in enumerate(program.x):
        yield from ((n, variable.name) for variable in (*row, *program.recomputed.get(n, ())))
    for (v, _), variable in program.keep.items():
        yield program.problem.values[program.problem.variants[v].value].op, variable.name


@dataclass(frozen=True, slots=True)
class RelaxedBound:
    """The bound that a relaxation proves, and its duals.

    Attributes:
        bound: the bound in the program's unit.
        duals: the duals of the engine's rows and of rows (9); None without further rows.
        prices: budget row → its dual.
        price_s_per_byte: the price of memory in all budget rows together.
        balance: the balance whose prices prove the same bound without the rows of excess.
        mixed: as in `Solution`.
    """

    bound: float = -np.inf
    duals: Floats | None = None
    prices: Mapping[int, float] = field(default_factory=dict)
    price_s_per_byte: float = 0.0
    balance: OverlapWeights = COMPUTE_BOUND
    mixed: dict[int, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class ProvenBound:
    """Bounds, in the program's unit.

    Attributes:
        extra: the rows that may be added to the program.
        bound: lower bound of all plans.
        free: lower bound if all reserves were 0.
        relaxed: the largest part of `bound` that a relaxation alone proves.
        first: the multipliers that were known before the search.
        vertex: duals of the relaxation without further rows.
    """

    extra: IncomingRows
    bound: float = -np.inf
    free: float = -np.inf
    relaxed: RelaxedBound = field(default_factory=RelaxedBound)
    first: Multipliers | None = None
    vertex: Floats | None = None

    @property
    def bound_s(self) -> float:
        """The bound in seconds; 0 if none is known."""
        return max(self.bound / SCALE, 0.0) if np.isfinite(self.bound) else 0.0

    def know(self, known: Quick) -> None:
        """Adopt a bound that was known before the search."""
        self.first = known.multipliers
        self.rise(known.bound_s * SCALE)

    def take(self, choices: Solution) -> None:
        """Adopt the bound of a known solution."""
        if choices.bound_s > 0.0:
            self.first = choices.multipliers or self.first
            self.rise(choices.bound_s * SCALE)

    def begin(self, relaxation: Relaxation) -> None:
        """Raise the bound by the relaxation without further rows."""
        self.vertex = relaxation.duals if relaxation.exact else None
        self.relaxed = RelaxedBound(relaxation.bound)
        self.bound, self.free = max(self.bound, relaxation.bound), max(self.free, relaxation.bound)

    def learn(self, point: Point, balance: OverlapWeights, duals: Mapping[int, float]) -> None:
        """Raise the bound by a relaxation with further rows.

        Args:
            point: the solution of the relaxation.
            balance: the balance whose prices prove the same bound without the rows of excess.
            duals: budget row → its dual.
        """
        program = self.extra.program
        prices = np.array([*duals.values()]) / max(program.problem.budget_bytes, 1)
        reserves = [unsure_bytes(program.problem, self.extra.rows[r]) for r in duals]
        if point.bound > self.relaxed.bound:
            values = point.values
            self.relaxed = RelaxedBound(
                point.bound,
                point.duals[: len(program.keys) + len(program.tighter)],
                dict(duals),
                max(0.0, float(-prices.sum()) / SCALE),
                balance,
                find_mixed(program, self.extra.engine, values) if len(values) else {},
            )
        self.bound = max(self.bound, point.bound)
        self.free = max(self.free, point.bound + float(prices @ np.array(reserves, float)))

    def rise(self, bound: float) -> None:
        """Raise the bound to that of a search tree."""
        self.bound = max(self.bound, bound)
        if not self.extra.reserves:
            self.free = max(self.free, bound)

    def multipliers(self) -> Multipliers | None:
        """Return the multipliers that prove the largest bound by arithmetic alone: those known
        before the search, of the first relaxation, or of the best relaxation. None if the bound
        depends on reserves."""
        if self.extra.reserves:
            return None
        candidates = [self.first] if self.first is not None else []
        program, engine, relaxed = self.extra.program, self.extra.engine, self.relaxed
        if self.vertex is not None:
            candidates.append(
                multipliers(program, engine, COMPUTE_BOUND, self.vertex, Rows.of([]), {})
            )
        if relaxed.duals is not None:
            budget = self.extra.matrix([*relaxed.prices])
            named = {self.extra.rows[r].name: y for r, y in relaxed.prices.items()}
            candidates.append(
                multipliers(program, engine, relaxed.balance, relaxed.duals, budget, named)
            )
        return (
            max(candidates, key=lambda m: m.bound_s)
            if candidates
            else quickest(program.problem)
            if self.bound_s
            else None
        )


# --------------------------------------------------------------------------------------------------
# The best plan of a search.

# Relative gap between plan and relaxation from which mixtures are reported, although no plan
# without them is better
_FAR = 0.05


@dataclass
class Incumbent:
    """The best plan so far.

    Attributes:
        best: the best plan; None before the first.
        start: the values of its columns, if they are known.
    """

    extra: IncomingRows
    proven: ProvenBound
    gap: float
    best: Solution | None = None
    start: Floats | None = None

    @property
    def best_s(self) -> float:
        """The objective of the best plan in seconds; infinite if there is none."""
        return np.inf if self.best is None else self.best.objective_s

    def is_close(self) -> bool:
        """Return whether the gap of the best plan is at most the requested gap."""
        return self.best is not None and self.best_s * SCALE * (1 - self.gap) <= self.proven.bound

    def is_far(self) -> bool:
        """Return whether separate decisions of equal ops could give a much better plan: the search
        has not closed the gap, or closed it only by not mixing their decisions."""
        return (
            not self.is_close()
            or self.best_s * SCALE * (1 - max(self.gap, _FAR)) > self.proven.relaxed.bound
        )

    def may_end(self) -> bool:
        """Return whether there is a plan, and the work limit is reached."""
        return self.best is not None and self.extra.engine.work.is_over

    def offer(self, values: Floats) -> list[int]:
        """Record a plan if it fits and is the best. Otherwise return the rows that it breaks, if
        none of them is in the program yet."""
        strategies, recomputed, kept_versions, regions = self.extra.program.read_choices(
            self._by_column(values)
        )
        return self._consider(
            strategies, recomputed, kept_versions, values, regions if self.extra.budget else None
        )  # without these rows they cost nothing

    def offer_rounded(self, relaxation: Relaxation) -> list[int]:
        """Offer the rounded relaxation as a plan, keeping every version that backward reads."""
        strategies = self.extra.program.read_choices(self._by_column(relaxation.values))[0]
        try:
            return self._consider(strategies, {}, None, relaxation.values)
        except LayoutError:  # rounded strategies may leave a reader without a usable layout
            return []

    def meet(self, choices: Solution) -> None:
        """Record a known plan if it fits and is better."""
        problem = self.extra.program.problem
        evaluation = evaluate(
            problem,
            choices.strategies,
            choices.recomputed,
            choices.kept,
            choices.regions,
        )
        if evaluation.objective_s < self.best_s and fits(problem, evaluation):
            self.best = Solution(
                choices.strategies,
                choices.recomputed,
                evaluation.kept,
                evaluation.objective_s,
                0.0,
                regions=choices.regions,
            )
            self.extra.engine.limit.waits = False

    def _by_column(self, values: Floats) -> dict[str, float]:
        return dict(zip(self.extra.engine.names, values.tolist(), strict=True))

    def _consider(
        self,
        strategies: tuple[int, ...],
        recomputed: dict[int, int],
        kept: dict[int, tuple[int, ...]] | None,
        values: Floats | None,
        regions: frozenset[int] | None = None,
    ) -> list[int]:
        """Record a plan, or the same plan without kernels, if it fits and is the best.

        Return the rows to add, the worst first: the broken rows, if none of them is in the program
        yet; else the excess of both phases, if the best plan is too far from the bound and its
        communication outlasts compute."""
        problem = self.extra.program.problem
        evaluation = evaluate(problem, strategies, recomputed, kept, regions)
        over = self.extra.over(evaluation)
        if over is not None and evaluation.regions:
            regions, values = frozenset(), None
            evaluation = evaluate(problem, strategies, recomputed, kept, regions)
        if evaluation.objective_s < self.best_s and fits(problem, evaluation):
            self.best = Solution(
                strategies,
                recomputed,
                evaluation.kept,
                evaluation.objective_s,
                0.0,
                regions=regions,
            )
            self.start, self.extra.engine.limit.waits = values, False
        if over is not None:
            return over
        return [] if self.is_close() else self.extra.rows_if_outlasted(evaluation)
