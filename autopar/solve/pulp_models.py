"""The whole program for other solvers: as a PuLP model, solved by any solver that PuLP finds, and
as a file.

Budget rows, and rows for early communication (`autopar.solve.lazy_rows`), are added when a plan
violates them. The program is solved and rows are added until no row is violated. So each solve is
of a relaxation, and each proven bound holds for the problem. If a solver reports an optimal
solution, its gap is proven. If a time limit stops a solver, PuLP does not report its bound; the
bound of the relaxation is used instead, which the duals of HiGHS prove (`autopar.solve.highs`).
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pulp

from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.core.streams import PHASES
from autopar.core.text_files import write_file
from autopar.errors import AutoparError
from autopar.solve.evaluate import Evaluation, evaluate
from autopar.solve.formulation import (
    AGAIN,
    CHOOSE,
    FLOW,
    HOST,
    KEEP,
    RULED_OUT,
    SCALE,
    SHARE,
    Formulation,
)
from autopar.solve.highs import Engine
from autopar.solve.kernel_rows import RowKey
from autopar.solve.lazy_rows import Excess
from autopar.solve.lp import Model
from autopar.solve.memory_rows import budget_rows, unsure_bytes
from autopar.solve.paths import refusal

# --------------------------------------------------------------------------------------------------
# Solvers by name: ``highs`` is the live model of `autopar.solve.branch_and_cut`. All others are the
# solvers that PuLP finds on this machine.

LIVE = "highs"
_PREFIX = (
    "pulp:"  # prefix that selects PuLP's solver, even if the name alone is that of the live model
)
_BUNDLED = "PULP_CBC_CMD"
_AFFIXES = re.compile(r"^PULP_|_(CMD|PY|DLL)$")


@dataclass(frozen=True, slots=True)
class PulpSolver:
    """One of PuLP's solvers.

    Attributes:
        name: its name in PuLP, for example ``PULP_CBC_CMD``.
        takes: the parameters of its constructor.
    """

    name: str
    takes: frozenset[str]

    def build(self, gap: float, time_limit_s: float) -> Any:
        """Build PuLP's solver object, which runs on one thread.

        Args:
            gap: relative gap; ignored by solvers without this setting.
            time_limit_s: time limit in seconds; may be infinite.

        Raises:
            AutoparError: if there is a time limit and the solver does not support one.
        """
        settings: dict[str, Any] = {"msg": False}
        options = {"gapRel": gap, "threads": 1}
        settings |= {name: value for name, value in options.items() if name in self.takes}
        if math.isfinite(time_limit_s):
            if "timeLimit" not in self.takes:
                remedy = "remove time_limit_s, or pass another solver"
                raise AutoparError(
                    f"solver {self.name} does not support a time limit through PuLP", remedy=remedy
                )
            settings["timeLimit"] = max(time_limit_s, 1.0)
        with warnings.catch_warnings():  # PuLP warns that version 4 will not include CBC
            warnings.simplefilter("ignore", DeprecationWarning)
            return pulp.getSolver(self.name, **settings)

    @property
    def keeps_gap(self) -> bool:
        """Whether the solver stops at a requested gap. If not, it has its own definition of
        optimal."""
        return "gapRel" in self.takes


def pulp_solver(name: str) -> PulpSolver:
    """Return PuLP's solver of this name.

    Args:
        name: PuLP's name or the family (``cbc``, ``scip``, ``gurobi``), in any case, with or
            without the prefix ``pulp:``.

    Raises:
        AutoparError: if PuLP knows no such solver, or if it is not installed.
    """
    requested = name.lower().removeprefix(_PREFIX)
    known = [
        solver_name
        for solver_name in dict.fromkeys(pulp.listSolvers())
        if requested in (solver_name.lower(), _family(solver_name))
    ]
    known.sort(key=lambda each: (each.lower() != requested, each != _BUNDLED))
    usable = available() if known else ()
    for solver_name in known:
        if solver_name in usable:
            return PulpSolver(solver_name, _solver_parameters(solver_name))
    raise _refusal(name, known)


def check_solver(name: str) -> None:
    """Check that a solver of this name is available.

    Raises:
        AutoparError: if the name is unknown, or if the solver is not installed.
    """
    if name.lower() != LIVE:
        pulp_solver(name)


def available() -> tuple[str, ...]:
    """Return the names of PuLP's solvers that run on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(pulp.listSolvers(onlyAvailable=True))


