"""The program as arrays, and HiGHS run on all of it or on a part of its columns.

A *relaxation* is solved for its duals y. Whatever y is, and however exactly it was found,

    bound(y) = Σ_rows y·(the side it pushes against) + Σ_columns min(0, d)        d = cost − Aᵀy

is a lower bound (weak duality; every column lies in [0, 1]), and a solution that uses a column with d > 0 costs at least
bound + d. So a *restricted* program over the columns with small d finds good solutions fast, and one over the columns with
d ≤ δ proves that whatever it leaves out costs at least bound + δ.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import highspy
import numpy as np

from autopar.solve.begun import Begun
from autopar.solve.model import Costs, Model
from autopar.solve.rows import Columns, Floats, Rows
from autopar.solve.work import Work

log = logging.getLogger("autopar")

Options = Mapping[str, bool | int | float | str]
_INF = highspy.kHighsInf
_INTERIOR_STEP = 200  # in simplex steps
_FEASIBLE = 2  # HiGHS' code of a feasible primal solution
_SIMPLEX: Options = {"solver": "simplex"}
_LARGE = 50_000  # columns: from here on presolve takes longer than what it removes (a fifth of a U-Net's and of T5's relaxation)
# The bound is computed from the duals, so an inexact solution costs only its inexactness.
_INTERIOR: Options = {"solver": "ipx", "run_crossover": "off", "ipm_optimality_tolerance": 1e-5}
# Strong branching and restarts take most of the time of a tree of few nodes, and seldom help it.
_QUICK: Options = {"mip_pscost_minreliable": 0, "mip_allow_restart": False}


@dataclass(frozen=True, slots=True)
class Relaxation:
    """What the duals prove.

    Attributes:
        bound: lower bound of the program. reduced: d per column. duals: y per row. values: the columns; `exact` says
            whether they are a vertex of the relaxation.
    """

    bound: float
    reduced: Floats
    duals: Floats
    values: Floats
    exact: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A restricted program's answer: values of all columns (None where nothing was found), and its own proven bound."""

    values: Floats | None
    bound: float


