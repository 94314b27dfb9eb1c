"""Tensors that a graph holds as numbers in its own code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def constant(values: Sequence[bool | int | float | complex], size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor of shape `size` that holds `values` in row-major order. Each call makes a new one."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(tuple(size))
