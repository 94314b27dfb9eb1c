"""Why not the runner-up: per op, the best other strategy with all else fixed, and what it would cost.

The price of a change is exact: compute of the op, and the cheapest trees of every variant that it makes or reads.
Candidates are ranked first by shortest distances between layouts, and only the most promising are priced exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.plans import RunnerUp
from autopar.problem import Choices, Problem
from autopar.solve import variant_time

_EXACT = 3  # candidates priced exactly per op


def runner_ups(problem: Problem, choices: Choices) -> Mapping[int, RunnerUp]:
    """Best other choice per op that has one."""
    touching = variants_by_op(problem)
    found: dict[int, RunnerUp] = {}
    for index, op in enumerate(problem.ops):
        if len(op.strategies) > 1:
            best = _best_other(problem, choices, index, touching.get(index, []))
            if best is not None:
                found[index] = best
    return found


def variants_by_op(problem: Problem) -> Mapping[int, list[int]]:
    """Op → the variants that it makes or reads."""
    touching: dict[int, list[int]] = {}
    for v, variant in enumerate(problem.variants):
        for index in {problem.values[variant.value].op, *(u.op for u in variant.uses)}:
            touching.setdefault(index, []).append(v)
    return touching


def _best_other(problem: Problem, choices: Choices, index: int, touched: Sequence[int]) -> RunnerUp | None:
    op, current = problem.ops[index], choices.strategies[index]
    now = op_cost(problem, choices, index, current, touched)
    others = [s for s in range(len(op.strategies)) if s != current and op.strategies[s].layouts != op.strategies[current].layouts]
    chosen = op.strategies[current].layouts

    def promise(s: int) -> tuple[int, float, int]:
        layouts = op.strategies[s].layouts
        pairs = zip((*layouts.inputs, *layouts.outputs), (*chosen.inputs, *chosen.outputs), strict=True)
        return sum(a != b for a, b in pairs), op.strategies[s].time_s, s

    exact = [(op_cost(problem, choices, index, s, touched) - now, s) for s in sorted(others, key=promise)[:_EXACT]]
    exact = [(delta, s) for delta, s in exact if delta < float("inf")]
    if not exact:
        return None
    delta, s = min(exact)
    return RunnerUp(str(op.strategies[s].layouts), delta)


def op_cost(problem: Problem, choices: Choices, index: int, strategy: int, touched: Sequence[int]) -> float:
    """Seconds of a step for what depends on one op's strategy: its compute, and the variants `touched` that it makes or reads."""
    strategies = list(choices.strategies)
    strategies[index] = strategy
    total = problem.ops[index].count * problem.ops[index].strategies[strategy].time_s
    return total + sum(variant_time(problem, v, strategies, choices.recomputed) for v in touched)
