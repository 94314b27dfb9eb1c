"""Products that overlap kernels compute, and the savings of these kernels in seconds.

A kernel computes a matrix product together with the collective before or after it, chunk by chunk
(`autopar.kernels.fused`):

    all_gather_matmul       the operand is gathered: a chunk is multiplied while the next one
                            arrives, beginning with the rank's own chunks
    matmul_reduce_scatter   the partial sums are scattered: chunks for other ranks are computed
                            first, and are sent while the next one is computed
    matmul_reduce_add_rmsnorm   the same, and the received chunks are added to a residual and
                                normalized in one pass (`reduce_add_rmsnorm`)

If the scattered tensor is a sum of products, such as the gradient of a tensor with several readers,
the last product adds the others to each of its chunks. With n ranks and q chunks per part, m = (n −
1)·q chunks move. Let w be the seconds of the product of one chunk, v those of a rank's own part,
which is not cut, c those to move one chunk, r those to add the received chunks, and o those of one
more launch:

    all_gather_matmul       max(v + m·w, m·c + w)                     c = collective's time / m + o
    matmul_reduce_scatter   max(m·w + v, m·w + c, w + m·c) + r

The kernel saves the difference from the product and the collective one after the other, times the
share that the profile states for the kernel. q is 1, 2 or 4, whichever saves the most. Smaller
products are less efficient. w includes this, since it is priced like any product.

In addition to the savings of matmul_reduce_scatter, a norm in the same pass saves r and the time of
the sum, the squares and the norm. It adds one pass over n + 3 parts: the received ones, the
residual, the sum and the norm. The profile states the share of a copy's bandwidth that this pass
reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from autopar import ops
from autopar.analysis.work import Work, computes_in, works
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.cost.op_times import call_time, compute_time, local_info
from autopar.kernels import chunked
from autopar.kernels.chunked import Shards
from autopar.ops.products import bias_term
from autopar.rules import Call, TensorInfo
from autopar.sharding import Cluster, ClusterClass, ClusterStrategy, Ref

NAMES = {"all_gather": "all_gather_matmul", "reduce_scatter": "matmul_reduce_scatter"}
"""Kind of the collective → the kernel's name."""
TAIL = "reduce_add_rmsnorm"
"""Name of the pass in which a kernel normalizes after its product."""
_CHUNKS = (1, 2, 4)
ADDITION = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a kernel keeps and shares with its peers along an axis. All uses of equal shards
    along that axis share one region (`autopar.kernels.chunked`)."""

    name: str
    shards: Shards

    @property
    def num_bytes(self) -> int:
        """Bytes of the region on one rank."""
        return (
            self.shards.gather_bytes
            if self.name == NAMES["all_gather"]
            else self.shards.scatter_bytes
        )


@dataclass(frozen=True, slots=True)
class KernelSite:
    """A product and the collective before or after it, on one rank.

    Attributes:
        call: the product.
        strategy: the layouts of its operands and its result.
        mesh_shape: devices per mesh axis.
        kind: kind of the collective.
        size: number of ranks of the collective.
        result_dim: dim of the product's result that is gathered or scattered.
        adds: whether a tensor of the result's shape is added before the collective.
        normed: the sum, the squares and the norm after the product, if the kernel computes them.
    """

    call: Call
    strategy: Strategy
    mesh_shape: tuple[int, ...]
    kind: str
    size: int
    result_dim: int
    adds: bool = False
    normed: tuple[tuple[Call, Strategy], ...] = ()

    def infos(self, num: int = 1) -> tuple[list[TensorInfo], list[TensorInfo]]:
        """Return the local shapes and dtypes of the operands and the result for one of `num`
        chunks."""
        *terms, result = terms_of(self.call)
        letter = result[self.result_dim]
        terms += [
            bias_term(str(self.call.args[0]), len(info.shape)) for info in self.call.inputs[2:]
        ]
        tensors = zip(
            (*self.call.inputs, *self.call.outputs),
            (*self.strategy.inputs, *self.strategy.outputs),
            (*terms, result),
            strict=True,
        )
        local = [
            (local_info(info, layout, self.mesh_shape), term) for info, layout, term in tensors
        ]
        cut = [
            TensorInfo(
                tuple(
                    -(-n // num) if at == letter else n for at, n in zip(t, i.shape, strict=True)
                ),
                i.dtype,
            )
            for i, t in local
        ]
        return cut[:-1], cut[-1:]

    def region(self, operand: int, dim: int, num_chunks: int) -> Region:
        """Return the memory that the kernel shares with its peers.

        Args:
            operand: index of the factor that is gathered; 2 for the result, which is scattered.
            dim: dim of that tensor along which it is gathered or scattered.
            num_chunks: number of chunks of a rank's part.
        """
        reads, makes = self.infos()
        info = (*reads[:2], *makes)[operand]
        return Region(
            NAMES[self.kind], Shards.of(info.shape, dim, info.dtype, self.size, num_chunks)
        )

    def seconds(self, profile: HardwareProfile, num: int = 1) -> float:
        """Return the seconds of one of `num` chunks of the product, including the addition if there
        is one."""
        reads, makes = self.infos(num)
        parts = list(works(self.call.target, self.call.args, self.call.kwargs, reads, makes))
        if self.adds:
            parts += works(ADDITION, (), {}, makes * 2, makes)
        return sum(times * compute_time(each, computes_in(reads), profile) for each, times in parts)


def terms_of(call: Call) -> tuple[str, str, str]:
    """Split the equation of a product into the terms of its two factors and its result."""
    return chunked.terms_of(str(call.args[0]))


def seconds_saved(site: KernelSite, moved_s: float, profile: HardwareProfile) -> tuple[float, int]:
    """Return the seconds that a kernel saves, with the best number of chunks.

    Args:
        site: the product and its collective.
        moved_s: seconds of the collective alone. The saving is at most this.
        profile: the hardware.

    Returns:
        Seconds, 0 if the kernel costs more than it hides; and the number of chunks of a rank's
        part.
    """
    reached = profile.kernels.get(NAMES[site.kind], 0.0)
    product_s, most, best = site.seconds(profile), 0.0, 1
    for chunks in _CHUNKS if reached else ():
        if _length(site) % (site.size * chunks) == 0:
            hidden_s = min(
                product_s + moved_s - _together(site, moved_s, chunks, profile), product_s, moved_s
            )
            if hidden_s > most:
                most, best = hidden_s, chunks
    if not site.normed:
        return reached * most, best
    tail_s = _tail_s(site, profile) if most else 0.0
    return min(reached * most + tail_s, moved_s) if tail_s > 0.0 else 0.0, best


def _tail_s(site: KernelSite, profile: HardwareProfile) -> float:
    """Return the seconds saved by computing the norm in the pass that adds chunks; 0 if the profile
    has no figure for it."""
    reached = profile.kernels.get(TAIL, 0.0)
    if not reached:
        return 0.0
    apart_s = sum(
        call_time(call, strategy, site.mesh_shape, profile) for call, strategy in site.normed
    )
    return (
        _pass_s(site, site.size + 1, profile)
        + apart_s
        - _pass_s(site, site.size + 3, profile) / reached
    )


def _length(site: KernelSite) -> int:
    """Return the local length of the dim that is cut into chunks."""
    return site.infos()[1][0].shape[site.result_dim]


def _together(site: KernelSite, moved_s: float, chunks: int, profile: HardwareProfile) -> float:
    """Return the seconds of product and collective in chunks, by the formulas of the module
    docstring."""
    others = (site.size - 1) * chunks
    product_s, own_s = site.seconds(profile, site.size * chunks), site.seconds(profile, site.size)
    made_s, chunk_s = others * product_s + own_s, moved_s / others + profile.launch_overhead_s
    if site.kind == "all_gather":
        return max(made_s, others * chunk_s + product_s)
    return max(made_s, others * product_s + chunk_s, product_s + others * chunk_s) + _pass_s(
        site, site.size + 1, profile
    )


def _pass_s(site: KernelSite, num: int, profile: HardwareProfile) -> float:
    """Return the seconds in which a rank reads or writes `num` parts of the scattered tensor."""
    result = site.infos()[1][0]
    part_bytes = result.dtype.itemsize * math.prod(result.shape) // site.size
    return compute_time(Work(0, num * part_bytes, "elementwise"), result.dtype, profile)


# --------------------------------------------------------------------------------------------------
# Products before or after the collectives of a tensor, and the ops that kernels add to them.

Place = tuple[int, ClusterClass]  # an op of the problem, and its class
Strategies = tuple[tuple[int, tuple[int, ...]], ...]
"""Ops, each with some of its strategies."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The op that adds another tensor to a product's partial sums."""

    op: int
    classes: ClusterClass

    def strategies(self, layout: Layout) -> tuple[int, ...]:
        """Return the strategies whose operands and result all have this layout."""
        return tuple(
            s for s, head in _heads(self.classes) if {*head.inputs, *head.outputs} == {layout}
        )


