"""The search for choices, by HiGHS.

1. The program without budget rows is solved first. Its bound holds for the whole, and if its answer fits, it is the answer.
2. Else the budget rows that this answer breaks come in, the relaxation gives the bound and the price of memory, and
   programs restricted to columns of small reduced cost (`autopar.solve.engine`) give plans, each program larger than the
   last. A plan that breaks a row which is not in yet brings it in, and the step is repeated.
3. Where plan and bound are still further apart than asked for, the program over all columns that could belong to a better
   plan is solved, if it is not too large; what it proves is the bound.

Limits count nodes of search trees and columns, not seconds, so the same problem gives the same choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import InfeasibleError, LayoutError
from autopar.problem import Choices, Multipliers, Problem
from autopar.solve.engine import Columns, Engine, Floats, Relaxation, Rows, proof
from autopar.solve.evaluate import Evaluation, evaluate
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.memory import BudgetRow, budget_rows
from autopar.solve.multipliers import multipliers

# Restricted programs over so many columns, those of the smallest reduced cost. Memory makes near-ties of many versions, so
# shares of the bound say little; and few columns do better than many: beyond some thousands each node takes seconds.
_RUNGS = (2000, 4000, 8000)
_RUNG_NODES = 20
# Without budget rows the program is nearly integral, and one over all columns of plans within the gap is solved at once.
_FREE_COLUMNS, _LEAST_SHARE = 16000, 1e-4
_SMALL = 4000  # columns: below, one program over all is cheaper than several
_TREE = 8000  # columns: above, a tree that is to prove the gap pays no longer
_NEW_ROWS, _ROUNDS = 3, 8


def fits(problem: Problem, evaluation: Evaluation) -> bool:
    """Whether all budget rows hold."""
    return max(evaluation.resting_bytes) <= problem.budget_bytes


def budget_matrix(engine: Engine, program: Formulation, rows: list[BudgetRow]) -> Rows:
    """Budget rows over the engine's columns, in shares of the budget."""
    unit = 1.0 / max(program.problem.budget_bytes, 1)
    lines = []
    for row in rows:
        terms = program.budget_terms(row)
        room = (program.problem.budget_bytes - row.reserve_bytes) * unit
        lines.append(([engine.column[v.name] for v, _ in terms], [size * unit for _, size in terms], -np.inf, room))
    return Rows.of(lines)


