"""Tokens and experts of all ranks, and how to run dispatch and combine with a provider of peers."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.kernels.peers import Peers
from autopar.kernels.routes import Combine, Dispatch, Routes, combine, dispatch

WIDTH = 5


def drawn(size: int, choices: int, per_rank: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    """Of every rank tokens, their experts and weights; uneven counts: rank 0 may have no token, some expert gets none, one gets many."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = size * per_rank
    counts = [0 if rank == 0 and size > 1 else 3 + 2 * rank for rank in range(size)]
    xs = [torch.randn(count, WIDTH, generator=generator) for count in counts]
    experts = [torch.randint(0, num_experts, (count, choices), generator=generator) for count in counts]
    for chosen in experts:
        chosen[: len(chosen) // 2, 0] = num_experts - 1
        chosen[chosen == 0] = num_experts // 2
    weights = [torch.rand(count, choices, generator=generator) for count in counts]
    return xs, experts, weights, max(count * choices for count in counts)


def dispatch_all(peers: Peers, xs: list[Tensor], experts: list[Tensor], num_experts: int, most: int, width: int = WIDTH) -> list[Dispatch]:
    jobs = {rank: Dispatch.of(x, chosen, num_experts, most, len(xs)) for rank, (x, chosen) in enumerate(zip(xs, experts, strict=True))}
    dispatch(peers, Routes(width * xs[0].element_size(), num_experts, len(xs), most), jobs)
    return list(jobs.values())


def combine_all(peers: Peers, parts: list[tuple[Tensor, Tensor, Tensor]], weights: list[Tensor]) -> list[Combine]:
    size, rows = len(parts), parts[0][0]
    jobs = {rank: Combine.of(*part, weights[rank]) for rank, part in enumerate(parts)}
    combine(peers, Routes(WIDTH * rows.element_size(), parts[0][1].shape[1], size, rows.shape[0] // size), jobs)
    return list(jobs.values())
