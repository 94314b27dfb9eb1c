"""Plans repriced on other hardware: on their own hardware they have the predicted time, at half of
the speed they take twice as long, and a plan made for the other hardware is never slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small

import autopar
from autopar.api.arguments import as_call
from autopar.api.plan_options import options_of
from autopar.api.tracing import planned_part
from autopar.api.what_if import _bytes_of
from autopar.capture import capture
from autopar.constraints import ddp, fsdp, megatron, pipeline, tensor_parallel
from autopar.core.hardware import Curve, HardwareProfile
from autopar.emit import returned_of
from autopar.errors import ConstraintError, PlanError
from autopar.planner import PlanOptions
from autopar.planner.transfer_plan import carry_plan, notes
from autopar.plans import Plan
from benchmarks import zoo

GLOO, CUTS = HardwareProfile.load("cpu-gloo"), ["model.layers.1"]
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "free": ("net", {"data": 2, "tensor": 2}, {}),
    "forced": (
        "llama",
        {"data": 2, "tensor": 2},
        {"constraints": (fsdp("data"), tensor_parallel(axes="tensor"))},
    ),
    "recomputes": (
        "llama",
        {"data": 2},
        {"constraints": (megatron(tp=1, dp="data", zero=3, recompute="full"),)},
    ),
    "stages": (
        "llama",
        {"stage": 2, "data": 2},
        {"constraints": (pipeline("stage", microbatches=4, cuts=CUTS), fsdp("data"))},
    ),
    "one stage": ("gpt2", {"data": 2}, {"constraints": (ddp("data"),), "num_microbatches": 2}),
}


class Net(torch.nn.Module):
    """A model with two linear layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (x + self.down(torch.relu(self.up(x)))).pow(2).mean()
        return loss


NET, NET_BATCH = Net(), {"x": torch.randn(64, 128)}
Built = tuple[Plan, torch.nn.Module, dict[str, Any]]


def scaled(profile: HardwareProfile, times: float) -> HardwareProfile:
    """Return hardware on which everything takes `times` times as long."""

    def slower(curve: Curve) -> Curve:
        return Curve(curve.sizes, tuple(t * times for t in curve.times))

    def figures(values: Mapping[str, float]) -> dict[str, float]:
        return {name: value / times for name, value in values.items()}

    links = {
        name: replace(
            link,
            latency_s=link.latency_s * times,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times,
            curves={
                kind: {n: slower(c) for n, c in by_num.items()}
                for kind, by_num in link.curves.items()
            },
        )
        for name, link in profile.links.items()
    }
    return replace(
        profile,
        name="scaled",
        hash=f"{times}",
        memory_bandwidth_bytes_per_s=profile.memory_bandwidth_bytes_per_s / times,
        launch_overhead_s=profile.launch_overhead_s * times,
        peak_flops_per_s=figures(profile.peak_flops_per_s),
        links=links,
        curves={key: slower(curve) for key, curve in profile.curves.items()},
    )


@cache
def built(name: str) -> Built:
    kind, axes, options = CASES.get(name, ("llama", {"stage": 2, "data": 2}, INTERLEAVED))
    layers = {} if name in CASES else {"num_hidden_layers": 4}
    model, batch = zoo.build(kind, batch=8, **layers) if kind != "net" else (NET, NET_BATCH)
    return (
        autopar.plan(model, autopar.Mesh(axes), example_inputs=batch, hardware=GLOO, **options),
        model,
        batch,
    )


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Built:
    return built(request.param)


def test_on_its_own_hardware_a_plan_has_its_predicted_time_and_no_regret(
    case: Built,
) -> None:
    plan, model, batch = case
    found = autopar.what_if(Plan.loads(plan.dumps()), model, batch, hardware=GLOO)
    assert any(c["plan"] == "megatron" for c in plan.options["constraints"]) == bool(
        plan.recomputed_choices()
    )
    assert found.step_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert found.best == plan
    assert found.regret == pytest.approx(0, abs=1e-12) and found.fits