class Engine:
    """HiGHS, one thread, on one program.

    Args:
        model: without budget rows; its columns come by name. time_limit_s: for all runs together. work: where runs are counted.

    Attributes:
        waits: whether runs go on when that is over, since there is nothing yet to end with.
    """

    def __init__(self, model: Model, time_limit_s: float = math.inf, work: Work | None = None) -> None:
        columns = sorted(model.columns, key=lambda c: c.name)
        self.names = [c.name for c in columns]
        self.column = {name: i for i, name in enumerate(self.names)}
        self.integer = np.array([c.integer for c in columns])
        self._at = np.empty(len(columns), np.int32)  # a column's number in the model → its place here
        self._at[[c.number for c in columns]] = np.arange(len(columns))
        self.cost = np.array(model.costs)[[c.number for c in columns]]
        starts, numbers = np.array(model.starts, np.int32), np.array(model.numbers, np.int32)
        self.rows = Rows(starts, self._at[numbers], np.array(model.values), np.array(model.lower), np.array(model.upper))
        self.begun = Begun(self.rows)
        self.time_limit_s, self._end = time_limit_s, time.monotonic() + time_limit_s
        self.timed_out = self.waits = False
        self.work = work or Work()
        self.basis: highspy.HighsBasis | None = None  # of the last vertex of the relaxation without further rows, and the steps to it
        self.num_iterations = 0

    def again(self, time_limit_s: float = math.inf) -> Engine:
        """Another on the same program, with the costs and the vertex that there are now."""
        found = copy.copy(self)
        found.cost = self.cost.copy()
        found.time_limit_s, found._end = time_limit_s, time.monotonic() + time_limit_s
        found.timed_out = found.waits = False
        return found

    def left_s(self) -> float:
        """Seconds that the next run may take."""
        return math.inf if self.waits else max(self._end - time.monotonic(), 0.1)

    def note(self, status: highspy.HighsModelStatus) -> None:
        """Say once where a run ended for want of time: only work, not time, is the same from run to run."""
        if status == highspy.HighsModelStatus.kTimeLimit and not self.timed_out:
            self.timed_out = True
            log.warning("the time limit ended a search: the plan may be another in the next run")

    def begin(self, duals: Floats) -> None:
        """Have relaxations begin at these duals of the program's rows."""
        self.begun = Begun(self.rows, duals)

    def costs(self, costs: Costs) -> Floats:
        """Costs of all columns; 0 where there are none."""
        cost = np.zeros(len(self.names))
        cost[self._at[costs[0]]] = costs[1]
        return cost

    def relax(self, extra: Rows | None = None, *, interior: bool = False) -> Relaxation | None:
        """Solve the relaxation with some more rows; None where it is infeasible.

        Args:
            interior: by the interior point method, which dense rows slow down less, instead of the simplex method.
        """
        cost, rows = self.cost, self.rows if extra is None else self.rows.plus(extra)
        ended = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit, highspy.HighsModelStatus.kInfeasible)
        simplex = {**_SIMPLEX, "presolve": "off"} if len(cost) >= _LARGE or self.begun.knows else _SIMPLEX
        highs = self._run(Begun(rows).lp(cost, rows), _INTERIOR) if interior else None
        if highs is None or highs.getModelStatus() not in ended:
            highs, interior = self._run(self.begun.lp(cost, rows), simplex), False
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None
        solution = highs.getSolution()
        if extra is None and not interior:
            self.basis, self.num_iterations = highs.getBasis(), max(highs.getInfo().simplex_iteration_count, 0)
        duals = np.array(solution.row_dual)
        bound, reduced, duals = proof(cost, rows, duals if interior else self.begun.duals(duals))
        values = np.array(solution.col_value)[: len(cost)]
        return Relaxation(bound, reduced, duals, values if len(values) else np.zeros(len(cost)), not interior and len(values) > 0)

    def part(self, columns: Columns, rows: Rows) -> Relaxation | None:
        """The relaxation of these rows over some columns only: its bound, duals and values; None where it has no solution."""
        some = rows.only(columns)
        highs = self._run(Begun(some).lp(self.cost[columns], some), _SIMPLEX)
        solution = highs.getSolution()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        bound, reduced, duals = proof(self.cost[columns], some, np.array(solution.row_dual))
        return Relaxation(bound, reduced, duals, np.array(solution.col_value), True)

    def restricted(
        self,
        columns: Columns,
        budget: Rows,
        *,
        gap: float,
        target: float,
        max_nodes: int,
        start: Floats | None = None,
        quick: bool = False,
        whole: Columns | None = None,
    ) -> Found:
        """Solve the integer program over some columns.

        Args:
            gap: stop at this relative gap to the restricted program's own bound. target: stop at this objective.
            start: a known solution; none that is worse is looked for. quick: for solutions rather than a proof.
            whole: the columns that are whole numbers, if not those of the model.
        """
        rows = self.rows.plus(budget).only(columns)
        options: Options = {"mip_rel_gap": gap, "objective_target": target, "mip_max_nodes": max(max_nodes, 1)}
        options = {**options, **_QUICK} if quick else options
        lp = Begun(rows).lp(self.cost[columns], rows)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[int(i)] for i in (self.integer if whole is None else whole)[columns]]
        highs = self._run(lp, options, None if start is None else start[columns])
        info = highs.getInfo()
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return Found(None, _INF)
        if info.primal_solution_status != _FEASIBLE:
            return Found(None, info.mip_dual_bound)
        values = np.zeros(len(columns))
        values[columns] = highs.getSolution().col_value
        return Found(values, info.mip_dual_bound)

    def _run(self, lp: highspy.HighsLp, options: Options, start: Floats | None = None) -> highspy.Highs:
        highs = highspy.Highs()
        shared: Options = {"output_flag": False, "threads": 1, "time_limit": self.left_s()}
        for name, value in {**shared, **options}.items():
            highs.setOptionValue(name, value)
        highs.passModel(lp)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            highs.setSolution(solution)
        highs.run()
        self.note(highs.getModelStatus())
        info = highs.getInfo()
        self.work.add(lp.num_col_, max(info.simplex_iteration_count, 0) + _INTERIOR_STEP * max(info.ipm_iteration_count, 0))
        return highs


def proof(cost: Floats, rows: Rows, duals: Floats) -> tuple[float, Floats, Floats]:
    """Weak duality (see the module): the bound, the reduced costs d, and the duals with wrong signs set to 0."""
    return reduced_costs(cost, rows, duals, 0.0, 1.0)


def reduced_costs(cost: Floats, rows: Rows, duals: Floats, lower: Floats | float, upper: Floats | float) -> tuple[float, Floats, Floats]:
    """As `proof`, for columns within other bounds."""
    duals = duals if len(duals) == len(rows.lower) else np.zeros(len(rows.lower))
    duals = rows.signed(duals)
    side = np.where(duals > 0, rows.lower, rows.upper)
    reduced = cost - rows.times(duals, len(cost))
    bound = float((duals * np.where(duals == 0, 0.0, side)).sum() + np.where(reduced < 0, reduced * upper, reduced * lower).sum())
    return bound, reduced, duals
