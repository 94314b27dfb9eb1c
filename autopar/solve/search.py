"""The search for choices, by HiGHS.

1. The relaxation without budget rows is solved first. Its bound holds for the whole, and if its answer, rounded, fits and is close
   enough, it is the answer.
2. Else a tree is grown (`autopar.solve.tree`) over the relaxation with rows that cut off mixtures. A plan that breaks a budget row
   which is not in yet brings it in; then the relaxation gives the price of memory, and the tree is grown anew.
3. Where that leaves plan and bound further apart than asked for, programs restricted to columns of small reduced cost
   (`autopar.solve.engine`) look for better plans, each larger than the last; of a small problem the program over all columns that
   could belong to a better plan is solved at last.

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
from autopar.solve.live import Live
from autopar.solve.memory import BudgetRow, budget_rows
from autopar.solve.multipliers import multipliers
from autopar.solve.tree import Tree
from autopar.streams import ON_COMPUTE, Balance

# Restricted programs over so many columns, those of the smallest reduced cost. Memory makes near-ties of many versions, so
# shares of the bound say little; and few columns do better than many: beyond some thousands each node takes seconds.
_RUNGS = (2000, 4000, 8000)
_RUNG_NODES = 20
_SMALL = 4000  # columns: below, one program over all is cheaper than several
_NEW_ROWS, _ROUNDS = 3, 12
_RELAXATIONS = 2  # of a tree, per node that a search may have


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
    """One search: the program at one balance, which budget rows are in it, the best plan and the best bound (in the program's unit).

    The best plan is the one of the least price, `best_s`, which the search brings down. What a plan takes may be more than its price
    (`autopar.solve.balancing`), so that the `fastest` of all plans on the way may be another; it is the answer.
    """

    problem: Problem
    gap: float
    max_nodes: int
    time_limit_s: float
    balance: Balance = ON_COMPUTE
    program: Formulation = field(init=False)
    engine: Engine = field(init=False)
    active: list[int] = field(default_factory=list)
    best: Choices | None = None
    best_s: float = np.inf
    fastest: Choices | None = None
    start: Floats | None = None
    bound: float = -np.inf
    free_bound: float = -np.inf
    price_s_per_byte: float = 0.0
    infeasible: bool = False  # proven so
    live: Live | None = None
    vertex: Floats | None = None  # duals of the relaxation without budget rows
    prices: dict[int, float] = field(default_factory=dict)  # budget row → its dual in the best relaxation

    def __post_init__(self) -> None:
        self.program = Formulation(self.problem, self.balance)
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
            broken = [] if self.active else self._rounded(relaxation)
            if not broken and not self._close():
                broken = self._grow()
            if not broken and self.active and not self.infeasible:
                broken = self._climb()
            if not broken and not self.infeasible and not self._close():
                broken = self._prove()
            if not broken:
                break
            if self._within(broken) is None:
                self.infeasible = self.best is None
                break
        return self._answer()

    @property
    def bound_s(self) -> float:
        """Proven lower bound so far, in seconds; 0 where none is known."""
        return max(self.bound / SCALE, 0.0) if np.isfinite(self.bound) else 0.0

    def relaxed_at(self, balance: Balance) -> tuple[float, tuple[float, float]] | None:
        """What the relaxation with the budget rows so far proves at another balance, and by how much that rises with λ of forward and of
        backward; None where it says nothing. The search itself is over then."""
        live, slowdown = self._live(), self.problem.overlap_slowdown
        cost, beside = np.zeros(len(live.cost)), np.zeros((2, len(live.cost)))
        for variable, load in self.program.loads:
            i = self.engine.column[variable.name]
            cost[i] = load.priced_s(slowdown, balance) * SCALE
            beside[:, i] = [c - (1.0 - slowdown) * p for c, p in zip(load.compute_s, load.early_s, strict=True)]
        live.reprice(cost)
        point = live.solve(np.zeros(len(cost)), np.ones(len(cost)))
        if point is None or not len(point.values):
            return None
        forward, backward = beside @ point.values
        return point.bound, (float(forward), float(backward))

    def _answer(self) -> Choices | None:
        if self.fastest is None:
            return None
        bound = min(self.bound_s, self.fastest.objective_s)
        stats = {"timed_out": float(self.engine.timed_out), "budget_rows": float(len(self.active))}
        return replace(
            self.fastest, bound_s=bound, free_bound_s=min(self.free_bound / SCALE, bound), num_variables=self.program.num_variables,
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

    def _relax(self) -> Relaxation | None:
        """The relaxation without budget rows."""
        relaxation = self.engine.relax()
        if relaxation is not None:
            self.vertex = relaxation.duals if relaxation.exact else None
            self.bound = self.free_bound = relaxation.bound
        return relaxation

    def _within(self, broken: list[int]) -> Relaxation | None:
        """The relaxation with these budget rows too, and with the rows that cut off mixtures."""
        live = self._live()
        self.active += broken
        live.add(budget_matrix(self.engine, self.program, [self.rows[r] for r in broken]))
        point = live.solve(np.zeros(len(live.cost)), np.ones(len(live.cost)))
        if point is None:
            return None
        duals = point.duals[len(point.duals) - len(self.active) :]
        if point.bound > self.bound or not self.prices:
            self.prices = dict(zip(self.active, duals.tolist(), strict=True))
        prices = duals / max(self.problem.budget_bytes, 1)
        reserves = [self.rows[r].reserve_bytes for r in self.active]
        self.price_s_per_byte = max(0.0, float(-prices.sum()) / SCALE)
        self.bound = max(self.bound, point.bound)
        self.free_bound = max(self.free_bound, point.bound + float(prices @ np.array(reserves, float)))
        return Relaxation(point.bound, point.reduced, point.duals, point.values, len(point.values) > 0)

    def _live(self) -> Live:
        if self.live is None:
            rows = [([self.engine.column[v.name] for v, _ in terms], [c for _, c in terms], -np.inf, 0.0) for terms in self.program.tighter]
            self.live = Live(self.engine, Rows.of(rows))
        return self.live

    def _grow(self) -> list[int]:
        """A tree; the rows that it asks for."""

        def offer(values: Floats) -> list[int]:
            try:
                return self._offer(values)
            except LayoutError:  # rounded strategies may make nothing that a reader can use
                return []

        def best() -> float:
            return self.best_s * SCALE

        live = self._live()
        sizes = self._budget().most(len(live.cost))
        grown = Tree(self.program, self.engine, live, offer, best, self.gap, self.max_nodes * _RELAXATIONS, sizes).grow()
        self.engine.timed_out |= live.timed_out
        if np.isinf(grown.bound):
            self.infeasible = self.best is None
        else:
            self._raise_bound(min(grown.bound, best()))
        return list(grown.broken)

    def _rounded(self, relaxation: Relaxation) -> list[int]:
        """Offer the relaxation itself, rounded where it is fractional, with every version kept that backward reads."""
        strategies = self.program.chosen(self._named(relaxation.values))[0]
        try:
            return self._consider(strategies, {}, None, relaxation.values)
        except LayoutError:  # rounded strategies may make nothing that a reader can use
            return []

    def _climb(self) -> list[int]:
        """Restricted programs, from small to large, until the gap is closed or a plan breaks a row that is not in yet."""
        if self._close():
            return []
        budget = self._budget()
        relaxation = self.engine.relax(budget, interior=True)  # its duals say more about which columns matter than a vertex'
        for most in _RUNGS:
            if relaxation is None or self._close() or (self.best is not None and most == _RUNGS[-1]):
                return []
            columns = np.ones(len(relaxation.reduced), bool)
            if len(columns) > max(_SMALL, most):
                columns = relaxation.reduced <= np.partition(relaxation.reduced, most)[most]
            found = self.engine.restricted(
                columns, budget, gap=min(self.gap / 10, 1e-3), target=self.bound / (1 - self.gap), max_nodes=_RUNG_NODES,
                start=self._start(columns), quick=True,
            )  # fmt: skip
            broken = self._offer(found.values) if found.values is not None else []
            if broken or columns.all():
                return broken
        return []

    def _budget(self) -> Rows:
        return budget_matrix(self.engine, self.program, [self.rows[r] for r in self.active])

    def _prove(self) -> list[int]:
        """The program over all columns that could belong to a better plan, if these are few or there is no plan yet."""
        budget = self._budget()
        relaxation = self.engine.relax(budget)
        if self._close() or relaxation is None:
            return []
        room = self.best_s * SCALE - relaxation.bound
        columns = relaxation.reduced <= room + 1e-9 * abs(relaxation.bound)
        if self.best is not None and columns.sum() > _SMALL:
            return []
        found = self.engine.restricted(columns, budget, gap=self.gap, target=-np.inf, max_nodes=self.max_nodes, start=self._start(columns))
        proven = min(found.bound, self.best_s * SCALE)
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
        return self.best is not None and self.best_s * SCALE * (1 - self.gap) <= self.bound

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
        """Take a plan if it fits and is the best. If it breaks rows none of which is in yet, these, the worst first."""
        evaluation = evaluate(self.problem, strategies, recomputed, kept)
        over = {r: size - self.problem.budget_bytes for r, size in enumerate(evaluation.resting_bytes)}
        if max(over.values()) > 0:
            broken = [r for r, size in over.items() if size > 0]
            return [] if set(broken) & set(self.active) else sorted(broken, key=lambda r: -over[r])[:_NEW_ROWS]
        plan = Choices(strategies, recomputed, evaluation.kept, evaluation.objective_s, 0.0)
        if self.fastest is None or plan.objective_s < self.fastest.objective_s:
            self.fastest = plan
        price_s = evaluation.load.priced_s(evaluation.slowdown, self.balance)
        if price_s < self.best_s:
            self.best, self.best_s, self.start = plan, price_s, values
        return []
