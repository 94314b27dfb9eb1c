"""Collective-overlap kernels in pipelines: tensor-parallel stages match the model, and changed
plans are refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.api.planning import plan_model
from autopar.api.tracing import trace_part
from autopar.api.what_if import what_if
from autopar.capture import capture
from autopar.constraints import pipeline
from autopar.cost import kernel_offers as offers
from autopar.cost.price import price
from autopar.planner import Planned
from autopar.plans import KERNELS_BUFFERS, Communication, Plan
from autopar.program.interpreter import Ranks
from autopar.program.lockstep import run_lockstep
from autopar.sharding import classes_of
from autopar.stages import cut_trace
from tests.laws.test_kernel_memory import Sharing, needs_kernels
from tests.laws.test_kernel_microbatches import built
from tests.laws.test_kernel_plans import SLOW, Change, kernel, kernels

MESH, NUM = autopar.Mesh({"stage": 2, "gpu": 2}), 2
WITHOUT = replace(SLOW, kernels={}, hash="without")


NEAR = 0.05  # under a budget, the last percents of the gap take most of the time and are not tested


@cache
def made(schedule: str = "1f1b", hardware: Any = SLOW, budget: int | None = None) -> Planned:
    model, batch = built()
    wish = pipeline("stage", microbatches=NUM, schedule=schedule)
    near = {} if budget is None else {"gap": NEAR}
    return plan_model(
        model,
        MESH,
        example_inputs=batch,
        hardware=hardware,
        constraints=(wish,),
        memory_bytes=budget,
        **near,
    )[1]


def stages_of(plan: Plan) -> tuple[Plan, ...]:
    assert plan.pipeline is not None and plan.pipeline.axis == "stage"
    return plan.pipeline.stages


def crosses(c: Communication) -> bool:
    return c.node.endswith(("/input", "/output"))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_with_both_kernels_match_the_model_on_every_rank(
    schedule: str,
) -> None:
    plan = made(schedule).plan
    for stage in stages_of(plan):
        assert {c.kernel.name for c in kernels(stage) if c.kernel} == set(SLOW.kernels)
    report = autopar.verify(plan, *built())
    assert report.ok, str(report)


def test_a_product_gathers_the_gradient_received_from_the_next_stage() -> None:
    first, last = stages_of(made().plan)
    assert any(crosses(c) and c.phase == "backward" for c in kernels(first))
    assert not any(crosses(c) and c.phase == "backward" for c in kernels(last)), (
        "what forward received has slack in backward"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_plan_with_kernels_in_stages_is_certified_with_its_bound_over_cuts(schedule: str) -> None:
    plan = made(schedule).plan
    assert Plan.loads(plan.dumps()) == plan
    found = autopar.check(plan, *built(), hardware=SLOW)
    assert found.ok, str(found)
    assert (
        0.99 * plan.prediction.step_s
        <= plan.proof.certified_bound_s
        <= plan.proof.bound_s
        <= plan.prediction.step_s
    )


@pytest.mark.slow
def test_a_plan_with_kernels_in_stages_is_faster_than_any_plan_without_them() -> None:
    plan, other = made().plan, made(hardware=WITHOUT).plan
    assert plan.prediction.step_s < other.proof.bound_s * (1 - 0.05)
    assert plan.prediction.in_kernels_s == pytest.approx(
        NUM * max(s.prediction.in_kernels_s for s in stages_of(plan))
    )
    assert what_if(plan, *built(), hardware=SLOW).step_s == pytest.approx(plan.prediction.step_s)
    assert "of what their chunks allow" in " ".join(stages_of(plan)[0].proof.covers)
    num = sum(len(c.instances) for stage in stages_of(plan) for c in kernels(stage))
    assert f"{num} collective-overlap kernels save" in str(autopar.explain(plan)).replace("\n", " ")


@needs_kernels
def test_the_shared_memory_of_kernels_in_stages_is_predicted_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, (model, batch) = made().program, built()
    tensors = dict(model.named_parameters()), dict(model.named_buffers())
    apart = run_lockstep(program, *tensors, batch)
    sharing: list[tuple[Ranks, Sharing]] = []  # by stage, in the order of their first run

    def run(ranks: Ranks, phase: str, node: fx.Node, env: Any) -> list[Any]:
        if not any(known is ranks for known, _ in sharing):
            sharing.append((ranks, Sharing()))
        return next(peers for known, peers in sharing if known is ranks).run(
            ranks, phase, node, env
        )

    monkeypatch.setattr(Ranks, "_run_kernel", run)
    found = run_lockstep(program, *tensors, batch)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, apart.gradients[name])
    for stage, (_, peers) in zip(stages_of(made().plan), sharing, strict=True):
        assert peers.held_bytes(0, 0) == stage.prediction.memory_bytes[KERNELS_BUFFERS] > 0


@cache
def deep() -> tuple[nn.Module, dict[str, Any]]:
    """Return a Llama with four layers, and eight samples of 16 tokens."""
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config, ids = (
        AutoConfig.for_model("llama", **sizes, vocab_size=64, use_cache=False),
        torch.randint(0, 64, (8, 16)),
    )
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


@cache
def interleaving(hardware: Any = SLOW, budget: int | None = None) -> Planned:
    """Return a plan with two stages per rank."""
    model, batch = deep()
    wish = pipeline("stage", microbatches=4, schedule="interleaved_1f1b")
    near = {} if budget is None else {"gap": NEAR}
    return plan_model(
        model,
        MESH,
        example_inputs=batch,
        hardware=hardware,
        constraints=(wish,),
        memory_bytes=budget,
        **near,
    )[1]


@pytest.mark.slow
def test_several_stages_of_a_rank_share_the_memory_of_their_kernels() -> None:
    plan = interleaving().plan
    assert plan.pipeline is not None and plan.pipeline.num_chunks == 2
    for stage in stages_of(plan):
        assert {c.kernel.name for c in kernels(stage) if c.kernel} == set(SLOW.kernels)
    assert plan.prediction.step_s < interleaving(WITHOUT).plan.prediction.step_s
    assert autopar.verify(plan, *deep()).ok
    found = autopar.check(plan, *deep(), hardware=SLOW)
    assert found.ok, str(found)
    assert what_if(plan, *deep(), hardware=SLOW).step_s == pytest.approx(plan.prediction.step_s)


@pytest.mark.slow  # test_routes always tests the shared memory of their routes
@needs_kernels
def test_the_shared_memory_of_the_stages_of_a_rank_is_allocated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, (model, batch), plan = interleaving().program, deep(), interleaving().plan
    number: dict[int, int] = {}  # number of a stage, by its runner, in the order of their first run
    sharing = [Sharing(), Sharing()]  # by rank

    def run(ranks: Ranks, phase: str, node: fx.Node, env: Any) -> list[Any]:
        return sharing[number.setdefault(id(ranks), len(number)) % 2].run(ranks, phase, node, env)

    monkeypatch.setattr(Ranks, "_run_kernel", run)
    run_lockstep(program, dict(model.named_parameters()), dict(model.named_buffers()), batch)
    held = [peers.held_bytes(0, 0) for peers in sharing]
    stages = [stage.prediction.memory_bytes[KERNELS_BUFFERS] for stage in stages_of(plan)]
    fullest = max(range(2), key=lambda rank: plan.pipeline.rank_bytes[rank] if plan.pipeline else 0)
    assert plan.prediction.memory_bytes[KERNELS_BUFFERS] == held[fullest] < sum(stages[fullest::2])


@pytest.mark.slow  # always runs with one stage per rank
def test_the_stages_of_a_rank_with_kernels_fit_the_budget_and_are_certified() -> None:
    free = interleaving().plan.prediction
    budget = free.peak_bytes - free.memory_bytes[KERNELS_BUFFERS] // 2
    plan = interleaving(budget=budget).plan
    assert (
        plan.pipeline is not None
        and max(plan.pipeline.rank_bytes) <= budget
        and plan.prediction.in_kernels_s > 0
    )
    found = autopar.check(plan, *deep(), hardware=SLOW)
    assert found.ok, str(found)


@pytest.mark.slow  # test_interleaved always tests changed claims of the memory of a rank
def test_a_too_small_claim_of_shared_memory_of_a_rank_is_detected() -> None:
    plan = interleaving().plan
    less = {
        **plan.prediction.memory_bytes,
        KERNELS_BUFFERS: plan.prediction.memory_bytes[KERNELS_BUFFERS] // 2,
    }
    found = autopar.check(
        replace(plan, prediction=replace(plan.prediction, memory_bytes=less)),
        *deep(),
        hardware=SLOW,
    )
    assert any(f.claim == "memory" for f in found.findings), str(found)


@pytest.mark.slow
def test_each_stage_with_kernels_fits_the_budget_and_is_certified() -> None:
    free = made().plan.prediction
    budget = free.peak_bytes - free.memory_bytes[KERNELS_BUFFERS] // 2
    plan = made(budget=budget).plan
    assert all(stage.prediction.peak_bytes <= budget for stage in stages_of(plan))
    found = autopar.check(plan, *built(), hardware=SLOW)
    assert found.ok, str(found)


# --- changed claims are refused
# --------------------------------------------------------------------------------------------------


def in_stage(number: int, change: Change) -> Change:
    def changed(plan: Plan) -> Plan:
        stages = list(stages_of(plan))
        stages[number] = change(stages[number])
        assert plan.pipeline is not None
        return replace(plan, pipeline=replace(plan.pipeline, stages=tuple(stages)))

    return changed


MUTANTS: dict[str, Change] = {
    "a kernel at a border saves more": in_stage(0, kernel(crosses, saved_s=1e-3)),
    "a kernel in more chunks": in_stage(1, kernel(lambda c: not crosses(c), num_chunks=8)),
    "a stage saves nothing": in_stage(
        1, lambda plan: replace(plan, prediction=replace(plan.prediction, in_kernels_s=0.0))
    ),
    "the step saves more": lambda plan: replace(
        plan, prediction=replace(plan.prediction, in_kernels_s=1.0)
    ),
    "a bound that is too high": lambda plan: replace(
        plan, proof=replace(plan.proof, certified_bound_s=plan.proof.objective_s * 1.01)
    ),
}


@pytest.mark.parametrize("change", [pytest.param(m, id=n) for n, m in MUTANTS.items()])
def test_one_changed_claim_of_kernels_in_stages_is_detected(change: Change) -> None:
    plan = change(made().plan)
    assert plan != made().plan
    found = autopar.check(plan, *built(), hardware=SLOW)
    assert not found.ok and {f.claim for f in found.findings} & {
        "kernels",
        "time",
        "bound",
        "layouts",
    }, str(found)


def test_a_stage_with_kernels_that_the_whole_lacks_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted fault treats crossing tensors as stored ones: another factor always exists, and
    so does the gathered operand of a kernel in backward."""
    all_of = offers._Offers.all

    def generous(self: Any) -> Any:
        nodes = self.index.nodes
        made_here = {
            name: phase
            for name, phase in self.index.phases.items()
            if nodes[name].op == "call_function"
        }
        self.index = replace(self.index, phases=made_here)
        self.sources = [replace(source, crosses=False) for source in self.sources]
        return all_of(self)

    plain = [sum(map(len, offers_of(stage).values())) for stage in range(2)]
    monkeypatch.setattr(offers._Offers, "all", generous)
    assert sum(sum(map(len, offers_of(stage).values())) for stage in range(2)) > sum(plain)


def offers_of(number: int) -> Any:
    """Return the available kernels of a stage of the plan, whose inputs may have any layout."""
    model, batch = built()
    part, _ = trace_part(model, capture(model, (), batch), (), batch, NUM)
    pipe, left = made().plan.pipeline, MESH.without("stage")
    assert pipe is not None
    stage = cut_trace(part, pipe.positions).stages[number]
    return price(
        stage, classes_of(stage, left.shape), left, SLOW, budget_bytes=2**60, num_microbatches=NUM
    ).problem.kernels
