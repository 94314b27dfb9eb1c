"""Operands of expert layers on all ranks, and the layers with dispatch between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.dispatched import BetweenPeers
from autopar.kernels.peers import Peers
from autopar.ops.expert_layers import Exchange, dispatched_experts, dispatched_experts_backward

H, D, F, PICKS = 5, 3, 7, 3
Ranks = list[tuple[Any, ...]]


def random_operands(
    size: int,
    per_rank: int,
    dtype: torch.dtype,
    seed: int,
    gates_dtype: torch.dtype | None = None,
    h: int = H,
) -> Ranks:
    """Return the operands of a gradient, by rank. Ranks have different numbers of tokens, some have
    none. Some tokens pick no expert, one expert gets all tokens of a rank, and some experts get
    none."""
    generator = torch.Generator().manual_seed(seed)
    num, starts, ranks = size * per_rank, [i * per_rank for i in range(size)], []

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    for rank in range(size):
        tokens = (3 * rank + 4 + seed) % 6
        ids = torch.randint(-1, num + 1, (tokens, PICKS), generator=generator)
        ids[ids == seed % num] = -1
        if seed % 2:
            ids[:, 0] = num - 1
        gates = normal(tokens, PICKS).to(gates_dtype or dtype)
        weights = normal(per_rank, 2, F, h), normal(per_rank, D if h == H else h, F)
        ranks.append(
            (
                normal(tokens, weights[1].shape[1]),
                normal(tokens, h),
                ids,
                gates,
                *weights,
                "silu",
                num,
                starts,
            )
        )
    return ranks


def both(ranks: Ranks, exchange: Callable[[], Exchange]) -> list[list[Tensor]]:
    """Return the outputs of the tokens and all gradients, by rank."""
    outputs = dispatched_experts([rank[1:] for rank in ranks], exchange())
    return [
        [y, *grads]
        for y, grads in zip(outputs, dispatched_experts_backward(ranks, exchange()), strict=True)
    ]


def between(peers: Peers) -> Callable[[], Exchange]:
    return lambda: BetweenPeers(peers, peers.ranks, most_of(peers.size))


def most_of(size: int) -> int:
    return 5 * PICKS + size % 2


def same(results: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for one, other in zip(results, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
