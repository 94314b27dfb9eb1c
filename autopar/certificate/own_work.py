"""Flops and bytes of one op on one device, counted by the certificate itself.

A product sums, for each element that it makes, over all letters that its result lacks: two flops
each. A convolution sums over its window in each channel of a group. Attention is two products,
whose causal half is not done, and its backward five of that size where forward has two. An op reads
its operands and writes its results once; a lookup reads of its table what it makes; a draw makes
each number in several passes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar import ops, random_ops
from autopar.ops.formats import torchs_own
from autopar.rules import Call, TensorInfo

aten = torch.ops.aten
Infos = Sequence[TensorInfo]
_DRAWS = (random_ops.keep_mask, random_ops.uniform, random_ops.normal, random_ops.randint)
_LOOKUPS = (
    ops.embedding, ops.pick, aten.embedding, aten.gather, aten.index, aten.index_select
)  # fmt: skip
_FREE = (aten._unsafe_view, aten.reshape)


def product_dtype(reads: Infos) -> torch.dtype:
    """In which a product computes: the wider of its factors."""
    factors = [i.dtype for i in reads[:2]]
    found = torch.float32 if not factors else factors[0]
    for each in factors[1:]:
        wider = each.is_floating_point, each.itemsize
        found = each if wider > (found.is_floating_point, found.itemsize) else found
    return found


def is_free(target: Callable[..., Any]) -> bool:
    """Whether an op only sees its operand otherwise."""
    if target is operator.getitem:
        return True
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    packet = target.overloadpacket  # type: ignore[attr-defined]
    alias = any(r.alias_info is not None for r in schema.returns) and not schema.is_mutable
    return packet in _FREE or bool(alias)


def counted(call: Call, reads: Infos, makes: Infos, *, mirrored: bool) -> tuple[int, int]:
    """Flops and bytes of a call on these local tensors.

    Args:
        call: its arguments are looked at, not its shapes. mirrored: whether the queries of causal
            attention lie mirrored: then each rank does half of all pairs.
    """
    target = torchs_own(call.target)
    packet = getattr(target, "overloadpacket", target)
    inputs, outputs = _sizes(reads), _sizes(makes)
    num_bytes = sum(inputs) + sum(outputs)
    if call.target in _DRAWS:
        num_bytes += 2 * 4 * random_ops.NUM_PASSES * math.prod(makes[0].shape)
    if packet in _LOOKUPS:
        num_bytes = sum(outputs) + sum(outputs) + sum(inputs[1:])
    if packet in (ops.attention, ops.attention_backward):
        return _attention(call, reads, makes, mirrored=mirrored), num_bytes
    count = _FLOPS.get(packet)
    return 0 if count is None else count(call, reads, makes), num_bytes


def _sizes(infos: Infos) -> list[int]:
    return [math.prod(i.shape) * i.dtype.itemsize for i in infos]


def _dot(call: Call, reads: Infos, makes: Infos) -> int:
    left, result = str(call.args[0]).replace(" ", "").split("->")
    summed = dict[str, int]()
    for term, info in zip(left.split(","), reads[:2], strict=True):
        summed |= {a: n for a, n in zip(term, info.shape, strict=True) if a not in result}
    return 2 * math.prod(makes[0].shape) * math.prod(summed.values())


def _matrix(factor: int) -> Callable[[Call, Infos, Infos], int]:
    """Of products that sum over the last dim of that operand."""
    return lambda call, reads, makes: 2 * math.prod(makes[0].shape) * reads[factor].shape[-1]


def _convolution(call: Call, reads: Infos, makes: Infos) -> int:
    window = math.prod(reads[1].shape) // reads[1].shape[0]
    transposed = bool(call.args[6]) if len(call.args) > 6 else False
    return 2 * window * math.prod((reads[0] if transposed else makes[0]).shape)


def _convolution_backward(call: Call, reads: Infos, makes: Infos) -> int:
    window = math.prod(reads[2].shape) // reads[2].shape[0]
    transposed = bool(call.args[7]) if len(call.args) > 7 else False
    gradients = [m for m in makes[:2] if math.prod(m.shape)]
    return 2 * window * math.prod((reads[1] if transposed else reads[0]).shape) * len(gradients)


def _attention(call: Call, reads: Infos, makes: Infos, *, mirrored: bool) -> int:
    """Scores [.., s, t] of e features, and sums over t of v features."""
    backward = call.target is ops.attention_backward
    query, key, value = (reads[1:] if backward else reads)[:3]
    *lead, s, e = query.shape
    t, v = key.shape[-2], value.shape[-1]
    pairs = math.prod(lead) * s * t
    flops = 2 * pairs * (e + v)
    flops = flops * 5 // 2 if backward else flops
    is_causal = call.args[7 if backward else 4]
    if not is_causal:
        return flops
    return flops - (flops // 2 if mirrored else flops * s // (2 * t))


_FLOPS: Mapping[Any, Callable[[Call, Infos, Infos], int]] = {
    ops.dot: _dot,
    aten.mm: _matrix(0), aten.bmm: _matrix(0), aten.addmm: _matrix(1), aten.baddbmm: _matrix(1),
    aten.linear: _matrix(0), aten.mv: _matrix(0), aten.dot: _matrix(0),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}  # fmt: skip
