"""Equal layers in groups with separate decisions: they are faster if memory suffices for only some
of the layers, and they are proven and correct."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import zoo_small
from torch import nn

import autopar
from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.core.solution import FractionalGroups, Solution
from autopar.cost.memory import Liveness
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.errors import PlanError
from autopar.planner import Planned, PlanOptions, make_plan, rounds, solving
from autopar.plans import Plan
from autopar.program.peak_memory import trace_peak
from autopar.sharding import Forced, Starts, classes_of, split_by_layers
from autopar.solve import SearchRequest, branch_and_cut, choices_or_least, evaluate, solve
from autopar.solve.bounds import Incumbent
from autopar.solve.restricted import Climb
from autopar.verification import verify_program

NUM_LAYERS, LIST, GAP, NAME = 8, "model.layers", 5e-4, "LlamaForCausalLM"
MESH, PROFILE = Mesh(2), HardwareProfile.load("h100-sxm")
BETWEEN = 0.94  # share of the memory that a plan without a budget needs


@cache
def traced() -> tuple[Trace, nn.Module, dict[str, Any]]:
    model, batch = zoo_small.llama(num_layers=NUM_LAYERS)
    return capture(model, (), batch), model, batch


@cache
def budget() -> int:
    ample = make_plan(traced()[0], MESH, PROFILE, PlanOptions(optimizer="sgd", gap=GAP))
    return int(BETWEEN * ample.plan.prediction.peak_bytes)


def planned() -> Planned:
    return make_plan(
        traced()[0],
        MESH,
        PROFILE,
        PlanOptions(memory_bytes=budget(), optimizer="sgd", gap=GAP),
        model_name=NAME,
    )


@cache
def grouped() -> Planned:
    return planned()


def solved(starts: Starts, gap: float = GAP) -> Solution:
    """Solve the problem of these groups without rows learned from the peak of the program."""
    trace = traced()[0]
    forced = replace(Forced.nothing(), starts=starts)
    classes = split_by_layers(classes_of(trace, MESH.shape), starts)
    priced = price(
        trace, classes, MESH, PROFILE, budget_bytes=budget(), optimizer="sgd", forced=forced
    )
    problem = replace(priced.problem, moments=tuple(Liveness(trace, priced).certain))
    return solve(problem, gap=gap)


@pytest.mark.slow
def test_the_plan_lists_the_groups_of_layers_and_they_differ() -> None:
    plan = grouped().plan
    assert list(plan.starts) == [LIST]
    [line] = [line for line in plan.proof.covers if LIST in line]
    first = plan.starts[LIST][0]
    assert (
        line.endswith(f"from {plan.starts[LIST][-1]} on")
        and (f"{LIST} 0–{first - 1}, " if first > 1 else f"{LIST} 0, ") in line
    )
    per_layer = [decisions_of(plan, layer) for layer in range(NUM_LAYERS)]
    borders = [layer for layer in range(1, NUM_LAYERS) if per_layer[layer] != per_layer[layer - 1]]
    assert borders == list(plan.starts[LIST]), "layers of one group are alike, those of two are not"


def decisions_of(plan: Plan, layer: int) -> dict[str, Any]:
    """Return the decisions of the nodes of a layer, by their names within the layer."""
    inside = f"{LIST}.{layer}."
    kept = {
        f"{node}#{result}": tuple(map(str, layouts))
        for (node, result), layouts in plan.kept_layouts().items()
    }
    said = {
        **plan.node_choices(),
        **{f"again {k}": v for k, v in plan.recomputed_choices().items()},
        **kept,
    }
    return {key.replace(inside, ""): str(choice) for key, choice in said.items() if inside in key}


@pytest.mark.slow
def test_a_grouped_plan_is_as_fast_as_the_best_split_into_groups() -> None:
    cuts = [solved({LIST: (layer,)}) for layer in range(1, NUM_LAYERS)]
    assert grouped().plan.proof.objective_s <= min(c.objective_s for c in cuts) * (1 + GAP)


@pytest.mark.slow
def test_a_grouped_plan_is_faster_than_with_equal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = grouped().plan
    assert plan.proof.gap <= GAP
    best_there = solved(plan.starts, gap=1e-5).objective_s
    assert plan.proof.bound_s <= best_there * (1 + 1e-9), (
        "the bound is one for plans with these groups"
    )
    monkeypatch.setattr(rounds, "starts_of", lambda priced, choices: {})
    alike = planned().plan
    assert not alike.starts
    assert plan.proof.objective_s < alike.proof.objective_s
    assert plan.proof.bound_s <= alike.proof.bound_s, "what all layers alike can do, groups can"


@pytest.mark.slow
def test_layers_are_regrouped_with_the_learned_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first grouping is the least useful one. Its program exceeds the budget, and the rows
    learned from it are transferred to the other groups."""
    trace, model, batch = traced()
    tight = PlanOptions(memory_bytes=int(budget() * 0.5 / BETWEEN), optimizer="sgd", gap=GAP)
    cuts, starts_of = list[Starts](), rounds.starts_of

    def first_the_last_layer(priced: Priced, choices: Solution) -> Starts:
        cuts.append({LIST: (NUM_LAYERS - 1,)} if not cuts else starts_of(priced, choices))
        return cuts[-1]

    monkeypatch.setattr(rounds, "starts_of", first_the_last_layer)
    plan = make_plan(trace, MESH, PROFILE, tight, model_name=NAME).plan
    assert len(cuts) == 2 and plan.starts == cuts[1] != cuts[0]
    assert autopar.check(plan, model, batch).ok, (
        "its bound is proven with the multipliers of these groups"
    )
    cuts.clear()
    monkeypatch.setattr(rounds.PlannerLoop, "_regroup", rounds.PlannerLoop._next_round)
    assert (
        plan.proof.objective_s
        < make_plan(trace, MESH, PROFILE, tight, model_name=NAME).plan.proof.objective_s
    )