def _refusal(name: str, known: Sequence[str]) -> AutoparError:
    here = ", ".join(
        (LIVE, *(f"{_PREFIX}{each}" if each.lower() == LIVE else each for each in available()))
    )
    remedy = f"pass one of the available solvers: {here}"
    if not known:
        return AutoparError(f"unknown solver {name!r}", remedy=remedy)
    message = f"solver {name!r} ({' or '.join(known)} in PuLP) is not installed"
    if _BUNDLED in known:
        message += ": PuLP includes no CBC for this platform, and no other CBC was found"
    return AutoparError(message, remedy=f"install it so that PuLP finds it, or {remedy}")


def _family(name: str) -> str:
    return _AFFIXES.sub("", _AFFIXES.sub("", name)).lower()


def _solver_parameters(name: str) -> frozenset[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        solver = pulp.getSolver(name, msg=False)
    return frozenset(inspect.signature(type(solver).__init__).parameters)


_TOLERANCE = 1e-5  # largest excess that solvers accept as feasible, as a share of the budget
_GRAIN = 1e-6  # relative difference of objectives that a solver accepts as a gap of 0


@dataclass(frozen=True, slots=True)
class _SolverAnswer:
    """Column name → value, and the proven bound in seconds."""

    values: Mapping[str, float]
    bound_s: float


def solve_modelled(
    problem: Problem, solver: str, gap: float, time_limit_s: float
) -> Solution | None:
    """Return the best plan that one of PuLP's solvers finds. Return None if no plan fits the
    budget, or if none is found in time.

    Args:
        problem: the problem.
        solver: name of the solver.
        gap: relative gap at which the solver may stop.
        time_limit_s: time limit of all solves together, in seconds.

    Raises:
        InfeasibleError: if no assignment of layouts is legal, regardless of memory.
        AutoparError: if the solver is not available, or if it fails.
    """
    backend, ends = pulp_solver(solver), time.monotonic() + time_limit_s
    program = Formulation(problem)
    excess, rows, outlasted = Excess(program), _AddedRows(program), set[int]()
    bound_s = free_s = 0.0
    while True:
        left_s, free = ends - time.monotonic(), None if rows.added else problem
        answer = _solve_once(program.model, backend, gap, left_s, free)
        if answer is None:
            return None
        strategies, recomputed, kept_versions, regions = program.read_choices(answer.values)
        used_regions = regions if rows.added else None  # they cost nothing without budget rows
        evaluation = evaluate(problem, strategies, recomputed, kept_versions, used_regions)
        if not rows.num_tightened:  # a tightened row excludes plans from the bound
            bound_s = max(bound_s, answer.bound_s)
            free_s = free_s if rows.are_unsure else bound_s
        broken = {
            r for r, size in enumerate(evaluation.resting_bytes) if size > problem.budget_bytes
        }
        exceeds = _exceeded_phases(evaluation) - outlasted
        if broken:
            rows.add(broken)
        elif exceeds:
            for phase in sorted(exceeds):
                excess.add(phase, evaluation.objective_s)
            outlasted |= exceeds
        else:
            return Solution(
                strategies,
                recomputed,
                evaluation.kept,
                evaluation.objective_s,
                min(bound_s, evaluation.objective_s),
                min(free_s, evaluation.objective_s),
                program.num_variables,
                program.num_constraints,
                solver.lower(),
                regions=used_regions,
            )


@dataclass
class _AddedRows:
    """The memory rows that were added to a program because a plan broke them.

    Attributes:
        program: the program.
        added: positions of these rows among the rows of the problem.
        num_tightened: how often a row was tightened.
    """

    program: Formulation
    added: set[int] = field(default_factory=set)
    num_tightened: int = 0

    def __post_init__(self) -> None:
        self._rows = list(budget_rows(self.program.problem))

    @property
    def are_unsure(self) -> bool:
        """Whether one of the rows counts memory that is not certain."""
        return any(unsure_bytes(self.program.problem, self._rows[r]) for r in self.added)

    def add(self, broken: set[int]) -> None:
        """Add broken rows. If all of them exist, they are broken within the solver's tolerance, and
        are tightened by more than it."""
        if broken <= self.added:
            self.num_tightened += 1
            budget = self.program.problem.budget_bytes
            margin = math.ceil(budget * _TOLERANCE * 2**self.num_tightened)
            rows = [self._rows[r] for r in sorted(broken)]
            rows = [replace(row, reserve_bytes=row.reserve_bytes + margin) for row in rows]
        else:
            rows = [self._rows[r] for r in sorted(broken - self.added)]
        for row in rows:
            self.program.add_budget(row)
        self.added |= broken


def _exceeded_phases(evaluation: Evaluation) -> set[int]:
    """Return the phases whose excess is added: both or none."""
    return set(range(len(PHASES))) if evaluation.outlasted else set()


def _solve_once(
    model: Model, solver: PulpSolver, gap: float, left_s: float, free: Problem | None
) -> _SolverAnswer | None:
    """Run the solver once. Return None if it found no solution.

    Args:
        model: the program.
        solver: the solver.
        gap: relative gap at which it may stop.
        left_s: remaining time in seconds.
        free: the problem if the program has no budget rows, else None. In this case an infeasible
            program means that no assignment of layouts is legal.
    """
    pulp_model = to_pulp(model)
    try:
        pulp_model.solve(solver.build(gap, left_s))
    except pulp.PulpSolverError as error:
        message = f"solver {solver.name} failed through PuLP: {error}"
        raise AutoparError(
            message, remedy="check its installation and licence, or pass another solver"
        ) from error
    if pulp_model.status == pulp.LpStatusInfeasible and free is not None:
        raise refusal(free)
    if pulp_model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    values = {v.name: v.value() or 0.0 for v in pulp_model.variables()}
    if pulp_model.sol_status == pulp.LpSolutionOptimal and solver.keeps_gap:
        objective = sum(
            cost * values[column.name]
            for column, cost in zip(model.columns, model.costs, strict=True)
        )
        return _SolverAnswer(values, (objective - max(gap, _GRAIN) * abs(objective)) / SCALE)
    relaxation = Engine(model).relax()
    return _SolverAnswer(values, 0.0 if relaxation is None else relaxation.bound / SCALE)


def to_pulp(
    model: Model, columns: Mapping[str, str] | None = None, rows: list[str] | None = None
) -> pulp.LpProblem:
    """Convert a model to a PuLP model. Each row must have one side, or two equal sides.

    Args:
        model: the model.
        columns: name of a column → name to use instead.
        rows: names of the rows; the model has none.
    """
    pulp_model = pulp.LpProblem("autopar", pulp.LpMinimize)
    names = [c.name if columns is None else columns[c.name] for c in model.columns]
    kinds = [pulp.LpBinary if c.integer else pulp.LpContinuous for c in model.columns]
    variables = [
        pulp_model.add_variable(name, 0, 1, kind) for name, kind in zip(names, kinds, strict=True)
    ]
    pulp_model += pulp.LpAffineExpression(
        [(variable, cost) for variable, cost in zip(variables, model.costs, strict=True) if cost]
    )
    sides = zip(itertools.pairwise(model.starts), model.lower, model.upper, strict=True)
    for i, ((start, end), lower, upper) in enumerate(sides):
        entries = zip(model.numbers[start:end], model.values[start:end], strict=True)
        terms = pulp.LpAffineExpression([(variables[number], value) for number, value in entries])
        sense = (
            pulp.LpConstraintEQ
            if lower == upper
            else pulp.LpConstraintLE
            if math.isinf(lower)
            else pulp.LpConstraintGE
        )
        side = lower if math.isinf(upper) else upper
        pulp_model.addConstraint(
            pulp.LpConstraint(terms, sense, None if rows is None else rows[i], side)
        )
    return pulp_model


# --------------------------------------------------------------------------------------------------
# The program as a file in LP format, which PuLP, HiGHS and CBC read, with descriptive names.
#
#     x3_1.layers.0.up.mm.R_S_0__to_S_0_      op 3 with strategy 1: its key, and the layouts that it
#                                             reads and produces
#     rc3_1. …                                backward recomputes it
#     k5_2.layers.0.act.S_0_                  value variant 5 is kept for backward in layout 2;
#                                             h5_2: on the hosts
#     f17.layers.0.act.S_0__to_R              the collective between two layouts; other names that
#                                             start with f are kernels and routes
#     choose3. …, flow5_0_0_2. …, share,      rows
#     keep, again, host, hidden_forward,
#     memory0.start_of_backward
#
# The objective is in microseconds. The file has all budget rows, and both rows of early
# communication. Characters that LP files do not allow everywhere are replaced by underscores. A
# long key is shortened in the middle. The part before the first point makes a name unique.

_MOST = 100  # largest number of characters of a name
_KINDS = {
    CHOOSE: "choose",
    SHARE: "share",
    FLOW: "flow",
    KEEP: "keep",
    AGAIN: "again",
    HOST: "host",
    RULED_OUT: "ruled_out",
}


def write_lp(problem: Problem, objective_s: float, path: str | Path) -> None:
    """Write the integer program of a problem to a file in LP format.

    Args:
        problem: the problem.
        objective_s: objective of a known plan in seconds. Early communication that compute cannot
            hide is counted up to it.
        path: the file.

    Raises:
        AutoparError: if the file cannot be written.
    """
    program = Formulation(problem)
    excess, keys = Excess(program), list(program.keys)
    names = [_row_name(problem, key, i) for i, key in enumerate(keys)]
    for number, row in enumerate(budget_rows(problem)):
        program.add_budget(row)
        names.append(_name(f"memory{number}", row.name))
    for phase, name in enumerate(PHASES):
        excess.add(phase, objective_s)
        names.append(_name("hidden", name))
    pulp_model = to_pulp(program.model, _column_names(program, keys), names)
    with tempfile.TemporaryDirectory() as folder:  # PuLP opens the file itself
        file = Path(folder) / "program.lp"
        pulp_model.writeLP(str(file), max_length=_MOST)
        text = file.read_text(encoding="utf-8")
    write_file(path, text, "the program")


def _name(unique: str, *words: object) -> str:
    """Return the unique part and the words, shortened to the largest number of characters."""
    text = re.sub(r"[^A-Za-z0-9_.]", "_", ".".join(str(word) for word in words))
    room = _MOST - len(unique) - 1
    if len(text) > room:
        text = f"{text[: room // 2 - 1]}__{text[len(text) - (room - room // 2 - 1) :]}"
    return f"{unique}.{text}" if text else unique


def _column_names(program: Formulation, keys: list[RowKey]) -> dict[str, str]:
    """Return name of a column → descriptive name."""
    problem = program.problem
    names = {column.name: column.name for column in program.model.columns}
    rows = [*enumerate(program.x), *program.recomputed.items()]
    for n, columns in rows:
        for column, strategy in zip(columns, problem.ops[n].strategies, strict=True):
            inputs, outputs = (
                " ".join(map(str, each))
                for each in (strategy.layouts.inputs, strategy.layouts.outputs)
            )
            names[column.name] = _name(column.name, problem.ops[n].key, f"{inputs} to {outputs}")
    for (v, version), column in program.keep.items():
        value = problem.values[problem.variants[v].value]
        names[column.name] = _name(column.name, value.key, value.layout(version))
    for name, (v, source, target) in _collectives(program, keys).items():
        value = problem.values[problem.variants[v].value]
        names[name] = _name(
            name, value.key, f"{value.graph.layouts[source]} to {value.graph.layouts[target]}"
        )
    return names


def _collectives(program: Formulation, keys: list[RowKey]) -> dict[str, tuple[int, int, int]]:
    """Return name of a flow → its variant and the layouts between which it leads. Rows (3) show the
    layouts that it leaves and reaches."""
    model, sources, targets = (
        program.model,
        dict[int, tuple[int, int]](),
        dict[int, tuple[int, int]](),
    )
    for key, (start, end) in zip(keys, itertools.pairwise(model.starts), strict=False):
        if key[0] != FLOW:
            continue
        for number, value in zip(model.numbers[start:end], model.values[start:end], strict=True):
            if model.columns[number].name.startswith("f"):
                (targets if value > 0 else sources)[number] = key[1], key[-1]
    both = sources.keys() & targets.keys()
    return {
        model.columns[number].name: (*sources[number], targets[number][1])
        for number in sorted(both)
    }


def _row_name(problem: Problem, key: RowKey, position: int) -> str:
    kind, indices = key[0], key[1:]
    unique = f"{_KINDS.get(kind, f'kernel{kind}')}{'_'.join(map(str, indices))}"
    if kind in (CHOOSE, AGAIN, RULED_OUT):
        return _name(unique, problem.ops[indices[0]].key)
    if kind in (FLOW, SHARE, KEEP):
        value = problem.values[problem.variants[indices[0]].value]
        return _name(unique, value.key, "" if kind == SHARE else value.graph.layouts[indices[-1]])
    return _name(f"{unique}_r{position}")
