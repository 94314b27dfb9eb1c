"""Plans of the planner match the model on all meshes, with sharding and recomputation.

Under `frictionless` prices, even a tiny model is worth sharding. Under a tight budget, parameters
are stored in shards.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import load_profile
from benchmarks.models import ModelSpec

MODELS = ("tiny-gpt2", "tiny-llama", "tiny-bert", "tiny-vit")
FAST = [("tiny-gpt2", "8"), ("tiny-llama", "a=2,b=4"), ("tiny-vit", "a=2,b=2")]
SLOW = [
    (m, mesh) for m in MODELS for mesh in ("4", "a=2,b=2", "a=2,b=4", "8") if (m, mesh) not in FAST
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def planned(
    model: str, mesh: str, profile: HardwareProfile, **options: object
) -> tuple[Planned, object]:
    """Return the plan and the result of its verification."""
    built, batch = ModelSpec.known(model).build()
    trace = capture(built, (), batch)
    made = make_plan(trace, Mesh.parse(mesh), profile, PlanOptions(**options))  # type: ignore[arg-type]
    return made, verify_program(trace, made.program, built, (), batch)


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_the_plan_of_the_planner_matches_the_plain_model(model: str, mesh: str) -> None:
    made, found = planned(model, mesh, load_profile("cpu-gloo-frictionless"))
    assert found.max_error <= found.tolerance <= 2e-6  # type: ignore[attr-defined]
    assert found.num_collectives > 20  # type: ignore[attr-defined]
    assert made.plan.proof.bound_s <= made.plan.proof.objective_s


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_for_a_small_budget_matches_the_plain_model_and_fits(
    model: str,
) -> None:
    profile = HardwareProfile.load("cpu-gloo")
    ample, _ = planned(model, "a=2,b=2", profile)
    budget = int(ample.plan.prediction.peak_bytes * 0.5)
    tight, found = planned(model, "a=2,b=2", profile, memory_bytes=budget)
    assert tight.plan.prediction.peak_bytes <= budget
    assert found.num_collectives > 0  # type: ignore[attr-defined]
    assert tight.plan.prediction.step_s > ample.plan.prediction.step_s


@pytest.mark.slow
def test_a_model_with_one_device_needs_no_communication() -> None:
    made, found = planned("tiny-bert", "1", load_profile("cpu-gloo-frictionless"))
    assert found.num_collectives == 0  # type: ignore[attr-defined]
    assert not any(c.collective.kind != "slice" for c in made.plan.communications)
    assert found.max_error < 1e-12  # type: ignore[attr-defined]
    assert torch.get_default_dtype() == torch.float32
