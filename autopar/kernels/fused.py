"""Products that do the collective at their border, one of them also a norm: the steps of emitted
graphs that plans ask for by name.

Like the steps of `autopar.kernels.collectives` they name mesh axes by index, and `bind` replaces
these by process groups. Their results are those of the collective, the product and the norm one
after the other, except for how often they are rounded. So they also run if ranks do not reach each
other's memory (`autopar.kernels.overlapped` and `autopar.kernels.normed` say what memory both ways
take). Whether they do is known only at run time. A plan therefore counts what the kernels share
with their peers and keep, and of the temporaries the larger of both ways.
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
    """A dim that a mesh axis splits, and that is sent in chunks: an argument of the kernels' nodes.
    `bind` replaces it by a `ChunkedDim`.

    Attributes:
        dim: of the operand that is gathered, or of the result that is scattered.
        axis: the mesh axis.
        num_chunks: the chunks in which each rank's part is sent.
    """

    dim: int
    axis: int
    num_chunks: int

    def bind(self, group: collectives.AxisGroup) -> ChunkedDim:
        """Return the dim over this rank's group along the axis."""
        return ChunkedDim.of(self.dim, group, self.num_chunks)

    def bind_here(self) -> ChunkedDim:
        """Return the dim over the group that `collectives.use_groups` has set for the axis."""
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
        a, b: the factors; one of them is this rank's part. equation: the product, see `ops.dot`.
        operand: which factor is gathered, 0 or 1. over: its dim that is split. bias, starts: of the
            product, see `ops.dot`.

    Returns:
        The whole factor, and ``ops.dot(equation, …)`` of it.
    """
    return gather_bound(a, b, equation, operand, over.bind_here(), bias, starts)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    equation: str,
    over: ChunkedAxis,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> Tensor:
    """Return this rank's part of a product's result, summed over the ranks of the axis.

    Args:
        a, b: the factors. addend: added to this rank's product before the sum, or None.
        equation: the product, see `ops.dot`. over: the result's dim that is split. bias, starts: of
            the product, see `ops.dot`.
    """
    return scatter_bound(a, b, addend, equation, over.bind_here(), bias, starts)


def matmul_reduce_add_rmsnorm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    equation: str,
    over: ChunkedAxis,
    norm: RmsNorm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `matmul_reduce_scatter` added to a residual, ``ops.square_sum(…, norm.dtype)`` of this
    sum, and ``ops.rms_norm`` of both.

    Args:
        a, b, equation, over: see `matmul_reduce_scatter`. residual: like this rank's part of the
            result. weight: of the norm.
        norm: the norm's settings; for the possible dtypes see `autopar.kernels.normed.norms`.
    """
    return norm_bound(a, b, residual, weight, equation, over.bind_here(), norm)


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
        a, b, equation, operand, bias, starts: see `all_gather_matmul`. over: the dim that is
            gathered.
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
        a, b, addend, equation, bias, starts: see `matmul_reduce_scatter`. over: the dim that is
            scattered.
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
        a, b, residual, weight, equation, norm: see `matmul_reduce_add_rmsnorm`. over: the dim that
            is scattered.
    """
    return dot_reduce_add_rmsnorm(equation, (a, b), residual, weight, over, norm)


KERNELS: Mapping[Callable[..., Any], Kind] = {
    all_gather_matmul: "all_gather",
    matmul_reduce_scatter: "reduce_scatter",
    matmul_reduce_add_rmsnorm: "reduce_scatter",
}
"""What a plan's kernels are emitted as, and the collective that each does."""

BOUND: Mapping[Callable[..., Any], Callable[..., Any]] = {
    all_gather_matmul: gather_bound,
    matmul_reduce_scatter: scatter_bound,
    matmul_reduce_add_rmsnorm: norm_bound,
}
"""Each in a process group, with a `ChunkedDim` for the `ChunkedAxis`."""


# --------------------------------------------------------------------------------------------------
# All ranks' parts in an op, in one call: for tests and benchmarks.


def shards_of(x: Tensor, dim: int, size: int) -> list[Tensor]:
    """Return all ranks' shards, contiguous; the last ones may be shorter, or empty.

    Args:
        x: the whole tensor. dim: the dim that is split. size: the number of ranks.
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
        peers: a provider that has all ranks. equation, which: see `overlapped.all_gather_dot`.
        dim, num_chunks: see `overlapped.ChunkedDim`. shards, others, biases: each rank's operands
            and bias.

    Returns:
        Each rank's gathered operand and product.
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
        peers: a provider that has all ranks. equation: see `overlapped.dot_reduce_scatter`. dim,
            num_chunks: see `overlapped.ChunkedDim`.
        pairs, addends, biases: each rank's operands, addend and bias.

    Returns:
        Each rank's part of the sum.
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
        peers: a provider that has all ranks. equation: see `normed.dot_reduce_add_rmsnorm`. dim,
            num_chunks: see `overlapped.ChunkedDim`.
        pairs, norms: each rank's factors, and its residual and norm.

    Returns:
        Each rank's y, squares and normed.
    """
    jobs: dict[int, Scatter] = {}
    shape: list[int] = []
    made = []
    for rank, (pair, norm) in enumerate(zip(pairs, norms, strict=True)):
        group = collectives.AxisGroup("", peers.size, rank)
        jobs[rank], shape, own = prepare_norm(equation, pair, norm, dim, group)
        made.append(own)
    scatter(peers, Shards.of(shape, dim, pairs[0][0].dtype, peers.size, num_chunks), dim, jobs)
    return made


def dispatch_all(
    peers: Peers, xs: Sequence[Tensor], experts: Sequence[Tensor], num_experts: int, most: int
) -> list[Dispatch]:
    """Run moe_dispatch for all ranks.

    Args:
        peers: a provider that has all ranks. xs, experts: each rank's operands. num_experts, most:
            see `autopar.kernels.routed`.

    Returns:
        Each rank's job, with rows, table and position filled.
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
        peers: a provider that has all ranks. parts: each rank's rows, table and position. weights:
            each rank's weights.

    Returns:
        Each rank's job, with y filled.
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
