"""Plans with collective-overlap kernels on gloo processes, where they run as a collective
followed by a product, with a log message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo_small
from harness import run_processes
from overlapping import NORMING, REACHED, overlapping

from autopar.capture import capture
from autopar.core.mesh import Mesh
from autopar.planner import PlanOptions, make_plan

pytestmark = pytest.mark.multiproc


KERNELS = {"all_gather_matmul", "matmul_reduce_scatter"}
CASES = {  # in float64 the model computes its norms in float32 and casts, which no kernel does
    "llama with kernels": (
        torch.float64,
        REACHED,
        KERNELS,
        1e-6,
    ),  # parts of the model compute in float32
    "llama in float32 with norms": (
        torch.float32,
        NORMING,
        KERNELS | {"matmul_reduce_add_rmsnorm"},
        1e-4,
    ),
}


@pytest.mark.slow
def test_two_processes_with_kernels_match_the_plain_model_in_the_predicted_memory() -> None:
    texts = {}
    for name, (dtype, reached, expected, _) in CASES.items():
        model, batch = zoo_small.llama(num_layers=1, dtype=dtype)
        profile = overlapping(link_bytes_per_s=2e8, kernels=reached)
        plan = make_plan(
            capture(model, (), batch), Mesh(2), profile, PlanOptions(outputs="dtensor")
        ).plan
        assert {c.kernel.name for c in plan.communications if c.kernel is not None} == expected
        texts[name] = plan.dumps()
    for facts in run_processes(2, str(Path(__file__).parent / "worker_overlap.py"), "run", texts):
        for name, (_, _, _, tolerance) in CASES.items():
            fact = facts[name]
            assert not fact["missing"]
            assert max(fact["loss"], fact["gradients"]) < tolerance
            predicted, seen = fact["peaks"]
            assert abs(predicted - seen) <= 0.01 * seen
