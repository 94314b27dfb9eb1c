"""Seconds of one call on the parts that a device has, by the certificate's own count and rates."""

from __future__ import annotations

from collections.abc import Sequence

from autopar import ops
from autopar.analysis.norms import PIECES
from autopar.analysis.work import works
from autopar.certificate.own import dispatched_along
from autopar.certificate.own_work import counted, is_free, product_dtype
from autopar.certificate.rates import Rates
from autopar.layout import Layout, Strategy
from autopar.mirrored import Mirrored
from autopar.rules import Call, TensorInfo
from autopar.validation.shards import local_lengths

_IN_PASSES = (*PIECES, ops.linear_cross_entropy, ops.experts, ops.experts_backward)
"""What is done in several passes, or by rows, which `works` tells apart"""


def local_infos(
    infos: Sequence[TensorInfo], layouts: Sequence[Layout], mesh_shape: Sequence[int]
) -> list[TensorInfo]:
    """The largest parts of tensors."""
    pairs = zip(infos, layouts, strict=True)
    return [TensorInfo(local_lengths(i.shape, at, mesh_shape), i.dtype) for i, at in pairs]


def call_s(call: Call, strategy: Strategy, rates: Rates) -> float:
    """Of a call at a strategy; nothing where what reads it takes what it is cast from."""
    if any(at.uncast for at in strategy.outputs):
        return 0.0
    sizes = rates.mesh.shape
    reads = local_infos(call.inputs, strategy.inputs, sizes)
    makes = local_infos(call.outputs, strategy.outputs, sizes)
    along, mirrored = dispatched_along(call, strategy), mirrored_queries(call, strategy)
    num = 1 if along is None else sizes[along]
    further = {"mirrored": mirrored, "by_kernels": rates.profile.has_row_kernels}
    done = works(call.target, call.args, call.kwargs, reads, makes, num, **further)
    dtype = product_dtype(reads)
    if call.target not in _IN_PASSES:
        kind = "view" if is_free(call.target) else done[0][0].kind.replace("view", "elementwise")
        return rates.op_s(kind, *counted(call, reads, makes, mirrored=mirrored), dtype)
    return sum(times * rates.op_s(w.kind, w.flops, w.bytes, dtype) for w, times in done)


def mirrored_queries(call: Call, strategy: Strategy) -> bool:
    """Whether attention reads queries that lie mirrored along some axis: then all ranks see equally
    many pairs of query and key.
    """
    if call.target not in (ops.attention, ops.attention_backward):
        return False
    queries = strategy.inputs[1 if call.target is ops.attention_backward else 0]
    return any(isinstance(placement, Mirrored) for placement in queries.placements)
