"""The cost of given choices, by arithmetic alone: no solver, exact trees of collectives.

A step takes at least max(C + s·P, P) + K seconds per phase (`autopar.core.streams`). The trees are
those that minimize this time: the cheapest trees if an early second costs s, or, if early
communication then outlasts compute, trees of other balances with which the step is shorter.

An offered kernel (`autopar.cost.kernel_offers`) is used if it saves time. It runs one collective
with one product, and a product has a kernel for its gathered operand or for its scattered result,
the same for all instances (`autopar.solve.pick_kernels`).

The same function prices incumbents, runner-ups and hand-made solutions. It returns the versions
that forward computes, the kept versions and the collectives. Emission follows it step by step, so
that priced and emitted collectives are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.core.streams import COMPUTE_BOUND, Load, OverlapWeights
from autopar.solve.memory_rows import budget_rows
from autopar.solve.pick_kernels import regions_of, saved_by, within, without_clashes
from autopar.solve.prices import op_load, routed_load
from autopar.solve.tensor_moves import Moves, Redistribution, moved_load, moves_of

# --------------------------------------------------------------------------------------------------
# Trees of collectives if early communication outlasts compute.
#
# If communication outlasts compute in no phase with the cheapest trees at λ = 1
# (`autopar.core.streams`), no others are better. Otherwise the compute of an outlasted phase costs
# nothing, and its early communication has its full cost: λ = 0. If compute is then the longer
# stream, the best λ is in between, and bisection finds it. A tensor with equal trees at both ends
# has no others in between. Each of the other tensors gets those of its trees that make the step the
# shortest.

_HALVES = 4
_BETTER = 1e-12  # least improvement, relative to the step


def balance_trees(
    problem: Problem,
    first: Sequence[Moves],
    at: Callable[[int, OverlapWeights], Moves],
    load: Callable[[Sequence[Moves]], Load],
) -> Sequence[Moves]:
    """Return the trees of all variants that make the step the shortest.

    Args:
        problem: the problem.
        first: the trees at λ = 1.
        at: returns the trees of a variant at a balance.
        load: returns the load of a step with given trees.
    """
    slowdown = problem.overlap_slowdown
    tried, loads = [first], [load(first)]
    outlasted = loads[0].outlasts_compute(slowdown)
    bounds = [(0.0, 1.0) if is_outlasted else (1.0, 1.0) for is_outlasted in outlasted]
    open_: Sequence[int] = range(len(first))
    for _ in range(1 + _HALVES if any(outlasted) else 0):
        balance = _middle(bounds) if len(tried) > 1 else (bounds[0][0], bounds[1][0])
        moves_of_open = {v: at(v, balance) for v in open_}
        tried.append([moves_of_open.get(v, moves) for v, moves in enumerate(first)])
        loads.append(load(tried[-1]))
        open_ = [v for v in open_ if len(tried) > 2 or moves_of_open[v] != first[v]]
        bounds = [
            _narrow_bounds(*each)
            for each in zip(bounds, balance, loads[-1].outlasts_compute(slowdown), strict=True)
        ]
        if not open_ or all(low == high for low, high in bounds):
            break
    best = min(range(len(tried)), key=lambda n: loads[n].least_s(slowdown))
    return _each_its_best(problem, tried, best, loads[best])


def _middle(bounds: Sequence[tuple[float, float]]) -> OverlapWeights:
    forward, backward = ((low + high) / 2 for low, high in bounds)
    return forward, backward


def _narrow_bounds(
    bounds: tuple[float, float], share: float, outlasted: bool
) -> tuple[float, float]:
    """Narrow the interval of λ of a phase, given whether λ leaves the phase outlasted."""
    low, high = bounds
    return (low, share) if outlasted and low < high else (max(low, share), high)


def _each_its_best(
    problem: Problem, tried: Sequence[Sequence[Moves]], best: int, total: Load
) -> list[Moves]:
    """Improve the best set of trees. Change one variant at a time, always the one with the largest
    saving, until none saves anything."""
    chosen, slowdown = list(tried[best]), problem.overlap_slowdown
    options = {
        v: ways
        for v, ways in ((v, _distinct(each)) for v, each in enumerate(zip(*tried, strict=True)))
        if len(ways) > 1
    }
    moved = {v: [moved_load(problem, v, way) for way in ways] for v, ways in options.items()}
    changes = [(v, n) for v, ways in options.items() for n in range(len(ways))]

    def after(change: tuple[int, int]) -> Load:
        """Return the load of the step after a change of one variant's trees."""
        v, n = change
        return total + moved[v][n] + moved[v][options[v].index(chosen[v])].scale(-1.0)

    while changes:
        v, n = best_one = min(changes, key=lambda change: after(change).least_s(slowdown))
        if after(best_one).least_s(slowdown) >= total.least_s(slowdown) * (1.0 - _BETTER):
            break
        total, chosen[v] = after(best_one), options[v][n]
    return chosen


