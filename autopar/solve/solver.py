"""Problem → Choices.

Where memory is ample the program without (5, 6, 7) is solved first: it is a relaxation, so its bound holds, and if its
answer fits the budget it is the answer. Otherwise memory gets a price (`autopar.solve.pricing`).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import AutoparError, InfeasibleError, size_text
from autopar.problem import Choices, Problem
from autopar.solve.evaluate import evaluate
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.pricing import fits, search
from autopar.solve.running import Limits, chosen, optimise

_PRICED_NODES = 20  # per price: the priced programs are nearly integral, and the next price is worth more than a deep tree


def solve(problem: Problem, *, gap: float = 0.01, max_nodes: int = 200, time_limit_s: float = 60.0, solver: str = "highs") -> Choices:
    """Choose strategies, recomputation and kept versions.

    Args:
        gap: stop when incumbent and bound are this close (relative).
        max_nodes: limit of the search tree. time_limit_s: a safety net per solve; where it strikes, the answer may differ
            between machines.
        solver: ``highs`` or ``cbc``.

    Raises:
        InfeasibleError: with the smallest budget that would do.
    """
    ample, bound = _without_memory(problem, Limits(gap, max_nodes, time_limit_s), solver)
    evaluation = evaluate(problem, ample.strategies)
    cost = evaluation.objective_s
    ample = replace(ample, kept=evaluation.kept, objective_s=cost, bound_s=min(bound, cost), solver=solver)
    if fits(problem, evaluation):
        return ample
    limits = Limits(gap / 4, _PRICED_NODES, time_limit_s)
    tight, program = search(problem, evaluation, limits, gap, solver)
    if tight is not None:
        return replace(tight, bound_s=min(max(tight.bound_s, bound), tight.objective_s))
    least = program.least() + problem.reserve_bytes
    raise InfeasibleError(
        f"no plan fits into {size_text(problem.budget_bytes)} per device; at least {size_text(least)} is needed"
        f" ({size_text(problem.reserve_bytes)} of it for the transient peak)",
        remedy="use more devices, a smaller batch or shorter sequence, or pass a larger memory_bytes",
    )


def _without_memory(problem: Problem, limits: Limits, solver: str) -> tuple[Choices, float]:
    program = Formulation(problem, with_memory=False)
    bound = optimise(program.model, limits, solver)
    if bound is None:
        raise AutoparError(
            f"{solver} found no assignment of layouts within {limits.time_limit_s:g} s",
            remedy="raise time_limit_s; if constraints are given, relax them: each op needs one strategy that meets them",
        )
    found = chosen(program)
    return found, bound / SCALE


__all__ = ["fits", "solve"]
