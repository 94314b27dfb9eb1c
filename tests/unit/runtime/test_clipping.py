"""Clipping processes many gradients at once and is bitwise equal to clipping one by one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import RuntimeStateError
from autopar.runtime.backward import clip_grad_norm_, clip_over_stages


def with_gradients(*dtypes: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(40):
        dtype = dtypes[number % len(dtypes)]
        shape = [(), (3,), (5, 7), (0, 2), (4097,)][number % 5]
        p = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=number % 7 != 3)
        p.grad = torch.randn(shape, generator=generator).to(dtype) if p.requires_grad else None
        found.append(p)
    return found


def one_by_one(gradients: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip gradients in place by the definition, one by one, and return their total norm."""
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    powers = [torch.linalg.vector_norm(g, norm_type, dtype=wide).pow(norm_type) for g in gradients]
    total = torch.stack(powers).sum().pow(1.0 / norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for g in gradients:
        g.mul_(scale)
    return total


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.bfloat16, torch.float16),
    ],
)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_many_gradients_equals_clipping_one_by_one(
    norm_type: float, dtypes: tuple[torch.dtype, ...], max_norm: float
) -> None:
    parameters = with_gradients(*dtypes)
    expected = [p.grad.clone() for p in parameters if p.grad is not None]
    total = one_by_one(expected, max_norm, norm_type)
    assert torch.equal(clip_grad_norm_(parameters, max_norm, norm_type), total)
    clipped = [p.grad for p in parameters if p.grad is not None]
    assert all(
        torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(clipped, expected, strict=True)
    )


def test_the_clipping_factor_is_not_rounded_to_16_bits() -> None:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    p.grad = torch.full_like(p, 3e4)
    clip_grad_norm_([p], 0.01)
    assert p.grad.double().norm().item() == pytest.approx(0.01, rel=2e-3)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0.0


@pytest.mark.parametrize("norm_type", [0, -1.0, -math.inf, math.nan])
def test_an_invalid_norm_type_is_refused(norm_type: float) -> None:
    parameters = with_gradients(torch.float32)
    with pytest.raises(RuntimeStateError, match=f"norm_type={norm_type} is not a norm"):
        clip_grad_norm_(parameters, 1.0, norm_type)
    with pytest.raises(RuntimeStateError, match=f"norm_type={norm_type} is not a norm"):
        clip_over_stages([(p, True) for p in parameters], 1.0, norm_type, None, None)  # type: ignore[arg-type]
