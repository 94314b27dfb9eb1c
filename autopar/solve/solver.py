"""Problem → Choices, by HiGHS (`autopar.solve.search`) or by CBC, PuLP's own."""

from __future__ import annotations

from autopar.errors import InfeasibleError, size_text
from autopar.problem import Choices, Problem
from autopar.solve.cbc import solve_with_cbc
from autopar.solve.least import least_budget
from autopar.solve.search import Search


def solve(problem: Problem, *, gap: float = 0.01, max_nodes: int = 200, time_limit_s: float = 60.0, solver: str = "highs") -> Choices:
    """Choose strategies, recomputation and kept versions.

    Args:
        gap: stop when incumbent and bound are this close (relative).
        max_nodes: limit of the search tree. time_limit_s: a safety net; where it strikes, the answer may differ between
            machines and `Choices.stats["timed_out"]` is 1.
        solver: ``highs``, or ``cbc``, which is slower.

    Raises:
        InfeasibleError: with the smallest budget that would do.
    """
    if solver == "cbc":
        choices = solve_with_cbc(problem, gap, max_nodes, time_limit_s)
    else:
        choices = Search(problem, gap, max_nodes, time_limit_s).run()
    if choices is None:
        raise infeasible(problem, time_limit_s)
    return choices


def infeasible(problem: Problem, time_limit_s: float = 60.0) -> InfeasibleError:
    """The error that says how much memory would do."""
    least, enough = least_budget(problem, time_limit_s)
    would_do = f", {size_text(enough)} would do" if enough else ""
    reserve = f" ({size_text(problem.reserve_bytes)} of it for the transient peak)" if problem.reserve_bytes else ""
    return InfeasibleError(
        f"no plan fits into {size_text(problem.budget_bytes)} per device: at least {size_text(least)} is needed{would_do}{reserve}",
        remedy="use more devices, a smaller batch or shorter sequence, or pass a larger memory_bytes",
    )
