"""Sums of gradients that are held through a step."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which gradients of this dtype add up: fp32, or a wider one as it is."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def add_to(total: Tensor, x: Tensor) -> Tensor:
    """Add `x`, of any dtype, to `total` in place, in the dtype of `total`; returns `total`."""
    return total.add_(x)


def write_to(total: Tensor, x: Tensor) -> Tensor:
    """What `add_to` makes of a `total` of zeros, whatever is in it."""
    return total.copy_(x)


FIRST = {add_to: write_to}
"""What stands in the backward graph, and what runs in its place on the first microbatch."""
