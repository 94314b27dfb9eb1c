"""Buckets on real processes: gradients are bitwise equal to those without buckets and match the
plain model, in the predicted memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo_small
from harness import run_processes

from autopar import constraints
from autopar.capture import capture
from autopar.constraints import Constraint
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import PlanOptions, make_plan

pytestmark = pytest.mark.multiproc


CASES: dict[str, dict[str, tuple[Constraint, str]]] = {
    "llama": {
        "llama replicated": (constraints.ddp(), "cpu-gloo"),
        "llama beside compute": (constraints.fsdp(), "h100-sxm"),
    },
    "gpt2": {"gpt2 sharded": (constraints.fsdp(), "cpu-gloo")},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_two_processes_give_the_same_results_with_and_without_buckets(kind: str) -> None:
    plans = {}
    for name, (constraint, hardware) in CASES[kind].items():
        model, batch = getattr(zoo_small, kind)(num_layers=1, dtype=torch.float64)
        options = PlanOptions(constraints=(constraint,), outputs="dtensor")
        plan = make_plan(
            capture(model, (), batch), Mesh(2), HardwareProfile.load(hardware), options
        ).plan
        assert plan.buckets
        plans[name] = plan.dumps()
    for facts in run_processes(2, str(Path(__file__).parent / "worker_buckets.py"), "run", plans):
        assert facts.keys() == plans.keys()
        for fact in facts.values():
            assert fact["equal"] and not fact["missing"]
            assert fact["gradients"] < 1e-6  # parts of the models compute in float32
            predicted, seen = fact["peaks"]
            assert predicted == seen
            assert fact["collectives"][0] < fact["collectives"][1]
