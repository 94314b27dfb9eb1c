"""The program as arrays, and HiGHS on the whole program or on some of its columns.

A *relaxation* is solved for its duals y. For any y, however exact,

    bound(y) = Σ_rows y·(the active side of the row) + Σ_columns min(0, d)        d = cost − Aᵀy

is a lower bound (weak duality; every column is in [0, 1]), and a solution that uses a column with
reduced cost d > 0 costs at least bound + d. So a *restricted* program over the columns with small d
finds good solutions fast, and one over the columns with d ≤ δ proves that solutions with other
columns cost at least bound + δ.
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

from autopar.solve.lp import Columns, Costs, Floats, Model, Rows

# --------------------------------------------------------------------------------------------------
# A relaxation that starts from given duals.
#
# The simplex method starts from duals of 0, which prove nearly nothing. For Llama-3 8B on three
# axes it takes 35,000 steps to the optimum, as long as all other steps of the search together. Dual
# ascent (`autopar.solve.dual_ascent`) gets close to the optimum in a fraction of that time, but not
# at a vertex, so no basis describes its result. So the program is written with its reduced costs at
# these duals y0, and with a slack column s for each row:
#
#     minimise (c − Aᵀy0)·x + |y0|·s      A x − sign(y0) s = b if y0 ≠ 0, s ≥ 0
#
# The program is equivalent: A x = b + sign(y0) s gives c·x − y0·b. Its duals are y − y0, which
# start from 0. Some thousand steps remain.


class Begun:
    """The start of the relaxations of a program.

    Args:
        rows: the rows with known duals; each has one side, or two equal sides.
        duals: y0; duals of a wrong sign count as 0. None is 0.

    Attributes:
        knows: whether some dual is not 0.
    """

    def __init__(self, rows: Rows, duals: Floats | None = None) -> None:
        duals = np.zeros(len(rows.lower)) if duals is None else rows.drop_wrong_signs(duals)
        self._rows, self._duals = rows, duals
        self._beyond = np.flatnonzero((duals != 0.0) & (rows.lower != rows.upper))
        self.knows = bool(duals.any())

    def costs(self, cost: Floats) -> Floats:
        """Compute the reduced costs of columns at the known duals."""
        return cost - self._rows.times(self._duals, len(cost)) if self.knows else cost

    def duals(self, found: Floats) -> Floats:
        """Compute y of these and further rows from the duals of a solver."""
        return (
            found + np.pad(self._duals, (0, len(found) - len(self._duals)))
            if self.knows and len(found)
            else found
        )

    def lp(self, cost: Floats, rows: Rows) -> highspy.HighsLp:
        """Build the program for the solver, its columns first.

        Args:
            cost: the cost by column.
            rows: these rows, possibly followed by further ones.
        """
        num, at, y = len(cost), self._beyond, self._duals[self._beyond]
        lower, upper, ends = rows.lower.copy(), rows.upper.copy(), rows.starts[at + 1]
        lower[at] = upper[at] = np.where(y > 0.0, rows.lower[at], rows.upper[at])
        more = np.zeros(len(lower), np.int32)
        more[at] = 1
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = num + len(at), len(lower)
        lp.col_cost_ = np.concatenate([self.costs(cost), np.abs(y)])
        lp.col_lower_ = np.zeros(num + len(at))
        lp.col_upper_ = np.concatenate([np.ones(num), np.full(len(at), highspy.kHighsInf)])
        lp.row_lower_, lp.row_upper_ = lower, upper
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.diff(rows.starts) + more)]).astype(
            np.int32
        )
        lp.a_matrix_.index_ = np.insert(
            rows.indices, ends, np.arange(num, num + len(at), dtype=np.int32)
        )
        lp.a_matrix_.value_ = np.insert(rows.values, ends, -np.sign(y))
        return lp


# --------------------------------------------------------------------------------------------------
# The work of a search in steps of the simplex method instead of seconds. It is the same in every
# run, so a work limit gives the same plan.

_BEGINNING = 1000  # cost in steps of a run that needs no steps
_MOST = 2**31 - 1  # the largest limit that HiGHS accepts


@dataclass(slots=True)
class SimplexWork:
    """The work of runs: simplex steps times columns of the program. Unlike seconds, it is the same
    in every run.

    Attributes:
        spent: the work so far.
        most: the work at which a search that has a plan ends.
    """

    spent: float = 0.0
    most: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether the limit is reached."""
        return self.spent >= self.most

    def add(self, num_columns: int, num_steps: int) -> None:
        """Count the steps of a run."""
        self.spent += num_columns * (max(num_steps, 0) + _BEGINNING)

    def steps_left(self, num_columns: int) -> int:
        """Compute the simplex steps that a run with this number of columns may take."""
        steps = (self.most - self.spent) / max(num_columns, 1)
        return int(min(max(steps, _BEGINNING), _MOST))


