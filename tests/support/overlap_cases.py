"""Operands of overlapped products on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORLDS = (1, 2, 3, 5, 8)


def whole_numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small whole numbers, whose products and sums are exact in all dtypes."""
    return torch.randint(-3, 4, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
