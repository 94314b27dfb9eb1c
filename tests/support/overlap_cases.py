"""Ranks' operands for the overlapped products, and how to run them with a provider of peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.kernels.chunked import Gather, Scatter, Shards, gather, scatter
from autopar.kernels.overlapped import gathering, scattering
from autopar.kernels.peers import Peers
from autopar.layout import part_range

WORLDS = (1, 2, 3, 5, 8)


def whole_numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose products and sums every dtype holds exactly."""
    return torch.randint(-3, 4, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def shards_of(x: Tensor, dim: int, size: int) -> list[Tensor]:
    """All ranks' shards, contiguous; the last ones may be shorter, or empty."""
    return [x.narrow(dim, *part_range(x.shape[dim], (size,), (rank,))).contiguous() for rank in range(size)]


def gather_all(
    peers: Peers, equation: str, shards: Sequence[Tensor], others: Sequence[Tensor], which: int, dim: int, length: int, num_chunks: int
) -> list[tuple[Tensor, Tensor]]:
    """all_gather_matmul of all ranks, in one call."""
    shape = [*shards[0].shape[:dim], length, *shards[0].shape[dim + 1 :]]
    jobs: dict[int, Gather] = {}
    products = []
    for rank, (shard, other) in enumerate(zip(shards, others, strict=True)):
        jobs[rank], y = gathering(equation, shard, other, which, dim, shape)
        products.append(y)
    gather(peers, Shards.of(shape, dim, shards[0].dtype, peers.size, num_chunks), jobs)
    return [(jobs[rank].gathered, products[rank]) for rank in range(peers.size)]


def scatter_all(peers: Peers, equation: str, pairs: Sequence[tuple[Tensor, Tensor]], dim: int, num_chunks: int) -> list[Tensor]:
    """matmul_reduce_scatter of all ranks, in one call."""
    jobs: dict[int, Scatter] = {}
    shape: list[int] = []
    for rank, (a, b) in enumerate(pairs):
        jobs[rank], shape = scattering(equation, a, b, None, dim, peers.size, rank)
    scatter(peers, Shards.of(shape, dim, pairs[0][0].dtype, peers.size, num_chunks), dim, jobs)
    return [jobs[rank].out for rank in range(peers.size)]