def _distinct(ways: Sequence[Moves]) -> list[Moves]:
    distinct: list[Moves] = []
    for way in ways:
        if way not in distinct:
            distinct.append(way)
    return distinct


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The cost of a solution, per device and step.

    Attributes:
        compute_s, communication_s: seconds of each stream alone.
        saved_s: seconds that kernels save of both.
        load: the load of both streams, from which their overlap follows.
        slowdown: the profile's `overlap_slowdown`.
        kept_bytes, static_bytes, gradient_bytes: bytes held between forward and backward, at all
            times, and at the end.
        host_bytes: largest use of host memory, in bytes.
        outlasted: whether communication outlasts compute in some phase, or would with the trees
            that are the cheapest if it does not.
        kept: per variant, the kept versions that backward reads.
        forward, backward: per variant, its redistributions.
        resting_bytes: left side of each budget row (`autopar.solve.memory_rows.budget_rows`), in
            their order.
        regions: the regions that kernels and routes need; `static_bytes` includes them.
        routed: the ops whose routes are used, and whether the op is recomputed.
    """

    compute_s: float
    communication_s: float
    kept_bytes: int
    static_bytes: int
    gradient_bytes: int
    kept: Mapping[int, tuple[int, ...]]
    forward: Mapping[int, Redistribution]
    backward: Mapping[int, Redistribution]
    resting_bytes: tuple[int, ...]
    load: Load
    slowdown: float
    saved_s: float = 0.0
    regions: frozenset[int] = frozenset()
    routed: frozenset[tuple[int, bool]] = frozenset()
    host_bytes: int = 0
    outlasted: bool = False

    @property
    def objective_s(self) -> float:
        """The least time of the step, in seconds."""
        return self.load.least_s(self.slowdown)


def fits(problem: Problem, evaluation: Evaluation) -> bool:
    """Return whether all budget rows hold, including that of the hosts."""
    return (
        max(evaluation.resting_bytes) <= problem.budget_bytes
        and evaluation.host_bytes <= problem.host_budget_bytes
    )


def evaluate(
    problem: Problem,
    strategies: Sequence[int],
    recomputed: Mapping[int, int] | None = None,
    kept: Mapping[int, tuple[int, ...]] | None = None,
    regions: frozenset[int] | None = None,
) -> Evaluation:
    """Price choices.

    Args:
        problem: the problem.
        strategies: strategy index per op.
        recomputed: strategy index per op that backward recomputes.
        kept: per variant, the versions that may be kept; by default every keepable layout that
            forward computes, on the devices.
        regions: those that kernels may use; by default all.
    """
    problem = within(problem, regions)
    evaluation = _evaluate(problem, strategies, recomputed or {}, kept)
    if (
        evaluation.saved_s and evaluation.outlasted
    ):  # compute waits in these phases, so kernels may save nothing
        without = _evaluate(
            replace(problem, kernels={}, routes={}), strategies, recomputed or {}, kept
        )
        evaluation = min(evaluation, without, key=lambda e: e.objective_s)
    if evaluation.outlasted and (kept is None or _versions(evaluation.kept) != _versions(kept)):
        return evaluate(
            problem, strategies, recomputed, evaluation.kept
        )  # evaluated again, so that the kept versions determine the same trees
    return evaluation


def _versions(kept: Mapping[int, tuple[int, ...]]) -> dict[int, set[int]]:
    return {v: set(versions) for v, versions in kept.items() if versions}


def evaluate_choices(problem: Problem, choices: Solution) -> Evaluation:
    """Price a solution, as `evaluate` does."""
    return evaluate(problem, choices.strategies, choices.recomputed, choices.kept, choices.regions)


def _evaluate(
    problem: Problem,
    strategies: Sequence[int],
    recomputed: Mapping[int, int],
    kept: Mapping[int, tuple[int, ...]] | None,
) -> Evaluation:
    def at(v: int, balance: OverlapWeights) -> Moves:
        """Return the cheapest collectives of a variant at a balance."""
        return moves_of(problem, v, strategies, recomputed, kept, balance)

    first = [at(v, COMPUTE_BOUND) for v in range(len(problem.variants))]
    evaluation = _price_trees(problem, strategies, recomputed, first)
    if not any(evaluation.load.outlasts_compute(evaluation.slowdown)):
        return evaluation
    best = balance_trees(
        problem, first, at, lambda moves: _price_trees(problem, strategies, recomputed, moves).load
    )
    return replace(_price_trees(problem, strategies, recomputed, best), outlasted=True)


def _price_trees(
    problem: Problem,
    strategies: Sequence[int],
    recomputed: Mapping[int, int],
    moves: Sequence[Moves],
) -> Evaluation:
    """Price a solution with these trees."""
    compute = sum(
        op.count * op.strategies[s].time_s for op, s in zip(problem.ops, strategies, strict=True)
    )
    compute += sum(
        problem.ops[o].count * problem.ops[o].strategies[s].time_s for o, s in recomputed.items()
    )
    static = sum(
        op.count * op.strategies[s].static_bytes
        for op, s in zip(problem.ops, strategies, strict=True)
    )
    gradient = sum(
        op.count * op.strategies[s].gradient_bytes
        for op, s in zip(problem.ops, strategies, strict=True)
    )
    on_host = sum(
        op.count * op.strategies[s].host_bytes
        for op, s in zip(problem.ops, strategies, strict=True)
    )
    forward: dict[int, Redistribution] = {}
    backward: dict[int, Redistribution] = {}
    kept_now: dict[int, tuple[int, ...]] = {}
    kept_sizes: dict[int, int] = {}
    stored: dict[int, int] = {}
    for v, (first, second, keep) in enumerate(moves):
        forward[v], backward[v], kept_now[v] = first, second, keep
        value = problem.values[problem.variants[v].value]
        unsaved = first.sources if value.resident else ()
        kept_sizes[v] = sum(value.bytes(n) for n in keep if n not in unsaved)
        stored[v] = sum(map(value.host_bytes, keep))
        on_host += problem.num_in_flight * problem.variants[v].count * stored[v]
    kept_bytes = sum(problem.variants[v].count * size for v, size in kept_sizes.items())
    communication = sum(
        problem.variants[v].count * r.time_s
        for phase in (forward, backward)
        for v, r in phase.items()
    )
    runs = [
        *((n, s, False) for n, s in enumerate(strategies)),
        *((n, s, True) for n, s in recomputed.items()),
    ]
    load = sum((op_load(problem, n, s, again=again) for n, s, again in runs), Load())
    moved = ((v, r) for phase in (forward, backward) for v, r in phase.items() if r.arcs)
    load = sum((r.load.scale(problem.variants[v].count) for v, r in moved), load)
    forward, backward = without_clashes(problem, forward, backward)
    routes = {(n, again): problem.routes[n, s] for n, s, again in runs if (n, s) in problem.routes}
    regions = regions_of(forward, backward).union(*(route.regions for route in routes.values()))
    static += sum(problem.regions[region] for region in regions)
    row_bytes = tuple(
        row.size(static, strategies, recomputed, kept_sizes, stored) for row in budget_rows(problem)
    )
    saved = [
        (problem, v, late, r)
        for late, phase in ((False, forward), (True, backward))
        for v, r in phase.items()
        if r.kernels
    ]
    less = sum((saved_by(*each) for each in saved), Load())
    less = sum(
        (
            routed_load(problem, n, route.saved_s, again=again)
            for (n, again), route in routes.items()
        ),
        less,
    )
    load = replace(load + less, serial_s=compute + communication + less.serial_s)
    return Evaluation(
        compute,
        communication,
        kept_bytes,
        static,
        gradient,
        kept_now,
        forward,
        backward,
        row_bytes,
        load,
        problem.overlap_slowdown,
        -less.serial_s,
        regions,
        frozenset(routes),
        on_host,
    )
