"""Pipelines match the plain model: stages × data × tensor parallelism, with all ranks in lockstep.
Their plans are certified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api.planning import plan_model
from autopar.breakdown import breakdown
from autopar.constraints import fsdp, layout, pipeline, tensor_parallel
from autopar.errors import (
    ConstraintError,
    CoupledError,
    EmissionError,
    InfeasibleError,
    MeshError,
    VerificationError,
)
from autopar.planner import Planned
from autopar.planner.pipeline.step_schedule import step_time
from autopar.plans import Plan
from autopar.program.schedule import num_in_flight
from benchmarks import zoo

MESH = autopar.Mesh({"stage": 2, "data": 2, "tensor": 2})
EXPERT = (fsdp("data"), tensor_parallel(axes="tensor"))


def planned(
    name: str, mesh: autopar.Mesh, *constraints: Any, **options: Any
) -> tuple[Planned, torch.nn.Module, dict[str, Any]]:
    settings = options.pop("settings", {})
    model, batch = zoo.build(name, batch=8, **settings)
    made = plan_model(
        model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=constraints, **options
    )[1]
    return made, model, batch


# Llama: one stream. GPT-2: tied weights, fused projections, dropout. T5: a decoder that reads the
# result of the encoder, and an embedding that is used three times.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "microbatches"),
    [
        ("llama", {}, 4),
        ("gpt2", {"dropout": 0.1}, 2),
        pytest.param("t5", {}, 4, marks=pytest.mark.slow),
    ],
)
def test_stages_with_data_and_tensor_parallelism_equal_the_plain_model(
    name: str, settings: dict[str, Any], microbatches: int
) -> None:
    made, model, batch = planned(
        name, MESH, pipeline("stage", microbatches=microbatches), *EXPERT, settings=settings
    )
    report = autopar.verify(made.plan, model, batch)
    assert report.ok
    assert report.num_collectives > 0
    for stage in made.program.stages:
        kinds = {c.kind for _, _, c in stage.collectives}
        assert (
            "all_gather" in kinds and {"all_reduce", "reduce_scatter"} & kinds
        )  # parameters; gradients and partial sums


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("unet2d", {"stage": 2, "data": 2}),
        pytest.param("gpt2", {"data": 2, "stage": 4}, marks=pytest.mark.slow),
        ("bert", {"stage": 3}),
    ],
)
def test_skip_connections_more_stages_and_other_axes_match_the_plain_model(
    name: str, axes: dict[str, int]
) -> None:
    settings: dict[str, Any] = (
        {"num_hidden_layers": 4} if name != "unet2d" else {"multipliers": (1,)}
    )
    num = 4 if axes["stage"] != 3 else 8
    made, model, batch = planned(
        name, autopar.Mesh(axes), pipeline("stage", microbatches=num), settings=settings
    )
    assert autopar.verify(made.plan, model, batch).ok


def test_one_stage_may_run_several_microbatches() -> None:
    made, model, batch = planned(
        "llama", autopar.Mesh({"data": 2}), fsdp("data"), num_microbatches=4
    )
    assert (
        made.plan.pipeline is not None
        and made.plan.pipeline.axis == ""
        and len(made.plan.pipeline.stages) == 1
    )
    assert autopar.verify(made.plan, model, batch).ok


def test_microbatches_need_less_memory() -> None:
    whole = planned("gpt2", autopar.Mesh({"data": 1}))[0].plan.prediction
    parts = planned("gpt2", autopar.Mesh({"data": 1}), num_microbatches=4)[0].plan.prediction
    assert parts.memory_bytes["activations"] * 3 < whole.memory_bytes["activations"]
    assert parts.peak_bytes < whole.peak_bytes


@pytest.fixture(scope="module")
def llama() -> tuple[Planned, torch.nn.Module, dict[str, Any]]:
    return planned("llama", MESH, pipeline("stage", microbatches=4), *EXPERT)


@pytest.mark.slow
def test_a_pipeline_plan_round_trips(llama: tuple[Planned, Any, Any]) -> None:
    plan = llama[0].plan
    assert Plan.loads(plan.dumps()) == plan


# test_alike_stages and tests without stages always test this
@pytest.mark.slow
def test_a_pipeline_plan_is_deterministic() -> None:
    one, other = (
        planned("llama", autopar.Mesh({"stage": 2, "data": 2}), pipeline("stage", microbatches=4))[
            0
        ].plan
        for _ in range(2)
    )
    assert one.dumps() == other.dumps()


def test_the_timeline_and_parts_of_a_stage_add_up_to_its_prediction(
    llama: tuple[Planned, Any, Any],
) -> None:
    pipeline, program = llama[0].plan.pipeline, llama[0].program
    assert pipeline is not None
    for number, stage in enumerate(pipeline.stages):
        p, parts = stage.prediction, breakdown(stage)
        slowed_s = p.hidden_s * stage.overlap.slowdown
        assert sum(bar[4] for bar in p.timeline) == pytest.approx(
            p.serial_s + p.beyond_shares_s + slowed_s - p.in_buckets_s
        )
        assert max(bar[3] + bar[4] for bar in p.timeline) == pytest.approx(p.simulated_s)
        assert sum(part.compute_s for part in parts) == pytest.approx(p.compute_s)
        assert sum(part.communication_s for part in parts) == pytest.approx(p.communication_s)
        leaving = [t for t in program.stages[number].outputs if t.crosses]
        told = pipeline.crossings[number] if number < len(pipeline.crossings) else ()
        assert [(c.node, c.layout) for c in told] == [(t.name, t.layout) for t in leaving]


def test_the_predicted_step_is_that_of_the_schedule(llama: tuple[Planned, Any, Any]) -> None:
    plan = llama[0].plan
    pipe = plan.pipeline
    assert pipe is not None
    assert plan.prediction.step_s == step_time([p.prediction.step_s for p in pipe.stages], 4)
    assert plan.proof.bound_s <= plan.proof.objective_s == plan.prediction.step_s
    assert pipe.num_in_flight == num_in_flight("1f1b", 2, 4) == (2, 1)
    assert plan.prediction.peak_bytes == max(p.prediction.peak_bytes for p in pipe.stages)


def test_neighbouring_stages_agree_on_transferred_tensors(llama: tuple[Planned, Any, Any]) -> None:
    program = llama[0].program
    first, last = program.stages
    leaving = {t.name: (t.layout, t.shape, t.has_gradient) for t in first.outputs if t.crosses}
    assert leaving == {
        t.name: (t.layout, t.shape, t.has_gradient) for t in last.inputs if t.crosses
    }
    assert len(leaving) == 1


@pytest.mark.slow
def test_a_plan_whose_stages_disagree_is_refused(llama: tuple[Planned, Any, Any]) -> None:
    made, model, batch = llama
    text = made.plan.dumps()
    pipe = made.plan.pipeline
    assert pipe is not None
    crossing = next(i for i in pipe.stages[1].entries if i.kind == "input" and i.module)
    assert text.count(crossing.key) > 0
    swapped = Plan.loads(text.replace(f'"num_microbatches": {4}', '"num_microbatches": 2'))
    with pytest.raises((EmissionError, autopar.AutoparError)):
        autopar.verify(swapped, model, batch)


def test_a_wrong_count_of_the_batch_is_detected(
    llama: tuple[Planned, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopar.program.program import Count

    made, model, batch = llama
    right = Count.of
    monkeypatch.setattr(
        Count, "of", lambda self, *read: {path: x * 1.01 for path, x in right(self, *read).items()}
    )
    with pytest.raises(VerificationError):
        autopar.verify(made.plan, model, batch)


@pytest.mark.slow
def test_named_cuts_and_their_errors() -> None:
    mesh = autopar.Mesh({"stage": 2})
    made = planned("llama", mesh, pipeline("stage", microbatches=4, cuts=["model.layers.1"]))[0]
    assert made.plan.pipeline is not None and made.plan.pipeline.modules == ("model.layers.1",)
    assert made.plan.proof.covers[0].startswith("the requested cuts")
    with pytest.raises(ConstraintError, match=r"no cut at 'model\.layers\.9'"):
        planned("llama", mesh, pipeline("stage", microbatches=4, cuts=["model.layers.9"]))
    with pytest.raises(ConstraintError, match="1F1B"):
        planned("llama", autopar.Mesh({"stage": 4}), pipeline("stage", microbatches=2))
    with pytest.raises(MeshError, match="has no axis 'pipe'"):
        planned("llama", mesh, pipeline("pipe", microbatches=2))
    with pytest.raises(
        ConstraintError, match=r"at most \d+ parts, but 2048 stages"
    ):  # fails before a microbatch is captured, which these samples allow
        planned("llama", autopar.Mesh({"stage": 2048}), pipeline("stage", microbatches=4))
    with pytest.raises(InfeasibleError, match="stage 0 of 2"):
        planned("llama", mesh, pipeline("stage", microbatches=4), memory_bytes=200_000)


class Sorted(nn.Module):
    """Permutes samples and restores their order at the end, which no rule detects."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0].argsort()
        hidden = self.mid(self.up(x).relu()[order]).relu()[order.argsort()]
        return self.down(hidden).square().mean()


