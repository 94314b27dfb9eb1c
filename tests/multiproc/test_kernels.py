"""Plans with collective-overlap kernels on real processes, where these run as collective and product one after the other, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo_small
from harness import run_processes
from overlapping import overlapping

from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.planning import PlanOptions, make_plan

pytestmark = pytest.mark.multiproc


def test_two_processes_compute_the_plain_model_in_the_predicted_memory() -> None:
    model, batch = zoo_small.llama(dtype=torch.float64)
    profile = overlapping(link_bytes_per_s=2e8)
    plan = make_plan(capture(model, (), batch), Mesh(2), profile, PlanOptions(outputs="dtensor")).plan
    names = {c.kernel.name for c in plan.communications if c.kernel is not None}
    assert names == {"all_gather_matmul", "matmul_reduce_scatter"}
    for facts in run_processes(2, str(Path(__file__).parent / "worker_overlap.py"), "run", {"llama with kernels": plan.dumps()}):
        fact = facts["llama with kernels"]
        assert not fact["missing"]
        assert max(fact["loss"], fact["gradients"]) < 1e-6  # parts of the model compute in float32 themselves
        predicted, seen = fact["peaks"]
        assert abs(predicted - seen) <= 0.01 * seen