log = logging.getLogger("autopar")

Options = Mapping[str, bool | int | float | str]
_INF = highspy.kHighsInf
_INTERIOR_STEP = 200  # simplex steps per step of the interior point method
_FEASIBLE = 2  # code of HiGHS for a feasible primal solution
_SIMPLEX: Options = {"solver": "simplex"}
# number of columns from which presolve takes longer than it saves (it removes a fifth of the
# relaxations of a U-Net and of T5)
_LARGE = 50_000
# The bound is computed from the duals, so an inexact solution only lowers it slightly.
_INTERIOR: Options = {"solver": "ipx", "run_crossover": "off", "ipm_optimality_tolerance": 1e-5}
# Strong branching and restarts take most of the time of a tree of few nodes, and seldom help it.
_QUICK: Options = {"mip_pscost_minreliable": 0, "mip_allow_restart": False}


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The bound of a relaxation.

    Attributes:
        bound: lower bound of the program.
        reduced: d, by column.
        duals: y, by row.
        values: the values of the columns.
        exact: whether the values are a vertex of the relaxation.
    """

    bound: float
    reduced: Floats
    duals: Floats
    values: Floats
    exact: bool


@dataclass(frozen=True, slots=True)
class RestrictedResult:
    """The result of a restricted program: values of all columns (None if no solution was found),
    and its own proven bound."""

    values: Floats | None
    bound: float


class TimeLimit:
    """The time limit of all runs of a search together.

    Attributes:
        waits: whether runs continue after the limit, since there is no result yet.
        timed_out: whether the limit ended a run.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self._end = time.monotonic() + limit_s
        self.timed_out = self.waits = False

    def left_s(self) -> float:
        """Return the seconds that the next run may take."""
        return math.inf if self.waits else max(self._end - time.monotonic(), 0.1)

    def note(self, status: highspy.HighsModelStatus) -> None:
        """Log, once, that the time limit ended a run: only work, not time, is the same from run to
        run."""
        if status == highspy.HighsModelStatus.kTimeLimit and not self.timed_out:
            self.timed_out = True
            log.warning("the time limit ended a search: the next run may return a different plan")


@dataclass(frozen=True, slots=True)
class Vertex:
    """The vertex at which the simplex method ended, and the number of its steps."""

    basis: highspy.HighsBasis | None = None
    num_iterations: int = 0


