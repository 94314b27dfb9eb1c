"""Dual ascent compared with the relaxation, brute force and the certificate, on generated small
problems."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
import zoo_small

from autopar.capture import capture
from autopar.certificate import certify
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.core.streams import COMPUTE_BOUND, OverlapWeights
from autopar.cost.price import price
from autopar.planner import PlanOptions, make_plan
from autopar.sharding import classes_of
from autopar.solve import evaluate, greedy, solve
from autopar.solve.dual_ascent import Ascent
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.greedy import decide_greedily
from autopar.solve.highs import Engine
from benchmarks.zoo import blocks
from tests.laws.test_certified_bound import proven
from tests.laws.test_kernel_oracles import best_s, with_kernels
from tests.laws.test_solver_oracles import LINE, SQUARE, Case, X, front

CASES = [
    *(Case(seed, LINE) for seed in range(6)),
    *(Case(seed, SQUARE) for seed in range(3)),
    Case(1, LINE, slowdown=0.4),
    Case(1, LINE, slowdown=0.4, hosts=1.0),
    Case(4, LINE, unasked=True),
]
BALANCES: tuple[OverlapWeights, ...] = (COMPUTE_BOUND, (0.5, 0.2))
NAMES = ("gpt2", "llama")


def ascended(p: Problem, balance: OverlapWeights = COMPUTE_BOUND, num: int = 40) -> Ascent:
    ascent = Ascent(p, balance)
    for _ in range(num):
        ascent.sweep()
    return ascent


def relaxation_s(p: Problem, balance: OverlapWeights = COMPUTE_BOUND) -> float:
    """Return the optimum of the linear program."""
    program = Formulation(p)
    program.model.minimise(program.costs(balance))
    relaxation = Engine(program.model).relax()
    assert relaxation is not None and relaxation.exact
    return relaxation.bound / SCALE


def quickest_s(p: Problem) -> float:
    return sum(op.count * min(s.time_s for s in op.strategies) for op in p.ops)


@cache
def modelled(name: str) -> Problem:
    model, batch = getattr(zoo_small, name)(dtype=torch.bfloat16)
    trace, mesh, profile = (
        capture(model, (), batch),
        Mesh.parse("a=2,b=2"),
        HardwareProfile.load("h100-sxm"),
    )
    return price(trace, classes_of(trace, mesh.shape), mesh, profile, budget_bytes=2**40).problem


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("case", CASES)
def test_the_bound_rises_with_each_sweep_and_approaches_the_relaxation_from_below(
    case: Case, balance: OverlapWeights
) -> None:
    p, seen = case.problem(), []
    ascent, most = Ascent(p, balance), relaxation_s(p, balance)
    for _ in range(40):
        seen.append(ascent.bound_s)
        ascent.sweep()
    assert all(before <= after + 1e-12 for before, after in itertools.pairwise(seen))
    assert 0.9 * most <= ascent.bound_s <= most * (1 + 1e-9) <= front(case)[-1][1] * (1 + 2e-9)


def test_operands_that_recompute_does_not_read_have_no_potential_there() -> None:
    for unasked in (False, True):
        groups = Ascent(Case(1, LINE, unasked=unasked).problem()).groups
        assert any(group.variant == X and group.late for group in groups) != unasked


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_dual_ascent_of_models_is_within_a_few_percent_of_the_relaxation(name: str) -> None:
    p = modelled(name)
    most, start, found = relaxation_s(p), quickest_s(p), ascended(p).bound_s
    assert start < found <= most * (1 + 1e-9)
    assert most - found <= 0.03 * most


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("case", CASES)
def test_the_certificate_proves_nearly_the_bound_of_the_potentials(
    case: Case, balance: OverlapWeights
) -> None:
    p = case.problem()
    ascent = ascended(p, balance)
    before = ascent.bound_s
    kept = ascent.multipliers()
    assert kept.bound_s == pytest.approx(proven(p, kept), rel=1e-12)
    assert (
        before - 2e-3 * (before - Ascent(p, balance).bound_s) - 1e-12
        <= kept.bound_s
        <= before * (1 + 1e-12)
    )
    assert all(round(value, 9) == value for value in kept.potentials_s.values())


@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 4, 5))]
)
def test_the_bound_with_kernels_is_at_most_the_brute_force_optimum(seed: int) -> None:
    p = with_kernels(seed)
    kept = ascended(p).multipliers()
    assert 0.0 < kept.bound_s <= proven(p, kept) * (1 + 1e-12) <= best_s(seed) * (1 + 1e-9)


@pytest.mark.parametrize("case", CASES[:3])
def test_a_too_high_potential_gives_a_lower_bound(case: Case) -> None:
    p = case.problem()
    kept = ascended(p).multipliers()
    worse = 0
    for key, value in kept.potentials_s.items():
        changed = replace(kept, potentials_s={**kept.potentials_s, key: value + 10.0})
        worse += proven(p, changed) < kept.bound_s * (1 - 1e-6)
    assert worse == len(kept.potentials_s) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_plans_from_potentials_are_legal_and_deterministic(name: str) -> None:
    p = modelled(name)
    plans = [decide_greedily(ascended(p, num=5)) for _ in range(2)]
    assert plans[0] == plans[1]
    assert evaluate(p, plans[0]).objective_s >= relaxation_s(p) * (1 - 1e-9)


@pytest.mark.slow
def test_a_huge_problem_dominated_by_launches_is_solved_without_a_relaxation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greedy, "_HUGE", 0)
    monkeypatch.setattr(Engine, "relax", lambda *_, **__: pytest.fail("it is not needed"))
    p = modelled("gpt2")
    rows = [tuple(replace(s, time_s=0.9 * s.time_s + 1e-5) for s in op.strategies) for op in p.ops]
    launches = replace(
        p, ops=tuple(replace(op, strategies=row) for op, row in zip(p.ops, rows, strict=True))
    )
    half_way_s = (quickest_s(launches) + ascended(launches).bound_s) / 2
    found = solve(
        launches,
        gap=1 - half_way_s / evaluate(launches, greedy._find_replicated(launches)).objective_s,
    )
    assert found.solver == "dual ascent" and found.multipliers is not None
    assert (
        half_way_s
        <= found.bound_s
        == found.multipliers.bound_s
        == pytest.approx(proven(launches, found.multipliers), rel=1e-12)
    )


@pytest.mark.slow
def test_a_huge_problem_dominated_by_communication_is_solved_without_a_relaxation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The problem is one layer of Mixtral 8×7B in its real size on an 8×8 mesh. The plan without
    communication takes forty times as long."""
    monkeypatch.setattr(greedy, "_HUGE", 0)
    monkeypatch.setattr(Engine, "relax", lambda *_, **__: pytest.fail("it is not needed"))
    layer, batch = blocks.mixtral_8x7b()
    trace, mesh = (
        capture(layer.bfloat16(), (), {name: x.bfloat16() for name, x in batch.items()}),
        Mesh.parse("node=8,gpu=8"),
    )
    profile = HardwareProfile.load("h100-sxm")
    p = price(
        trace,
        classes_of(trace, mesh.shape),
        mesh,
        profile,
        budget_bytes=PlanOptions().budget(profile),
    ).problem
    found = solve(p, gap=0.01)
    assert evaluate(p, greedy._find_replicated(p)).objective_s > 10 * found.objective_s
    assert found.solver == "dual ascent" and found.multipliers is not None
    assert (
        0.99 * found.objective_s
        <= found.bound_s
        == pytest.approx(proven(p, found.multipliers), rel=1e-9)
    )


