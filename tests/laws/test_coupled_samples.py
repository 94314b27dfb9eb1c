"""If samples depend on each other, stages use one microbatch, the plan gives the reason, and
results match the model."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.constraints import layout, megatron, pipeline
from autopar.errors import ConstraintError, CoupledError

NUM_SAMPLES, WIDTH = 8, 8


class Normed(nn.Module):
    """Each layer normalizes over the batch and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(4)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class Plain(nn.Module):
    """A model without dependencies between samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.loss(x, y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x, y)


class Contrasted(Plain):
    """A contrastive loss in which each sample should be closest to its own label in the batch (van
    den Oord et al., 2018)."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ y.t(), torch.arange(x.shape[0]))


KINDS: dict[str, tuple[type[nn.Module], str]] = {
    "BatchNorm": (Normed, "at layers.0.1/"),
    "contrastive": (Contrasted, "at /dot/forward"),
}


def planned(
    kind: type[nn.Module], axes: dict[str, int], *constraints: Any, **options: Any
) -> tuple[autopar.Plan, nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = kind()
        batch = {"x": torch.randn(NUM_SAMPLES, WIDTH), "y": torch.randn(NUM_SAMPLES, WIDTH)}
    plan = autopar.plan(
        model,
        autopar.Mesh(axes),
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=constraints,
        **options,
    )
    return plan, model, batch


def check_one(plan: autopar.Plan, model: nn.Module, batch: dict[str, Tensor], op: str) -> None:
    pipe = plan.pipeline
    assert (
        pipe is not None
        and pipe.num_microbatches == 1
        and pipe.schedule == "gpipe"
        and set(pipe.num_in_flight) == {1}
    )
    assert plan.prediction.step_s == pytest.approx(
        sum(stage.prediction.step_s for stage in pipe.stages)
    )
    said = plan.proof.covers[-1]
    assert (
        said.startswith("only one microbatch, because samples depend on each other") and op in said
    )
    assert autopar.verify(plan, model, batch).ok and autopar.check(plan, model, batch).ok


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "axes", [{"stage": 2, "data": 2}, pytest.param({"stage": 4}, marks=pytest.mark.slow)], ids=str
)
def test_stages_of_coupled_samples_use_one_microbatch_and_match_the_model(
    name: str, axes: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    kind, op = KINDS[name]
    plan, model, batch = planned(kind, axes, pipeline("stage"))
    check_one(plan, model, batch, op)
    assert any(
        op in record.message and record.levelno == logging.WARNING for record in caplog.records
    )


@pytest.mark.slow
def test_stages_use_one_microbatch_if_smaller_ones_would_have_a_single_sample() -> None:
    plan, model, batch = planned(Normed, {"stage": 4}, pipeline("stage", schedule="auto"))
    check_one(plan, model, batch, "at layers.0.1/")
    few = {
        name: tensor[:4] for name, tensor in batch.items()
    }  # four stages need at least four microbatches, with one sample each
    made = autopar.plan(
        model,
        autopar.Mesh({"stage": 4}),
        example_inputs=few,
        hardware="h100-sxm",
        constraints=(pipeline("stage"),),
    )
    check_one(made, model, few, "at layers.0.1/")


def test_stages_of_coupled_samples_work_with_data_parallelism() -> None:
    plan, model, batch = planned(Normed, {"stage": 2, "data": 2}, megatron(pp="stage", dp="data"))
    check_one(plan, model, batch, "at layers.0.1/")
    assert plan.pipeline is not None and all(
        stage.prediction.communication_s > 0 for stage in plan.pipeline.stages
    )


def test_several_requested_microbatches_of_coupled_samples_are_refused_with_the_op() -> None:
    asked: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        ((pipeline("stage", microbatches=4),), {}),
        ((pipeline("stage"),), {"num_microbatches": 2}),
        (
            (pipeline("stage", schedule="interleaved_1f1b"),),
            {},
        ),  # this schedule does not support one microbatch
    )
    for constraints, options in asked:
        with pytest.raises(CoupledError, match=r"at layers\.0\.1/") as caught:
            planned(Normed, {"stage": 2}, *constraints, **options)
        assert "or no number" in caught.value.remedy


def test_one_requested_microbatch_needs_no_other_schedule() -> None:
    plan, model, batch = planned(Contrasted, {"stage": 2}, pipeline("stage", microbatches=1))
    assert plan.pipeline is not None and (
        plan.pipeline.num_microbatches,
        plan.pipeline.schedule,
    ) == (1, "gpipe")
    assert not any("depend on each other" in line for line in plan.proof.covers)
    assert autopar.verify(plan, model, batch).ok
    with pytest.raises(ConstraintError, match="2 microbatches are fewer than the stages"):
        planned(Plain, {"stage": 4}, pipeline("stage", microbatches=2))


def test_a_free_axis_gets_stages_if_only_stages_fit() -> None:
    whole = layout("layers.*.0", weight="R")
    alone = planned(Normed, {"gpu": 2}, whole, pipeline())[0]
    assert alone.pipeline is None, "nothing is gained by waiting"
    plan, model, batch = planned(
        Normed, {"gpu": 2}, whole, pipeline(), memory_bytes=alone.prediction.peak_bytes * 3 // 4
    )
    pipe = plan.pipeline
    assert pipe is not None and pipe.num_microbatches == 1
    tried = plan.proof.covers[-1]
    assert "2 to 8 microbatches in stages along gpu (at least" in tried, "they need no capture"
    assert autopar.verify(plan, model, batch).ok and autopar.check(plan, model, batch).ok
