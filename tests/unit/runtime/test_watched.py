"""Tensors that the user can change and that backward reads must not change between a call and
its backward. Other tensors may change."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RuntimeStateError


class Net(nn.Module):
    """A model whose backward reads the input, the scale and `exp`, but neither `shifted` nor the
    running mean that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        grown = hidden.exp()
        return {"loss": (grown * self.scale).mean(), "exp": grown, "shifted": hidden + 1.0}


def batch() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8)


def made(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return autopar.compile(Net(), 1, example_inputs=(batch(),), hardware="cpu-gloo", **options)


@pytest.mark.parametrize("outputs", ["full", "local", "dtensor"])
@pytest.mark.parametrize(
    "held",
    [
        "input '0'",
        "output 'exp'",
        "buffer 'scale'",
        "parameter 'layer.weight'",
        "output 'shifted'",
        "mean",
    ],
)
def test_only_tensors_that_backward_reads_must_not_change_before_it(
    held: str, outputs: str
) -> None:
    def run(change: bool) -> Tensor:
        module, x = made(outputs=outputs), batch()
        out = module(x)
        tensors = {
            "input '0'": x,
            "output 'exp'": out["exp"],
            "buffer 'scale'": module.scale,
            "mean": module.mean,
        }
        tensors |= {
            "output 'shifted'": out["shifted"],
            "parameter 'layer.weight'": module.layer.weight,
        }
        assert isinstance(out["exp"], DTensor) == (outputs == "dtensor")
        if change:
            with torch.no_grad():
                tensors[held].mul_(2.0)
        out["loss"].backward()
        return module.layer.weight.grad.full_tensor()

    if held in (
        "output 'shifted'",
        "mean",
        "parameter 'layer.weight'",
    ):  # only the gradient of the weight is computed, and it does not depend on the weight
        torch.testing.assert_close(run(change=True), run(change=False))
        return
    with pytest.raises(
        RuntimeStateError,
        match=f"{held} was changed in place after the call, and backward reads it",
    ):
        run(change=True)


def test_a_change_of_the_base_of_a_view_that_backward_reads_is_refused() -> None:
    module, x = made(), batch()
    loss = module(x[:])["loss"]
    x[0, 0] = 5.0
    with pytest.raises(RuntimeStateError, match="input '0' was changed in place"):
        loss.backward()


@pytest.mark.slow
def test_changes_are_detected_with_inductor_too() -> None:
    module = made(backend="inductor", outputs="full")
    for held in ("input", "output"):
        x = batch()
        out = module(x)
        (x if held == "input" else out["exp"]).zero_()
        with pytest.raises(RuntimeStateError, match=f"{held} '.*' was changed in place"):
            out["loss"].backward()


def test_an_in_place_scaled_loss_and_a_second_call_before_backward_are_allowed() -> None:
    module, plain, x = made(), Net(), batch()
    plain.load_state_dict(
        {
            name: t.full_tensor() if isinstance(t, DTensor) else t
            for name, t in module.state_dict().items()
        }
    )
    for each in (module, plain):
        losses = [each(x)["loss"], each(x + 1.0)["loss"]]
        for loss in losses:
            loss /= 2.0
        sum(losses).backward()
    torch.testing.assert_close(module.layer.weight.grad.full_tensor(), plain.layer.weight.grad)


def test_inference_tensors_that_backward_reads_are_refused_as_in_torch() -> None:
    module, plain = made(), Net()
    with torch.inference_mode():
        x = batch()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        plain(x)
    with pytest.raises(
        RuntimeStateError, match=r"input '0' was created under torch\.inference_mode"
    ):
        module(x)
    with torch.no_grad():
        assert module(x)["loss"].isfinite()


class Perplexity(Net):
    """A model whose backward also reads the loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = super().forward(x)
        return {**out, "loss": out["loss"].exp()}


@pytest.mark.parametrize("outputs", ["full", "dtensor"])
@pytest.mark.parametrize("backward", [True, False])
def test_watched_tensors_are_freed_with_the_saved_tensors(backward: bool, outputs: str) -> None:
    module = autopar.compile(
        Perplexity(), 1, example_inputs=(batch(),), hardware="cpu-gloo", outputs=outputs
    )
    gc.disable()
    try:
        out = module(batch())
        memory = [weakref.ref(out[name]) for name in ("exp", "loss")]
        if backward:
            out["loss"].backward()
        del out
        assert [each() for each in memory] == [None, None]
    finally:
        gc.enable()
