"""Problem → Choices, by HiGHS (`autopar.solve.search`) or by CBC, PuLP's own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, overload

from autopar.choices import Apart, Choices
from autopar.errors import InfeasibleError, size_text
from autopar.problem import Problem
from autopar.solve.cbc import solve_with_cbc
from autopar.solve.common import Common
from autopar.solve.idle import without_idle
from autopar.solve.illegal import refusal
from autopar.solve.least import Least, least_budget
from autopar.solve.quick import quick
from autopar.solve.search import BranchAndCut
from autopar.streams import ON_COMPUTE, Balance


def solve(problem: Problem, *, gap: float = 0.01, max_nodes: int = 200, time_limit_s: float = math.inf, solver: str = "highs") -> Choices:
    """Choose strategies, recomputation and kept versions.

    Args:
        gap: stop when incumbent and bound are this close (relative).
        max_nodes: limit of the search tree. time_limit_s: where it ends a run, which is logged, the answer may differ between
            runs and `Choices.stats["timed_out"]` is 1.
        solver: ``highs``, or ``cbc``, which is slower.

    Raises:
        InfeasibleError: where nothing fits the budget; with the smallest budget that would do.
    """
    found = choices_or_least(problem, gap=gap, max_nodes=max_nodes, time_limit_s=time_limit_s, solver=solver)
    if isinstance(found, Choices):
        return found
    would_do = f", {size_text(found.size_bytes)} would do" if found.choices else ""
    needed = f"at least {size_text(found.bound_bytes)} is needed{would_do}"
    raise shortage(f"no plan fits into {size_text(problem.budget_bytes)} per device: {needed}")


def shortage(what: str, needed_bytes: int = 0) -> InfeasibleError:
    """The refusal of a budget of memory.

    Args:
        needed_bytes: per device, where that is known.
    """
    remedy = "use more devices, a smaller batch or shorter sequence, or pass a larger memory_bytes"
    return InfeasibleError(what, remedy=remedy, needed_bytes=needed_bytes)


@overload
def choices_or_least(
    problem: Problem, *, gap: float, max_nodes: int = 200, time_limit_s: float, solver: str, bound_only: bool = False,
    whole: Literal[True] = True, likely: Balance = ON_COMPUTE, only_plan: bool = False, waits: bool = False, common: Common | None = None,
    met: Choices | None = None,
) -> Choices | Least: ...  # fmt: skip


@overload
def choices_or_least(
    problem: Problem, *, gap: float, max_nodes: int = 200, time_limit_s: float, solver: str, bound_only: bool = False, whole: bool,
    likely: Balance = ON_COMPUTE, only_plan: bool = False, waits: bool = False, common: Common | None = None,
    met: Choices | None = None,
) -> Choices | Least | Apart: ...  # fmt: skip


def choices_or_least(
    problem: Problem, *, gap: float, max_nodes: int = 200, time_limit_s: float, solver: str, bound_only: bool = False, whole: bool = True,
    likely: Balance = ON_COMPUTE, only_plan: bool = False, waits: bool = False, common: Common | None = None,
    met: Choices | None = None,
) -> Choices | Least | Apart:  # fmt: skip
    """As `solve`, but where no plan fits, how much memory would do.

    Args:
        bound_only: what would do need not be found (`least_budget`) where it is proven that nothing fits.
        whole: search on where the relaxation mixes decisions of equal ops; else the answer then says which (`Choices.mixed`), without a
            plan (`Apart`) where memory binds in a large problem, only a plan is asked for, and none is near the relaxation.
        likely: at which balance the bound of a problem like this one was best; a search that begins there is sooner done.
        waits: let the search go on past the time limit as long as it has no plan.
        only_plan: in a large problem, or where memory binds, end with a plan, however far its bound (`Choices.unfinished`).
        common: what searches for the same problem with other moments have found, and this one adds to.
        met: an answer that is known already, and its bound, if any, with which HiGHS' search begins; it ends with none that is worse.

    Raises:
        InfeasibleError: where no assignment of layouts is legal, whatever the memory; naming the op that refuses where that is known.
    """
    if not all(op.strategies for op in problem.ops):
        raise refusal(problem)
    proven = False
    if solver == "cbc":
        choices, bound_s, proven_by = solve_with_cbc(problem, gap, max_nodes, time_limit_s), 0.0, None
    else:
        known = quick(problem, gap)
        if known is not None and known.close and known.answer is not None:
            return without_idle(problem, known.answer)
        search = BranchAndCut(problem, gap, max_nodes, time_limit_s, whole, likely, known, only_plan, waits, common or Common(), met)
        choices, bound_s, proven = search.run(), search.proven.bound_s, search.infeasible
        proven_by = search.proven.multipliers() if choices is None and not proven else None
        if search.least is not None and bound_only:
            return search.least
        if choices is None and search.apart is not None:
            return search.apart
    if choices is not None:
        return without_idle(problem, choices)
    least = least_budget(problem, math.inf if waits else time_limit_s, bound_only=bound_only and proven)
    if least.choices is None or least.size_bytes > problem.budget_bytes:
        return least
    # The limits ended the search before it found a plan; this one fits, however long it takes.
    return replace(least.choices, bound_s=min(bound_s, least.choices.objective_s), free_bound_s=0.0, solver=solver, multipliers=proven_by)
