"""The search at another balance, where early communication outlasts the compute that could hide it.

A step takes max(C + s·P, P) + K per phase, and the program's objective is λ(C + s·P) + (1 − λ)P + K (`autopar.solve.prices`), which for
no λ is more. So every balance proves a bound, and every plan found on the way is one. With λ = 1, where the search starts, both are the
same as long as compute hides all that is early, and there is nothing more to do. Where in a phase of the best plan it does not, a larger
bound lies at a smaller λ: the relaxation's bound is concave in λ, with C − (1 − s)P of its solution for a slope, and is solved a few times
to bisect λ, in both phases at once. At the best of these the search is done again. Between bound and plan a gap may be left that no
balance closes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from autopar.problem import Choices, Problem
from autopar.solve.evaluate import evaluate
from autopar.solve.search import Search
from autopar.streams import ON_COMPUTE, Balance

_SEARCHES = 2  # beyond the first: the second knows the budget rows of the one before
_STEPS = 6  # of a bisection


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan, if any, with the best bound; and the first search, which says what it proved where there is none."""

    choices: Choices | None
    first: Search


def balanced(problem: Problem, gap: float, max_nodes: int, time_limit_s: float) -> Found:
    """The best plan of all balances that were tried.

    Raises:
        InfeasibleError: where no assignment of layouts is legal, whatever the memory.
    """
    end = time.monotonic() + time_limit_s
    first = now = Search(problem, gap, max_nodes, time_limit_s)
    best, num = first.run(), 1
    while num <= _SEARCHES:
        if best is None or now.best is None or best.gap <= gap or now.engine.timed_out:
            break
        load = evaluate(problem, now.best.strategies, now.best.recomputed, now.best.kept).load
        balance = _bisected(now) if now.balance != ON_COMPUTE or any(load.unbalanced(problem.overlap_slowdown)) else now.balance
        if balance == now.balance:
            break
        now = Search(problem, gap, max_nodes, max(end - time.monotonic(), 0.0), balance)
        found, num = now.run(), num + 1
        best = best if found is None else _better(best, found)
    return Found(best and replace(best, stats={**best.stats, "balances": num}), first)


def _bisected(search: Search) -> Balance:
    """The balance of the best bound among those tried."""
    low, high, at = [0.0, 0.0], [*ON_COMPUTE], ON_COMPUTE
    tried: list[tuple[float, Balance]] = []
    for _ in range(_STEPS):
        point = search.relaxed_at(at)
        if point is None:
            break
        bound, slopes = point
        tried.append((bound, at))
        for phase, slope in enumerate(slopes):
            (high if slope < 0.0 else low)[phase] = at[phase]
        middle = (low[0] + high[0]) / 2, (low[1] + high[1]) / 2
        if middle == at:
            break
        at = middle
    return max(tried)[1] if tried else search.balance


def _better(best: Choices, other: Choices) -> Choices:
    """The faster plan with what is proven of all plans by either."""
    plan, proof = min(best, other, key=lambda c: c.objective_s), max(best, other, key=lambda c: c.bound_s)
    multipliers = max(filter(None, (best.multipliers, other.multipliers)), key=lambda m: m.bound_s, default=None)
    stats = {name: max(best.stats[name], other.stats[name]) for name in best.stats}
    return replace(
        plan, bound_s=min(proof.bound_s, plan.objective_s), free_bound_s=min(max(best.free_bound_s, other.free_bound_s), plan.objective_s),
        memory_price_s_per_byte=proof.memory_price_s_per_byte, num_constraints=proof.num_constraints, stats=stats, multipliers=multipliers,
    )  # fmt: skip