@dataclass
class Search:
    """One search: the program, which budget rows are in it, the best plan and the best bound (in the program's unit)."""

    problem: Problem
    gap: float
    max_nodes: int
    time_limit_s: float
    program: Formulation = field(init=False)
    engine: Engine = field(init=False)
    active: list[int] = field(default_factory=list)
    best: Choices | None = None
    start: Floats | None = None
    bound: float = -np.inf
    free_bound: float = -np.inf
    price_s_per_byte: float = 0.0
    infeasible: bool = False  # proven so
    vertex: Floats | None = None  # duals of the relaxation without budget rows
    prices: dict[int, float] = field(default_factory=dict)  # budget row → its dual in the best relaxation

    def __post_init__(self) -> None:
        self.program = Formulation(self.problem)
        self.engine = Engine(self.program.model, self.time_limit_s)
        self.rows = budget_rows(self.problem)

    def run(self) -> Choices | None:
        """The best plan found, or None.

        Raises:
            InfeasibleError: where no assignment of layouts is legal, whatever the memory.
        """
        relaxation = self._relax()
        if relaxation is None:
            remedy = "relax the constraints; each op needs one strategy that meets them"
            raise InfeasibleError("no assignment of layouts is legal", remedy=remedy)
        for _ in range(_ROUNDS):
            broken = self._rounded(relaxation) if relaxation.exact else []
            if relaxation.exact and not broken and not self._close():
                relaxation = self._relax(interior=True) or relaxation
            broken = broken or self._climb(relaxation) or self._prove(relaxation)
            if not broken:
                break
            self.active += broken
            relaxation = self._relax()
            if relaxation is None:
                self.infeasible = self.best is None
                break
        return self._answer()

    @property
    def bound_s(self) -> float:
        """Proven lower bound so far, in seconds; 0 where none is known."""
        return max(self.bound / SCALE, 0.0) if np.isfinite(self.bound) else 0.0

    def _answer(self) -> Choices | None:
        if self.best is None:
            return None
        bound = min(self.bound_s, self.best.objective_s)
        stats = {"timed_out": float(self.engine.timed_out), "budget_rows": float(len(self.active))}
        return replace(
            self.best, bound_s=bound, free_bound_s=min(self.free_bound / SCALE, bound), num_variables=self.program.num_variables,
            num_constraints=self.program.num_constraints + len(self.active), solver="highs",
            memory_price_s_per_byte=self.price_s_per_byte, stats=stats, multipliers=self.multipliers(),
        )  # fmt: skip

    def multipliers(self) -> Multipliers | None:
        """What the best relaxation proves by arithmetic alone, or None where that leans on reserves.

        Interior duals are neither few nor short; so with the prices of memory as they are, those of a vertex are found anew.
        """
        if self.vertex is None or any(self.rows[r].reserve_bytes for r in self.active):
            return None
        rows = [self.rows[r] for r in self.prices]
        budget, prices = budget_matrix(self.engine, self.program, rows), np.array([*self.prices.values()])
        duals: Floats = self.vertex
        if rows:
            apart = np.concatenate([np.zeros(len(duals)), prices])
            relaxation = self.engine.relax(cost=proof(self.engine.cost, self.engine.rows.plus(budget), apart)[1])
            duals = duals if relaxation is None else relaxation.duals
        return multipliers(self.program, self.engine, duals, budget, {r.name: y for r, y in zip(rows, prices.tolist(), strict=True)})

    def _relax(self, *, interior: bool = False) -> Relaxation | None:
        """The relaxation under the active rows. Interior duals say more about which columns matter than those of a vertex."""
        self.budget = budget_matrix(self.engine, self.program, [self.rows[r] for r in self.active])
        relaxation = self.engine.relax(self.budget if self.active else None, interior=interior or bool(self.active))
        if relaxation is None:
            return None
        duals = relaxation.duals[len(relaxation.duals) - len(self.active) :]
        if relaxation.bound > self.bound:
            self.prices = dict(zip(self.active, duals.tolist(), strict=True))
        if not self.active and relaxation.exact:
            self.vertex = relaxation.duals
        prices = duals / max(self.problem.budget_bytes, 1)
        reserves = [self.rows[r].reserve_bytes for r in self.active]
        self.price_s_per_byte = max(0.0, float(-prices.sum()) / SCALE)
        self.bound = max(self.bound, relaxation.bound)
        self.free_bound = max(self.free_bound, relaxation.bound + float(prices @ np.array(reserves, float)))
        return relaxation

    def _rounded(self, relaxation: Relaxation) -> list[int]:
        """Offer the relaxation itself, rounded where it is fractional, with every version kept that backward reads."""
        strategies = self.program.chosen(self._named(relaxation.values))[0]
        try:
            return self._consider(strategies, {}, None, relaxation.values)
        except LayoutError:  # rounded strategies may make nothing that a reader can use
            return []

    def _climb(self, relaxation: Relaxation) -> list[int]:
        """Restricted programs, from small to large, until the gap is closed or a plan breaks a row that is not in yet."""
        for most in _RUNGS if self.active else (_FREE_COLUMNS,):
            if self._close():
                return []
            columns = np.ones(len(relaxation.reduced), bool)
            if len(columns) > max(_SMALL, most):
                columns = relaxation.reduced <= np.partition(relaxation.reduced, most)[most]
            if not self.active and len(columns) > _SMALL:
                columns &= relaxation.reduced <= max(self.gap, _LEAST_SHARE) * relaxation.bound
            target = relaxation.bound / (1 - self.gap) if self.active else -np.inf
            found = self.engine.restricted(
                columns, self.budget, gap=min(self.gap / 10, 1e-3), target=target, max_nodes=_RUNG_NODES, start=self._start(columns),
                quick=True,
            )  # fmt: skip
            broken = self._offer(found.values) if found.values is not None else []
            if broken or columns.all():
                return broken
        return []

    def _prove(self, relaxation: Relaxation) -> list[int]:
        """The program over all columns that could belong to a better plan."""
        if self._close():
            return []
        room = np.inf if self.best is None else self.best.objective_s * SCALE - relaxation.bound
        columns = relaxation.reduced <= room + 1e-9 * abs(relaxation.bound)
        if self.best is not None and self.gap > 0 and columns.sum() > _TREE:
            return []
        found = self.engine.restricted(
            columns, self.budget, gap=self.gap, target=-np.inf, max_nodes=self.max_nodes, start=self._start(columns)
        )
        proven = found.bound if self.best is None else min(found.bound, self.best.objective_s * SCALE)
        if found.values is None:
            self._raise_bound(proven)
            return []
        broken = self._offer(found.values)
        self._raise_bound(proven)
        return broken

    def _raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, bound)
        if not any(self.rows[r].reserve_bytes for r in self.active):
            self.free_bound = max(self.free_bound, bound)

    def _close(self) -> bool:
        return self.best is not None and self.best.objective_s * SCALE * (1 - self.gap) <= self.bound

    def _start(self, columns: Columns) -> Floats | None:
        known = self.start
        return known if known is not None and not known[~columns].any() else None

    def _named(self, values: Floats) -> dict[str, float]:
        return dict(zip(self.engine.names, values.tolist(), strict=True))

    def _offer(self, values: Floats) -> list[int]:
        return self._consider(*self.program.chosen(self._named(values)), values)

    def _consider(
        self, strategies: tuple[int, ...], recomputed: dict[int, int], kept: dict[int, tuple[int, ...]] | None, values: Floats
    ) -> list[int]:
        """Take a plan if it fits and is the best; else the rows that it breaks and that are not in yet, the worst first."""
        evaluation = evaluate(self.problem, strategies, recomputed, kept)
        over = {r: size - self.problem.budget_bytes for r, size in enumerate(evaluation.resting_bytes)}
        if max(over.values()) > 0:
            broken = [r for r, size in over.items() if size > 0 and r not in self.active]
            return sorted(broken, key=lambda r: -over[r])[:_NEW_ROWS]
        if self.best is None or evaluation.objective_s < self.best.objective_s:
            self.best = Choices(strategies, recomputed, evaluation.kept, evaluation.objective_s, 0.0)
            self.start = values
        return []
