"""Compiled models on one device match the plain models, for each model of the zoo and with
recomputation."""

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
TOLERANCE = 2e-6  # parts of the models compute in float32


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


def largest_error(plain: nn.Module, compiled: nn.Module, batch: dict[str, Any]) -> float:
    """Return the largest relative error of the loss and the gradients, relative to the largest
    element of each tensor, or to that of all gradients for tensors near zero."""
    losses = [loss_of(model(**batch)) for model in (plain, compiled)]
    for loss in losses:
        loss.backward()
    actual, expected = gradients(compiled), gradients(plain)
    assert actual.keys() == expected.keys() and actual
    floor = 1e-6 * max(grad.abs().max().item() for grad in expected.values())
    errors = [
        (actual[name] - grad).abs().max().item() / max(grad.abs().max().item(), floor)
        for name, grad in expected.items()
    ]
    return max(*errors, abs(losses[1].item() - losses[0].item()) / abs(losses[0].item()))


@pytest.mark.parametrize("name", zoo.NAMES)
def test_compiled_model_matches_the_loss_and_gradients_of_the_plain_model(name: str) -> None:
    if name == "llava" and torch.__version__ < (2, 13):
        pytest.skip("torch before 2.13 cannot capture its masked_scatter")
    plain, batch = on_device(*zoo.build(name, dtype=torch.float64))
    model, _ = on_device(*zoo.build(name, dtype=torch.float64))
    compiled = autopar.compile(model, ONE, example_inputs=batch, hardware="h100-sxm")
    assert largest_error(plain, compiled, batch) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "unet2d"])
def test_recomputation_gives_the_gradients_of_the_plain_model(name: str) -> None:
    plain, batch = on_device(*zoo.build(name, dtype=torch.float64))
    model, cpu_batch = zoo.build(name, dtype=torch.float64)
    plan, program = random_plan(
        prepare(model, cpu_batch, ONE, HardwareProfile.load("h100-sxm")), 0, recompute_share=1.0
    )
    assert any(entry.recompute for entry in plan.entries)
    compiled = ParallelModule(program, device_mesh(ONE, "cuda"), model.cuda())
    assert largest_error(plain, compiled, batch) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral"])
def test_bfloat16_errors_of_compiled_and_plain_models_are_similar(name: str) -> None:
    exact, exact_batch = on_device(*zoo.build(name, dtype=torch.float64))
    grads_by_kind = []
    for compile in (False, True):
        model, batch = on_device(*zoo.build(name, dtype=torch.bfloat16))
        module = (
            autopar.compile(model, ONE, example_inputs=batch, hardware="h100-sxm")
            if compile
            else model
        )
        module(**batch)["loss"].backward()
        grads_by_kind.append(gradients(module))
    exact(**exact_batch)["loss"].backward()
    expected = gradients(exact)
    plain, compiled = (
        sum((grads[name] - expected[name]).norm().item() for name in expected)
        for grads in grads_by_kind
    )
    assert compiled < 1.5 * plain
