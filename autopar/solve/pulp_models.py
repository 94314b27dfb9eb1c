"""The whole program for other solvers: as a PuLP model, solved by any solver that PuLP finds, and
as a file.

Budget rows, and those of early communication (`autopar.solve.lazy_rows`), come in as plans break
them: solve, look at what the plan breaks, add those rows, solve again, until nothing is broken. So
every solve is of a relaxation of the problem, and what is proven of it holds for the problem. A
solver that says "optimal" has proven its gap; of one that a limit has ended, PuLP does not tell the
bound, and the bound of the relaxation is taken, which HiGHS' duals prove (`autopar.solve.highs`).
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pulp

from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.core.streams import PHASES
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
# Solvers by name: ``highs`` is the live model of `autopar.solve.branch_and_cut`; all others are
# those that PuLP finds on this machine.

LIVE = "highs"
_PREFIX = "pulp:"  # before a name: PuLP's solver, also where the name alone is the live model
_BUNDLED = "PULP_CBC_CMD"
_AFFIXES = re.compile(r"^PULP_|_(CMD|PY|DLL)$")


@dataclass(frozen=True, slots=True)
class PulpSolver:
    """One of PuLP's solvers.

    Attributes:
        name: PuLP's, for example ``PULP_CBC_CMD``.
        takes: the settings that its constructor has.
    """

    name: str
    takes: frozenset[str]

    def build(self, gap: float, time_limit_s: float) -> Any:
        """Build PuLP's solver object, which runs on one thread.

        Args:
            gap: relative; ignored by solvers that take none.
            time_limit_s: in seconds; may be infinite.

        Raises:
            AutoparError: if it takes no time limit and there is one.
        """
        settings: dict[str, Any] = {"msg": False}
        wanted = {"gapRel": gap, "threads": 1}
        settings |= {name: value for name, value in wanted.items() if name in self.takes}
        if math.isfinite(time_limit_s):
            if "timeLimit" not in self.takes:
                remedy = "remove time_limit_s, or pass another solver"
                raise AutoparError(
                    f"solver {self.name} does not support a time limit through PuLP", remedy=remedy
                )
            settings["timeLimit"] = max(time_limit_s, 1.0)
        with (
            warnings.catch_warnings()
        ):  # PuLP announces that version 4 comes without the bundled CBC
            warnings.simplefilter("ignore", DeprecationWarning)
            return pulp.getSolver(self.name, **settings)

    @property
    def keeps_gap(self) -> bool:
        """Whether it stops at the gap that it is given; else what "optimal" means is its own."""
        return "gapRel" in self.takes


def pulp_solver(name: str) -> PulpSolver:
    """PuLP's solver of a name: PuLP's own, or the family (``cbc``, ``scip``, ``gurobi``), in any
    case; ``pulp:`` may stand in front.

    Raises:
        AutoparError: if PuLP knows no such solver, or it is not installed.
    """
    wanted = name.lower().removeprefix(_PREFIX)
    known = [
        each
        for each in dict.fromkeys(pulp.listSolvers())
        if wanted in (each.lower(), _family(each))
    ]
    known.sort(key=lambda each: (each.lower() != wanted, each != _BUNDLED))
    usable = available() if known else ()
    for each in known:
        if each in usable:
            return PulpSolver(each, _takes(each))
    raise _refusal(name, known)


def check_solver(name: str) -> None:
    """Check that there is a solver of this name.

    Raises:
        AutoparError: if there is none, or it is not installed.
    """
    if name.lower() != LIVE:
        pulp_solver(name)


def available() -> tuple[str, ...]:
    """The names of PuLP's solvers that run on this machine."""
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
    what = f"solver {name!r} ({' or '.join(known)} in PuLP) is not installed"
    if _BUNDLED in known:
        what += ": PuLP includes no CBC for this platform, and no other CBC was found"
    return AutoparError(what, remedy=f"install it so that PuLP finds it, or {remedy}")


def _family(name: str) -> str:
    return _AFFIXES.sub("", _AFFIXES.sub("", name)).lower()


