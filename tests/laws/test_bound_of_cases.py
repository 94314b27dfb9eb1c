"""Proofs by cases: bounds compared with the optimum of small problems, and the certificate of a
proof by cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from autopar.capture import Trace, capture
from autopar.certificate import certify
from autopar.certificate.bound import lower_bound
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Condition, Problem
from autopar.core.solution import CaseMultipliers, FractionalGroups, Multipliers, Solution
from autopar.cost.priced import Priced
from autopar.planner import PlanOptions
from autopar.planner.candidates import Candidate
from autopar.planner.clock import Clock
from autopar.planner.pipeline.stage_cache import Effort, StageCache
from autopar.planner.plan_assembly import certify_proof
from autopar.planner.search import finish_search, prepare_search
from autopar.plans import Plan, ProofCase
from autopar.solve import Cases, Common, Least, SearchRequest, choices_or_least, solve
from autopar.solve.cases import find_split
from autopar.solve.memory_rows import budget_rows
from benchmarks.common import load_profile
from tests import zoo_small
from tests.laws.test_certified_bound import row, versions_of
from tests.laws.test_solver_oracles import LINE, problem

PROBLEMS = [(0, LINE, 1.0), (2, LINE, 0.3), (3, LINE, 0.3)]


def conditions_of(p: Problem) -> Iterator[Condition]:
    """Return conditions that some strategies of an op satisfy and others do not."""
    for n, op in enumerate(p.ops):
        layouts = op.strategies[0].layouts
        for axis in range(len((*layouts.outputs, *layouts.inputs)[0].placements)):
            condition = Condition(n, axis, is_whole=True)
            if len({condition.admits(s.layouts) for s in op.strategies}) == 2:
                yield condition


def without(p: Problem, condition: Condition) -> Problem:
    """Return the problem with only the strategies of the op that satisfy a condition."""
    ops = list(p.ops)
    op = ops[condition.op]
    left = tuple(s for s in op.strategies if condition.admits(s.layouts))
    ops[condition.op] = replace(op, strategies=left)
    return replace(p, ops=tuple(ops))


def proven(p: Problem, multipliers: Multipliers) -> float:
    prices: dict[tuple[int, int, bool], dict[int, float]] = {}
    for (v, late, use, layout), value in multipliers.potentials_s.items():
        prices.setdefault((v, use, bool(late)), {})[layout] = value
    named = {r.name: r for r in budget_rows(p)}
    rows = [row(named[name], worth) for name, worth in multipliers.memory_s.items()]
    versions = versions_of(p, multipliers)
    return lower_bound(p, prices, rows, multipliers.balance, versions, p.ruled_out())


def optimum(p: Problem) -> float:
    return solve(p, gap=0.0).objective_s


@pytest.mark.parametrize(("seed", "mesh", "slowdown"), PROBLEMS)
def test_two_opposite_cases_cover_a_problem_and_each_bound_is_below_the_optimum_of_its_case(
    seed: int, mesh: tuple[int, ...], slowdown: float
) -> None:
    p = problem(seed, mesh, slowdown=slowdown)
    best_s = optimum(p)
    for condition in conditions_of(p):
        found = []
        for each in (condition, condition.opposite):
            case = replace(p, conditions=(each,))
            answer = solve(case, gap=0.0)
            strategy = p.ops[each.op].strategies[answer.strategies[each.op]]
            assert each.admits(strategy.layouts), "the plan is one of the case"
            if not p.ops[each.op].recomputable:
                assert answer.objective_s == pytest.approx(optimum(without(p, each)))
            assert answer.bound_s <= answer.objective_s * (1 + 1e-9)
            assert answer.multipliers is not None
            bound_s = proven(case, answer.multipliers)
            assert answer.multipliers.bound_s * (1 - 1e-6) <= bound_s
            assert bound_s <= answer.objective_s * (1 + 1e-9)
            found.append(answer.objective_s)
        assert min(found) == pytest.approx(best_s)


def test_a_case_without_remaining_strategies_has_an_infinite_bound() -> None:
    p = problem(0)
    everything = {0: range(len(p.ops[0].strategies))}
    assert math.isinf(lower_bound(p, {}, [], ruled_out=everything))


def ask(
    p: Problem, met: Solution | None, common: Common, gap: float = 0.0
) -> Solution | Least | FractionalGroups:
    return choices_or_least(SearchRequest(p, gap, met=met, common=common), solver="highs")


@pytest.mark.parametrize(("seed", "mesh", "slowdown"), PROBLEMS)
def test_the_bound_over_all_cases_and_the_plan_enclose_the_optimum(
    seed: int, mesh: tuple[int, ...], slowdown: float
) -> None:
    p = problem(seed, mesh, slowdown=slowdown)
    best_s, poor = optimum(p), solve(p, gap=0.9)
    for condition in conditions_of(p):
        first = replace(poor, bound_s=0.1 * best_s, free_bound_s=0.1 * best_s, split=condition)
        cases = Cases.of(p, first, 0.0, Common(), ask)
        again = Cases.of(p, first, 0.0, Common(), ask)
        assert cases.answer == again.answer, "equal input gives equal answers"
        assert cases.answer.objective_s == pytest.approx(best_s)
        assert 0.1 * best_s < cases.answer.bound_s <= best_s * (1 + 1e-9)
        covered = {case.conditions for case in cases.leaves}
        assert covered in ({(condition,), (condition.opposite,)}, {()})
        known = cases.answer.multipliers
        assert known is not None and known.bound_s <= best_s * (1 + 1e-9)
        solved = cases.solve(p)
        assert solved is not None and solved.objective_s == pytest.approx(best_s)
        assert solved.bound_s <= best_s * (1 + 1e-9)


def test_a_reused_solution_has_memory_prices_for_its_own_rows_in_each_case() -> None:
    def with_moments(key: str) -> Problem:
        p = problem(0, moments=True)
        return replace(p, moments=tuple(replace(m, key=f"{key}{m.key}") for m in p.moments))

    first, second = with_moments("first/"), with_moments("second/")
    name = first.moments[0].key
    condition, answer = next(conditions_of(first)), solve(first, gap=0.5)
    case = CaseMultipliers((condition,), Multipliers(0.0, {}, {name: 1.0}))
    alike = StageCache()
    alike.learn(
        first, replace(answer, multipliers=Multipliers(0.0, {}, {}, cases=(case,))), Effort.END
    )
    known = alike.known(second, Effort.END)
    assert isinstance(known, Solution) and known.multipliers is not None
    [renamed] = known.multipliers.cases
    assert renamed.multipliers.memory_s == {second.moments[0].key: 1.0}


def test_a_mixture_is_divided_by_the_op_whose_time_differs_most() -> None:
    p = problem(3, slowdown=0.3)
    shares = [np.eye(len(op.strategies))[0] for op in p.ops]
    assert find_split(p, shares) is None, "nothing is mixed"
    found = 0
    for condition in conditions_of(p):
        sides = [
            next(i for i, s in enumerate(p.ops[condition.op].strategies) if c.admits(s.layouts))
            for c in (condition, condition.opposite)
        ]
        mixed = np.zeros(len(p.ops[condition.op].strategies))
        mixed[sides] = 0.5
        one = [mixed if n == condition.op else each for n, each in enumerate(shares)]
        split = find_split(p, one)
        assert split is not None and split.op == condition.op and split.is_whole
        found += 1
    assert found


# --------------------------------------------------------------------------------------------------
# The certificate of a proof by cases.

MESH = Mesh.parse("node=2,gpu=2")


@cache
def slow_links() -> HardwareProfile:
    base = load_profile("h100-sxm-frictionless")
    inter = replace(base.links["inter"], bandwidth_bytes_per_s=1e9)
    return replace(base, links={**base.links, "inter": inter}, hash=f"{base.hash}-slow")


@cache
def planned() -> tuple[Trace, Plan]:
    """Return a plan whose proof has three cases."""
    model, batch = zoo_small.gpt2()
    trace = capture(model, (), batch)
    clock, options = Clock(lambda _: None), PlanOptions().of_a_trace().begun()
    search = prepare_search(trace, MESH, slow_links(), options, clock, model_name="gpt2")
    best = search.find_best()
    priced = best.draft.priced
    conditions = [c for c in conditions_of(priced.problem) if c.axis == 0]
    near = partial(ask, gap=0.05)
    cases = Cases.of(priced.problem, as_if_far(best, conditions[0]), 0.05, Common(), near)
    deeper = divided_again(priced, cases, conditions[-1])
    proof = replace(best.plan.proof, certified_bound_s=0.0)
    proof = certify_proof(proof, best.draft, deeper)
    best = replace(best, plan=replace(best.plan, proof=proof))
    return trace, finish_search(best, clock, options).plan


def as_if_far(best: Candidate, split: Condition) -> Solution:
    found = best.draft.choices
    return replace(found, bound_s=0.0, free_bound_s=0.0, multipliers=None, split=split)


def divided_again(priced: Priced, cases: Cases, split: Condition) -> Multipliers:
    """Return the multipliers of all cases after one case is split again."""
    first, last = cases.leaves
    found = list[tuple[tuple[Condition, ...], Multipliers]]()
    for each in (split, split.opposite):
        conditions = (*first.conditions, each)
        answer = solve(replace(priced.problem, conditions=conditions), gap=0.05)
        assert answer.multipliers is not None
        found.append((conditions, answer.multipliers))
    assert last.multipliers is not None
    found.append((last.conditions, last.multipliers))
    bound_s = min(multipliers.bound_s for _, multipliers in found)
    return Multipliers(bound_s, {}, {}, cases=tuple(itertools.starmap(CaseMultipliers, found)))


@pytest.mark.slow
def test_a_proof_by_cases_is_certified_and_round_trips() -> None:
    trace, plan = planned()
    assert len(plan.proof.cases) == 3 and not plan.proof.potentials
    read = Plan.loads(plan.dumps())
    assert read == plan
    found = certify(trace, read, slow_links())
    assert found.ok, str(found)
    assert found.certified_bound_s is not None
    assert 0.5 * plan.proof.objective_s < plan.proof.certified_bound_s
    assert plan.proof.certified_bound_s <= found.certified_bound_s * (1 + 1e-9)


def changed(case: ProofCase, **changes: object) -> ProofCase:
    return replace(case, conditions=(replace(case.conditions[0], **changes), *case.conditions[1:]))  # type: ignore[arg-type]


TAMPERED: dict[str, tuple[Callable[[tuple[ProofCase, ...]], tuple[ProofCase, ...]], str]] = {
    "a case is missing": (lambda cases: cases[:-1], "do not cover choices"),
    "a part of a case is missing": (lambda cases: cases[1:], "do not cover choices"),
    "a condition is turned into its opposite": (
        lambda cases: (
            *cases[:-1],
            changed(cases[-1], is_whole=cases[0].conditions[0].is_whole),
        ),
        "do not cover choices",
    ),
    "a condition is of another axis": (
        lambda cases: (*cases[:-1], changed(cases[-1], axis=1)),
        "do not cover choices",
    ),
    "a condition is of no axis": (
        lambda cases: (*cases[:-1], changed(cases[-1], axis=2)),
        "the mesh has 2 axes",
    ),
    "a condition is of no op": (
        lambda cases: (*cases[:-1], changed(cases[-1], node="h.9/add/forward/0")),
        "not the first node of an op",
    ),
    "a case has a condition twice": (
        lambda cases: (*cases[:-1], replace(cases[-1], conditions=cases[-1].conditions * 2)),
        "two conditions",
    ),
    "the multipliers of a case are missing": (
        lambda cases: (*cases[:-1], replace(cases[-1], potentials=(), versions=(), memory_s={})),
        "the multipliers prove",
    ),
    "multipliers of one case stand for another": (
        lambda cases: (replace(cases[0], conditions=()),),
        "the multipliers prove",
    ),
}


@pytest.mark.parametrize(("change", "said"), TAMPERED.values(), ids=[*TAMPERED])
def test_a_changed_proof_by_cases_is_refused(
    change: Callable[[tuple[ProofCase, ...]], tuple[ProofCase, ...]], said: str
) -> None:
    trace, plan = planned()
    proof = replace(plan.proof, cases=change(plan.proof.cases))
    found = certify(trace, replace(plan, proof=proof), slow_links())
    assert not found.ok and said in str(found)


def test_a_higher_bound_than_the_cases_prove_is_refused() -> None:
    trace, plan = planned()
    proof = replace(plan.proof, certified_bound_s=plan.proof.objective_s)
    found = certify(trace, replace(plan, proof=proof), slow_links())
    assert not found.ok and "the multipliers prove" in str(found)
