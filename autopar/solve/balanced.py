"""Trees of collectives where early communication outlasts compute.

Where the trees that cost least at λ = 1 (`autopar.streams`) leave no phase outlasted, none is better. Else the compute of a phase that is
outlasted costs nothing, and its early communication all that it takes: at λ = 0. Where that makes compute the longer in turn, the best
lies between, and λ is sought there by halves. A tensor whose trees are the same at both ends has no others between. Of the rest each takes
those, of all that were seen, with which the step is the shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.problem import Problem
from autopar.solve.moves import Moves, moved_load
from autopar.streams import Balance, Load

_HALVES = 4
_BETTER = 1e-12  # of a step, relative


def balanced(
    problem: Problem, first: Sequence[Moves], at: Callable[[int, Balance], Moves], load: Callable[[Sequence[Moves]], Load]
) -> Sequence[Moves]:
    """The trees of all variants that make the step the shortest.

    Args:
        first: those of λ = 1. at: those of a variant at a balance. load: of a step with such trees.
    """
    slowdown = problem.overlap_slowdown
    tried, loads = [first], [load(first)]
    outlasted = loads[0].unbalanced(slowdown)
    bounds = [(0.0, 1.0) if said else (1.0, 1.0) for said in outlasted]
    open_ = range(len(first))
    for _ in range(1 + _HALVES if any(outlasted) else 0):
        balance = _middle(bounds) if len(tried) > 1 else (bounds[0][0], bounds[1][0])
        found = {v: at(v, balance) for v in open_}
        tried.append([found.get(v, moves) for v, moves in enumerate(first)])
        loads.append(load(tried[-1]))
        open_ = [v for v in open_ if len(tried) > 2 or found[v] != first[v]]  # type: ignore[assignment]
        bounds = [_narrowed(*each) for each in zip(bounds, balance, loads[-1].unbalanced(slowdown), strict=True)]
        if not open_ or all(low == high for low, high in bounds):
            break
    best = min(range(len(tried)), key=lambda n: loads[n].least_s(slowdown))
    return _each_its_best(problem, tried, best, loads[best])


def _middle(bounds: Sequence[tuple[float, float]]) -> Balance:
    forward, backward = ((low + high) / 2 for low, high in bounds)
    return forward, backward


def _narrowed(bounds: tuple[float, float], share: float, outlasted: bool) -> tuple[float, float]:
    """Where λ of a phase may be, if one share leaves it outlasted, or does not."""
    low, high = bounds
    return (low, share) if outlasted and low < high else (max(low, share), high)


def _each_its_best(problem: Problem, tried: Sequence[Sequence[Moves]], best: int, total: Load) -> list[Moves]:
    """From the best of all so far one change after the other, each the one that saves the most, until none saves anything."""
    found, slowdown = list(tried[best]), problem.overlap_slowdown
    options = {v: ways for v, ways in ((v, _distinct(each)) for v, each in enumerate(zip(*tried, strict=True))) if len(ways) > 1}
    moved = {v: [moved_load(problem, v, way) for way in ways] for v, ways in options.items()}
    changes = [(v, n) for v, ways in options.items() for n in range(len(ways))]

    def after(change: tuple[int, int]) -> Load:
        v, n = change
        return total + moved[v][n] + moved[v][options[v].index(found[v])].scaled(-1.0)

    while changes:
        v, n = best_one = min(changes, key=lambda change: after(change).least_s(slowdown))
        if after(best_one).least_s(slowdown) >= total.least_s(slowdown) * (1.0 - _BETTER):
            break
        total, found[v] = after(best_one), options[v][n]
    return found


def _distinct(ways: Sequence[Moves]) -> list[Moves]:
    found: list[Moves] = []
    for way in ways:
        if way not in found:
            found.append(way)
    return found
