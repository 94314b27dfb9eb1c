"""Stages of a model that returns no loss: forward of all microbatches, then backward from losses of
the full outputs; and forward only. Outputs and gradients match the plain model, memory and time
match the plan, and changed plans are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import no_loss
import pytest
import torch
from torch import nn

import autopar
from autopar import constraints as asked
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.constraints import Constraint
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.priced import output_broadcast_s
from autopar.errors import AutoparError, ConstraintError, VerificationError
from autopar.planner import Planned
from autopar.plans import Plan, forward_load
from autopar.program.executor import UnusedGradients
from autopar.program.program import Microbatches

TOLERANCE = 1e-6  # parts of the models compute in float32
MESH = Mesh({"stage": 2, "data": 2})


@cache
def built(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    made: tuple[nn.Module, dict[str, Any]] = (
        no_loss.layers(dropout=0.2) if kind == "layers dropout" else getattr(no_loss, kind)()
    )
    return made


@cache
def planned(
    kind: str, mesh: Mesh, constraints: Sequence[Constraint], inference: bool = False
) -> Planned:
    model, batch = built(kind)
    options: dict[str, Any] = {"hardware": "cpu-gloo", "inference": inference}
    return plan_model(model, mesh, example_inputs=batch, constraints=constraints, **options)[1]


def holds(kind: str, plan: Plan) -> None:
    model, batch = built(kind)
    again = Plan.loads(plan.dumps())
    assert again == plan
    certificate = autopar.check(again, model, batch)
    assert certificate.ok, certificate.findings
    verified = autopar.verify(again, model, batch, tolerance=TOLERANCE)
    trained = not plan.options["inference"]
    assert verified.loss is None and verified.outputs
    assert verified.gradients.keys() == (
        dict(model.named_parameters()).keys() if trained else set()
    )


@pytest.mark.parametrize("inference", [False, True], ids=["trained", "forward alone"])
@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_any_number_of_microbatches_without_a_loss_matches_the_plain_model(
    num: int, inference: bool
) -> None:
    plan = planned("layers", MESH, (asked.pipeline("stage", microbatches=num),), inference).plan
    holds("layers", plan)
    assert plan.pipeline is not None
    assert (plan.pipeline.schedule, plan.pipeline.num_in_flight) == ("gpipe", (num, num))
    waits = (
        "all forward passes run first (GPipe), because backward needs a loss that is computed"
        " outside the model"
    )
    assert ("forward only" if inference else waits) in plan.proof.covers


@pytest.mark.parametrize(
    ("kind", "constraints"),
    [
        ("layers dropout", (asked.pipeline("stage", microbatches=2),)),
        (
            "llama",
            (asked.pipeline("stage", microbatches=2), asked.tensor_parallel("1d", axes="data")),
        ),
        ("gpt2", (asked.pipeline("stage", microbatches=2), asked.fsdp(axes="data"))),
        ("bert", (asked.pipeline("stage", microbatches=2), asked.ddp(axes="data"))),
        ("convolutions", (asked.pipeline("stage"),)),
    ],
    ids=["dropout", "llama heads", "tied fsdp", "bert ddp", "coupled"],
)
def test_stages_without_a_loss_match_the_plain_model_under_named_plans(
    kind: str, constraints: tuple[Constraint, ...]
) -> None:
    plan = planned(kind, MESH, constraints).plan
    holds(kind, plan)
    assert plan.pipeline is not None and plan.pipeline.num_microbatches == (
        1 if kind == "convolutions" else 2
    )


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_inference_runs_in_stages_of_every_kind(schedule: str) -> None:
    plan = planned(
        "layers",
        Mesh({"stage": 2}),
        (asked.pipeline("stage", microbatches=2, schedule=schedule),),
        inference=True,
    ).plan
    holds("layers", plan)
    assert plan.pipeline is not None and len(plan.pipeline.stages) == (
        4 if schedule == "interleaved_1f1b" else 2
    )


def test_sequential_microbatches_of_inference_need_less_memory() -> None:
    torch.manual_seed(0)
    model, batch, mesh = (
        nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4)),
        (torch.randn(64, 8),),
        Mesh({"a": 1}),
    )
    options: dict[str, Any] = {"example_inputs": batch, "hardware": "cpu-gloo", "inference": True}
    whole = autopar.plan(model, mesh, **options)
    budget = int(whole.prediction.peak_bytes * 0.6)
    plan = autopar.plan(model, mesh, **options, memory_bytes=budget)
    assert (
        plan.pipeline is not None
        and plan.pipeline.num_microbatches > 1
        and plan.prediction.peak_bytes <= budget
    )
    assert autopar.check(plan, model, batch).ok and autopar.verify(plan, model, batch).ok
    module = autopar.compile(model, mesh, example_inputs=batch, plan=plan)
    assert torch.equal(module(*batch), model(*batch))


def test_the_step_is_that_of_the_schedule_plus_the_broadcast_of_outputs() -> None:
    plan = planned("layers", MESH, (asked.pipeline("stage", microbatches=4),)).plan
    pipeline = plan.pipeline
    assert pipeline is not None
    model, batch = built("layers")
    outputs = model(**batch)
    assert pipeline.handed_bytes == sum(x.numel() * x.element_size() for x in outputs.values())
    link = HardwareProfile.load("cpu-gloo").links[MESH.link(0)]
    assert pipeline.handed_s == pytest.approx(
        link.latency_s + pipeline.handed_bytes / link.bandwidth_bytes_per_s
    )
    times = [stage.prediction.step_s for stage in pipeline.stages]
    forward = [forward_load(stage).least_s(stage.overlap.slowdown) for stage in pipeline.stages]
    slowest = max(forward) + max(both - each for both, each in zip(times, forward, strict=True))
    assert plan.prediction.step_s == pytest.approx(3 * slowest + sum(times) + pipeline.handed_s)
    assert "sent to all stages" in str(autopar.explain(plan))


def test_the_broadcast_of_outputs_takes_one_latency_per_stage() -> None:
    profile = HardwareProfile.load("cpu-gloo")
    for ranks in (2, 4):
        mesh = Mesh({"stage": ranks})
        link = profile.links[mesh.link(0)]
        wanted = (ranks - 1) * link.latency_s + 4096 / link.bandwidth_bytes_per_s
        assert output_broadcast_s("stage", mesh, profile, 4096) == pytest.approx(wanted)
    assert (
        output_broadcast_s("", mesh, profile, 4096)
        == output_broadcast_s("stage", mesh, profile, 0)
        == 0.0
    )


@pytest.mark.slow
def test_the_value_of_faster_links_between_stages_is_that_of_planning_again() -> None:
    model, batch = built("layers")
    plan = planned("layers", MESH, (asked.pipeline("stage", microbatches=2),)).plan
    same = autopar.what_if(plan, model, batch)
    assert same.step_s == pytest.approx(plan.prediction.step_s, rel=1e-9)
    wider = autopar.what_if(plan, model, batch, mesh=Mesh({"stage": 2, "data": 4}))
    assert wider.step_s >= plan.pipeline.handed_s  # type: ignore[union-attr]


@pytest.mark.slow
def test_changed_plans_of_stages_without_a_loss_are_refused() -> None:
    plan = planned("layers", MESH, (asked.pipeline("stage", microbatches=2),)).plan
    pipeline = plan.pipeline
    assert pipeline is not None
    model, batch = built("layers")
    for changed in (
        replace(pipeline, handed_bytes=0),
        replace(pipeline, handed_s=pipeline.handed_s / 2),
        replace(pipeline, num_in_flight=(2, 1)),
    ):
        assert not autopar.check(replace(plan, pipeline=changed), model, batch).ok
    faster = replace(plan.prediction, step_s=plan.prediction.step_s - pipeline.handed_s)
    assert not autopar.check(replace(plan, prediction=faster), model, batch).ok
    proof = replace(plan.proof, bound_s=plan.proof.bound_s * 1.5)
    assert not autopar.check(replace(plan, proof=proof), model, batch).ok


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {
                "constraints": (
                    asked.pipeline("stage", schedule="interleaved_1f1b", microbatches=2),
                )
            },
            "no backward can run between forwards",
        ),
        (
            {"constraints": (asked.pipeline("stage"),), "outputs": "dtensor"},
            "the model returns no loss in stages",
        ),
        ({"num_microbatches": 2}, "backward waits for a loss that is computed outside the model"),
    ],
    ids=["interleaved", "split outputs", "one after another"],
)
def test_impossible_stages_without_a_loss_are_refused(options: dict[str, Any], said: str) -> None:
    model, batch = built("layers")
    with pytest.raises(ConstraintError, match=said) as refused:
        autopar.plan(model, MESH, example_inputs=batch, hardware="cpu-gloo", **options)
    assert isinstance(refused.value, AutoparError) and refused.value.remedy


def test_parameters_reached_only_by_absent_outputs_are_known() -> None:
    cuts = asked.pipeline("stage", microbatches=2, cuts=["layers.2"])
    program = planned("layers", Mesh({"stage": 2}), (cuts,)).program
    every = {p.name for p in program.trace.parameters}
    (crossing,) = (t.name for t in program.stages[0].outputs if t.crosses)
    some = UnusedGradients.of(program, ["early", "size", "total", "scale"])
    assert some == UnusedGradients(
        frozenset(),
        (frozenset({"early"}), frozenset({"size", "total", "scale"})),
        (frozenset(), frozenset()),
    )
    assert UnusedGradients.of(program, ["logits"]).parameters == {"head.weight", "head.bias"}
    second = UnusedGradients.of(program, ["logits", "size", "total"])
    assert second.parameters == {
        name for name in every if name.startswith(("head", "layers.2", "layers.3"))
    }
    assert (second.tangents[0], second.gradients[1]) == ({crossing}, {crossing})
    assert (
        UnusedGradients.of(program, ["logits", "early", "size", "total", "scale"]).parameters
        == every
    )


@pytest.mark.parametrize("kind", ["layers dropout", "layers"])
def test_wrong_tangents_of_microbatches_are_detected(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(kind, MESH, (asked.pipeline("stage", microbatches=2),)).plan
    right = Microbatches.tangents

    def wrong(how: Microbatches, path: str, whole: torch.Tensor) -> list[torch.Tensor]:
        return [x * (2 if path == "size" else 1) for x in right(how, path, whole)]

    monkeypatch.setattr(Microbatches, "tangents", wrong)
    with pytest.raises(VerificationError):
        autopar.verify(plan, *built(kind), tolerance=TOLERANCE)


def test_a_schedule_that_does_not_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is consistent in all other respects."""
    model, batch = built("layers")
    with monkeypatch.context() as patched:
        patched.setattr(
            "autopar.planner.pipeline.pipeline_request.in_order",
            lambda pipelined, *_, **__: pipelined,
        )
        options: dict[str, Any] = {
            "constraints": (asked.pipeline("stage", microbatches=2),),
            "hardware": "cpu-gloo",
        }
        plan = autopar.plan(model, MESH, example_inputs=batch, **options)
    assert plan.pipeline is not None and plan.pipeline.schedule == "1f1b"
    (finding,) = autopar.check(plan, model, batch).findings
    assert "no backward runs between forwards" in str(finding)


def test_a_tangent_is_added_last() -> None:
    model, batch = built("layers")
    trace = capture(model, (), batch)
    tangent = next(o.tangent for o in trace.outputs if o.path == "early")
    (total,) = trace.node(tangent).users
    assert total.args[1] is trace.node(tangent)
    assert len(total.users) > 1 or next(iter(total.users)).target is not torch.ops.aten.add.Tensor
