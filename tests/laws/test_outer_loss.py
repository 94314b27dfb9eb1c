"""Models that return no loss: outputs, and gradients of losses computed from them, match the plain
model under all plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import no_loss
import pytest
import torch
from measured import measured_peak
from torch import nn

import autopar
from autopar import constraints as asked
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.capture.normalize.tangents import tangent_of
from autopar.constraints import Constraint
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import AutoparError, CaptureError, ConstraintError, VerificationError
from autopar.planner import Planned
from autopar.program import lockstep
from autopar.program.peak_memory import trace_peak

SQUARE, THREE = Mesh({"a": 2, "b": 2}), Mesh({"a": 3})
TOLERANCE = 1e-6  # parts of the models compute in float32
PLANS: dict[str, Sequence[Constraint]] = {
    "free": (),
    "ddp": (asked.ddp(),),
    "fsdp": (asked.fsdp(),),
    "heads": (asked.tensor_parallel("1d", axes="b"),),
    "fsdp and heads": (asked.fsdp(axes="a"), asked.tensor_parallel("1d", axes="b")),
}


@cache
def built(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    made: tuple[nn.Module, dict[str, Any]] = getattr(no_loss, kind)()
    return made


@cache
def planned(kind: str, mesh: Mesh, plan: str, outputs: str = "auto") -> Planned:
    model, batch = built(kind)
    return plan_model(
        model,
        mesh,
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=PLANS[plan],
        outputs=outputs,
    )[1]


def holds(kind: str, found: Planned) -> None:
    model, batch = built(kind)
    again = autopar.Plan.loads(found.plan.dumps())
    assert again == found.plan
    certificate = autopar.check(again, model, batch)
    assert certificate.ok, certificate.findings
    verified = autopar.verify(again, model, batch, tolerance=TOLERANCE)
    assert (
        verified.loss is None
        and verified.gradients.keys() == dict(model.named_parameters()).keys()
        and verified.outputs
    )


@pytest.mark.parametrize("outputs", ["full", "dtensor"])
@pytest.mark.parametrize("plan", ["free", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["several", "convolutions", "bert"])
def test_data_parallel_plans_with_an_outer_loss_match_the_plain_model(
    kind: str, plan: str, outputs: str
) -> None:
    holds(kind, planned(kind, SQUARE, plan, outputs))


@pytest.mark.parametrize("outputs", ["full", "dtensor"])
@pytest.mark.parametrize("plan", ["heads", "fsdp and heads"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tensor_parallel_plans_with_an_outer_loss_match_the_plain_model(
    kind: str, plan: str, outputs: str
) -> None:
    holds(kind, planned(kind, SQUARE, plan, outputs))


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_an_indivisible_batch_with_an_outer_loss_matches_the_plain_model(plan: str) -> None:
    holds("several", planned("several", THREE, plan, "dtensor"))


@pytest.mark.slow
def test_requested_full_outputs_are_gathered_by_the_program_and_priced() -> None:
    whole, parts = planned("bert", SQUARE, "ddp"), planned("bert", SQUARE, "ddp", "dtensor")
    assert whole.plan.options["outputs"] == "full"
    assert [str(t.layout) for t in whole.program.outputs] == ["R R"]
    assert [str(t.layout) for t in parts.program.outputs] != ["R R"]
    gathered = [
        c.collective for c in whole.plan.communications if c.collective.kind == "all_gather"
    ]
    assert sum(c.size_in(SQUARE.shape) for c in gathered) > 0
    assert whole.plan.prediction.communication_s > parts.plan.prediction.communication_s


@pytest.mark.parametrize(
    ("kind", "plan"), [("several", "ddp"), ("bert", "fsdp"), ("llama", "heads")]
)
@pytest.mark.parametrize("outputs", ["full", "dtensor"])
def test_the_predicted_peak_with_an_outer_loss_equals_that_of_real_tensors(
    kind: str, plan: str, outputs: str
) -> None:
    program = planned(kind, SQUARE, plan, outputs).stage_program()
    peak, gradients = measured_peak(program, built(kind)[1], "local")
    assert trace_peak(program, outputs="local").peak_bytes == peak
    assert len(gradients) == sum(t.has_gradient for t in program.parameters)


def test_a_tangent_with_permuted_rows_is_detected_by_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = built("several")
    plan = planned("several", SQUARE, "fsdp", "dtensor").plan
    monkeypatch.setattr(
        lockstep, "tangent_of", lambda *border, **how: tangent_of(*border, **how).roll(1, 0)
    )
    with pytest.raises(VerificationError):
        autopar.verify(plan, model, batch)


def test_the_test_tangents_are_deterministic_and_not_constant() -> None:
    first, again = (tangent_of("logits", (4, 3), torch.float64, is_loss=False) for _ in range(2))
    assert torch.equal(first, again) and first.unique().numel() == 12
    assert not torch.equal(first, tangent_of("other", (4, 3), torch.float64, is_loss=False))
    assert tangent_of("loss", (), torch.float32, is_loss=True, scale=0.5).item() == 0.5
    assert tangent_of("z", (2,), torch.complex64, is_loss=False).imag.abs().sum() > 0


def test_without_a_loss_all_outputs_with_a_gradient_are_differentiated() -> None:
    trace = capture(*built("several")[:1], (), built("several")[1])
    assert trace.loss is None
    assert [o.path for o in trace.differentiable] == ["out", "same", "flat", "weight", "total"]
    assert all(o.is_answered == bool(o.tangent) for o in trace.outputs)


def test_a_scalar_output_is_the_loss_if_it_has_a_gradient() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = self.linear(x)
            return (found > 0).float().mean(), found

    trace = capture(Counted(), (torch.randn(2, 4),))
    assert trace.loss is None and [o.path for o in trace.differentiable] == ["1"]


@pytest.mark.parametrize(
    ("options", "refusal", "words"),
    [
        ({"num_microbatches": 2}, ConstraintError, "returns no loss"),
        ({"outputs": "loss"}, CaptureError, "returns no loss"),
        ({"batch": "local"}, ConstraintError, "the weight of each rank's loss"),
    ],
)
def test_options_that_need_a_loss_are_refused(
    options: dict[str, Any], refusal: type[AutoparError], words: str
) -> None:
    model, batch = built("bert")
    with pytest.raises(refusal, match=words) as error:
        autopar.plan(model, SQUARE, example_inputs=batch, hardware="cpu-gloo", **options)
    assert error.value.remedy


@pytest.mark.slow
def test_without_a_loss_the_batch_is_not_split_if_nothing_fits() -> None:
    model, batch = built("bert")
    least = planned("bert", SQUARE, "fsdp").plan.prediction.memory_bytes["parameters"]
    with pytest.raises(AutoparError, match="fit"):
        autopar.plan(model, SQUARE, example_inputs=batch, hardware="cpu-gloo", memory_bytes=least)


def test_the_certificate_detects_a_tangent_in_another_layout() -> None:
    model, batch = built("several")
    plan = planned("several", SQUARE, "ddp", "dtensor").plan

    def moved(entry: Any) -> Any:
        if entry.key != "out/output":
            return entry
        return replace(
            entry,
            nodes=tuple(
                replace(c, strategy=replace(c.strategy, outputs=(Layout.replicated(2),)))
                for c in entry.nodes
            ),
        )

    entries = tuple(map(moved, plan.entries))
    assert entries != plan.entries
    assert not autopar.check(replace(plan, entries=entries), model, batch).ok
