"""The minimum of a part of a problem with additional costs of ops, compared with enumeration of all
choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from test_solver_oracles import LINE, SQUARE, A, B, BruteForce, problem

from autopar.core.problem import Problem
from autopar.solve import relaxation as solving
from autopar.solve.relaxation import PricedPart, least_of

ENOUGH = 10_000  # limit of relaxations
SEEDS = range(8)


def part_of(seed: int, mesh: tuple[int, ...] = LINE) -> PricedPart:
    """Return a part of a small problem that keeps little, so that recomputation pays off for the
    ops that allow it."""
    rng = np.random.default_rng(seed)
    own = problem(seed, mesh)
    values = list(own.values)
    for v in (A, B):
        layouts = range(len(values[v].graph.layouts))
        values[v] = replace(
            values[v], keepable=frozenset(rng.choice(layouts, int(rng.integers(0, 2))).tolist())
        )
    own = replace(own, values=tuple(values))
    needed = {own.values[v].op for v in (A, B) if not own.values[v].keepable}
    again = frozenset(
        n for n, op in enumerate(own.ops) if op.recomputable and (n in needed or (seed + n) % 2)
    )
    further = tuple(
        (rng.uniform(-0.5, 2.0, len(op.strategies)), rng.uniform(0.0, 2.0, len(op.strategies)))
        for op in own.ops
    )
    return PricedPart(own, again, further)


@cache
def optimum(seed: int, mesh: tuple[int, ...] = LINE) -> float:
    """Return the cheapest of all choices of a part: the seconds of the problem plus the additional
    costs of ops for each run."""
    part = part_of(seed, mesh)
    own = replace(
        part.problem,
        ops=tuple(
            replace(op, recomputable=n in part.recomputable)
            for n, op in enumerate(part.problem.ops)
        ),
    )
    force, best = BruteForce(own), math.inf
    for strategies in itertools.product(*(range(len(op.strategies)) for op in own.ops)):
        for picked in itertools.product(
            *([None, *range(len(own.ops[n].strategies))] for n in sorted(part.recomputable))
        ):
            recomputed = {
                n: s
                for n, s in zip(sorted(part.recomputable), picked, strict=True)
                if s is not None
            }
            more = sum(part.further[n][0][s] for n, s in enumerate(strategies))
            more += sum(part.further[n][1][s] for n, s in recomputed.items())
            best = min(
                [best, *(seconds + more for _, seconds in force._outcomes(strategies, recomputed))]
            )
    return float(best)


@pytest.mark.parametrize("mesh", [LINE, SQUARE], ids=["line", "square"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_minimum_of_a_part_is_a_lower_bound_and_is_attained(
    seed: int, mesh: tuple[int, ...]
) -> None:
    part = part_of(seed, mesh)
    best = optimum(seed, mesh)
    unreachable, num = least_of(part, 2 * abs(best) + 1, ENOUGH)
    if best == math.inf:  # the kept layouts lead to no solution without recomputation
        assert unreachable == best
        return
    assert unreachable <= best + 1e-9 * abs(best)
    assert unreachable >= best - 1e-3 * abs(best), "searched to the end it is the best of all"
    shown, fewer = least_of(part, best - 0.05 * abs(best), ENOUGH)
    assert best - 0.05 * abs(best) - 1e-9 <= shown <= best + 1e-9 * abs(best)
    assert 1 <= fewer <= num


@pytest.mark.slow
def test_most_parts_are_feasible() -> None:
    assert all(optimum(seed) < math.inf for seed in SEEDS)
    assert sum(optimum(seed, SQUARE) < math.inf for seed in SEEDS) >= len(SEEDS) // 2


@pytest.mark.slow
def test_a_search_that_ends_early_gives_a_valid_bound() -> None:
    for seed in SEEDS:
        part, best = part_of(seed, SQUARE), optimum(seed, SQUARE)
        assert best == math.inf or least_of(part, 2 * abs(best) + 1, 1)[0] <= best + 1e-9 * abs(
            best
        )


Mutant = Callable[[PricedPart], PricedPart]
MUTANTS: dict[str, Mutant] = {
    "what running again costs further is left out": lambda p: replace(
        p, further=tuple((f, np.zeros_like(a)) for f, a in p.further)
    ),
    "what running costs further is left out": lambda p: replace(
        p, further=tuple((np.zeros_like(f), a) for f, a in p.further)
    ),
    "nothing runs again": lambda p: replace(p, recomputable=frozenset()),
    "everything may run again": lambda p: replace(
        p, recomputable=frozenset(n for n, op in enumerate(p.problem.ops) if op.recomputable)
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_part_with_omitted_costs_has_another_minimum(name: str) -> None:
    differs = 0
    for seed in SEEDS:
        part, best = part_of(seed), optimum(seed)
        differs += abs(
            least_of(MUTANTS[name](part), 2 * abs(best) + 1, ENOUGH)[0] - best
        ) > 1e-2 * abs(best)
    assert differs


def test_a_part_program_with_the_recompute_rules_of_the_problem_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        solving._PartProgram,
        "_useful_again",
        lambda self: {n for n, op in enumerate(self.problem.ops) if op.recomputable},
    )
    wrong = 0
    for seed in SEEDS:
        part, best = part_of(seed), optimum(seed)
        wrong += least_of(part, 2 * abs(best) + 1, ENOUGH)[0] < best - 1e-3 * abs(best)
    assert wrong


def test_an_infeasible_part_has_no_minimum() -> None:
    part = part_of(0)
    none: Problem = replace(
        part.problem, ops=(*part.problem.ops[:-1], replace(part.problem.ops[-1], strategies=()))
    )
    further = (*part.further[:-1], (np.zeros(0), np.zeros(0)))
    assert least_of(PricedPart(none, part.recomputable, further), 1.0, ENOUGH) == (math.inf, 1)
