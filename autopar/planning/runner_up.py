"""Why not the runner-up: per op, the best other strategy with all else fixed, and what it would cost.

The price of a change is exact: compute of the op, and the cheapest trees of every variant that it makes or reads, in a step that takes as
long as `autopar.solve.evaluate` says.
Candidates are ranked first by shortest distances between layouts, and only the most promising are priced exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.choices import Choices
from autopar.plans import RunnerUp
from autopar.problem import Problem
from autopar.solve import evaluated, op_load, routed_load, variant_load, within
from autopar.streams import Load

_EXACT = 3  # candidates priced exactly per op


def runner_ups(problem: Problem, choices: Choices) -> Mapping[int, RunnerUp]:
    """Best other choice per op that has one."""
    touching = variants_by_op(problem)
    step = evaluated(problem, choices).load
    problem = within(problem, choices.regions)
    found: dict[int, RunnerUp] = {}
    for index, op in enumerate(problem.ops):
        if len(op.strategies) > 1:
            best = _best_other(problem, choices, index, touching.get(index, []), step)
            if best is not None:
                found[index] = best
    return found


def variants_by_op(problem: Problem) -> Mapping[int, list[int]]:
    """Op → the variants that it makes or reads, or whose kernels hang on what it does."""
    touching: dict[int, list[int]] = {}
    for v, variant in enumerate(problem.variants):
        kernels = [kernel for late in (False, True) for kernel in problem.kernels.get((v, late), ())]
        needed = {op for kernel in kernels for op, _ in (kernel.product, *kernel.also)}
        for index in {problem.values[variant.value].op, *(u.op for u in variant.uses), *needed}:
            touching.setdefault(index, []).append(v)
    return touching


def _best_other(problem: Problem, choices: Choices, index: int, touched: Sequence[int], step: Load) -> RunnerUp | None:
    op, current = problem.ops[index], choices.strategies[index]
    now = local_load(problem, choices, index, current, touched)
    assert now is not None, "the plan's own layouts can be reached"
    others = [s for s in range(len(op.strategies)) if s != current and op.strategies[s].layouts != op.strategies[current].layouts]
    chosen = op.strategies[current].layouts

    def promise(s: int) -> tuple[int, float, int]:
        layouts = op.strategies[s].layouts
        pairs = zip((*layouts.inputs, *layouts.outputs), (*chosen.inputs, *chosen.outputs), strict=True)
        return sum(a != b for a, b in pairs), op.strategies[s].time_s, s

    loads = [(local_load(problem, choices, index, s, touched), s) for s in sorted(others, key=promise)[:_EXACT]]
    exact = [(_longer(step, now, load, problem.overlap_slowdown), s) for load, s in loads if load is not None]
    if not exact:
        return None
    delta, s = min(exact)
    return RunnerUp(str(op.strategies[s].layouts), delta)


def local_load(problem: Problem, choices: Choices, index: int, strategy: int, touched: Sequence[int]) -> Load | None:
    """What depends on one op's strategy: its compute, with its route, and the variants `touched`; None where some layout cannot be
    reached."""
    strategies = list(choices.strategies)
    strategies[index] = strategy
    total, route = op_load(problem, index, strategy), problem.routes.get((index, strategy))
    if route is not None:
        total += routed_load(problem, index, route.saved_s, again=False)
    for v in touched:
        moves = variant_load(problem, v, strategies, choices.recomputed)
        if moves is None:
            return None
        total += moves
    return total


def _longer(step: Load, now: Load, other: Load, slowdown: float) -> float:
    """By how much a step is longer with one part of it in another's place."""
    change = other + now.scaled(-1.0)
    return change.serial_s - ((step + change).saved_s(slowdown) - step.saved_s(slowdown))
