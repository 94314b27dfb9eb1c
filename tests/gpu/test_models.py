"""On one device a compiled model computes what the plain one does there: every model of the zoo,
whatever runs again in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native import needs_gpu
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule
from benchmarks import zoo
from benchmarks.random_plans import prepare, random_plan

pytestmark = [pytest.mark.gpu, needs_gpu]
ONE = Mesh.parse("d=1")
TOLERANCE = 2e-6  # parts of the models compute in float32 themselves


def on_device(model: nn.Module, batch: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return model.cuda(), {
        name: x.cuda() if isinstance(x, Tensor) else x for name, x in batch.items()
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: (grad.to_local() if isinstance(grad, DTensor) else grad).double()
        for name, grad in grads.items()
    }


def loss_of(outputs: Any) -> Tensor:
    if isinstance(outputs, tuple):
        return outputs[0]
    return outputs["loss"] if isinstance(outputs, dict) else outputs


def compared(plain: nn.Module, compiled: nn.Module, batch: dict[str, Any]) -> float:
    """The largest difference of loss and gradients, over the largest of each tensor; tensors
    near zero are held to the largest of all."""
    losses = [loss_of(model(**batch)) for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    ours, theirs = gradients(compiled), gradients(plain)
    assert ours.keys() == theirs.keys() and ours
    floor = 1e-6 * max(grad.abs().max().item() for grad in theirs.values())
    errors = [
        (ours[name] - grad).abs().max().item() / max(grad.abs().max().item(), floor)
        for name, grad in theirs.items()
    ]
    return max(*errors, abs(losses[1].item() - losses[0].item()) / abs(losses[0].item()))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_compiled_model_has_the_plain_ones_loss_and_gradients(name: str) -> None:
    if name == "llava" and torch.__version__ < (2, 13):
        pytest.skip("torch before 2.13 cannot capture its masked_scatter")
    plain, batch = on_device(*zoo.build(name, dtype=torch.float64))
    model, _ = on_device(*zoo.build(name, dtype=torch.float64))
    compiled = autopar.compile(model, ONE, example_inputs=batch, hardware="h100-sxm")
    assert compared(plain, compiled, batch) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "unet2d"])
def test_what_runs_again_in_backward_gives_the_same(name: str) -> None:
    plain, batch = on_device(*zoo.build(name, dtype=torch.float64))
    model, cpu_batch = zoo.build(name, dtype=torch.float64)
    plan, program = random_plan(
        prepare(model, cpu_batch, ONE, HardwareProfile.load("h100-sxm")), 0, recompute_share=1.0
    )
    assert any(entry.recompute for entry in plan.entries)
    compiled = ParallelModule(program, device_mesh(ONE, "cuda"), model.cuda())
    assert compared(plain, compiled, batch) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral"])
def test_in_bfloat16_it_is_no_further_from_float64_than_the_plain_one(name: str) -> None:
    exact, exact_batch = on_device(*zoo.build(name, dtype=torch.float64))
    found = []
    for compile in (False, True):
        model, batch = on_device(*zoo.build(name, dtype=torch.bfloat16))
        made = (
            autopar.compile(model, ONE, example_inputs=batch, hardware="h100-sxm")
            if compile
            else model
        )
        made(**batch)["loss"].backward()
        found.append(gradients(made))
    exact(**exact_batch)["loss"].backward()
    wanted = gradients(exact)
    plain, ours = (
        sum((grads[name] - wanted[name]).norm().item() for name in wanted) for grads in found
    )
    assert ours < 1.5 * plain