@pytest.mark.slow
def test_the_bound_of_groups_is_valid_for_fewer_groups() -> None:
    whole, finer, finest = (
        solved({LIST: cuts} if cuts else {}, gap=1e-4) for cuts in ((), (3,), (2, 3, 6))
    )
    for fewer, more in ((whole, finer), (finer, finest)):
        assert more.bound_s <= fewer.objective_s * (1 + 1e-9)
        assert more.objective_s <= fewer.objective_s * (1 + 1e-4)


@pytest.mark.slow
def test_a_grouped_plan_matches_the_model_in_the_predicted_memory() -> None:
    made, (trace, model, batch) = grouped(), traced()
    assert verify_program(trace, made.program, model, (), batch).ok
    peak = (
        trace_peak(made.stage_program(), outputs="dtensor").peak_bytes
        + made.plan.prediction.memory_bytes["optimizer"]
    )
    assert peak == made.plan.prediction.peak_bytes <= budget()


@pytest.mark.slow
def test_a_grouped_plan_is_certified_only_with_its_groups() -> None:
    plan, (_, model, batch) = grouped().plan, traced()
    assert autopar.check(plan, model, batch).ok
    [start] = plan.starts[LIST][:1]
    for starts in ({}, {LIST: (start + 1, *plan.starts[LIST][1:])}):
        refused = autopar.check(replace(plan, starts=starts), model, batch)
        assert any("one decision" in finding.what for finding in refused.findings), (
            "classes are other ones"
        )


@pytest.mark.slow
def test_a_grouped_plan_round_trips() -> None:
    plan = grouped().plan
    assert Plan.loads(plan.dumps()) == plan
    assert Plan.loads(plan.dumps()).dumps() == plan.dumps()


@pytest.mark.slow  # the same test of plans without groups always runs
def test_a_grouped_plan_is_deterministic() -> None:
    assert grouped().plan.dumps() == planned().plan.dumps()


@pytest.mark.parametrize("cuts", [(), (3, 3), (5, 2)])
def test_invalid_groups_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="groups of layers"):
        Plan.loads(replace(grouped().plan, starts={LIST: cuts}).dumps())


@pytest.mark.slow  # test_what_if always tests this for plans without groups
def test_what_if_on_the_same_hardware_gives_the_time_of_a_grouped_plan() -> None:
    plan, (_, model, batch) = grouped().plan, traced()
    same = autopar.what_if(plan, model, batch, hardware=PROFILE)
    assert same.step_s == pytest.approx(plan.proof.objective_s, rel=1e-9)


def test_explain_and_diff_accept_a_grouped_plan() -> None:
    plan = grouped().plan
    text = str(autopar.explain(plan))
    assert all(f"{LIST}.*" in text for _ in plan.starts)
    assert not autopar.diff(plan, plan).changes


