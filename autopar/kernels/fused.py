"""Products that are fused with a collective, and optionally with a norm. They are steps of emitted
graphs that plans select by name.

Like the steps of `autopar.kernels.collectives`, they refer to mesh axes by index, and `bind`
replaces these by process groups. Their results equal those of the separate collective, product and
norm, except for the number of roundings. If ranks cannot access each other's memory, the separate
ops run. Which variant runs is known only at run time. A plan therefore includes the shared memory
that the kernels keep, and the larger of the temporaries of both variants
(`autopar.kernels.overlapped` and `autopar.kernels.normed` describe the memory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from autopar.core.collective import Kind
from autopar.core.layout import part_range
from autopar.kernels import collectives
from autopar.kernels.chunked import Gather, Scatter, Shards, gather, scatter
from autopar.kernels.normed import AddNorm, Made, dot_reduce_add_rmsnorm, prepare_norm
from autopar.kernels.overlapped import (
    ChunkedDim,
    all_gather_dot,
    dot_reduce_scatter,
    prepare_gather,
    prepare_scatter,
)
from autopar.kernels.peers import Peers
from autopar.kernels.routed import Combine, Dispatch, Routes, combine, dispatch
from autopar.ops.norms import RmsNorm


class ChunkedAxis(NamedTuple):
    """A dim that a mesh axis shards and that is sent in chunks. Nodes of kernels have it as an
    argument, which `bind` replaces by a `ChunkedDim`.

    Attributes:
        dim: the dim of the gathered operand, or of the scattered result.
        axis: the mesh axis.
        num_chunks: the number of chunks in which each rank's shard is sent.
    """

    dim: int
    axis: int
    num_chunks: int

    def bind(self, group: collectives.AxisGroup) -> ChunkedDim:
        """Return the dim with this rank's group along the axis."""
        return ChunkedDim.of(self.dim, group, self.num_chunks)

    def bind_current_group(self) -> ChunkedDim:
        """Return the dim with the group that `collectives.use_groups` has set for the axis."""
        return self.bind(collectives.group_of(self.axis))


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    equation: str,
    operand: int,
    over: ChunkedAxis,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Gather a factor of a product, and multiply.

    Args:
        a, b: the factors. One of them is this rank's shard.
        equation: the equation of the product; see `ops.dot`.
        operand: the factor that is gathered, 0 or 1.
        over: the sharded dim of this factor.
        bias, starts: see `ops.dot`.

    Returns:
        The full factor, and the product of the full factors.
    """
    return gather_bound(a, b, equation, operand, over.bind_current_group(), bias, starts)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    equation: str,
    over: ChunkedAxis,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> Tensor:
    """Return this rank's shard of the sum of the products of all ranks of the axis.

    Args:
        a, b: the factors.
        addend: a tensor that is added to this rank's product before the sum, or None.
        equation: the equation of the product; see `ops.dot`.
        over: the dim of the result that is scattered.
        bias, starts: see `ops.dot`.
    """
    return scatter_bound(a, b, addend, equation, over.bind_current_group(), bias, starts)


def matmul_reduce_add_rmsnorm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    equation: str,
    over: ChunkedAxis,
    norm: RmsNorm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum y of `matmul_reduce_scatter` and a residual, its
    ``ops.square_sum(y, norm.dtype)``, and ``ops.rms_norm`` of both.

    Args:
        a, b, equation, over: see `matmul_reduce_scatter`.
        residual: a tensor with the shape of this rank's shard of the result.
        weight: the weight of the norm.
        norm: the settings of the norm; `autopar.kernels.normed.norms` defines the supported dtypes.
    """
    return norm_bound(a, b, residual, weight, equation, over.bind_current_group(), norm)