@pytest.mark.slow
def test_a_needed_promise_of_independent_samples_is_recorded_in_the_plan() -> None:
    model, batch = Sorted(), (torch.randn(8, 8),)
    with pytest.raises(CoupledError, match="/sort/forward/0"):
        asked = (pipeline("stage", microbatches=2),)
        autopar.plan(
            model, {"stage": 2}, example_inputs=batch, hardware="h100-sxm", constraints=asked
        )
    promised = (pipeline("stage", microbatches=2, independent=True),)
    plan = autopar.plan(
        model, {"stage": 2}, example_inputs=batch, hardware="h100-sxm", constraints=promised
    )
    assert any("promise" in line and "/sort/forward/0" in line for line in plan.proof.covers)
    assert autopar.verify(plan, model, batch).ok
    plain = planned(
        "llama", autopar.Mesh({"stage": 2}), pipeline("stage", microbatches=2, independent=True)
    )[0]
    assert not any("promise" in line for line in plain.plan.proof.covers)


@pytest.mark.slow
def test_a_forced_layout_applies_in_the_stage_of_the_op() -> None:
    mesh = autopar.Mesh({"stage": 2, "tensor": 2})
    force = layout("model.layers.*.mlp.up_proj", weight="S(0)")
    made = planned("llama", mesh, pipeline("stage", microbatches=4), force)[0]
    assert made.plan.pipeline is not None
    for stage in made.plan.pipeline.stages:
        used = [c for e in stage.entries for c in e.nodes if "mlp.up_proj/dot/forward" in c.node]
        assert used and all(str(c.strategy.inputs[1]) == "S(0)" for c in used)


