"""Overlapped communication on real processes matches the plain model, in the predicted memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo_small
from harness import run_processes

from autopar import constraints
from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import PlanOptions, make_plan

pytestmark = pytest.mark.multiproc
SHARDED, REPLICATED = "gpt2 fully sharded", "llama replicated"


@pytest.mark.slow
def test_two_processes_with_overlap_match_the_plain_model_in_the_predicted_memory() -> None:
    plans = {}
    for name, constraint, slowdown in (
        (SHARDED, constraints.fsdp(), 0.41),
        (REPLICATED, constraints.ddp(), 0.0),
    ):
        model, batch = getattr(zoo_small, name.split()[0])(num_layers=1, dtype=torch.float64)
        options = PlanOptions(constraints=(constraint,), outputs="dtensor")
        plan = make_plan(
            capture(model, (), batch), Mesh(2), HardwareProfile.load("h100-sxm"), options
        ).plan
        assert plan.overlap.backward_bytes > 0
        plans[name] = replace(plan, overlap=replace(plan.overlap, slowdown=slowdown)).dumps()
    for facts in run_processes(2, str(Path(__file__).parent / "worker_overlap.py"), "run", plans):
        assert facts.keys() == plans.keys()
        for fact in facts.values():
            assert fact["starts"] > 0 and not fact["missing"]
            assert (
                max(fact["loss"], fact["gradients"]) < 1e-6
            )  # parts of the models compute in float32
            predicted, seen = fact["peaks"]
            assert abs(predicted - seen) <= 0.01 * seen
