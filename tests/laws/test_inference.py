"""Inference plans, without gradients and optimizer state, match the plain model with less time and
memory than a training step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import no_loss
import pytest
import torch
import zoo_small
from measured import measured_peak
from torch import nn

import autopar
from autopar import constraints as asked
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.constraints import Constraint
from autopar.core.mesh import Mesh
from autopar.errors import InfeasibleError
from autopar.planner import Planned
from autopar.program.peak_memory import trace_peak

SQUARE = Mesh({"a": 2, "b": 2})
TOLERANCE = 1e-6  # parts of the models compute in float32
PLANS: dict[str, Sequence[Constraint]] = {
    "free": (),
    "fsdp": (asked.fsdp(),),
    "heads": (asked.tensor_parallel("1d", axes="b"),),
    "grid": (asked.tensor_parallel("2d", axes=("a", "b")),),
}


@cache
def built(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    of = zoo_small if hasattr(zoo_small, kind) else no_loss
    model, batch = getattr(of, kind)()
    return model.eval(), batch


@cache
def planned(kind: str, plan: str, **options: Any) -> Planned:
    model, batch = built(kind)
    options = {"inference": True, "hardware": "cpu-gloo", **options}
    return plan_model(model, SQUARE, example_inputs=batch, constraints=PLANS[plan], **options)[1]


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", "free"),
        ("llama", "heads"),
        ("gpt2", "fsdp"),
        ("gpt2", "grid"),
        ("convolutions", "free"),
        ("convolutions", "fsdp"),
        ("bert", "heads"),
        ("several", "free"),
        ("several", "fsdp"),
        ("mixtral", "free"),
        ("vit", "fsdp"),
    ],
)
def test_an_inference_plan_matches_the_plain_model(kind: str, plan: str) -> None:
    model, batch = built(kind)
    found = planned(kind, plan).plan
    again = autopar.Plan.loads(found.dumps())
    assert again == found and again.options["inference"]
    certificate = autopar.check(again, model, batch)
    assert certificate.ok, certificate.findings
    verified = autopar.verify(again, model, batch, tolerance=TOLERANCE)
    assert not verified.gradients and verified.outputs
    assert "inference" in next(iter(autopar.explain(again).summary()))


@pytest.mark.parametrize("kind", ["llama", "convolutions"])
def test_an_inference_plan_has_no_backward_and_no_memory_for_it(kind: str) -> None:
    model, batch = built(kind)
    here = planned(kind, "fsdp")
    step = plan_model(
        model, SQUARE, example_inputs=batch, constraints=PLANS["fsdp"], hardware="cpu-gloo"
    )[1]
    assert here.program.stages[0].num_saved == 0 and not any(
        t.has_gradient for t in (*here.program.stages[0].parameters, *here.program.outputs)
    )
    assert [
        n.op for n in here.program.stages[0].backward.graph.nodes if n.op == "call_function"
    ] == []
    held = here.plan.prediction.memory_bytes
    assert (
        held.get("optimizer", 0)
        == held.get("gradients", 0)
        == 0
        < held["parameters"]
        == step.plan.prediction.memory_bytes["parameters"]
    )
    assert here.plan.prediction.peak_bytes < step.plan.prediction.peak_bytes
    assert here.plan.prediction.compute_s < 0.6 * step.plan.prediction.compute_s


@pytest.mark.parametrize(
    ("kind", "plan"), [("llama", "heads"), ("convolutions", "fsdp"), ("gpt2", "grid")]
)
def test_the_predicted_peak_of_inference_equals_that_of_real_tensors(kind: str, plan: str) -> None:
    program = planned(kind, plan).stage_program()
    peak, _ = measured_peak(program, built(kind)[1], train=False)
    assert trace_peak(program, train=False).peak_bytes == peak == trace_peak(program).peak_bytes


@pytest.mark.slow
def test_a_model_that_does_not_fit_in_training_fits_in_inference() -> None:
    model, batch = built("llama")
    within = 4 * sum(
        p.numel() for p in model.parameters()
    )  # replicated on one device, where a training step needs four times as much memory
    options = {
        "example_inputs": batch,
        "hardware": "cpu-gloo",
        "memory_bytes": int(1.5 * within),
        "outputs": "loss",
    }
    assert (
        autopar.plan(model, Mesh(1), inference=True, **options).prediction.memory_bytes[
            "parameters"
        ]
        == within
    )
    with pytest.raises(InfeasibleError):
        autopar.plan(model, Mesh(1), num_microbatches=1, **options)


@pytest.mark.slow
def test_a_frozen_model_is_planned_for_inference() -> None:
    model, batch = built("gpt2")
    frozen = copy.deepcopy(model).requires_grad_(False)
    plan = autopar.plan(frozen, SQUARE, example_inputs=batch, hardware="cpu-gloo")
    assert plan.options["inference"]
    asked_for = planned("gpt2", "free").plan
    assert (plan.prediction.step_s, plan.prediction.peak_bytes) == (
        asked_for.prediction.step_s,
        asked_for.prediction.peak_bytes,
    )


def test_an_inference_plan_with_only_the_loss_does_not_return_logits() -> None:
    plan = planned("llama", "heads", outputs="loss")
    assert [t.name for t in plan.program.outputs] == ["loss"]
    assert autopar.verify(plan.plan, *built("llama"), tolerance=TOLERANCE).loss is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"num_microbatches": 2}, {"constraints": (asked.pipeline("a"),)}],
    ids=["microbatches", "stages"],
)
def test_the_loss_of_microbatches_and_stages_is_weighted_by_label_counts(
    options: dict[str, Any],
) -> None:
    model, batch = built("llama")
    batch = {
        **batch,
        "labels": batch["labels"].masked_fill(
            torch.arange(len(batch["labels"]))[:, None] < 3, -100
        ),
    }
    plan = autopar.plan(
        model,
        SQUARE,
        example_inputs=batch,
        hardware="cpu-gloo",
        inference=True,
        outputs="full",
        **options,
    )
    assert plan.pipeline is not None and plan.options["inference"]
    assert autopar.check(plan, model, batch).ok
    verified = autopar.verify(plan, model, batch, tolerance=TOLERANCE)
    assert verified.loss is not None and verified.outputs and not verified.gradients


@pytest.mark.parametrize("grad", [True, False])
def test_the_transformer_of_torch_is_captured_without_fused_inference_ops(grad: bool) -> None:
    """Without gradients, it would use fused ops."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(4, 6, 16)
    with torch.set_grad_enabled(grad):
        plan = autopar.plan(
            layer,
            SQUARE,
            example_inputs=(x,),
            hardware="cpu-gloo",
            inference=True,
            strict=True,
            constraints=(asked.fsdp(),),
        )
        assert autopar.verify(plan, layer, (x,)).ok
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_requires_grad_flags_of_the_model_are_unchanged() -> None:
    model, batch = built("several")
    trace = capture(model, (), batch, inference=True)
    assert all(p.requires_grad for p in model.parameters())
    assert (
        not any(p.requires_grad or p.gradient for p in trace.parameters)
        and not trace.differentiable
    )
