"""All ranks' part in an op of `autopar_csrc`, in one call, with a provider of peers that has them all: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autopar.kernels.chunked import Gather, Scatter, Shards, gather, scatter
from autopar.kernels.normed_scatter import Made, norming
from autopar.kernels.overlapped import gathering, scattering
from autopar.kernels.peers import Peers
from autopar.kernels.routes import Combine, Dispatch, Routes, combine, dispatch
from autopar.layout import part_range


def shards_of(x: Tensor, dim: int, size: int) -> list[Tensor]:
    """All ranks' shards, contiguous; the last ones may be shorter, or empty."""
    return [x.narrow(dim, *part_range(x.shape[dim], (size,), (rank,))).contiguous() for rank in range(size)]


def gather_all(
    peers: Peers,
    equation: str,
    shards: Sequence[Tensor],
    others: Sequence[Tensor],
    which: int,
    dim: int,
    length: int,
    num_chunks: int,
    biases: Sequence[Tensor | None] = (),
) -> list[tuple[Tensor, Tensor]]:
    """all_gather_matmul: of every rank the gathered operand and the product. Arguments as of `overlapped.all_gather_dot`, by rank."""
    shape = [*shards[0].shape[:dim], length, *shards[0].shape[dim + 1 :]]
    jobs: dict[int, Gather] = {}
    products = []
    for rank, (shard, other, bias) in enumerate(zip(shards, others, biases or [None] * len(shards), strict=True)):
        jobs[rank], y = gathering(equation, shard, other, which, dim, shape, bias)
        products.append(y)
    gather(peers, Shards.of(shape, dim, shards[0].dtype, peers.size, num_chunks), jobs)
    return [(jobs[rank].gathered, products[rank]) for rank in range(peers.size)]


def scatter_all(
    peers: Peers,
    equation: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    dim: int,
    num_chunks: int,
    addends: Sequence[Tensor | None] = (),
    biases: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """matmul_reduce_scatter: of every rank its part of the sum."""
    jobs: dict[int, Scatter] = {}
    shape: list[int] = []
    none = [None] * len(pairs)
    for rank, ((a, b), addend, bias) in enumerate(zip(pairs, addends or none, biases or none, strict=True)):
        jobs[rank], shape = scattering(equation, a, b, addend, dim, peers.size, rank, bias)
    scatter(peers, Shards.of(shape, dim, pairs[0][0].dtype, peers.size, num_chunks), dim, jobs)
    return [jobs[rank].out for rank in range(peers.size)]


def scatter_norm_all(
    peers: Peers,
    equation: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    residuals: Sequence[Tensor],
    weights: Sequence[Tensor],
    dim: int,
    num_chunks: int,
    eps: float,
    rounded: bool,
) -> list[Made]:
    """matmul_reduce_add_rmsnorm: of every rank y, squares and normed."""
    jobs: dict[int, Scatter] = {}
    shape: list[int] = []
    made = []
    for rank, ((a, b), residual, weight) in enumerate(zip(pairs, residuals, weights, strict=True)):
        jobs[rank], shape, own = norming(equation, a, b, residual, weight, dim, peers.size, rank, eps, rounded)
        made.append(own)
    scatter(peers, Shards.of(shape, dim, pairs[0][0].dtype, peers.size, num_chunks), dim, jobs)
    return made


def dispatch_all(peers: Peers, xs: Sequence[Tensor], experts: Sequence[Tensor], num_experts: int, most: int) -> list[Dispatch]:
    """moe_dispatch: of every rank its job, with rows, table and position filled."""
    jobs = {rank: Dispatch.of(x, chosen, num_experts, most, len(xs)) for rank, (x, chosen) in enumerate(zip(xs, experts, strict=True))}
    dispatch(peers, Routes(xs[0].shape[1] * xs[0].element_size(), num_experts, len(xs), most), jobs)
    return list(jobs.values())


def combine_all(peers: Peers, parts: Sequence[tuple[Tensor, Tensor, Tensor]], weights: Sequence[Tensor]) -> list[Combine]:
    """moe_combine of every rank's rows, table and position: of every rank its job, with y filled."""
    size, rows = len(parts), parts[0][0]
    jobs = {rank: Combine.of(*part, weights[rank]) for rank, part in enumerate(parts)}
    combine(peers, Routes(rows.shape[1] * rows.element_size(), parts[0][1].shape[1], size, rows.shape[0] // size), jobs)
    return list(jobs.values())
