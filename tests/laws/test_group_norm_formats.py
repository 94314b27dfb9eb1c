"""Gradients behind a group norm are right, whatever memory format its operands have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.ops import formats


class Last(nn.Module):
    """A group norm behind a convolution whose result is channels-last; its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x.permute(0, 3, 1, 2)))
        return self.head(hidden.mean((2, 3))).square().mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_are_the_plain_models(devices: int) -> None:
    model, x = Last(), torch.randn(4, 8, 8, 4, generator=torch.Generator().manual_seed(1))
    options = [autopar.constraints.ddp()] if devices > 1 else []
    plan = autopar.plan(
        model, devices, example_inputs=(x,), hardware="cpu-gloo", constraints=options
    )
    assert autopar.verify(plan, model, (x,)).ok


@pytest.mark.parametrize("of_grad", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_x", [torch.contiguous_format, torch.channels_last])
def test_formats_do_not_matter(of_grad: torch.memory_format, of_x: torch.memory_format) -> None:
    random = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(2, 8, 3, 5, generator=random, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(8, generator=random, dtype=torch.float64)
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, weight, None, 2, 8, 15, 2, 1e-5)
    rest = (mean, rstd, weight, 2, 8, 15, 2, [True, True, True])
    due = torch.ops.aten.native_group_norm_backward.default(grad, x, *rest)
    made = formats.native_group_norm_backward(
        grad.contiguous(memory_format=of_grad), x.contiguous(memory_format=of_x), *rest
    )
    for a, b in zip(made, due, strict=True):
        torch.testing.assert_close(a, b)
