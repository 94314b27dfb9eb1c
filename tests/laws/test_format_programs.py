"""Programs compute the results of the plain model if kernels need a memory format and values have
other strides than at capture.

Inputs, parameters and results of collectives are contiguous in a program, whatever their strides at
capture. Views of them that were contiguous at capture may not be contiguous in the program.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ops import formats


class Last(nn.Module):
    """A group norm after a convolution whose result is channels-last. Its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x.permute(0, 3, 1, 2)))
        return self.head(hidden.mean((2, 3))).square().mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_gradients_match_the_plain_model_for_other_memory_formats(devices: int) -> None:
    model, x = Last(), torch.randn(4, 8, 8, 4, generator=torch.Generator().manual_seed(1))
    options = [autopar.constraints.ddp()] if devices > 1 else []
    plan = autopar.plan(
        model, devices, example_inputs=(x,), hardware="cpu-gloo", constraints=options
    )
    assert autopar.verify(plan, model, (x,)).ok


@pytest.mark.parametrize("of_grad", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_x", [torch.contiguous_format, torch.channels_last])
def test_results_do_not_depend_on_memory_formats(
    of_grad: torch.memory_format, of_x: torch.memory_format
) -> None:
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


class Turned(nn.Module):
    """A function of the transposed input, which is contiguous at capture because the input is
    not."""

    def __init__(self, function: Callable[[Tensor], Tensor], table: Tensor | None = None) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(1.5))
        self.table = None if table is None else nn.Parameter(table)

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.table is None else self.table
        return (self.function(given.mT) * x.mean()).square().mean() * self.scale


def _bags(table: Tensor) -> Tensor:
    return F.embedding_bag(torch.tensor([0, 3, 1, 2, 2]), table, torch.tensor([0, 2]))


KINDS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 4, 6, 8)),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        (2, 4, 6, 8),
    ),
    "group norm": (lambda x: F.group_norm(x, 2), (2, 4, 6)),
    "weight norm": (lambda v: torch._weight_norm(v, v[:, :1].exp(), 0), (6, 4)),
    "pdist": (F.pdist, (6, 4)),
    "bags": (_bags, (4, 6)),
}


@pytest.mark.parametrize("stored", [False, True], ids=["input", "parameter"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_transposed_tensor_that_was_contiguous_at_capture(kind: str, stored: bool) -> None:
    function, shape = KINDS[kind]
    laid = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).mT
    model = Turned(function, laid if stored else None).double()
    x = laid.clone().requires_grad_()
    assert x.mT.is_contiguous() and (model.table is None or model.table.mT.is_contiguous())
    plan = autopar.plan(model, 1, example_inputs=(x,), hardware="cpu-gloo")
    assert autopar.verify(plan, model, (x,)).ok