@pytest.mark.parametrize("case", ["free", "recomputes", "stages"], indirect=True)
def test_on_hardware_with_half_the_speed_a_plan_takes_twice_as_long(case: Built) -> None:
    plan, model, batch = case
    found = autopar.what_if(plan, model, batch, hardware=scaled(GLOO, 2.0))
    assert found.step_s == pytest.approx(2 * plan.prediction.step_s, rel=1e-9)
    assert found.regret >= -plan.options["gap"]


def test_a_plan_for_fast_links_has_regret_on_slow_links() -> None:
    links = {
        name: replace(link, latency_s=1e-9, bandwidth_bytes_per_s=1e13, curves={})
        for name, link in GLOO.links.items()
    }
    fast = replace(GLOO, name="fast", hash="fast", links=links)
    model, batch = NET, NET_BATCH
    plan = autopar.plan(
        model, autopar.Mesh({"data": 2, "tensor": 2}), example_inputs=batch, hardware=fast
    )
    found = autopar.what_if(plan, model, batch, hardware="cpu-gloo")
    assert found.regret > 0.05
    assert found.most_regret >= found.regret
    assert found.best == autopar.plan(
        model, plan.mesh, example_inputs=batch, hardware="cpu-gloo", memory_bytes=found.budget_bytes
    )
    back = autopar.what_if(found.best, model, batch, hardware=fast)
    assert back.regret >= -plan.options["gap"]
    assert f"regret +{found.regret * 100:.1f} %" in str(found)


def test_the_budget_of_what_if_is_that_of_the_plan_or_of_the_device() -> None:
    model, batch = NET, NET_BATCH
    mesh = autopar.Mesh({"data": 2})
    default = autopar.plan(model, mesh, example_inputs=batch, hardware="cpu-gloo")
    asked = autopar.plan(model, mesh, example_inputs=batch, hardware="cpu-gloo", memory_bytes=2**27)
    other = HardwareProfile.load("h100-sxm")
    assert autopar.what_if(default, model, batch, hardware=other).budget_bytes == int(
        other.device_memory_bytes * 0.9
    )
    assert autopar.what_if(asked, model, batch, hardware=other).budget_bytes == 2**27
    tight = autopar.what_if(
        default, model, batch, hardware=other, memory_bytes=default.prediction.peak_bytes - 1
    )
    assert not tight.fits and "does not fit" in str(tight)
    assert tight.best.prediction.peak_bytes < default.prediction.peak_bytes


SIZES: dict[str, dict[str, int]] = {
    "free": {"data": 4, "tensor": 2},
    "forced": {"data": 4, "tensor": 2},
    "recomputes": {"data": 4},
}


@pytest.mark.parametrize("name", SIZES)
def test_on_a_mesh_with_other_sizes_the_decisions_are_kept_and_the_bound_is_valid(
    name: str,
) -> None:
    plan, model, batch = built(name)
    there = autopar.Mesh(SIZES[name])
    found = autopar.what_if(plan, model, batch, mesh=there)
    assert found.best.mesh == there and found.hardware == plan.fingerprint.profile
    assert found.step_s >= found.best.proof.bound_s * (1 - 1e-9) and found.most_regret >= -1e-9
    assert f"and mesh {there}" in str(found)
    assert (found.step_s == plan.prediction.step_s) == (name == "free"), (
        "of these the free plan alone does everything everywhere"
    )
    args, kwargs = as_call(batch)
    options = PlanOptions(
        memory_bytes=found.budget_bytes, constraints=CASES[name][2].get("constraints", ())
    )
    trace = capture(model, args, kwargs)
    part, how = planned_part(found.best, model, trace, args, kwargs)
    returned = returned_of(part, how, found.best.options["outputs"])
    itself = carry_plan(  # carried to its own sizes, a plan has its predicted figures
        found.best, part, there, GLOO, options, _bytes_of(trace), returned
    )
    assert itself.step_s == pytest.approx(found.best.prediction.step_s, rel=1e-9)
    assert itself.peak_bytes == found.best.prediction.peak_bytes


INTERLEAVED = {"constraints": (megatron(pp=2, zero=2, microbatches=4, chunks=2),)}
SAME = [*CASES, "interleaved"]  # cases that are carried to their own axes