@dataclass(frozen=True, slots=True)
class NormedSum:
    """The sum and the norms after a product.

    Attributes:
        total: the sum.
        norms: the squares and the norm of the sum; several pairs if instances differ.
    """

    total: Sum
    norms: tuple[tuple[Place, Place], ...]

    def strategies(self, layout: Layout) -> Strategies:
        """Return the strategies in which all ops have whole rows in a layout; empty if an op has
        none."""
        strategies_of_ops = [(self.total.op, self.total.strategies(layout))]
        for (squares, squaring), (norm, norming) in self.norms:
            sums = {
                s: head.outputs[0]
                for s, head in _heads(squaring)
                if head.inputs[0] == layout and not head.outputs[0].has_partial
            }
            reads = [
                (layout, squared) for squared in set(sums.values()) if len(set(sums.values())) == 1
            ]
            rows = ((s, head.inputs, head.outputs[0]) for s, head in _heads(norming))
            normed = [
                s
                for s, (*read, weight), y in rows
                if tuple(read) in reads and weight.is_replicated and y == layout
            ]
            strategies_of_ops += [(squares, tuple(sums)), (norm, tuple(normed))]
        return (
            tuple(strategies_of_ops)
            if all(strategies for _, strategies in strategies_of_ops)
            else ()
        )

    def calls(self, layout: Layout) -> tuple[tuple[Call, Strategy], ...]:
        """Return the calls of one instance, with strategies that have whole rows in a layout."""
        first = dict(self.strategies(layout))
        places = (self.total.op, self.total.classes), *self.norms[0]
        return tuple(
            (classes.first.members[0].call, classes.strategies[first[op][0]].members[0])
            for op, classes in places
        )