def test_a_free_pipeline_is_never_slower_than_none() -> None:
    mesh = autopar.Mesh({"node": 2})
    alone = planned("llama", mesh)[0].plan
    free = planned("llama", mesh, pipeline())[0].plan
    assert (
        free.pipeline is None and free.prediction.step_s == alone.prediction.step_s
    )  # a model of this size only waits


@pytest.mark.slow
def test_megatron_defines_the_whole_plan() -> None:
    force = autopar.constraints.megatron(
        pp=2, tp="tensor", dp="data", zero=3, recompute="full", microbatches=4
    )
    made, model, batch = planned("llama", MESH, force)
    pipe = made.plan.pipeline
    assert pipe is not None and (pipe.axis, pipe.num_microbatches) == ("stage", 4)
    assert all(any(entry.recompute for entry in stage.entries) for stage in pipe.stages)
    assert autopar.verify(made.plan, model, batch).ok
    with pytest.raises(ConstraintError, match=r"mesh .* has no axis with 3 devices"):
        planned("llama", MESH, autopar.constraints.megatron(pp=3, tp="tensor", dp="data"))
    with pytest.raises(
        ConstraintError, match=r"megatron\(.*pp=2.* and pipeline\('data'\) both define a pipeline"
    ):
        planned("llama", MESH, force, pipeline("data"))
