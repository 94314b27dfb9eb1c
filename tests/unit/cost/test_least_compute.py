"""The lower bound of a step's compute, which needs no strategies."""

from __future__ import annotations

import pytest
import torch
import zoo_small
from torch import nn

import autopar
from autopar.analysis.work import Work
from autopar.api.planning import plan_model
from autopar.api.tracing import as_wanted
from autopar.capture import capture
from autopar.constraints import pipeline
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.op_times import TotalWork, compute_time
from autopar.planner import PlanOptions
from autopar.planner.pipeline.pipeline_bound import least_batch_s

H100 = HardwareProfile.load("h100-sxm")


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def product_work() -> TotalWork:
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        trace = capture(Product(), (x,), {}, inference=True)
    return TotalWork.of(trace, H100)


@pytest.mark.parametrize("parts", [(1, 1), (4, 1), (2, 2)])
def test_a_product_takes_what_its_share_of_flops_and_bytes_takes(parts: tuple[int, int]) -> None:
    devices, microbatches = parts
    share = devices * microbatches
    item = 2
    work = Work(2 * 16 * 32 * 64 // share, item * (16 * 32 + 32 * 64 + 16 * 64) // share, "matmul")
    least_s = product_work().least_s(H100, devices, microbatches)
    assert least_s == compute_time(work, torch.bfloat16, H100)


def test_stages_wait_for_the_first_microbatch_less_if_each_device_has_several() -> None:
    total = product_work()
    one_s = total.least_s(H100, 2, 8)
    assert total.least_staged_s(H100, 2, 4, 8) == pytest.approx(one_s * (8 + 3) / 4)
    assert total.least_staged_s(H100, 2, 4, 8, num_chunks=3) == pytest.approx(one_s * (8 + 1) / 4)
    assert total.least_staged_s(H100, 8, 1, 1) == total.least_s(H100, 8)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "vit"])
@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}], ids=str)
def test_no_plan_computes_less_than_the_bound(name: str, axes: dict[str, int]) -> None:
    model, batch = getattr(zoo_small, name)()
    mesh = Mesh(axes)
    trace, found = plan_model(
        model, mesh, example_inputs=batch, hardware="h100-sxm", num_microbatches=1
    )
    assert 0 < TotalWork.of(trace, H100).least_s(H100, 4) <= found.computing_s


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "gpipe"])
def test_no_pipeline_is_faster_than_its_bound(schedule: str) -> None:
    """The stages of this model are alike, so the bound holds for interleaved stages as well."""
    model, batch = zoo_small.gpt2()
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    plan = autopar.plan(
        model,
        Mesh({"stage": 2, "b": 2}),
        example_inputs=batch,
        hardware="h100-sxm",
        outputs="loss",
        constraints=(pipeline("stage", microbatches=2, schedule=schedule, chunks=chunks),),
    )
    trace = capture(model, (), batch)
    least_s = TotalWork.of(trace, H100).least_staged_s(H100, 2, 2, 2, chunks)
    assert 0 < least_s <= plan.prediction.step_s


@pytest.mark.parametrize("num", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_batch_on_the_mesh_of_a_stage_bounds_every_pipeline_along_the_axis(
    name: str, num: int
) -> None:
    model, batch = getattr(zoo_small, name)()
    options = {"example_inputs": batch, "hardware": "h100-sxm", "outputs": "loss"}
    stages = pipeline("stage", microbatches=num, schedule="1f1b")
    plan = autopar.plan(model, Mesh({"stage": 2, "b": 2}), constraints=(stages,), **options)
    trace = as_wanted(capture(model, (), batch), "loss")
    batch_s = least_batch_s(trace, Mesh({"b": 2}), H100, PlanOptions(outputs="loss"))
    assert 0 < batch_s * (num + 1) / (2 * num) <= plan.prediction.step_s