@dataclass(frozen=True, slots=True)
class Product:
    """A product before or after the collectives of a tensor.

    Attributes:
        op: index of the op.
        recomputed: whether backward recomputes it.
        classes: the class of clusters whose first op is the product.
        factor: index of the factor that the tensor is; None if the tensor is the result, or a sum
            that contains it.
        total: the sum, if partial sums of several products are added first.
        normed: the sum and the norms after the product that a kernel may compute.
    """

    op: int
    recomputed: bool
    classes: ClusterClass
    factor: int | None
    total: Sum | None = None
    normed: NormedSum | None = None

    @property
    def cluster(self) -> Cluster:
        """The first instance."""
        return self.classes.first

    def layout(self, strategy: ClusterStrategy) -> Layout:
        """Return the layout of the tensor in a strategy of the product."""
        chosen = strategy.members[0]
        return chosen.outputs[0] if self.factor is None else chosen.inputs[self.factor]

    def result_dim(self, dim: int) -> int | None:
        """Return the dim of the product's result that corresponds to a dim of the tensor; None if
        the product sums over it, or if both factors have it."""
        if self.factor is None:
            return dim
        mine, other, result_term = (
            terms_of(self.cluster.members[0].call)[i] for i in (self.factor, 1 - self.factor, 2)
        )
        return (
            result_term.index(mine[dim])
            if mine[dim] in result_term and mine[dim] not in other
            else None
        )


def _heads(classes: ClusterClass) -> Iterator[tuple[int, Strategy]]:
    yield from ((s, strategy.members[0]) for s, strategy in enumerate(classes.strategies))


def factor_of(cluster: Cluster, ref: Ref) -> int | None:
    """Return the index (0 or 1) of the factor that a tensor is, of the product at the head of a
    cluster.

    None if it is not a factor, or if other ops of the cluster read it as well.
    """
    head = cluster.members[0]
    at = [i for i, read in enumerate(head.reads) if read == ref]
    alone = (
        head.call.target is ops.dot
        and len(at) == 1
        and not any(ref in m.reads for m in cluster.members[1:])
    )
    return at[0] if alone and at[0] < 2 else None


def makes(cluster: Cluster, ref: Ref, target: Callable[..., object]) -> bool:
    """Return whether a tensor is the result of the first op of a cluster, and no other op of it
    reads it.

    Args:
        cluster: the cluster.
        ref: the tensor.
        target: the function that the first op must call.
    """
    head = cluster.members[0]
    return (
        head.call.target is target
        and head.makes[0] == ref
        and not any(ref in m.reads for m in cluster.members[1:])
    )