def carry(name: str, axes: dict[str, int]) -> tuple[Plan, float, int]:
    """Return the plan, and its time and memory on a mesh of these axes."""
    plan, model, batch = built(name)
    args, kwargs = as_call(batch)
    trace = capture(model, args, kwargs)
    options, (part, how) = (
        options_of(plan, GLOO, None),
        planned_part(plan, model, trace, args, kwargs),
    )
    returned = returned_of(part, how, plan.options["outputs"])
    found = carry_plan(plan, part, autopar.Mesh(axes), GLOO, options, _bytes_of(trace), returned)
    return plan, found.step_s, found.peak_bytes


@pytest.mark.parametrize("name", SAME)
def test_a_plan_on_its_own_axes_in_any_order_has_its_predicted_time_and_memory(
    name: str,
) -> None:
    axes = {axis.name: axis.size for axis in built(name)[0].mesh.axes}
    for there in (axes, dict(reversed(axes.items())), axes | {"alone": 1}):
        plan, step_s, peak_bytes = carry(name, there)
        assert step_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
        assert peak_bytes == plan.prediction.peak_bytes


@pytest.mark.parametrize("name", [name for name in SAME if name != "free"])
def test_over_a_new_axis_the_work_is_replicated_and_this_is_reported(name: str) -> None:
    axes = {axis.name: axis.size for axis in built(name)[0].mesh.axes}
    plan, step_s, peak_bytes = carry(name, {"node": 3, **axes})
    assert step_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert peak_bytes == plan.prediction.peak_bytes
    said = "axis 'node' is new: with the plan's decisions its 3 devices repeat the same work"
    assert notes(plan, autopar.Mesh({"node": 3, **axes})) == (said,)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("stages", {"stage": 2}),
        ("forced", {"tensor": 2}),
        ("one stage", {"data": 4}),
        ("recomputes", {"data": 4, "node": 2}),
    ],
)
def test_forced_decisions_on_another_mesh_have_the_time_of_a_plan_made_there(
    name: str, axes: dict[str, int]
) -> None:
    plan, model, batch = built(name)
    found = autopar.what_if(plan, model, batch, mesh=axes)
    assert found.step_s != pytest.approx(plan.prediction.step_s, rel=1e-3)
    if name == "recomputes":  # the choice of kept tensors is not forced
        assert found.step_s == pytest.approx(found.best.prediction.step_s, rel=1e-2)
    else:
        assert found.step_s == pytest.approx(found.best.prediction.step_s, rel=1e-9)
        assert found.peak_bytes == found.best.prediction.peak_bytes
    gone = [name for name in plan.mesh.names if name not in axes]
    said = [f"axis {name!r} of the plan is not in this mesh: it has size 1 here" for name in gone]
    said += [f"axis {name!r} is new" for name in axes if name not in plan.mesh.names]
    assert len(found.notes) == len(said) and all(start in str(found) for start in said)
    if gone:  # a missing axis has size 1
        assert carry(name, axes | dict.fromkeys(gone, 1))[1:] == (found.step_s, found.peak_bytes)


@pytest.mark.slow
def test_parameters_gathered_by_zero_are_stored_as_used_if_the_axis_is_missing() -> None:
    plan, step_s, peak_bytes = carry("interleaved", {"stage": 2})
    assert plan.pipeline is not None and any(
        len(e.nodes) > 1 for e in plan.pipeline.stages[0].entries if e.kind == "parameter"
    )
    assert (step_s, peak_bytes) == carry("interleaved", {"stage": 2, "data": 1})[1:]
    assert step_s < plan.prediction.step_s and peak_bytes > plan.prediction.peak_bytes


@pytest.mark.slow
def test_impossible_questions_about_another_mesh_are_refused() -> None:
    plan, model, batch = built("stages")
    for mesh, size in ({"stage": 4, "data": 2}, 4), ({"data": 2}, 1):
        with pytest.raises(
            PlanError,
            match=(
                rf"2 stages along 'stage', 2 devices, but the axis has size {size} in"
                r" mesh (.|\n)*with"
                r" stage=2"
            ),
        ):
            autopar.what_if(plan, model, batch, mesh=mesh)
    with pytest.raises(ConstraintError, match=r"a batch of 2 cannot be split over 4 devices"):
        autopar.what_if(plan, model, batch, mesh={"stage": 2, "data": 4})
    plan, model, batch = built("recomputes")
    with pytest.raises(ConstraintError, match=r"a batch of 8 cannot be split over 16 devices"):
        autopar.what_if(plan, model, batch, mesh={"data": 16})
    with pytest.raises(
        PlanError,
        match="the plan is for data=2, but this mesh is rows=4: they have no common axis name",
    ):
        autopar.what_if(plan, model, batch, mesh={"rows": 4})
    plan, model, batch = built("forced")
    with pytest.raises(ConstraintError, match="cannot hold"):
        autopar.what_if(plan, model, batch, mesh={"data": 2, "tensor": 16})