def test_a_plan_proven_by_dual_ascent_is_certified_and_scaled_potentials_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greedy, "_HUGE", 0)
    monkeypatch.setattr(greedy, "_NEAR", 1.0)
    model, batch = zoo_small.gpt2(dtype=torch.bfloat16)
    trace, profile = capture(model, (), batch), HardwareProfile.load("h100-sxm")
    plan = make_plan(trace, Mesh.parse("a=2,b=2"), profile, PlanOptions(gap=1e-4)).plan
    assert plan.proof.solver == "dual ascent" and plan.proof.potentials
    assert certify(trace, plan, profile).ok
    double = tuple(
        replace(x, values_s={k: 2 * v for k, v in x.values_s.items()})
        for x in plan.proof.potentials
    )
    found = certify(trace, replace(plan, proof=replace(plan.proof, potentials=double)), profile)
    assert [finding.claim for finding in found.findings] == ["bound"]


@pytest.mark.slow
def test_a_search_keeps_the_solution_and_bound_of_the_ascent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search starts from the result of the ascent and gives the same answer as a search without
    it."""
    p = modelled("llama")
    alone = solve(p, gap=0.0)
    monkeypatch.setattr(greedy, "_HUGE", 0)
    monkeypatch.setattr(greedy, "_NEAR", 1.0)
    after = solve(p, gap=0.0)
    assert after.objective_s == pytest.approx(
        alone.objective_s, rel=1e-9
    ) and after.bound_s == pytest.approx(alone.bound_s, rel=1e-9)
    assert after.multipliers is not None and alone.multipliers is not None
    assert after.multipliers.bound_s >= alone.multipliers.bound_s * (1 - 1e-9)
