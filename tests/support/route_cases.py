"""Tokens and experts of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH = 5


def random_tokens(
    size: int, choices: int, per_rank: int, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    """Return tokens, their experts and weights, by rank. The numbers of tokens differ: rank 0 may
    have none, some experts get none, and one gets many."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = size * per_rank
    counts = [0 if rank == 0 and size > 1 else 3 + 2 * rank for rank in range(size)]
    xs = [torch.randn(count, WIDTH, generator=generator) for count in counts]
    experts = [
        torch.randint(0, num_experts, (count, choices), generator=generator) for count in counts
    ]
    for picks in experts:
        picks[: len(picks) // 2, 0] = num_experts - 1
        picks[picks == 0] = num_experts // 2
    weights = [torch.rand(count, choices, generator=generator) for count in counts]
    return xs, experts, weights, max(count * choices for count in counts)