def gather_bound(
    a: Tensor,
    b: Tensor,
    equation: str,
    operand: int,
    over: ChunkedDim,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Run `all_gather_matmul` in a process group.

    Args:
        a, b, equation, operand, bias, starts: see `all_gather_matmul`.
        over: the dim that is gathered.
    """
    return all_gather_dot(equation, (a, b), operand, over, bias=None if any(starts) else bias)


def scatter_bound(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    equation: str,
    over: ChunkedDim,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> Tensor:
    """Run `matmul_reduce_scatter` in a process group.

    Args:
        a, b, addend, equation, bias, starts: see `matmul_reduce_scatter`.
        over: the dim that is scattered.
    """
    return dot_reduce_scatter(equation, (a, b), over, addend, None if any(starts) else bias)


def norm_bound(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    equation: str,
    over: ChunkedDim,
    norm: RmsNorm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `matmul_reduce_add_rmsnorm` in a process group.

    Args:
        a, b, residual, weight, equation, norm: see `matmul_reduce_add_rmsnorm`.
        over: the dim that is scattered.
    """
    return dot_reduce_add_rmsnorm(equation, (a, b), residual, weight, over, norm)


KERNELS: Mapping[Callable[..., Any], Kind] = {
    all_gather_matmul: "all_gather",
    matmul_reduce_scatter: "reduce_scatter",
    matmul_reduce_add_rmsnorm: "reduce_scatter",
}
"""The kernels of plans, with the collective of each."""

BOUND: Mapping[Callable[..., Any], Callable[..., Any]] = {
    all_gather_matmul: gather_bound,
    matmul_reduce_scatter: scatter_bound,
    matmul_reduce_add_rmsnorm: norm_bound,
}
"""The form of each kernel in a process group, with a `ChunkedDim` instead of the `ChunkedAxis`."""


# --------------------------------------------------------------------------------------------------
# Ops of all ranks in one call, for tests and benchmarks.


def shards_of(x: Tensor, dim: int, size: int) -> list[Tensor]:
    """Return the contiguous shards of all ranks. The last ones may be shorter or empty.

    Args:
        x: the full tensor.
        dim: the dim that is sharded.
        size: the number of ranks.
    """
    return [
        x.narrow(dim, *part_range(x.shape[dim], (size,), (rank,))).contiguous()
        for rank in range(size)
    ]


def gather_all(
    peers: Peers,
    equation: str,
    shards: Sequence[Tensor],
    others: Sequence[Tensor],
    which: int,
    dim: int,
    num_chunks: int,
    *,
    biases: Sequence[Tensor | None] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Run all_gather_matmul for all ranks.

    Args:
        peers: a provider that has all ranks.
        equation, which: see `overlapped.all_gather_dot`.
        dim, num_chunks: see `overlapped.ChunkedDim`.
        shards, others, biases: the operands and bias of each rank.

    Returns:
        The gathered operand and the product of each rank.
    """
    length = sum(shard.shape[dim] for shard in shards)
    shape = [*shards[0].shape[:dim], length, *shards[0].shape[dim + 1 :]]
    jobs: dict[int, Gather] = {}
    products = []
    for rank, (shard, other, bias) in enumerate(
        zip(shards, others, biases or [None] * len(shards), strict=True)
    ):
        jobs[rank], y = prepare_gather(equation, shard, other, which, dim, shape, bias)
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
    """Run matmul_reduce_scatter for all ranks.

    Args:
        peers: a provider that has all ranks.
        equation: see `overlapped.dot_reduce_scatter`.
        dim, num_chunks: see `overlapped.ChunkedDim`.
        pairs, addends, biases: the operands, addend and bias of each rank.

    Returns:
        The shard of the sum of each rank.
    """
    jobs: dict[int, Scatter] = {}
    shape: list[int] = []
    none = [None] * len(pairs)
    for rank, (pair, addend, bias) in enumerate(
        zip(pairs, addends or none, biases or none, strict=True)
    ):
        group = collectives.AxisGroup("", peers.size, rank)
        jobs[rank], shape = prepare_scatter(equation, pair, addend, dim, group, bias)
    scatter(peers, Shards.of(shape, dim, pairs[0][0].dtype, peers.size, num_chunks), dim, jobs)
    return [jobs[rank].out for rank in range(peers.size)]


def scatter_norm_all(
    peers: Peers,
    equation: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    norms: Sequence[AddNorm],
    dim: int,
    num_chunks: int,
) -> list[Made]:
    """Run matmul_reduce_add_rmsnorm for all ranks.

    Args:
        peers: a provider that has all ranks.
        equation: see `normed.dot_reduce_add_rmsnorm`.
        dim, num_chunks: see `overlapped.ChunkedDim`.
        pairs: the factors of each rank.
        norms: the residual and norm of each rank.

    Returns:
        y, squares and normed of each rank.
    """
    jobs: dict[int, Scatter] = {}
    shape: list[int] = []
    results = []
    for rank, (pair, norm) in enumerate(zip(pairs, norms, strict=True)):
        group = collectives.AxisGroup("", peers.size, rank)
        jobs[rank], shape, result = prepare_norm(equation, pair, norm, dim, group)
        results.append(result)
    scatter(peers, Shards.of(shape, dim, pairs[0][0].dtype, peers.size, num_chunks), dim, jobs)
    return results


def dispatch_all(
    peers: Peers, xs: Sequence[Tensor], experts: Sequence[Tensor], num_experts: int, most: int
) -> list[Dispatch]:
    """Run moe_dispatch for all ranks.

    Args:
        peers: a provider that has all ranks.
        xs, experts: the operands of each rank.
        num_experts, most: see `autopar.kernels.routed`.

    Returns:
        The job of each rank, with rows, table and position filled.
    """
    jobs = {
        rank: Dispatch.of(x, chosen, num_experts, most, len(xs))
        for rank, (x, chosen) in enumerate(zip(xs, experts, strict=True))
    }
    dispatch(peers, Routes(xs[0].shape[1] * xs[0].element_size(), num_experts, len(xs), most), jobs)
    return list(jobs.values())


def combine_all(
    peers: Peers, parts: Sequence[tuple[Tensor, Tensor, Tensor]], weights: Sequence[Tensor]
) -> list[Combine]:
    """Run moe_combine for all ranks.

    Args:
        peers: a provider that has all ranks.
        parts: the rows, table and position of each rank.
        weights: the weights of each rank.

    Returns:
        The job of each rank, with y filled.
    """
    size, rows = len(parts), parts[0][0]
    jobs = {rank: Combine.of(*part, weights[rank]) for rank, part in enumerate(parts)}
    combine(
        peers,
        Routes(
            rows.shape[1] * rows.element_size(), parts[0][1].shape[1], size, rows.shape[0] // size
        ),
        jobs,
    )
    return list(jobs.values())
