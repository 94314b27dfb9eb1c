"""Problem → Solution, by HiGHS (`autopar.solve.branch_and_cut`) or by one of PuLP's solvers
(`autopar.solve.pulp_models`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.core.problem import Problem
from autopar.core.solution import FractionalGroups, Multipliers, Solution
from autopar.errors import InfeasibleError, size_text
from autopar.solve.branch_and_cut import BranchAndCut, SearchRequest
from autopar.solve.evaluate import Evaluation, evaluate, evaluate_choices
from autopar.solve.greedy import quick
from autopar.solve.min_budget import Least, least_budget
from autopar.solve.paths import refusal
from autopar.solve.pulp_models import LIVE, solve_modelled

# --------------------------------------------------------------------------------------------------
# Ops that backward would recompute although nothing reads their results.
#
# If communication outlasts compute, or an op takes no time, recomputing it costs nothing, and the
# solver may choose it without a reason. Its operands would then be kept for it in predictions and
# budgets, but not in the emitted program.


def without_idle(problem: Problem, choices: Solution) -> Solution:
    """Remove recomputation that nothing reads; neither time nor memory of the plan increases."""
    if not choices.recomputed:
        return choices
    evaluation = evaluate_choices(problem, choices)
    while idle := _idle(problem, choices.recomputed, evaluation):
        remaining = {op: s for op, s in choices.recomputed.items() if op not in idle}
        evaluation = evaluate(
            problem, choices.strategies, remaining, evaluation.kept, choices.regions
        )
        choices = replace(
            choices, recomputed=remaining, kept=evaluation.kept, objective_s=evaluation.objective_s
        )
    return choices


def _idle(problem: Problem, recomputed: Mapping[int, int], evaluation: Evaluation) -> set[int]:
    """Return the recomputed ops none of whose recomputed results is read."""
    idle = set(recomputed)
    for v, moves in evaluation.backward.items():
        value = problem.values[problem.variants[v].value]
        if value.op in idle:
            layouts = problem.ops[value.op].strategies[recomputed[value.op]].layouts
            layout = value.graph.index[layouts.outputs[value.result]]
            read = {arc.src for arc in moves.arcs} | set(moves.read_layouts)
            if layout in read and not {layout, value.stored_version(layout)}.intersection(
                evaluation.kept[v]
            ):
                idle.discard(value.op)
    return idle


def solve(
    problem: Problem,
    *,
    gap: float = 0.01,
    max_nodes: int = 200,
    time_limit_s: float = math.inf,
    solver: str = "highs",
) -> Solution:
    """Choose strategies, recomputation and kept versions.

    Args:
        problem: the problem.
        gap: relative gap between incumbent and bound at which the search stops.
        max_nodes: limit of the nodes of ``highs``' search tree.
        time_limit_s: time limit in seconds. If it ends a run, this is logged, the solution may
            differ between runs, and `Solution.stats["timed_out"]` is 1.
        solver: ``highs``, or one of PuLP's (`autopar.solve.pulp_models`), which are slower.

    Returns:
        The best solution, with its proven bound.

    Raises:
        InfeasibleError: if no plan fits the budget; the error states the smallest sufficient
            budget.
    """
    result = choices_or_least(SearchRequest(problem, gap, max_nodes, time_limit_s), solver=solver)
    if isinstance(result, Solution):
        return result
    assert isinstance(result, Least), "a search for whole decisions returns no fractions"
    would_do = f", {size_text(result.size_bytes)} is sufficient" if result.choices else ""
    needed = f"at least {size_text(result.bound_bytes)} is needed{would_do}"
    raise shortage(f"no plan fits into {size_text(problem.budget_bytes)} per device: {needed}")


def shortage(what: str, needed_bytes: int = 0) -> InfeasibleError:
    """Return the error for a memory budget that no plan fits.

    Args:
        what: the description of the failure.
        needed_bytes: required bytes per device, if known; else 0.
    """
    remedy = "use more devices, a smaller batch or shorter sequence, or pass a larger memory_bytes"
    return InfeasibleError(what, remedy=remedy, needed_bytes=needed_bytes)


def choices_or_least(
    request: SearchRequest, *, solver: str, bound_only: bool = False
) -> Solution | Least | FractionalGroups:
    """Solve as `solve` does, but return the memory that is needed if no plan fits.

    Args:
        request: the problem, and the limits of the search.
        solver: as in `solve`. PuLP's solvers use only `gap` and `time_limit_s` of the request.
        bound_only: whether to skip the search for the smallest sufficient budget (`least_budget`)
            if it is proven that nothing fits.

    Raises:
        InfeasibleError: if no assignment of layouts is legal, regardless of memory. The error names
            the op without a legal layout if it is known.
    """
    problem = request.problem
    if not all(op.strategies for op in problem.ops):
        raise refusal(problem)
    if solver.lower() != LIVE:
        result = _Searched(solve_modelled(problem, solver, request.gap, request.time_limit_s))
    else:
        known = quick(problem, request.gap)
        result = _search(replace(request, known=known), bound_only=bound_only)
    if isinstance(result.answer, Solution):
        return without_idle(problem, result.answer)
    if result.answer is not None:
        return result.answer
    time_limit_s = math.inf if request.waits else request.time_limit_s
    least = least_budget(problem, time_limit_s, bound_only=bound_only and result.infeasible)
    if least.choices is None or least.size_bytes > problem.budget_bytes:
        return least
    # The limits ended the search before it found a plan; this one fits, however long it takes.
    return replace(
        least.choices,
        bound_s=min(result.bound_s, least.choices.objective_s),
        free_bound_s=0.0,
        solver=solver.lower(),
        multipliers=result.multipliers,
    )


@dataclass(frozen=True, slots=True)
class _Searched:
    """The result of a search.

    Attributes:
        answer: the solution; None if there is none yet.
        bound_s, multipliers: the proven bound if there is no solution.
        infeasible: whether the problem is proven infeasible.
    """

    answer: Solution | Least | FractionalGroups | None
    bound_s: float = 0.0
    multipliers: Multipliers | None = None
    infeasible: bool = False


def _search(request: SearchRequest, *, bound_only: bool) -> _Searched:
    """Search by HiGHS, unless a solution that is close enough is known."""
    known = request.known
    if known is not None and known.close and known.answer is not None:
        return _Searched(known.answer)
    search = BranchAndCut(request)
    choices, bound_s = search.run(), search.proven.bound_s
    if search.least is not None and bound_only:
        return _Searched(search.least)
    if choices is not None or search.apart is not None:
        return _Searched(choices or search.apart)
    multipliers = None if search.infeasible else search.proven.multipliers()
    return _Searched(None, bound_s, multipliers, search.infeasible)
