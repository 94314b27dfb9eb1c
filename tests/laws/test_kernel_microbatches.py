"""Collective-overlap kernels in plans with several microbatches: they run for each microbatch as
predicted, and changed claims are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api.planning import plan_model
from autopar.api.what_if import what_if
from autopar.planner import Planned
from autopar.plans import KERNELS_BUFFERS, Plan
from autopar.program.interpreter import Ranks
from autopar.program.lockstep import run_lockstep
from autopar.program.program import Program
from tests.laws.test_kernel_memory import Sharing, needs_kernels
from tests.laws.test_kernel_plans import LINE, SLOW, kernels, narrow

NUM = 2


@cache
def built() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = narrow()
    return model, {name: torch.cat([x, x.flip(0)]) for name, x in batch.items()}


@cache
def made(budget: int | None = None) -> Planned:
    model, batch = built()
    return plan_model(
        model, LINE, example_inputs=batch, hardware=SLOW, num_microbatches=NUM, memory_bytes=budget
    )[1]


def stage_of(plan: Plan) -> Plan:
    assert plan.pipeline is not None and not plan.pipeline.axis
    return plan.pipeline.stages[0]


@pytest.mark.slow
def test_microbatches_with_both_kernels_match_the_model_on_every_rank() -> None:
    plan, stage = made().plan, stage_of(made().plan)
    assert {c.kernel.name for c in kernels(stage) if c.kernel} == set(SLOW.kernels)
    assert {c.phase for c in kernels(stage)} == {
        "forward",
        "backward",
    }, "what is done once a step is no kernel's"
    report = autopar.verify(plan, *built())
    assert report.ok, str(report)


@pytest.mark.slow
def test_the_kernels_of_a_microbatch_count_once_per_microbatch() -> None:
    plan, stage = made().plan, stage_of(made().plan)
    saved_s = sum(len(c.instances) * c.kernel.saved_s for c in kernels(stage) if c.kernel)
    assert stage.prediction.in_kernels_s == pytest.approx(saved_s) and saved_s > 0
    assert plan.prediction.in_kernels_s == pytest.approx(NUM * saved_s)
    assert plan.prediction.step_s == pytest.approx(NUM * stage.prediction.step_s)
    without = what_if(plan, *built(), hardware=replace(SLOW, kernels={}, hash="without")).step_s
    assert what_if(plan, *built(), hardware=SLOW).step_s == pytest.approx(plan.prediction.step_s)
    assert without == pytest.approx(plan.prediction.step_s + NUM * saved_s)


@pytest.mark.slow
def test_kernels_shorten_the_step_of_microbatches_and_the_plan_lists_them() -> None:
    model, batch = built()
    plain = replace(SLOW, kernels={}, hash="without")
    other = plan_model(model, LINE, example_inputs=batch, hardware=plain, num_microbatches=NUM)[
        1
    ].plan
    assert made().plan.prediction.step_s < other.prediction.step_s
    assert "of what their chunks allow" in " ".join(stage_of(made().plan).proof.covers)
    num = sum(len(c.instances) for c in kernels(stage_of(made().plan)) if c.kernel)
    assert num > 10 and f"{num} collective-overlap kernels save" in str(
        autopar.explain(made().plan)
    )


def test_a_plan_with_kernels_in_microbatches_is_certified_and_round_trips() -> None:
    plan = made().plan
    assert Plan.loads(plan.dumps()) == plan
    found = autopar.check(plan, *built(), hardware=SLOW)
    assert found.ok, str(found)
    assert plan.proof.certified_bound_s <= plan.proof.bound_s <= plan.prediction.step_s


def records_of(program: Program) -> Counter[tuple[str, str, int]]:
    model, batch = built()
    found = run_lockstep(
        program, dict(model.named_parameters()), dict(model.named_buffers()), batch
    )
    return Counter((phase, c.kind, c.axis) for phase, _, c in found.records)


def test_listed_kernels_run_once_per_microbatch_or_once_per_step() -> None:
    plan, program = made().plan, made().program
    listed: Counter[tuple[str, str, int]] = Counter()
    for c in stage_of(plan).communications:
        listed[c.phase, c.collective.kind, c.collective.axis] += len(c.instances) * (
            1 if c.phase == "step" else NUM
        )
    assert records_of(program) == listed


@needs_kernels
def test_the_shared_memory_of_kernels_in_microbatches_is_predicted_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, (model, batch), sharing = made().program, built(), Sharing()
    tensors = dict(model.named_parameters()), dict(model.named_buffers())
    apart = run_lockstep(program, *tensors, batch)
    monkeypatch.setattr(Ranks, "_run_kernel", lambda *args: sharing.run(*args))
    found = run_lockstep(program, *tensors, batch)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, apart.gradients[name])
    held = made().plan.prediction.memory_bytes[KERNELS_BUFFERS]
    assert sharing.held_bytes(0, 0) == held > 0 and len(sharing.peers) == 1


def test_a_plan_with_kernels_in_microbatches_fits_its_budget_and_is_certified() -> None:
    free = made().plan
    budget = free.prediction.peak_bytes - free.prediction.memory_bytes[KERNELS_BUFFERS] // 2
    plan = made(budget).plan
    assert plan.prediction.peak_bytes <= budget
    found = autopar.check(plan, *built(), hardware=SLOW)
    assert found.ok, str(found)


# --- changed claims are refused
# --------------------------------------------------------------------------------------------------

Change = Callable[[Plan], Plan]


def in_stage(change: Change) -> Change:
    def changed(plan: Plan) -> Plan:
        assert plan.pipeline is not None
        return replace(plan, pipeline=replace(plan.pipeline, stages=(change(stage_of(plan)),)))

    return changed


def kernel(**changes: object) -> Change:
    def change(plan: Plan) -> Plan:
        at = next(i for i, c in enumerate(plan.communications) if c.kernel is not None)
        parts = list(plan.communications)
        assert parts[at].kernel is not None
        parts[at] = replace(parts[at], kernel=replace(parts[at].kernel, **changes))  # type: ignore[type-var]
        return replace(plan, communications=tuple(parts))

    return change


def predicted(**changes: float) -> Change:
    return lambda plan: replace(plan, prediction=replace(plan.prediction, **changes))


def of_the_step(plan: Plan) -> Plan:
    """Return a plan that claims that its kernels run once per step."""
    at = next(i for i, c in enumerate(plan.communications) if c.kernel is not None)
    parts = [replace(c, phase="step") if i == at else c for i, c in enumerate(plan.communications)]
    return replace(plan, communications=tuple(parts))


def fewer_bytes(plan: Plan) -> Plan:
    memory = plan.prediction.memory_bytes
    return replace(
        plan,
        prediction=replace(
            plan.prediction, memory_bytes={**memory, KERNELS_BUFFERS: memory[KERNELS_BUFFERS] - 128}
        ),
    )


MUTANTS: dict[str, Change] = {
    "a kernel saves more": in_stage(kernel(saved_s=1e-3)),
    "a kernel in more chunks": in_stage(kernel(num_chunks=8)),
    "a stage saves what is not said": in_stage(predicted(in_kernels_s=0.0)),
    "the step saves what a microbatch does": lambda plan: predicted(
        in_kernels_s=stage_of(plan).prediction.in_kernels_s
    )(plan),
    "what is done once a step in a kernel": in_stage(of_the_step),
    "less is shared": in_stage(fewer_bytes),
}


@pytest.mark.parametrize("change", [pytest.param(m, id=n) for n, m in MUTANTS.items()])
def test_one_changed_claim_of_kernels_in_microbatches_is_detected(change: Change) -> None:
    plan = change(made().plan)
    assert plan != made().plan
    found = autopar.check(plan, *built(), hardware=SLOW)
    assert not found.ok and {f.claim for f in found.findings} & {
        "kernels",
        "time",
        "memory",
        "layouts",
        "emission",
        "moves",
    }, str(found)
