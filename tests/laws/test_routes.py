"""Routes of expert rows between peers as a choice of the planner: when they pay off, their
description, and that changed plans are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from overlapping import overlapping
from torch import nn

import autopar
from autopar.api import what_if
from autopar.api.planning import plan_model
from autopar.capture import Trace, capture
from autopar.certificate import certify
from autopar.certificate import intra_op as certified_routes
from autopar.constraints import ddp, expert_parallel, pipeline
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost import expert_routes as cost_routes
from autopar.cost.expert_routes import TOO_LITTLE
from autopar.cost.kernel_offers import NO_ROOM
from autopar.emit import emit_stage
from autopar.kernels import dispatched
from autopar.kernels import routed as kernel_routes
from autopar.planner import PlanOptions, make_plan
from autopar.plans import KERNELS_BUFFERS, Communication, Plan

LINE, SQUARE = Mesh({"expert": 4}), Mesh({"data": 2, "expert": 2})
PLACES = {"4": (LINE, ()), "data beside": (SQUARE, (ddp("data"),))}


def profile(share: float | None = 1.0, **how: Any) -> HardwareProfile:
    """Return a profile with slow memory relative to the links, so that passes over rows cost as
    much as sending them."""
    made = overlapping(
        link_bytes_per_s=3e8, flops_per_s=5e9, kernels={} if share is None else {"moe_route": share}
    )
    return replace(made, memory_bandwidth_bytes_per_s=1e8, hash=f"{share} {how}", **how)


@cache
def built() -> tuple[nn.Module, dict[str, torch.Tensor], Trace]:
    model, batch = zoo_small.mixtral(num_layers=2)
    return model, batch, capture(model, (), batch)


@cache
def planned(place: str = "4", share: float | None = 1.0, budget: int | None = None) -> Plan:
    mesh, beside = PLACES[place]
    constraints = (expert_parallel("expert", tokens="dispatched"), *beside)
    options = PlanOptions(memory_bytes=budget, constraints=constraints, gap=0.05)
    return make_plan(built()[2], mesh, profile(share), options).plan


def own(plan: Plan) -> list[Communication]:
    return [c for c in plan.communications if c.own]


def routed(plan: Plan) -> list[Communication]:
    return [c for c in own(plan) if c.kernel is not None]


@pytest.mark.parametrize("place", PLACES)
def test_rows_take_routes_if_the_profile_has_figures_and_results_match_the_model(
    place: str,
) -> None:
    plan, (model, batch, trace) = planned(place), built()
    assert routed(plan) == own(plan) and routed(plan)
    assert {c.kernel.name for c in routed(plan) if c.kernel} == {"moe_dispatch", "moe_combine"}
    program = emit_stage(trace, plan)
    steps = [
        n
        for g in (program.forward, program.backward)
        for n in g.graph.nodes
        if n.target in dispatched.TOGETHER
    ]
    assert len(steps) >= 4 and all(n.args[-1] is True for n in steps)
    assert autopar.verify(plan, model, batch).ok
    found = certify(trace, Plan.loads(plan.dumps()), profile())
    assert found.ok, str(found)
    assert plan.prediction.memory_bytes[KERNELS_BUFFERS] > 0


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_microbatches_use_routes(place: str) -> None:
    (mesh, beside), (model, batch, _) = PLACES[place], built()
    batch = {name: torch.cat((x, x)) for name, x in batch.items()}
    asked = (expert_parallel("expert", tokens="dispatched"), *beside)
    made = plan_model(
        model,
        mesh,
        example_inputs=batch,
        hardware=profile(),
        constraints=asked,
        num_microbatches=2,
        gap=0.05,
    )[1].plan
    assert made.num_microbatches == 2
    assert routed(made.stages[0]) == own(made.stages[0]) != []
    assert autopar.verify(made, model, batch).ok
    found = autopar.check(made, model, batch, hardware=profile())
    assert found.ok, str(found)


def test_without_route_figures_rows_use_all_to_alls_and_the_step_is_longer() -> None:
    plain = planned(share=None)
    steps = [
        n
        for n in emit_stage(built()[2], plain).forward.graph.nodes
        if n.target in dispatched.TOGETHER
    ]
    assert own(plain) and not routed(plain) and steps and all(n.args[-1] is False for n in steps)
    assert not any(c.why for c in own(plain)), "no profile, no choice"
    assert planned().prediction.step_s < plain.prediction.step_s
    assert (
        KERNELS_BUFFERS not in plain.prediction.memory_bytes
        or not plain.prediction.memory_bytes[KERNELS_BUFFERS]
    )


def test_a_route_that_is_slower_than_an_all_to_all_is_not_taken() -> None:
    slow = planned(share=0.05)
    assert own(slow) and not routed(slow)
    assert {c.why for c in own(slow)} == {TOO_LITTLE}


def test_there_is_no_route_between_more_ranks_than_the_kernels_support(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = planned()
    for module in (cost_routes, dispatched, kernel_routes):
        monkeypatch.setattr(module, "MOST_RANKS", 3)
    plan = planned.__wrapped__()
    assert own(plan) and not routed(plan)
    assert {c.why for c in own(plan)} == {"the kernels support up to 3 ranks per axis, not 4"}
    monkeypatch.setattr(certified_routes, "_MOST_RANKS", 3)
    found = certify(built()[2], before, profile())
    assert "kernels" in {f.claim for f in found.findings}


def test_between_nodes_there_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    before, apart = planned(), Mesh({"expert": 4}, links={"expert": "inter"})
    monkeypatch.setitem(PLACES, "4", (apart, ()))
    plan = planned.__wrapped__()
    assert own(plan) and not routed(plan)
    assert {c.why for c in own(plan)} == {
        "axis 'expert' spans several nodes, which do not share memory"
    }
    found = certify(built()[2], replace(before, mesh=apart), profile())
    assert "ranks along 'expert' cannot access each other's memory" in str(found)


def test_with_less_memory_fewer_routes_fit_and_the_plan_says_so() -> None:
    free, plain = planned(), planned(share=None)
    some, none = (
        planned(budget=free.prediction.peak_bytes - 1),
        planned(budget=plain.prediction.peak_bytes),
    )
    assert (
        free.prediction.peak_bytes - free.prediction.memory_bytes[KERNELS_BUFFERS]
        == plain.prediction.peak_bytes
    )
    assert len(own(some)) > len(routed(some)) > 0 and not routed(none)
    steps_s = [plan.prediction.step_s for plan in (free, some, none)]
    assert steps_s == sorted(steps_s) and none.prediction.step_s == plain.prediction.step_s
    assert all(plan.prediction.peak_bytes < free.prediction.peak_bytes for plan in (some, none))
    assert {c.why for plan in (some, none) for c in own(plan) if c.kernel is None} == {NO_ROOM}
    assert {c.phase for c in routed(some)} == {"backward"}, (
        "forward's region is another, and saves less"
    )
    for plan in (some, none):
        assert certify(built()[2], plan, profile()).ok and autopar.verify(plan, *built()[:2]).ok


def test_the_savings_of_routes_are_the_saved_passes_minus_the_loss_of_bandwidth() -> None:
    """At 0.8 of the bandwidth of an all-to-all, each transfer takes a quarter longer."""
    plans = {share: [c for c in routed(planned(share=share)) if c.kernel] for share in (1.0, 0.8)}
    both = {
        share: {(c.node, c.phase, c.kernel.name, c.collective): c for c in cs if c.kernel}
        for share, cs in plans.items()
    }
    assert both[1.0].keys() == both[0.8].keys()
    for key, c in both[1.0].items():
        assert c.kernel is not None and both[0.8][key].kernel is not None
        lost = c.kernel.saved_s - both[0.8][key].kernel.saved_s  # type: ignore[union-attr]
        assert lost == pytest.approx(c.time_s / 4)
        passes = 2 * c.collective.bytes / (1e8 * profile().memory_efficiency["indexing"])
        assert c.kernel.saved_s == pytest.approx(passes) or c.kernel.saved_s == 0.0


def test_a_plan_with_routes_saves_nothing_on_a_profile_without_route_figures() -> None:
    model, batch, _ = built()
    plan = planned()
    with_s, without_s = (
        what_if(plan, model, batch, hardware=profile(share)).step_s for share in (1.0, None)
    )
    assert with_s == pytest.approx(plan.prediction.step_s, rel=1e-6)
    assert without_s - with_s == pytest.approx(plan.prediction.in_kernels_s, rel=1e-6)


def test_explain_describes_routes() -> None:
    said = str(autopar.explain(planned()))
    assert "moe_dispatch" in said and "moe_combine" in said
    assert "share of an all-to-all's bandwidth: moe_route 1" in " ".join(planned().proof.covers)


Change = Callable[[Plan], Plan]


def kernel(which: str, **changes: object) -> Change:
    def change(plan: Plan) -> Plan:
        at = next(
            i
            for i, c in enumerate(plan.communications)
            if c.kernel is not None and c.kernel.name == which and c.kernel.saved_s > 0
        )
        parts = list(plan.communications)
        parts[at] = replace(parts[at], kernel=replace(parts[at].kernel, **changes))  # type: ignore[type-var]
        return replace(plan, communications=tuple(parts))

    return change


def without(plan: Plan) -> Plan:
    at = next(i for i, c in enumerate(plan.communications) if c.kernel is not None)
    parts = [replace(c, kernel=None) if i == at else c for i, c in enumerate(plan.communications)]
    return replace(plan, communications=tuple(parts))


def holding(plan: Plan) -> Plan:
    less = {
        **plan.prediction.memory_bytes,
        KERNELS_BUFFERS: plan.prediction.memory_bytes[KERNELS_BUFFERS] - 128,
    }
    return replace(plan, prediction=replace(plan.prediction, memory_bytes=less))


MUTANTS: dict[str, Change] = {
    "saves more": kernel("moe_dispatch", saved_s=1.0),
    "saves less": kernel("moe_combine", saved_s=1e-12),
    "another kernel": kernel("moe_dispatch", name="moe_combine"),
    "of another node": kernel("moe_combine", node="model.layers.{0}.mlp.experts/nothing/forward/0"),
    "as it runs again": kernel("moe_dispatch", again=True),
    "in chunks": kernel("moe_dispatch", num_chunks=2),
    "one of them not": without,
    "less is shared": holding,
}


@pytest.mark.parametrize("change", [pytest.param(m, id=n) for n, m in MUTANTS.items()])
def test_a_plan_whose_routes_are_changed_is_not_certified(change: Change) -> None:
    plan = change(planned())
    found = certify(built()[2], plan, profile())
    assert not found.ok and {f.claim for f in found.findings} & {"kernels", "memory"}, str(found)


STAGES: dict[int, dict[str, Any]] = {1: {}, 2: {"schedule": "interleaved_1f1b", "chunks": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("chunks", STAGES)
def test_the_stages_of_a_rank_share_the_memory_of_their_routes(chunks: int) -> None:
    model, batch = zoo_small.mixtral(num_layers=2 * chunks)
    asked = (
        expert_parallel("expert", tokens="dispatched"),
        pipeline("pp", microbatches=2, **STAGES[chunks]),
    )
    mesh = Mesh({"pp": 2, "expert": 2})
    made = plan_model(model, mesh, example_inputs=batch, hardware=profile(), constraints=asked)[
        1
    ].plan
    assert made.pipeline is not None
    held = [stage.prediction.memory_bytes[KERNELS_BUFFERS] for stage in made.pipeline.stages]
    assert all(routed(stage) == own(stage) != [] for stage in made.pipeline.stages)
    assert len(set(held)) == 1 and made.prediction.memory_bytes[KERNELS_BUFFERS] == held[0]
    assert autopar.verify(made, model, batch).ok
    found = autopar.check(made, model, batch, hardware=profile())
    assert found.ok, str(found)


def test_the_cost_of_a_runner_up_includes_the_route_of_the_chosen_strategy() -> None:
    """Otherwise, other strategies would seem faster than the plan."""
    plan = make_plan(built()[2], LINE, profile(), PlanOptions(gap=0.0)).plan
    sending = {c.node for c in routed(plan)}
    deltas = [
        e.runner_up.delta_s
        for e in plan.entries
        if e.runner_up is not None and e.nodes[0].node in sending
    ]
    assert deltas and min(deltas) >= -1e-9
