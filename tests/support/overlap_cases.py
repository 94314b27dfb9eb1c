"""Ranks' operands for the overlapped products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORLDS = (1, 2, 3, 5, 8)


def whole_numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose products and sums every dtype holds exactly."""
    return torch.randint(-3, 4, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
