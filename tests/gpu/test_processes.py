"""Processes on one GPU, over gloo: their memory is mapped into one another, and emitted graphs with kernels train the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo_small
from harness import run_processes
from native import needs_gpu, needs_nvcc
from overlapping import NORMING, REACHED, overlapping

from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.planning import PlanOptions, make_plan

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nvcc]
HERE = Path(__file__).parent
KERNELS = {"all_gather_matmul", "matmul_reduce_scatter"}
CASES = {
    "products": (torch.float64, REACHED, KERNELS, 1e-6),  # parts of the model compute in float32 themselves
    "products and norms": (torch.float32, NORMING, KERNELS | {"matmul_reduce_add_rmsnorm"}, 1e-4),
}


@pytest.mark.parametrize("size", [2, 3])
def test_processes_reach_each_others_memory_and_get_the_references_numbers(size: int) -> None:
    for fact in run_processes(size, str(HERE / "worker_symmetric.py"), "run"):
        assert fact == {"wrong": [], "why_not": ""}


def test_plans_with_kernels_train_the_plain_model_and_the_kernels_run() -> None:
    plans = {}
    for name, (dtype, reached, expected, _) in CASES.items():
        model, batch = zoo_small.llama(num_layers=1, dtype=dtype)
        profile = overlapping(link_bytes_per_s=2e8, kernels=reached)
        plan = make_plan(capture(model, (), batch), Mesh(2), profile, PlanOptions()).plan
        assert {c.kernel.name for c in plan.communications if c.kernel is not None} == expected
        plans[name] = plan.dumps(), dtype
    for facts in run_processes(2, str(HERE / "worker_shared_gpu.py"), "run", plans):
        assert not any("before their communication" in message for message in facts["messages"])
        for name, (_, _, _, tolerance) in CASES.items():
            assert facts[name]["losses"] < tolerance and facts[name]["parameters"] < tolerance and facts[name]["fell"] > 0
