"""Each gradient has its own memory, as with autograd, also with Inductor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar


class Turning(nn.Module):
    """A model with an activation whose gradient has another order of dims in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = (
            nn.functional.gelu(self.up(x).view(6, 3, 4).permute(2, 0, 1) * 2)
            .permute(1, 2, 0)
            .reshape(6, 12)
        )
        return self.down(turned.tanh()).square().sum()


@pytest.mark.slow
def test_inductor_accepts_gradients_with_permuted_strides() -> None:
    plain, x = Turning(), torch.randn(6, 8)
    module = autopar.compile(
        copy.deepcopy(plain), 1, example_inputs=(x,), hardware="cpu-gloo", backend="inductor"
    )
    for each in (plain, module):
        each(x).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), parameter.grad)


class StageCache(nn.Module):
    """A model in which two parameters may have the same gradient."""

    def __init__(
        self, loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.a, self.b, self.loss = (
            nn.Parameter(torch.rand(6, 8)),
            nn.Parameter(torch.rand(6, 8)),
            loss,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.a, self.b, x)


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b, x: ((a + b).sin() * x).sum(),
        lambda a, b, x: ((a + b.view(8, 6).view(6, 8)).sin() * x).sum(),
        lambda a, b, x: (a + b + x.sum()).sum(),  # an expanded scalar
        lambda a, b, x: (a * x).sum() + (b.t() * x.t()).sum(),
    ],
    ids=["one tensor", "a view of it", "one number", "the batch"],
)
def test_gradients_do_not_share_memory(loss: Callable[..., torch.Tensor]) -> None:
    plain, x = StageCache(loss), torch.randn(6, 8)
    module = autopar.compile(copy.deepcopy(plain), 1, example_inputs=(x,), hardware="cpu-gloo")
    for each in (plain, module):
        for _ in range(2):
            each(x).backward()
    torch.testing.assert_close(
        module.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    )
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), parameter.grad)