class Engine:
    """HiGHS with one thread on one program.

    Args:
        model: the program without budget rows; its columns have names.
        time_limit_s: time limit of all runs together, in seconds.
        work: counts the work of runs.

    Attributes:
        vertex: the last vertex of the relaxation without further rows.
    """

    def __init__(
        self, model: Model, time_limit_s: float = math.inf, work: SimplexWork | None = None
    ) -> None:
        columns = sorted(model.columns, key=lambda c: c.name)
        self.names = [c.name for c in columns]
        self.column = {name: i for i, name in enumerate(self.names)}
        self.integer = np.array([c.integer for c in columns])
        self._at = np.empty(
            len(columns), np.int32
        )  # a column's number in the model → its place here
        self._at[[c.number for c in columns]] = np.arange(len(columns))
        self.cost = np.array(model.costs)[[c.number for c in columns]]
        starts, numbers = np.array(model.starts, np.int32), np.array(model.numbers, np.int32)
        self.rows = Rows(
            starts,
            self._at[numbers],
            np.array(model.values),
            np.array(model.lower),
            np.array(model.upper),
        )
        self.begun = Begun(self.rows)
        self.limit = TimeLimit(time_limit_s)
        self.work = work or SimplexWork()
        self.vertex = Vertex()

    def copy_for_search(self, time_limit_s: float = math.inf) -> Engine:
        """Copy the engine with its costs and its vertex for another search."""
        copied = copy.copy(self)
        copied.cost = self.cost.copy()
        copied.limit = TimeLimit(time_limit_s)
        return copied

    def begin(self, duals: Floats) -> None:
        """Set the duals of the program's rows from which relaxations start."""
        self.begun = Begun(self.rows, duals)

    def costs(self, costs: Costs) -> Floats:
        """Costs of all columns; 0 if there are none."""
        cost = np.zeros(len(self.names))
        cost[self._at[costs[0]]] = costs[1]
        return cost

    def relax(self, extra: Rows | None = None, *, interior: bool = False) -> Relaxation | None:
        """Solve the relaxation with further rows; None if it is infeasible.

        Args:
            extra: further rows.
            interior: whether to use the interior point method, which dense rows slow down less than
                the simplex method.
        """
        cost, rows = self.cost, self.rows if extra is None else self.rows.plus(extra)
        highs = self._run_interior(rows) if interior else None
        if highs is None:
            highs, interior = self._run_simplex(rows), False
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return None
        solution = highs.getSolution()
        if extra is None and not interior:
            steps = max(highs.getInfo().simplex_iteration_count, 0)
            self.vertex = Vertex(highs.getBasis(), steps)
        duals = np.array(solution.row_dual)
        bound, reduced, duals = proof(cost, rows, duals if interior else self.begun.duals(duals))
        values = np.array(solution.col_value)[: len(cost)]
        return Relaxation(
            bound,
            reduced,
            duals,
            values if len(values) else np.zeros(len(cost)),
            not interior and len(values) > 0,
        )

    def _run_interior(self, rows: Rows) -> highspy.Highs | None:
        """Solve by the interior point method; None if it failed."""
        highs = self._run(Begun(rows).lp(self.cost, rows), _INTERIOR)
        ended = (
            highspy.HighsModelStatus.kOptimal,
            highspy.HighsModelStatus.kTimeLimit,
            highspy.HighsModelStatus.kInfeasible,
        )
        return highs if highs.getModelStatus() in ended else None

    def _run_simplex(self, rows: Rows) -> highspy.Highs:
        """Solve by the simplex method, starting from the known duals."""
        without_presolve = len(self.cost) >= _LARGE or self.begun.knows
        options = {**_SIMPLEX, "presolve": "off"} if without_presolve else _SIMPLEX
        return self._run(self.begun.lp(self.cost, rows), options)

    def part(self, columns: Columns, rows: Rows) -> Relaxation | None:
        """Solve the relaxation of these rows over some columns; None if it is infeasible."""
        some = rows.only(columns)
        highs = self._run(Begun(some).lp(self.cost[columns], some), _SIMPLEX)
        solution = highs.getSolution()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        bound, reduced, duals = proof(self.cost[columns], some, np.array(solution.row_dual))
        return Relaxation(bound, reduced, duals, np.array(solution.col_value), True)

    def solve_restricted(
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
    ) -> RestrictedResult:
        """Solve the integer program over some columns.

        Args:
            columns: mask of the columns.
            budget: budget rows, in addition to the rows of the program.
            gap: relative gap to the restricted program's own bound at which to stop.
            target: objective at which to stop.
            max_nodes: limit of the nodes of the search tree.
            start: a known solution; only better solutions are searched for.
            quick: whether to prefer finding solutions to proving a bound.
            whole: the integral columns, if they differ from those of the model.
        """
        rows = self.rows.plus(budget).only(columns)
        options: Options = {
            "mip_rel_gap": gap,
            "objective_target": target,
            "mip_max_nodes": max(max_nodes, 1),
        }
        options = {**options, **_QUICK} if quick else options
        lp = Begun(rows).lp(self.cost[columns], rows)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [
            kinds[int(i)] for i in (self.integer if whole is None else whole)[columns]
        ]
        highs = self._run(lp, options, None if start is None else start[columns])
        info = highs.getInfo()
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return RestrictedResult(None, _INF)
        if info.primal_solution_status != _FEASIBLE:
            return RestrictedResult(None, info.mip_dual_bound)
        values = np.zeros(len(columns))
        values[columns] = highs.getSolution().col_value
        return RestrictedResult(values, info.mip_dual_bound)

    def _run(
        self, lp: highspy.HighsLp, options: Options, start: Floats | None = None
    ) -> highspy.Highs:
        highs = highspy.Highs()
        shared: Options = {"output_flag": False, "threads": 1, "time_limit": self.limit.left_s()}
        for name, value in {**shared, **options}.items():
            highs.setOptionValue(name, value)
        highs.passModel(lp)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            highs.setSolution(solution)
        highs.run()
        self.limit.note(highs.getModelStatus())
        info = highs.getInfo()
        self.work.add(
            lp.num_col_,
            max(info.simplex_iteration_count, 0)
            + _INTERIOR_STEP * max(info.ipm_iteration_count, 0),
        )
        return highs


def proof(cost: Floats, rows: Rows, duals: Floats) -> tuple[float, Floats, Floats]:
    """Prove a lower bound by weak duality (see the module docstring). Columns are in [0, 1].

    Args:
        cost: cost of each column.
        rows: the rows of the program.
        duals: y, by row; missing duals count as 0.

    Returns:
        The bound, the reduced costs d by column, and the duals with wrong signs set to 0.
    """
    return reduced_costs(cost, rows, duals, 0.0, 1.0)


