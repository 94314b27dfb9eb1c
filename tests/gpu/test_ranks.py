"""All ranks of a plan in lockstep on one GPU: layouts, redistributions and recomputation give the
results of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native import needs_gpu
from torch import Tensor, nn

import autopar
from autopar import constraints
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.verification import verify_program
from benchmarks import zoo
from benchmarks.random_plans import prepare, random_plan

pytestmark = [pytest.mark.gpu, needs_gpu]
TOLERANCE = 2e-6  # parts of the models compute in float32
HALF = 5e-2
PLANS = {
    "fsdp": ({"gpu": 2}, (constraints.fsdp(),)),
    "uneven": ({"gpu": 3}, (constraints.fsdp(),)),
    "heads": (
        {"a": 2, "b": 2},
        (constraints.fsdp(axes="a"), constraints.tensor_parallel("1d", axes="b")),
    ),
    "sequence": ({"gpu": 2}, (constraints.context_parallel("gpu"),)),
}


def on_device(model: nn.Module, batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return model.cuda(), {
        name: x.cuda() if isinstance(x, Tensor) else x for name, x in batch.items()
    }


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_random_plan_of_four_ranks_matches_the_plain_model(name: str, seed: int) -> None:
    if name == "llava" and torch.__version__ < (2, 13):
        pytest.skip("torch before 2.13 cannot capture its masked_scatter")
    model, batch = zoo.build(name)
    prepared = prepare(model, batch, Mesh({"a": 2, "b": 2}), HardwareProfile.load("h100-sxm"))
    _, program = random_plan(prepared, seed, recompute_share=0.5)
    model, batch = on_device(model, batch)
    verification = verify_program(prepared.trace, program, model, (), batch, tolerance=TOLERANCE)
    assert verification.gradients and verification.num_collectives > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_plans_of_models_on_the_device_are_verified_on_the_device(
    name: str, plan: str, dtype: torch.dtype
) -> None:
    axes, presets = PLANS[plan]
    model, batch = on_device(*zoo.build(name, dtype=dtype))
    planned = autopar.plan(
        model, Mesh(axes), example_inputs=batch, hardware="h100-sxm", constraints=presets
    )
    verification = autopar.verify(
        planned, model, batch, dtype=None, tolerance=TOLERANCE if dtype is torch.float64 else HALF
    )
    assert verification.gradients.keys() == {name for name, _ in model.named_parameters()}
