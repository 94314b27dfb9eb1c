"""The search over plans: budgets, progress, runner-ups, and errors that state only what is
proven."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from mlp import traced

from autopar.capture.trace import Trace
from autopar.constraints import layout
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.solution import Solution
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.emit import emit_stage
from autopar.errors import AutoparError, ConstraintError, InfeasibleError
from autopar.planner import Planned, PlanOptions, make_plan, solving
from autopar.planner.clock import Clock
from autopar.planner.comm_schedule import Ordering, Peaks
from autopar.planner.pipeline.stage_cache import Effort, StageCache
from autopar.planner.rounds import PlannerLoop, SearchPhase, SearchState
from autopar.planner.search import prepare_search
from autopar.planner.sensitivity import runner_ups
from autopar.program.peak_memory import trace_peak
from autopar.program.program import StageProgram
from autopar.sharding import classes_of
from autopar.solve import Least, evaluate, solve
from autopar.solve.branch_and_cut import BranchAndCut, SearchRequest

MESH = Mesh({"a": 2, "b": 2})
GLOO = HardwareProfile.load("cpu-gloo")
KIB = 2**10


def trace() -> Trace:
    return traced(32, 64, 64, num_layers=3, dtype=torch.float32)


def planned(**options: object) -> Planned:
    return make_plan(trace(), MESH, GLOO, PlanOptions(**options))  # type: ignore[arg-type]


def priced(mesh: Mesh) -> Priced:
    return price(trace(), classes_of(trace(), mesh.shape), mesh, GLOO, budget_bytes=2**40)


@pytest.mark.parametrize("memory_bytes", [300 * KIB, 120 * KIB, 110 * KIB])
def test_the_peak_of_the_emitted_program_is_the_predicted_one_and_within_the_budget(
    memory_bytes: int,
) -> None:
    made = planned(memory_bytes=memory_bytes)
    prediction = made.plan.prediction
    again = (
        trace_peak(emit_stage(trace(), made.plan), outputs="dtensor").peak_bytes
        + prediction.memory_bytes["optimizer"]
    )
    assert again == prediction.peak_bytes <= memory_bytes
    parts = prediction.memory_bytes
    rest = sum(parts[kind] for kind in ("parameters", "optimizer", "buffers", "inputs"))
    assert (
        rest + max(parts["activations"], parts["gradients"]) + parts["transient"]
        == prediction.peak_bytes
    )
    assert made.program.plan_hash == made.plan.hash


@pytest.mark.slow
def test_memory_has_a_price_only_if_the_budget_is_binding() -> None:
    assert planned().plan.proof.memory_price_s_per_gib == 0.0
    assert planned(memory_bytes=150 * KIB).plan.proof.memory_price_s_per_gib > 0.0


@pytest.mark.slow
def test_a_budget_below_the_persistent_memory_is_refused_with_a_valid_bound() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits into 8 KiB per device") as refused:
        planned(memory_bytes=8 * KIB)
    found = re.search(
        r"at least (\S+) KiB is needed, in addition to the transient peak", refused.value.what
    )
    assert found
    assert (
        8 * KIB < float(found[1]) * KIB < planned(memory_bytes=110 * KIB).plan.prediction.peak_bytes
    )


def test_if_no_round_finds_a_plan_that_fits_a_plan_with_little_memory_is_tried() -> None:
    assert planned(memory_bytes=85 * KIB).plan.prediction.peak_bytes <= 85 * KIB


def test_a_budget_below_the_transient_peak_is_refused_with_the_peak_of_a_plan() -> None:
    with pytest.raises(
        InfeasibleError, match="no plan was found that fits into 73 KiB per device"
    ) as refused:
        planned(memory_bytes=73 * KIB, gap=0.2)  # a refused budget needs no small gap
    found = re.search(r"the smallest plan tried needs (\S+) KiB", refused.value.what)
    assert found and float(found[1]) > 73
    assert "larger memory_bytes" in refused.value.remedy


def test_the_bound_is_searched_to_the_end_only_if_it_may_close_the_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, answer = list[bool](), solving.choices_or_least

    def cut_short(request: SearchRequest, **how: Any) -> object:
        ended.append(not request.only_plan)
        found = answer(request, **how)
        return (
            replace(found, bound_s=found.bound_s / 2, unfinished=True)
            if request.only_plan and isinstance(found, Solution)
            else found
        )

    monkeypatch.setattr(solving, "choices_or_least", cut_short)
    proof = planned().plan.proof
    assert ended == [False, True] and proof.gap <= 0.01
    ended.clear()
    tight = planned(
        memory_bytes=240_000
    ).plan  # the plan that fits is slower than the solution of the initial problem
    assert len(ended) > 1 and not any(ended) and tight.proof.gap > 0.01
    ended.clear()
    bare = prepare_search(trace(), MESH, GLOO, PlanOptions(), Clock(lambda _: None))
    bare.regions = frozenset()
    assert bare.find_best() and ended == [False], (
        "a proof without kernels is not a proof for all plans"
    )
    monkeypatch.setattr(PlannerLoop, "_prove_to_the_end", lambda _, state, best: best)
    assert planned().plan.proof.gap > 0.4


@pytest.mark.parametrize("memory_bytes", [2**20, 240_000])
def test_a_faster_plan_found_by_the_search_for_the_bound_is_kept(
    memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches for a plan only return one for less memory. In 240,000 bytes, the solution of the
    first search for the bound exceeds the budget as emitted."""
    answer, ends = solving.choices_or_least, list[float]()

    def slow_at_first(request: SearchRequest, **how: Any) -> Solution:
        found = answer(request, **how)
        assert isinstance(found, Solution)
        if not request.only_plan:
            ends.append(found.objective_s)
            return replace(found, bound_s=0.0)
        smaller = replace(request.problem, budget_bytes=130 * KIB)
        slow = answer(replace(request, problem=smaller), **how)
        assert isinstance(slow, Solution) and slow.objective_s > found.objective_s
        return replace(slow, bound_s=found.bound_s, unfinished=True)

    monkeypatch.setattr(solving, "choices_or_least", slow_at_first)
    made = planned(memory_bytes=memory_bytes, effort="quick").plan
    assert len(ends) == (1 if memory_bytes == 2**20 else 2)
    assert made.proof.objective_s == pytest.approx(ends[-1])
    assert made.prediction.peak_bytes <= memory_bytes


