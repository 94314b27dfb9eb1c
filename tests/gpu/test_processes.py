"""Processes that share one GPU: they map each other's memory, and emitted graphs, also with
kernels, train like the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo_small
from harness import run_processes
from native import needs_gpu, needs_nvcc
from overlapping import NORMING, REACHED, overlapping

import autopar
from autopar.capture import capture
from autopar.constraints import expert_parallel, fsdp, tensor_parallel
from autopar.core.mesh import Mesh
from autopar.planner import PlanOptions, make_plan

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nvcc]
HERE = Path(__file__).parent
WORKER = str(HERE / "worker_shared_gpu.py")
KERNELS = {"all_gather_matmul", "matmul_reduce_scatter"}
WITH_KERNELS = {
    "products": (
        torch.float64,
        REACHED,
        KERNELS,
        1e-6,
    ),  # parts of the model compute in float32
    "products and norms": (torch.float32, NORMING, KERNELS | {"matmul_reduce_add_rmsnorm"}, 1e-4),
}
PLANS = {
    "fsdp": ("gpt2", (fsdp(),), {"gpu": 4}),
    "heads": ("llama", (fsdp(axes="a"), tensor_parallel("1d", axes="b")), {"a": 2, "b": 2}),
    "experts": (
        "mixtral",
        (expert_parallel("expert", tokens="dispatched"), fsdp("data")),
        {"data": 2, "expert": 2},
    ),
}


@pytest.mark.parametrize("size", [2, 3])
def test_overlapped_products_over_symmetric_memory_match_the_reference(size: int) -> None:
    for fact in run_processes(size, str(HERE / "worker_symmetric.py"), "run"):
        assert fact == {"wrong": [], "why_not": ""}


def test_plans_with_kernels_train_like_the_plain_model_without_fallbacks() -> None:
    plans = {}
    for name, (dtype, reached, expected, _) in WITH_KERNELS.items():
        model, batch = zoo_small.llama(num_layers=1, dtype=dtype)
        profile = overlapping(link_bytes_per_s=2e8, kernels=reached)
        plan = make_plan(capture(model, (), batch), Mesh(2), profile, PlanOptions()).plan
        assert {c.kernel.name for c in plan.communications if c.kernel is not None} == expected
        plans[name] = plan.dumps(), "llama", dtype
    for facts in run_processes(2, WORKER, "train", plans):
        assert (
            facts["said"] == []
        )  # a message would mean that products do not overlap with their communication
        for name, (_, _, _, tolerance) in WITH_KERNELS.items():
            assert (
                facts[name]["losses"] < tolerance
                and facts[name]["parameters"] < tolerance
                and facts[name]["fell"] > 0
            )


@pytest.mark.parametrize("name", PLANS)
def test_plans_of_four_processes_train_like_the_plain_model(name: str) -> None:
    kind, presets, axes = PLANS[name]
    model, batch = getattr(zoo_small, kind)(num_layers=1, dtype=torch.float64)
    plan = autopar.plan(
        model, Mesh(axes), example_inputs=batch, hardware="h100-sxm", constraints=presets
    )
    joins = (
        torch.__version__ >= (2, 12) or name == "experts"
    )  # torch 2.11 does not support full_tensor for strided shards
    for facts in run_processes(
        4, WORKER, "train", {name: (plan.dumps(), kind, torch.float64)}, joins
    ):
        assert facts[name]["losses"] < 2e-6 and facts[name]["fell"] > 0
        assert not joins or facts[name]["parameters"] < 2e-6


def test_kernels_write_expert_rows_into_the_memory_of_other_processes() -> None:
    for fact in run_processes(4, WORKER, "dispatch"):
        assert fact == {"wrong": [], "why_not": ""}