def _takes(name: str) -> frozenset[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        solver = pulp.getSolver(name, msg=False)
    return frozenset(inspect.signature(type(solver).__init__).parameters)


_TOLERANCE = 1e-5  # share of the budget: what solvers take for feasible is over it by less
_GRAIN = 1e-6  # relative, of objectives: what a solver with a gap of 0 takes for equal


@dataclass(frozen=True, slots=True)
class _SolverAnswer:
    """Values of columns by name; the proven bound in seconds."""

    values: Mapping[str, float]
    bound_s: float


def solve_modelled(
    problem: Problem, solver: str, gap: float, time_limit_s: float
) -> Solution | None:
    """The best plan by one of PuLP's solvers; None if none fits, or none was found in time.

    Args:
        solver: its name.
        time_limit_s: time limit of all solves together, in seconds.

    Raises:
        InfeasibleError: if no assignment of layouts is legal, regardless of memory.
        AutoparError: if the solver is not there, or fails.
    """
    used, ends = pulp_solver(solver), time.monotonic() + time_limit_s
    program = Formulation(problem)
    excess, rows = Excess(program), list(budget_rows(problem))
    active, outlasted, tightened = set[int](), set[int](), 0
    bound_s = free_s = 0.0
    while True:
        found = _solve_once(
            program.model, used, gap, ends - time.monotonic(), problem if not active else None
        )
        if found is None:
            return None
        strategies, recomputed, kept, regions = program.read_choices(found.values)
        evaluation = evaluate(
            problem, strategies, recomputed, kept, regions if active else None
        )  # else regions cost nothing yet
        if not tightened:  # under a row that was made tighter, what is proven is not of all plans
            bound_s = max(bound_s, found.bound_s)
            free_s = bound_s if not any(unsure_bytes(problem, rows[r]) for r in active) else free_s
        broken = {
            r for r, size in enumerate(evaluation.resting_bytes) if size > problem.budget_bytes
        }
        exceeds = _exceeded_phases(evaluation) - outlasted
        if not broken and not exceeds:
            bound_s, free_s = (
                min(bound_s, evaluation.objective_s),
                min(free_s, evaluation.objective_s),
            )
            return Solution(
                strategies,
                recomputed,
                evaluation.kept,
                evaluation.objective_s,
                bound_s,
                free_s,
                program.num_variables,
                program.num_constraints,
                solver.lower(),
                regions=regions if active else None,
            )
        if not broken:
            for phase in sorted(exceeds):
                excess.add(phase, evaluation.objective_s)
            outlasted |= exceeds
        if broken and broken <= active:  # by the solver's tolerance
            tightened += 1
            margin = math.ceil(problem.budget_bytes * _TOLERANCE * 2**tightened)
            for r in sorted(broken):
                program.add_budget(replace(rows[r], reserve_bytes=rows[r].reserve_bytes + margin))
        for r in sorted(broken - active):
            program.add_budget(rows[r])
        active |= broken


def _exceeded_phases(evaluation: Evaluation) -> set[int]:
    """The phases whose excess is to come in: both, or none."""
    return set(range(len(PHASES))) if evaluation.outlasted else set()


def _solve_once(
    model: Model, solver: PulpSolver, gap: float, left_s: float, free: Problem | None
) -> _SolverAnswer | None:
    """Run the solver once; None if it found nothing.

    Args:
        free: the problem, where no budget row is in, so that without a solution no layouts are
            legal.
    """
    made = to_pulp(model)
    try:
        made.solve(solver.build(gap, left_s))
    except pulp.PulpSolverError as error:
        what = f"solver {solver.name} failed through PuLP: {error}"
        raise AutoparError(
            what, remedy="check its installation and licence, or pass another solver"
        ) from error
    if made.status == pulp.LpStatusInfeasible and free is not None:
        raise refusal(free)
    if made.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    values = {v.name: v.value() or 0.0 for v in made.variables()}
    if made.sol_status == pulp.LpSolutionOptimal and solver.keeps_gap:
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
    """Convert a model to PuLP's classes; each row has one side, or two that are equal.

    Args:
        columns: names to use in place of those of the model, for each.
        rows: names of the rows, which have none by themselves.
    """
    made = pulp.LpProblem("autopar", pulp.LpMinimize)
    names = [c.name if columns is None else columns[c.name] for c in model.columns]
    kinds = [pulp.LpBinary if c.integer else pulp.LpContinuous for c in model.columns]
    variables = [
        made.add_variable(name, 0, 1, kind) for name, kind in zip(names, kinds, strict=True)
    ]
    made += pulp.LpAffineExpression(
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
        made.addConstraint(pulp.LpConstraint(terms, sense, None if rows is None else rows[i], side))
    return made


# --------------------------------------------------------------------------------------------------
# The program as a file in LP format, which PuLP, HiGHS and CBC read, with names that a reader can
# follow.
#
#     x3_1.layers.0.up.mm.R_S_0__to_S_0_      op 3 with strategy 1: its key, and the layouts that it
#                                             reads and makes
#     rc3_1. …                                backward recomputes it
#     k5_2.layers.0.act.S_0_                  value variant 5 is kept for backward in layout 2;
#                                             h5_2: on the hosts
#     f17.layers.0.act.S_0__to_R              the collective between two layouts; others that start
#                                             with f are kernels and routes
#     choose3. …, flow5_0_0_2. …, share,      rows
#     keep, again, host, hidden_forward,
#     memory0.start_of_backward
#
# The objective is in microseconds. All budget rows are in, and both rows of early communication.
# Characters that LP files do not allow everywhere are underscores, and a long key loses its middle;
# what stands before the first point makes a name unique.

_MOST = 100  # characters of a name
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
        objective_s: of a plan that is known; early communication that compute cannot hide is
            counted up to it.

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
    made = to_pulp(program.model, _column_names(program, keys), names)
    try:
        made.writeLP(str(path), max_length=_MOST)
    except OSError as error:
        raise AutoparError(
            f"cannot write the program: {error.strerror}", where=str(path), remedy="check the path"
        ) from error


def _name(unique: str, *words: object) -> str:
    """The unique part, then the words, as far as there is room."""
    said = re.sub(r"[^A-Za-z0-9_.]", "_", ".".join(str(word) for word in words))
    room = _MOST - len(unique) - 1
    if len(said) > room:
        said = f"{said[: room // 2 - 1]}__{said[len(said) - (room - room // 2 - 1) :]}"
    return f"{unique}.{said}" if said else unique


def _column_names(program: Formulation, keys: list[RowKey]) -> dict[str, str]:
    """Name of each column → a name that says what it is."""
    problem = program.problem
    names = {column.name: column.name for column in program.model.columns}
    rows = [*enumerate(program.x), *program.again.items()]
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
    """Flow → variant, and the layouts that it leads between: rows (3) say which it leaves and
    which it reaches."""
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
