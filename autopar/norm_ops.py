"""Batch normalization in pieces, whose sums over the batch and over space may be partial.

`x` is [n, c, ...]; statistics have one element per channel, [c]. Sums are taken in at least float32.
Formulas: Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def channel_sum(x: Tensor) -> Tensor:
    """Σ x over all dims but the channels'."""
    return x.sum(_others(x), dtype=torch.float32 if x.dtype in _HALF else None)


def squared_deviation(x: Tensor, mean: Tensor) -> Tensor:
    """Σ (x − mean)² over all dims but the channels'."""
    return _minus(x, mean).square_().sum(_others(x))


def scaled_product(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Σ grad · (x − mean) · rstd over all dims but the channels': the gradient of the norm's weight."""
    return _minus(x, mean).mul_(grad).sum(_others(x)).mul_(rstd)


def normalize(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``(x − mean) · rstd · weight + bias`` in the dtype of `x`."""
    scale = rstd if weight is None else rstd * weight
    result = _minus(x, mean).mul_(_seen(scale, x))
    return (result if bias is None else result.add_(_seen(bias, x))).to(x.dtype)


def normalize_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, grad_sum: Tensor, product: Tensor, count: int
) -> Tensor:
    """Gradient of `x`, given that of the result, where mean and rstd are those of x's own batch.

    Args:
        grad_sum: `channel_sum` of `grad`. product: its `scaled_product`.
        count: elements per channel of the whole batch.
    """
    normalized = _minus(x, mean).mul_(_seen(rstd * product / -count, x))
    centered = normalized.add_(grad).sub_(_seen(grad_sum / count, x))
    return centered.mul_(_seen(rstd if weight is None else rstd * weight, x)).to(x.dtype)


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _seen(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view((-1,) + (1,) * (x.dim() - 2))


def _minus(x: Tensor, mean: Tensor) -> Tensor:
    """x − mean, a new tensor, in at least float32."""
    return x - _seen(mean.float() if x.dtype in _HALF else mean, x)