@pytest.mark.parametrize("others", [True, False])
def test_a_plan_over_the_budget_is_retried_only_with_other_kernels(
    others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, tried = list[Solution](), list[StageProgram]()
    answer, peak = solving.ProblemSolver.answer, Peaks.peak_bytes

    def same_again(asks: solving.ProblemSolver, *problem: Any, **how: Any) -> Solution:
        if not answers:
            first = answer(asks, *problem, **how)
            assert isinstance(first, Solution)
            answers.append(first)
        else:
            answers.append(
                replace(answers[0], regions=frozenset() if others else answers[0].regions)
            )
        return answers[-1]

    def first_too_much(peaks: Peaks, program: StageProgram) -> int:
        tried.append(program)
        return peak(peaks, program) if len(tried) > 1 else 2**60

    monkeypatch.setattr(solving.ProblemSolver, "answer", same_again)
    monkeypatch.setattr(Peaks, "peak_bytes", first_too_much)
    monkeypatch.setattr(PlannerLoop, "find_lightest", lambda *_: None)
    if others:
        assert planned().plan and len(tried) > 1
    else:
        with pytest.raises(InfeasibleError, match="the smallest plan tried"):
            planned()
        assert (len(answers), len(tried)) == (2, 1)


def test_a_search_runs_its_phases_in_order_and_ends_with_a_plan_or_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases, functions = list[SearchPhase](), PlannerLoop.phases.fget
    assert functions is not None

    def watched(search: PlannerLoop) -> Any:
        def run(state: SearchState) -> SearchState:
            phases.append(state.phase)
            return functions(search)[state.phase](state)

        return dict.fromkeys(SearchPhase, run)

    monkeypatch.setattr(PlannerLoop, "phases", property(watched))
    planned()
    assert phases == [
        SearchPhase.ASK,
        SearchPhase.TRY,
        SearchPhase.FINISH,
        SearchPhase.COMPARE,
    ]
    phases.clear()
    planned(memory_bytes=240_000)
    round_trip = [SearchPhase.ASK, SearchPhase.TRY, SearchPhase.LEARN]
    num_rounds = len(phases) // 3
    assert num_rounds > 1 and phases == [
        *round_trip * (num_rounds - 1),
        SearchPhase.ASK,
        SearchPhase.TRY,
        SearchPhase.FINISH,
        SearchPhase.COMPARE,
    ]
    phases.clear()
    with pytest.raises(InfeasibleError):
        planned(memory_bytes=8 * KIB)
    assert phases == [SearchPhase.ASK, SearchPhase.TRY, SearchPhase.FINISH, SearchPhase.SHRINK]


def test_a_search_restarts_without_kernels_if_plans_with_kernels_do_not_fit() -> None:
    search = prepare_search(trace(), MESH, GLOO, PlanOptions(), Clock(lambda _: None))
    learnt = replace(
        search.ungrouped_layers.learnt, retained=(search.ungrouped_layers.problem.moments[0],)
    )
    problem = replace(search.ungrouped_layers.priced.problem, regions=(KIB,))
    groups = replace(
        search.ungrouped_layers,
        priced=replace(search.ungrouped_layers.priced, problem=problem),
        learnt=learnt,
        bound_s=1e-9,
    )
    state = SearchState(SearchPhase.SHRINK, groups, None, 1.0, smallest=2**60, decided=(1,))
    again = search.phases[state.phase](state)
    assert (again.phase, again.regions, again.effort) == (
        SearchPhase.SOLVE,
        frozenset(),
        Effort.WHOLE,
    )
    assert not again.groups.learnt.retained and again.groups.bound_s == 1e-9, (
        "a bound of all plans stays valid"
    )
    assert (again.smallest, again.decided, again.best) == (0, (), None)


def test_every_phase_is_reported_and_timed() -> None:
    told: list[str] = []
    made = make_plan(trace(), MESH, GLOO, PlanOptions(), progress=told.append)
    assert told == [
        "enumerate",
        "price",
        "solve",
        "assemble",
        "emit",
        "memory",
        "buckets",
        "named plans",
        "explain",
    ]
    assert set(made.seconds) == set(told) and all(seconds >= 0 for seconds in made.seconds.values())


def test_constraints_are_checked_against_the_mesh_before_the_search() -> None:
    told: list[str] = []
    options = PlanOptions(constraints=(layout("layers.*", input="R"),))
    with pytest.raises(ConstraintError, match="1 placements, but mesh a=2,b=2 has 2 axes"):
        make_plan(trace(), MESH, GLOO, options, progress=told.append)
    assert not told


@pytest.mark.slow
def test_both_solvers_find_plans_with_the_same_objective() -> None:
    ours, theirs = planned(gap=0.0), planned(gap=0.0, solver="cbc")
    assert theirs.plan.proof.solver == "cbc"
    assert theirs.plan.proof.objective_s == pytest.approx(ours.plan.proof.objective_s)


def test_strict_planning_of_a_model_whose_ops_all_have_rules_succeeds() -> None:
    assert planned(strict=True).plan.options["strict"] is True


def test_the_cost_of_a_runner_up_is_the_exact_price_of_the_change() -> None:
    problem = priced(Mesh(2)).problem
    choices = solve(problem, gap=0.0)
    now = evaluate(problem, choices.strategies, choices.recomputed).objective_s
    found = runner_ups(problem, choices)
    num_best = 0
    for op, runner_up in found.items():
        prices = {}
        for n, strategy in enumerate(problem.ops[op].strategies):
            changed = [*choices.strategies[:op], n, *choices.strategies[op + 1 :]]
            if strategy.layouts != problem.ops[op].strategies[choices.strategies[op]].layouts:
                prices[str(strategy.layouts)] = (
                    evaluate(problem, changed, choices.recomputed).objective_s - now
                )
        assert runner_up.delta_s == pytest.approx(prices[runner_up.strategy], abs=1e-12)
        assert runner_up.delta_s >= -1e-12, "the plan is optimal"
        if 1 < len(prices) <= 3:
            num_best += 1
            assert runner_up.delta_s == pytest.approx(min(prices.values()), abs=1e-12)
    assert num_best > 0


def test_an_optimizer_without_state_needs_less_memory() -> None:
    with_state, without = (
        planned(optimizer="adamw").plan.prediction,
        planned(optimizer="none").plan.prediction,
    )
    assert without.memory_bytes["optimizer"] == 0 < with_state.memory_bytes["optimizer"]
    assert with_state.memory_bytes["optimizer"] == 2 * with_state.memory_bytes["parameters"]


def test_a_profile_without_a_link_is_refused() -> None:
    with pytest.raises(AutoparError, match="has no link 'inter'"):
        make_plan(
            trace(),
            Mesh({"a": 2, "b": 2}, links={"a": "inter"}),
            replace(GLOO, links={"intra": GLOO.links["intra"]}),
            PlanOptions(),
        )


@pytest.mark.slow
def test_after_the_time_limit_the_best_plan_so_far_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solves, answer, orders = list[bool](), solving.choices_or_least, list[StageProgram]()

    def counted(request: SearchRequest, **how: Any) -> object:
        solves.append(request.waits)
        return answer(request, **how)

    monkeypatch.setattr(solving, "choices_or_least", counted)
    monkeypatch.setattr(
        Ordering, "fastest", lambda _, tried: (tried, orders.append(tried.program))[0]
    )  # type: ignore[func-returns-value]
    tight = {"memory_bytes": 110 * KIB, "gap": 0.0}
    free = planned(**tight).plan
    assert len(solves) > 2 and orders
    solves.clear()
    orders.clear()
    found = planned(**tight, time_limit_s=1e-6).plan
    assert found.prediction.peak_bytes <= 110 * KIB
    assert found.proof.bound_s <= free.prediction.step_s * (1 + 1e-9) and found.proof.gap > 0.0
    assert solves[0] and not orders, (
        "the search waits for a first plan, but not for an order of its communication"
    )


@pytest.mark.parametrize(("spent", "most"), [(0.0, 3e9), (1e12, 1.25e12)])
def test_only_the_search_for_the_bound_has_a_limit_of_work(
    spent: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[float]()
    monkeypatch.setattr(
        solving,
        "choices_or_least",
        lambda request, **_: (asked.append(request.common.work.most), Least(1))[1],
    )
    asks = solving.ProblemSolver(PlanOptions(), StageCache())
    asks.common.work.spent = spent
    for effort in (Effort.END, Effort.WHOLE, Effort.MIXED):
        asks.answer(priced(MESH).problem, effort, learnt=False, regions=None)
    assert asked == [most, math.inf, math.inf]


def test_a_search_exceeds_its_time_limit_only_until_it_has_a_plan() -> None:
    problem = priced(MESH).problem
    engines = [
        BranchAndCut(SearchRequest(problem, 0.0, 10, time_limit_s=0.0, waits=waits))
        for waits in (True, False)
    ]
    assert [search.engine.limit.left_s() for search in engines] == [math.inf, 0.1]
    assert engines[0].run() is not None
    assert engines[0].engine.limit.left_s() == 0.1