def reduced_costs(
    cost: Floats, rows: Rows, duals: Floats, lower: Floats | float, upper: Floats | float
) -> tuple[float, Floats, Floats]:
    """Prove a lower bound as `proof` does, for columns within other bounds.

    Args:
        cost, rows, duals: as in `proof`.
        lower, upper: bounds of the columns.
    """
    duals = duals if len(duals) == len(rows.lower) else np.zeros(len(rows.lower))
    duals = rows.drop_wrong_signs(duals)
    side = np.where(duals > 0, rows.lower, rows.upper)
    reduced = cost - rows.times(duals, len(cost))
    bound = float(
        (duals * np.where(duals == 0, 0.0, side)).sum()
        + np.where(reduced < 0, reduced * upper, reduced * lower).sum()
    )
    return bound, reduced, duals


# --------------------------------------------------------------------------------------------------
# A relaxation that is kept in memory. HiGHS keeps its basis, so after a change of bounds or with
# further rows the dual simplex method continues from the last vertex. This takes one hundredth of
# the time of a new solve.

_STATUS = highspy.HighsModelStatus


@dataclass(frozen=True, slots=True)
class Point:
    """The solution of a relaxation within bounds of the columns.

    Attributes:
        bound: lower bound of all solutions within these bounds, as the duals prove it.
        values: the values of the columns.
        duals: y per row.
        reduced: cost − Aᵀy.
    """

    bound: float
    values: Floats
    duals: Floats
    reduced: Floats


class Live:
    """The relaxation of an engine's program with further rows. It starts from the last vertex of
    the engine's relaxation, or from duals of all rows.

    Attributes:
        num_iterations: steps of the simplex method so far, with those of the engine.
    """

    def __init__(self, engine: Engine, extra: Rows, duals: Floats | None = None) -> None:
        self.cost, self.rows = (
            engine.cost,
            engine.rows if duals is None else engine.rows.plus(extra),
        )
        self._begun = engine.begun if duals is None else Begun(self.rows, duals)
        self.num_iterations, self._engine = engine.vertex.num_iterations, engine
        self._numbers = np.arange(len(self.cost), dtype=np.int32)
        self._bounds = np.zeros(len(self.cost)), np.ones(len(self.cost))
        self._highs = highspy.Highs()
        options: Options = {"output_flag": False, "threads": 1, "solver": "simplex"}
        for name, value in options.items():
            self._highs.setOptionValue(name, value)
        self._highs.passModel(self._begun.lp(self.cost, self.rows))
        if duals is None:
            if engine.vertex.basis is not None:
                self._highs.setBasis(engine.vertex.basis)
            self.add(extra)

    @property
    def is_over(self) -> bool:
        """Whether the time limit or the work limit of the engine is reached."""
        return self._engine.limit.timed_out or self._engine.work.is_over

    def add(self, rows: Rows) -> None:
        """Append rows to the relaxation."""
        self.rows = self.rows.plus(rows)
        num, entries = len(rows.lower), len(rows.indices)
        self._highs.addRows(
            num, rows.lower, rows.upper, entries, rows.starts[:-1], rows.indices, rows.values
        )

    def reprice(self, cost: Floats) -> None:
        """Change the costs of the columns."""
        self.cost = cost
        self._highs.changeColsCost(len(self._numbers), self._numbers, self._begun.costs(cost))

    def solve(self, lower: Floats, upper: Floats, most: int = highspy.kHighsIInf) -> Point | None:
        """Solve within bounds of the columns.

        Args:
            lower: lower bounds of the columns.
            upper: upper bounds of the columns.
            most: limit of simplex steps, in addition to the work limit. The method may cycle if the
                bounds leave almost no room.

        Returns:
            None if there is no solution within these bounds. At a limit of time or steps, the bound
            that the current duals prove; at the limit of steps without values.
        """
        changed = self._numbers[(lower != self._bounds[0]) | (upper != self._bounds[1])]
        self._highs.changeColsBounds(len(changed), changed, lower[changed], upper[changed])
        self._bounds = lower.copy(), upper.copy()
        self._highs.setOptionValue(
            "simplex_iteration_limit", min(most, self._engine.work.steps_left(len(self.cost)))
        )
        self._highs.setOptionValue(
            "time_limit", self._highs.getRunTime() + self._engine.limit.left_s()
        )
        self._highs.run()
        status, solution = self._highs.getModelStatus(), self._highs.getSolution()
        steps = max(self._highs.getInfo().simplex_iteration_count, 0)
        self.num_iterations += steps
        self._engine.work.add(len(self.cost), steps)
        self._engine.limit.note(status)
        if status == _STATUS.kInfeasible:
            return None
        duals_of_rows = self._begun.duals(np.array(solution.row_dual))
        bound, reduced, duals = reduced_costs(self.cost, self.rows, duals_of_rows, lower, upper)
        ended = status == _STATUS.kIterationLimit
        return Point(
            bound,
            np.array([] if ended else solution.col_value, float)[: len(self.cost)],
            duals,
            reduced,
        )
