"""Routes in the integer program, compared for each set of allowed regions with the problem in which
ops simply have the costs of their routes."""

from __future__ import annotations

import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from autopar.certificate.bound import lower_bound
from autopar.core.problem import PeerRoute, Problem, at_best
from autopar.errors import InfeasibleError
from autopar.solve import evaluate, evaluate_choices, solve
from tests.laws.test_certified_bound import changed
from tests.laws.test_solver_oracles import AMPLE, LINE, problem

SIZES = (60, 150)
SEEDS = (0, 1, 3, 6, 7)


def routed(seed: int, budget: int = AMPLE, *, slowdown: float = 1.0) -> Problem:
    """Return a `problem` in which most strategies of most ops have a route through one region or
    both."""
    p, rng = problem(seed, LINE, slowdown=slowdown), random.Random(seed)
    routes = {
        (n, s): PeerRoute(
            rng.uniform(0.1, 0.9) * (strategy.time_s - strategy.communication_s),
            rng.choice(((0,), (1,), (0, 1))),
        )
        for n, op in enumerate(p.ops)
        if op.kind == "compute"
        for s, strategy in enumerate(op.strategies)
        if rng.random() < 0.7
    }
    return replace(p, routes=routes, regions=SIZES, budget_bytes=budget)


def taking(p: Problem, regions: frozenset[int]) -> Problem:
    """Use the routes through the given regions as the costs of their ops, remove the other routes,
    and subtract the bytes of the regions from the budget."""
    left = {where: route for where, route in p.routes.items() if regions.issuperset(route.regions)}
    return replace(
        at_best(replace(p, routes=left)),
        regions=(),
        budget_bytes=p.budget_bytes - sum(SIZES[b] for b in regions),
    )


def by_sets(p: Problem) -> float:
    best = math.inf
    for some in itertools.chain.from_iterable(
        itertools.combinations(range(len(SIZES)), n) for n in range(len(SIZES) + 1)
    ):
        with suppress(InfeasibleError):
            best = min(best, solve(taking(p, frozenset(some)), gap=0.0).objective_s)
    return best


def needed(p: Problem) -> int:
    """Return the bytes of the best plan without routes."""
    plain = replace(p, routes={}, regions=())
    return max(evaluate_choices(plain, solve(plain, gap=0.0)).resting_bytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_set_of_route_regions_is_chosen_under_every_budget(seed: int) -> None:
    base = needed(routed(seed))
    seen = set()
    for budget in (base, base + SIZES[0], base + SIZES[1], base + sum(SIZES), AMPLE):
        p = routed(seed, budget)
        found = solve(p, gap=0.0)
        e = evaluate_choices(p, found)
        assert max(e.resting_bytes) <= budget
        assert (
            found.bound_s * (1 - 1e-6) <= by_sets(p) == pytest.approx(found.objective_s, rel=1e-6)
        )
        assert e.objective_s == pytest.approx(found.objective_s)
        seen.add(e.regions)
    assert len(seen) > 1


def test_a_route_saves_time_for_every_instance_and_every_run() -> None:
    for seed in SEEDS:
        p = routed(seed)
        found = solve(p, gap=0.0)
        e, bare = evaluate_choices(p, found), evaluate_choices(replace(p, routes={}), found)
        runs = [
            *((n, s, False) for n, s in enumerate(found.strategies)),
            *((n, s, True) for n, s in found.recomputed.items()),
        ]
        taken = [(n, p.routes[n, s].saved_s, again) for n, s, again in runs if (n, s) in p.routes]
        assert e.routed == {(n, again) for n, _, again in taken}
        assert e.saved_s == pytest.approx(sum(p.ops[n].count * saved_s for n, saved_s, _ in taken))
        assert e.objective_s == pytest.approx(bare.objective_s - e.saved_s)


def test_a_route_may_save_nothing_if_compute_waits_for_communication() -> None:
    for seed in SEEDS:
        p = routed(seed, slowdown=0.2)
        found = solve(p, gap=0.0)
        plain = evaluate(replace(p, routes={}), found.strategies, found.recomputed, found.kept)
        assert evaluate_choices(p, found).objective_s <= plain.objective_s * (1 + 1e-12)


def test_cbc_finds_the_same_optimum_with_routes() -> None:
    for seed in (0, 1):
        p = routed(seed, needed(routed(seed)) + SIZES[0])
        assert solve(p, gap=0.0, solver="cbc").objective_s == pytest.approx(
            solve(p, gap=0.0).objective_s, rel=1e-6
        )


@examples(60)
@given(
    seed=st.sampled_from((0, 3)),
    noise=st.integers(0, 2**32),
    size=st.sampled_from((0.0, 0.02, 0.3, 3.0)),
    share=st.sampled_from((0.0, 0.1, 1.0)),
    shift=st.sampled_from((0.0, 0.3)),
)
def test_the_bound_with_routes_is_valid_for_any_multipliers(
    seed: int, noise: int, size: float, share: float, shift: float
) -> None:
    p = routed(seed)
    found = solve(p, gap=0.0)
    assert found.multipliers is not None
    multipliers = changed(p, found.multipliers, random.Random(noise), size, share, shift)
    assert lower_bound(at_best(p), multipliers, []) <= found.objective_s * (1 + 1e-9)