@pytest.mark.slow  # finding the best plan within 0.04 % takes a minute
def test_a_grouped_plan_is_priced_on_another_mesh() -> None:
    _, model, batch = traced()
    wider = autopar.what_if(grouped().plan, model, batch, hardware=PROFILE, mesh=Mesh(4))
    assert wider.most_regret >= -1e-9 and wider.peak_bytes > 0


def test_a_search_that_ends_early_names_the_ops_to_separate() -> None:
    trace = traced()[0]
    priced = price(
        trace, classes_of(trace, MESH.shape), MESH, PROFILE, budget_bytes=budget(), optimizer="sgd"
    )
    problem = replace(priced.problem, moments=tuple(Liveness(trace, priced).certain))
    request = SearchRequest(problem, gap=1e-5, time_limit_s=60.0, whole=False)
    early = choices_or_least(request, solver="highs")
    assert isinstance(early, Solution)
    assert early.mixed
    assert all(
        problem.ops[n].count > 1 and all(0.0 < share < 1.0 for share in shares)
        for n, shares in early.mixed.items()
    )
    assert early.gap > 1e-5


@pytest.mark.slow
def test_a_search_without_a_plan_names_the_ops_to_separate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace, best_s = traced()[0], solved({}).objective_s
    priced = price(
        trace, classes_of(trace, MESH.shape), MESH, PROFILE, budget_bytes=budget(), optimizer="sgd"
    )
    problem = replace(priced.problem, moments=tuple(Liveness(trace, priced).certain))
    monkeypatch.setattr(branch_and_cut, "SMALL", 0)
    monkeypatch.setattr(Incumbent, "_consider", meeting_none)
    monkeypatch.setattr(Climb, "over", lambda climb, columns: pytest.fail("a plan is looked for"))
    request = SearchRequest(problem, gap=1e-5, time_limit_s=60.0, whole=False, only_plan=True)
    found = choices_or_least(request, solver="highs")
    assert isinstance(found, FractionalGroups)
    assert all(
        problem.ops[n].count > 1 and all(0.0 < share < 1.0 for share in shares)
        for n, shares in found.mixed.items()
    )
    assert found.mixed and found.bound_s <= best_s * (1 + 1e-9)


def meeting_none(plans: Incumbent, *choices: Any) -> list[int]:
    """Return the exceeded rows, and never record a plan."""
    over = plans.extra.over(evaluate(plans.extra.program.problem, *choices[:3]))
    return over or []


def told_apart(monkeypatch: pytest.MonkeyPatch, poorer: float) -> list[bool]:
    """Let searches report ops that would decide separately without a plan, and let the next search
    give a plan that is slower by a factor. Return whether each search had all layers in one
    group."""
    alike, answer = list[bool](), solving.choices_or_least

    def without_plan(request: SearchRequest, **how: Any) -> object:
        found = answer(request, **how)
        if isinstance(found, Solution) and not request.whole and found.mixed:
            alike.append(True)
            return FractionalGroups(found.mixed, found.bound_s)
        alike.append(len(request.problem.ops) == len(ungrouped().ops))
        return (
            replace(found, objective_s=found.objective_s * poorer)
            if len(alike) == 2 and isinstance(found, Solution)
            else found
        )

    monkeypatch.setattr(solving, "choices_or_least", without_plan)
    return alike


@cache
def ungrouped() -> Problem:
    trace = traced()[0]
    return price(
        trace, classes_of(trace, MESH.shape), MESH, PROFILE, budget_bytes=budget(), optimizer="sgd"
    ).problem


@pytest.mark.slow
def test_layers_are_split_into_the_same_groups_without_a_plan_for_equal_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, alike = grouped().plan, told_apart(monkeypatch, 1.0)
    found = planned().plan
    assert found.starts == expected.starts
    assert (
        found.proof.objective_s == expected.proof.objective_s
        and found.proof.bound_s == expected.proof.bound_s
    )
    assert alike[:2] == [True, False]


@pytest.mark.slow
def test_a_grouped_plan_far_from_the_bound_is_compared_with_equal_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alike = told_apart(monkeypatch, 2.0)
    assert not planned().plan.starts
    assert alike[:3] == [True, False, True]
