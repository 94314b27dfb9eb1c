"""Shared memory regions of kernels in the integer program, compared with brute force for all
budgets, on small problems."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from autopar.certificate.bound import lower_bound
from autopar.core.problem import OverlapOption, Problem
from autopar.core.solution import Multipliers, Solution
from autopar.errors import InfeasibleError
from autopar.solve import evaluate, evaluate_choices, least_budget, solve
from autopar.solve.memory_rows import budget_rows
from tests.laws.test_certified_bound import changed, row
from tests.laws.test_kernel_oracles import Brute, with_kernels
from tests.laws.test_solver_oracles import AMPLE, Point, kept_of, peak_of

SLOW = pytest.mark.slow  # brute force takes many seconds for each
MANY = range(20)
SIZES = (16, 40)
Way = tuple[
    int, float, frozenset[object], frozenset[int]
]  # kept bytes of an instance, seconds of all instances, products, regions


def sharing(seed: int, budget: int = AMPLE, in_flight: int = 0) -> Problem:
    """Return a problem like `with_kernels` in which each use of a kernel needs one of two regions,
    with a number of microbatches in flight."""
    p, rng = with_kernels(seed), random.Random(seed)

    def through(hidden: OverlapOption) -> OverlapOption:
        return replace(hidden, region=rng.randrange(len(SIZES)))

    kernels = {
        at: tuple(replace(k, hides=tuple(map(through, k.hides))) for k in offered)
        for at, offered in p.kernels.items()
    }
    return replace(
        p,
        kernels=kernels,
        regions=SIZES,
        budget_bytes=budget,
        num_in_flight=max(in_flight, 1),
        accumulates=in_flight > 0,
    )


def rests(
    p: Problem, strategies: Sequence[int], recomputed: Mapping[int, int], kept: list[int]
) -> int:
    """Return the largest stored bytes without regions. Accumulated gradients count all the time,
    and kept tensors of all microbatches in flight count at the start of backward."""
    if not p.accumulates:
        return peak_of(p, tuple(strategies), dict(recomputed), kept)
    chosen = [(op.count, op.strategies[s]) for op, s in zip(p.ops, strategies, strict=True)]
    always = sum(n * (s.static_bytes + s.gradient_bytes) for n, s in chosen)
    return always + p.num_in_flight * sum(
        v.count * size for v, size in zip(p.variants, kept, strict=True)
    )


class WithMemory(Brute):
    """The shortest step for each peak."""

    def front(self) -> tuple[Point, ...]:
        ops, best = self.p.ops, dict[int, float]()
        again = [n for n, op in enumerate(ops) if op.recomputable]
        for strategies in itertools.product(*(range(len(op.strategies)) for op in ops)):
            for picked in itertools.product(
                *([None, *range(len(ops[n].strategies))] for n in again)
            ):
                recomputed = {n: s for n, s in zip(again, picked, strict=True) if s is not None}
                for peak, step_s in self._steps(strategies, recomputed):
                    best[peak] = min(step_s, best.get(peak, math.inf))
        kept: list[Point] = []
        for size, cost in sorted(best.items()):
            if not kept or cost < kept[-1][1]:
                kept.append((size, cost))
        return tuple(kept)

    def _steps(self, strategies: tuple[int, ...], recomputed: dict[int, int]) -> Iterator[Point]:
        ops = self.p.ops
        own = sum(
            ops[n].count * ops[n].strategies[s].time_s
            for n, s in [*enumerate(strategies), *recomputed.items()]
        )
        for ways in itertools.product(
            *(self._outcomes(v, strategies, recomputed) for v in range(len(self.p.variants)))
        ):
            if self._one_way(product for _, _, products, _ in ways for product in products):  # type: ignore[misc]
                shared = sum(
                    self.p.regions[b] for b in frozenset().union(*(regions for *_, regions in ways))
                )
                peak = rests(self.p, strategies, recomputed, [size for size, *_ in ways])
                yield peak + shared, own + sum(time_s for _, time_s, *_ in ways)

    def _outcomes(
        self, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]
    ) -> list[Way]:
        variant = self.p.variants[v]
        key = (
            "memory",
            v,
            *(
                (n, strategies[n], recomputed.get(n))
                for n in (variant.value, *(use.op for use in variant.uses))
            ),
        )
        if key not in self._moves:
            best: dict[tuple[object, ...], float] = {}
            for allowed in itertools.chain.from_iterable(
                itertools.combinations(range(len(SIZES)), n) for n in range(len(SIZES) + 1)
            ):
                less = WithMemory(only(self.p, frozenset(allowed)))
                for kept, (time_s, products) in less._kept_ways(v, strategies, recomputed):
                    at = kept, products, frozenset(allowed) if products else frozenset()
                    best[at] = min(time_s, best.get(at, math.inf))
            found = [
                (kept, time_s, products, regions)
                for (kept, products, regions), time_s in best.items()
            ]
            self._moves[key] = [w for w in found if not any(_less(o, w) for o in found)]  # type: ignore[assignment]
        return self._moves[key]  # type: ignore[return-value]

    def _kept_ways(
        self, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]
    ) -> Iterator[tuple[int, tuple[float, frozenset[object]]]]:
        """Return all ways to communicate a variant, by the kept versions."""
        value = self.p.values[self.p.variants[v].value]
        made = value.graph.index[
            self.p.ops[value.op].strategies[strategies[value.op]].layouts.outputs[0]
        ]
        sizes = [
            0 if value.resident and n == made else size for n, size in enumerate(value.graph.bytes)
        ]
        for kept, *way in self.ways_by_kept(v, strategies, recomputed):
            yield sum(sizes[n] for n in kept), tuple(way)  # type: ignore[misc]


def only(p: Problem, regions: frozenset[int]) -> Problem:
    kernels = {
        at: tuple(replace(k, hides=tuple(h for h in k.hides if h.region in regions)) for k in ks)
        for at, ks in p.kernels.items()
    }
    return replace(p, kernels=kernels)


def _less(a: Way, b: Way) -> bool:
    """Return whether a choice is not worse in any respect."""
    return a != b and a[0] <= b[0] and a[1] <= b[1] and a[2] <= b[2] and a[3] <= b[3]


@cache
def front(seed: int, in_flight: int = 0) -> tuple[Point, ...]:
    return WithMemory(sharing(seed, in_flight=in_flight)).front()


def peak(p: Problem, found: Solution) -> int:
    """Return the peak of a plan, counted as in brute force."""
    return rests(p, found.strategies, found.recomputed, kept_of(p, found)) + sum(
        p.regions[b] for b in evaluate_choices(p, found).regions
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "in_flight"),
    [(0, 0), (0, 1), *(pytest.param(*case, marks=SLOW) for case in ((1, 0), (2, 2)))],
)
def test_the_plan_with_regions_fits_every_budget_and_is_optimal(seed: int, in_flight: int) -> None:
    points = front(seed, in_flight)
    for budget, best_s in (*points, (AMPLE, points[-1][1])):
        p = sharing(seed, budget, in_flight)
        found = solve(p, gap=0.0)
        assert peak(p, found) <= budget
        assert found.bound_s <= best_s * (1 + 1e-6)
        assert found.objective_s == pytest.approx(best_s, rel=1e-6)
        assert evaluate_choices(p, found).objective_s == pytest.approx(found.objective_s)


def by_sets(p: Problem) -> float:
    """Return the optimum over all sets of allowed regions, whose bytes are subtracted from the
    budget."""
    best = math.inf
    for num in range(len(SIZES) + 1):
        for some in itertools.combinations(range(len(SIZES)), num):
            left = p.budget_bytes - sum(SIZES[b] for b in some)
            with suppress(InfeasibleError):
                alone = replace(
                    only(p, frozenset(some)), regions=(0,) * len(SIZES), budget_bytes=left
                )
                best = min(best, solve(alone, gap=0.0).objective_s)
    return best


@pytest.mark.slow
def test_the_best_of_all_sets_of_regions_is_chosen() -> None:
    one_of_two = 0
    for seed in MANY[:6]:
        free = replace(sharing(seed), regions=(0,) * len(SIZES))
        needed = peak(free, solve(free, gap=0.0))
        for budget in (needed, needed + min(SIZES), needed + max(SIZES)):
            p = sharing(seed, budget)
            found = solve(p, gap=0.0)
            assert peak(p, found) <= budget
            assert (
                found.bound_s * (1 - 1e-6)
                <= by_sets(p)
                == pytest.approx(found.objective_s, rel=1e-6)
            )
            one_of_two += len(evaluate_choices(p, found).regions) == 1
    assert one_of_two > 2


@SLOW
@pytest.mark.parametrize("seed", [0, 1])
def test_the_least_budget_with_regions_equals_that_of_brute_force(seed: int) -> None:
    found, smallest = least_budget(sharing(seed)), front(seed)[0][0]
    assert found.bound_bytes <= smallest <= found.size_bytes
    assert found.size_bytes == smallest


@pytest.mark.slow
def test_cbc_finds_the_same_optimum_with_regions() -> None:
    for budget, best_s in front(0)[::2]:
        found = solve(sharing(0, budget), gap=0.0, solver="cbc")
        assert found.objective_s == pytest.approx(best_s, rel=1e-6)


def test_regions_change_the_optimal_plan() -> None:
    """Under the budget of the best plan without regions, most of these problems cannot use some
    kernel."""
    dearer = 0
    for seed in MANY:
        free = replace(sharing(seed), regions=(0,) * len(SIZES))
        p = sharing(seed, peak(free, solve(free, gap=0.0)))
        found = solve(p, gap=0.0)
        assert peak(p, found) <= p.budget_bytes
        dearer += found.objective_s > solve(
            replace(free, budget_bytes=p.budget_bytes), gap=0.0
        ).objective_s * (1 + 1e-6)
    assert dearer > len(MANY) // 3


def test_a_region_counts_once_for_all_kernels_that_use_it() -> None:
    several = 0
    for seed in MANY:
        p = sharing(seed)
        e = evaluate(p, solve(p, gap=0.0).strategies)
        taken = [
            t.hidden.region
            for phase in (e.forward, e.backward)
            for r in phase.values()
            for t in r.kernels.values()
        ]
        bare = evaluate(replace(p, regions=(0,) * len(SIZES)), solve(p, gap=0.0).strategies)
        assert e.static_bytes - bare.static_bytes == sum(SIZES[b] for b in set(taken))
        several += len(taken) > len(set(taken))
    assert several


@cache
def known(seed: int, budget: int, in_flight: int) -> Multipliers:
    found = solve(sharing(seed, budget, in_flight), gap=0.5).multipliers
    assert found is not None
    return found


@pytest.mark.slow
@examples(60)
@given(
    case=st.sampled_from(((0, 0), (0, 1))),
    number=st.integers(0, 100),
    noise=st.integers(0, 2**32),
    size=st.sampled_from((0.0, 0.02, 0.3, 3.0)),
    share=st.sampled_from((0.0, 0.1, 1.0)),
    shift=st.sampled_from((0.0, 0.3)),
)
def test_no_plan_within_the_budget_is_below_the_bound_for_any_multipliers(
    case: tuple[int, int], number: int, noise: int, size: float, share: float, shift: float
) -> None:
    (seed, in_flight), points = case, front(*case)
    budget, best_s = points[number % len(points)]
    p, rng, m = (
        sharing(seed, budget, in_flight),
        random.Random(noise),
        known(seed, budget, in_flight),
    )
    rows = [
        row(r, m.memory_s.get(r.name, 0.0) + size * rng.gauss(0.0, 1.0)) for r in budget_rows(p)
    ]
    assert lower_bound(p, changed(p, m, rng, size, share, shift), rows) <= best_s * (1 + 1e-9)
    assert m.bound_s <= best_s * (1 + 1e-9)
