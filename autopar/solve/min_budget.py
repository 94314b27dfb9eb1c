"""The smallest sufficient budget: minimizes the largest budget row over all solutions.

The peak is an additional column. It is minimized subject to row ≤ peak for each budget row. Sizes
are in units of a lower bound of the peak, so the absolute tolerances of the solver are small shares
of the peak.

Many solutions have the same peak, and most of them have useless communication, whose memory is in
no row. So plans to emit (`Lightest`) minimize peak/least peak + w · time/least time for a small w.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.solve.evaluate import evaluate
from autopar.solve.formulation import Formulation
from autopar.solve.highs import Engine, Relaxation
from autopar.solve.lp import Columns, Rows
from autopar.solve.memory_rows import BudgetRow, budget_rows

# share of the bound: columns with smaller reduced costs form the first restricted program
_FIRST_SHARE = 1e-6
_GROWTH = 1.25  # columns of each further restricted program, as a multiple of those before
_ROUNDS, _NODES = 6, 50


@dataclass(frozen=True, slots=True)
class Least:
    """The memory that a problem needs, with reserves.

    Attributes:
        bound_bytes: lower bound of the sufficient budgets.
        size_bytes: a budget that `choices` fit into, regardless of their time; 0 and None if the
            search found none.
    """

    bound_bytes: int
    size_bytes: int = 0
    choices: Solution | None = None


def least_budget(
    problem: Problem, time_limit_s: float = math.inf, *, bound_only: bool = False
) -> Least:
    """Search for the smallest sufficient budget. The problem's own budget is ignored.

    Args:
        problem: the problem.
        time_limit_s: time limit in seconds.
        bound_only: whether to return a bound without a solution. The bound is then that of the
            first two rows, and takes a fraction of the time.
    """
    program = Formulation(problem)
    most, unit = _most(problem), _unit(problem)
    peak = program.model.add_column("peak")  # in shares of `most`
    program.model.minimise((np.array([peak.number]), np.array([most / unit])))
    engine = Engine(program.model, time_limit_s)
    rows = budget_rows(problem)
    active, bound = [0, 1], 0.0
    least = Least(0)
    for _ in range(_ROUNDS):
        matrix = _matrix(program, engine, [rows[r] for r in active], most, unit)
        relaxation = engine.relax(matrix)
        if relaxation is None:
            break
        bound = max(bound, relaxation.bound)
        if bound_only:
            break
        choices, sizes = _plan(problem, program, engine, matrix, relaxation)
        if choices is None:
            break
        if least.choices is None or max(sizes) < least.size_bytes:
            least = Least(0, max(sizes), choices)
        broken = [r for r, size in enumerate(sizes) if size == max(sizes) and r not in active]
        if not broken:
            break
        active += broken
    return Least(int(np.ceil(bound * unit * (1 - 1e-6))), least.size_bytes, least.choices)


@dataclass
class Lightest:
    """Plans that need little memory for one problem, whose budget is ignored."""

    problem: Problem
    time_limit_s: float

    def __post_init__(self) -> None:
        self.program = Formulation(self.problem)
        self._times = np.array(self.program.model.costs)
        self._peak = self.program.model.add_column("peak")
        self._most, self._unit = _most(self.problem), _unit(self.problem)
        self._matrix: Rows | None = None
        relaxed = self._relax(1.0, 0.0)[2]
        self._least = 0.0 if relaxed is None else relaxed.bound
        self._fastest: float | None = None

    @property
    def bound_bytes(self) -> int:
        """A lower bound of the bytes that any plan needs, from the relaxation with all rows."""
        return int(np.ceil(self._least * self._unit * (1 - 1e-6)))

    def choices(self, weight: float) -> Solution | None:
        """Find a plan with a weight of time against memory, both relative to their minimum; None if
        none was found."""
        if self._fastest is None:
            relaxed = self._relax(0.0, 1.0)[2]
            self._fastest = 0.0 if relaxed is None else relaxed.bound
        if not self._fastest > 0.0:
            return None
        engine, matrix, relaxation = self._relax(1.0, weight * self._least / self._fastest)
        return (
            None
            if relaxation is None
            else _plan(self.problem, self.program, engine, matrix, relaxation, quick=True)[0]
        )

    def _relax(self, peak: float, time: float) -> tuple[Engine, Rows, Relaxation | None]:
        costs = np.append(time * self._times, peak * self._most / self._unit)
        self.program.model.minimise((np.arange(len(costs), dtype=np.int32), costs))
        engine = Engine(self.program.model, self.time_limit_s)
        matrix = self._budget_matrix(engine) if peak else Rows.of([])
        return engine, matrix, engine.relax(matrix)

    def _budget_matrix(self, engine: Engine) -> Rows:
        if self._matrix is None:  # the same for all weights: engines order columns by name
            rows = list(budget_rows(self.problem))
            self._matrix = _matrix(self.program, engine, rows, self._most, self._unit)
        return self._matrix


def _most(problem: Problem) -> float:
    """Return an upper bound of all rows, in bytes."""
    rows = budget_rows(problem)
    kept_bytes = sum(
        variant.count * sum(problem.values[variant.value].graph.bytes)
        for variant in problem.variants
    )
    per_op = [
        max(op.count * (s.static_bytes + s.gradient_bytes) for s in op.strategies)
        for op in problem.ops
    ]
    live = sum(max(*sizes, 0) for row in rows for _, sizes in (*row.live, *row.recomputed))
    return float(
        max(
            kept_bytes
            + sum(per_op)
            + live
            + sum(problem.regions)
            + max(row.reserve_bytes for row in rows),
            1,
        )
    )


def _unit(problem: Problem) -> float:
    """Return a lower bound of the bytes of any plan."""
    return float(
        max(sum(op.count * min(s.static_bytes for s in op.strategies) for op in problem.ops), 1)
    )


def _matrix(
    program: Formulation, engine: Engine, rows: list[BudgetRow], most: float, unit: float
) -> Rows:
    """Build the rows row ≤ peak, in units."""
    lines = []
    for row in rows:
        terms = program.budget_terms(row)
        columns = [*(engine.column[v.name] for v, _ in terms), engine.column["peak"]]
        lines.append(
            (
                columns,
                [*(size / unit for _, size in terms), -most / unit],
                -np.inf,
                -row.reserve_bytes / unit,
            )
        )
    return Rows.of(lines)


def _grow_columns(relaxation: Relaxation) -> Iterator[Columns]:
    """Generate sets of columns with the smallest reduced costs, each larger than the one before;
    the last has all columns.

    A restricted program without a solution takes a small part of the time that one with too many
    columns does, so sets grow slowly.
    """
    ascending = np.sort(relaxation.reduced)
    size = int(np.searchsorted(ascending, _FIRST_SHARE * relaxation.bound, "right"))
    while size < len(ascending):
        yield relaxation.reduced <= ascending[max(size - 1, 0)]
        size = int(size * _GROWTH) + 1
    yield np.ones(len(ascending), bool)


def _plan(
    problem: Problem,
    program: Formulation,
    engine: Engine,
    matrix: Rows,
    relaxation: Relaxation,
    *,
    quick: bool = False,
) -> tuple[Solution | None, tuple[int, ...]]:
    """Return a plan with a small peak, and its budget rows; None and no rows if there is none."""
    for columns in _grow_columns(relaxation):
        columns[engine.column["peak"]] = True
        answer = engine.solve_restricted(
            columns, matrix, gap=1e-3, target=-np.inf, max_nodes=_NODES, quick=quick
        )
        if answer.values is not None:
            chosen = program.read_choices(
                dict(zip(engine.names, answer.values.tolist(), strict=True))
            )
            evaluation = evaluate(problem, *chosen)
            strategies, recomputed, _, regions = chosen
            choices = Solution(
                strategies,
                recomputed,
                evaluation.kept,
                evaluation.objective_s,
                0.0,
                regions=regions,
            )
            return choices, evaluation.resting_bytes
    return None, ()
