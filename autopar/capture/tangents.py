"""What backward starts from where no user's loss does: in checks, and in the traced graph as it stands."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch


def tangent_of(path: str, shape: Sequence[int], dtype: torch.dtype, *, is_loss: bool, scale: float = 1.0) -> torch.Tensor:
    """The gradient of one number, some loss, by an output.

    Of the model's loss `scale`. Of any other output `scale` times normally distributed numbers, always the same for its path and shape:
    with ones the gradient through a softmax would be zero, whatever was computed. They are drawn in float64, or complex128, and rounded.

    Args:
        shape, dtype: of the output, which the tangent shares.
    """
    if is_loss:
        return torch.full(tuple(shape), scale, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{path} {tuple(shape)}".encode()))
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    return (scale * drawn).to(dtype)