def test_an_op_that_cannot_be_sharded_on_another_mesh_is_named_with_the_tensor() -> None:
    model, batch = zoo_small.gpt2()  # 4 samples do not divide by 8 over both axes
    ask = {
        "example_inputs": batch,
        "hardware": "h100-sxm",
        "constraints": (ddp("a"),),
        "loss_rows": 4,
        "outputs": "loss",
    }
    plan = autopar.plan(model, autopar.Mesh({"a": 2, "b": 2}), **ask)
    said = (
        r"the plan has input input_ids of shape \(4, 12\), which cannot have layout"
        r" 'S\(0\) S\(0\)' on mesh a=2,b=4"
    )
    with pytest.raises(PlanError, match=said + r"(.|\n)*smaller axes"):
        autopar.what_if(plan, model, batch, mesh={"a": 2, "b": 4})


def test_what_if_refuses_plans_for_another_model_and_impossible_decisions() -> None:
    model, batch = NET, NET_BATCH
    plan = autopar.plan(model, autopar.Mesh({"data": 2}), example_inputs=batch, hardware="cpu-gloo")
    other, its_batch = zoo.build("gpt2", batch=8)
    with pytest.raises(PlanError, match="the plan is for Net, but the model is GPT2LMHeadModel"):
        autopar.what_if(plan, other, its_batch, hardware="cpu-gloo")
    entry = next(e for e in plan.entries if e.op == "dot")
    broken = replace(
        entry,
        nodes=tuple(
            replace(c, strategy=replace(c.strategy, inputs=c.strategy.outputs)) for c in entry.nodes
        ),
    )
    wrong = replace(plan, entries=tuple(broken if e is entry else e for e in plan.entries))
    with pytest.raises(PlanError, match="is not possible here"):
        autopar.what_if(wrong, model, batch, hardware="cpu-gloo")


@pytest.mark.slow
def test_what_if_with_other_constraints_gives_the_plan_of_these_constraints() -> None:
    plan, model, batch = built("stages")
    found = autopar.what_if(
        plan,
        model,
        batch,
        hardware=GLOO,
        without=["pipeline"],
        constraints=[tensor_parallel(axes="stage")],
    )
    asked = (fsdp("data"), tensor_parallel(axes="stage"))
    assert found.step_s == pytest.approx(plan.prediction.step_s, rel=1e-12)
    assert found.best == autopar.plan(
        model, plan.mesh, example_inputs=batch, hardware=GLOO, constraints=asked
    )
    there = autopar.what_if(
        plan,
        model,
        batch,
        mesh={"stage": 2, "data": 1},
        without=[fsdp("data")],
        constraints=[ddp("data")],
    )
    assert (
        there.best.pipeline is not None
        and there.best.options["constraints"][-1] == ddp("data").to_json()
    )
    assert there.change == "without fsdp(axes=['data']), with ddp(axes=['data'])"


def test_what_if_can_remove_the_number_of_microbatches_by_name() -> None:
    plan, model, batch = built("one stage")
    found = autopar.what_if(plan, model, batch, hardware=GLOO, without="num_microbatches")
    assert (
        plan.options["num_microbatches"] == 2 and found.best.options["num_microbatches"] == "auto"
    )
    assert (
        found.change == "without num_microbatches=2"
        and "ddp(axes=['data']) forced, takes" in str(found)
    )
    with pytest.raises(
        ConstraintError,
        match=r"no constraint pipeline[\s\S]*ddp\(axes=\['data'\]\), num_microbatches=2",
    ):
        autopar.what_if(plan, model, batch, hardware=GLOO, without="pipeline")
