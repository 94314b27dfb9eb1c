"""Softmax attention as one op on all devices, which supports a part of the queries or heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autopar.core.placements import second_start

# --------------------------------------------------------------------------------------------------
# Softmax attention by the most suitable kernel: on the CPU torch's flash attention; on a GPU that
# of cuDNN, FlashAttention or the memory-efficient kernel; else matrix products.

aten = torch.ops.aten


class Saved(NamedTuple):
    """The operands and results of an attention, which its backward reads.

    Attributes:
        q: queries, ``[b, h, s, d]``.
        k: keys, ``[b, g, t, d]``, where g divides h.
        v: values, ``[b, g, t, d]``.
        out: the result, ``[b, h, s, d]``.
        lse: logsumexp of the scores, ``[b, h, s]``, in at least float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `autopar.ops.attention` of all queries and heads.

    Args:
        q: as for `attention`.
        k: as for `attention`.
        v: as for `attention`.
        mask: as for `attention`.
        is_causal: as for `attention`.
        scale: as for `attention`.

    Returns:
        The result, ``[b, h, s, d]``, and the logsumexp of the scores, ``[b, h, s]``.
    """
    q, k, v = _contiguous_rows(q, k, v)
    bias = _bias(mask, q.dtype)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return out, lse.to(
            torch.promote_types(out.dtype, torch.float32)
        )  # only changes fake results for float64 of torch 2.11
    if _cudnn_fits(q, k, v, bias, is_causal, scale):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, is_causal, False, scale=scale
        )
        return out, lse.view(q.shape[:-1])
    if _flash_fits(q, k, bias, is_causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
        return out, lse
    if _efficient_fits(q):
        keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
        wide = _aligned_bias(bias, q, k)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(
            q, keys, values, wide, True, 0.0, is_causal, scale=scale
        )
        return out, lse[..., : q.shape[2]]
    scores = _scores(q, _repeat_heads(k, q), bias, is_causal, scale)
    return torch.matmul(scores.softmax(-1).to(v.dtype), _repeat_heads(v, q)), scores.logsumexp(-1)


def attend_backward(
    grad: Tensor, saved: Saved, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        grad: gradient of the result, ``[b, h, s, d]``.
        saved: the operands and results of `attend`. The results may be computed from more keys than
            `saved.k`; the gradients are then the terms of these keys.
        mask: as for `attention`.
        is_causal: as for `attention`.
        scale: as for `attention`.
    """
    grad, q, k, v, out = _contiguous_rows(grad, saved.q, saved.k, saved.v, saved.out)
    lse = saved.lse.contiguous()
    bias = _bias(mask, q.dtype)
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return backward(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale)
    if _cudnn_fits(q, k, v, bias, is_causal, scale):
        backward = aten._scaled_dot_product_cudnn_attention_backward.default
        state = torch.zeros(
            (), dtype=torch.int64, device=q.device
        )  # state of the random generator, unused without dropout
        rows = lse.unsqueeze(-1)
        return backward(
            grad,
            q,
            k,
            v,
            out,
            rows,
            state,
            state,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            is_causal,
            scale=scale,
        )
    if _flash_fits(q, k, bias, is_causal):
        backward = aten._scaled_dot_product_flash_attention_backward.default
        state = torch.zeros(
            2, dtype=torch.uint64, device=q.device
        )  # state of the random generator, unused without dropout
        return backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            is_causal,
            state,
            state[0],
            scale=scale,
        )
    repeated = Saved(q, _repeat_heads(k, q), _repeat_heads(v, q), out, lse)
    if _efficient_fits(q):
        aligned = _aligned_bias(bias, q, k)
        dq, dk, dv = _efficient_backward(grad, repeated, aligned, is_causal, scale)
    else:
        dq, dk, dv = _plain_backward(grad, repeated, bias, is_causal, scale)
    return dq, _sum_heads(dk, k), _sum_heads(dv, v)


def _contiguous_rows(*operands: Tensor) -> tuple[Tensor, ...]:
    """Return the operands with stride 1 in the last dim, copied if necessary. All kernels assume
    this stride without a check; `torch.nn.functional.scaled_dot_product_attention` does not call
    them for other strides."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in operands)


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )


def _cudnn_fits(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> bool:
    """Return whether torch selects the cuDNN kernel, and the sizes have a backward kernel; False
    under a compiler."""
    if (
        torch.compiler.is_compiling()
        or q.shape[-1] > 128
        or v.shape[-1] > 128
        or not _flash_fits(q, k, bias, is_causal)
    ):
        return False
    chosen = torch._fused_sdp_choice(
        q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return bool(chosen == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)


def _flash_fits(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> bool:
    """Return whether FlashAttention supports the operands. Its causal mask aligns the last query
    with the last key, but `attention` aligns the first ones, which differs if the lengths
    differ."""
    same_length = not is_causal or q.shape[2] == k.shape[2]
    return (
        same_length
        and bias is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    )


def _efficient_fits(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.shape[-1] % 8 == 0


def _repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _sum_heads(grad: Tensor, k: Tensor) -> Tensor:
    return grad if grad.shape == k.shape else grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _aligned_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return `bias` expanded to all heads; its rows start at multiples of 8 elements, as the
    memory-efficient kernel requires."""
    if bias is None:
        return None
    length = k.shape[2]
    padded = (
        torch.nn.functional.pad(bias.to(q.dtype), (0, -length % 8))
        if bias.shape[-1] == length
        else bias.to(q.dtype)
    )
    return padded[..., :length].expand(q.shape[0], q.shape[1], q.shape[2], length)


def _efficient_backward(
    grad: Tensor, saved: Saved, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    rows = torch.nn.functional.pad(
        lse, (0, -lse.shape[-1] % 32)
    )  # the padding that the kernel expects, which `attend` removed
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    gradient_mask = [True, True, True, False]
    return backward(
        grad, q, k, v, bias, out, rows, state, state, 0.0, gradient_mask, is_causal, scale=scale
    )[:3]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return the scores in at least float32: float16 may overflow, and the logsumexp needs more
    precision than 16-bit dtypes."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-2, -1)).mul_(scale)
    if bias is not None:
        scores = scores.add_(bias)
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
    return scores


def _plain_backward(
    grad: Tensor, saved: Saved, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    weights = _scores(q, k, bias, is_causal, scale).sub_(lse.unsqueeze(-1)).exp_().to(q.dtype)
    inner = (
        torch.matmul(grad, v.transpose(-2, -1))
        .sub_((grad * out).sum(-1, keepdim=True))
        .mul_(weights)
        .mul_(scale)
    )
    return (
        torch.matmul(inner, k),
        torch.matmul(inner.transpose(-2, -1), q),
        torch.matmul(weights.transpose(-2, -1), grad),
    )


# --------------------------------------------------------------------------------------------------
# Causal attention of a part of the queries, given the index of its first query, without a mask.
#
# The s queries from index p on see all p keys before them, and the first, the first two, and so on,
# of the s keys at their own indices. Thus the attention consists of two attentions over two ranges
# of keys, which the kernels support: the first without a mask, the second square and causal. Their
# results are combined by their logsumexp, as in Milakov and Gimelshein, "Online normalizer
# calculation for softmax", 2018, for two parts of a softmax, and in Liu et al., "Ring Attention
# with Blockwise Transformers for Near-Infinite Context", 2023, for blocks of keys:
#
# lse = log(exp(lse₁) + exp(lse₂)), out = out₁ · exp(lse₁ − lse) + out₂ · exp(lse₂ − lse)
#
# In backward, both ranges get the combined `out` and `lse`: a probability is exp(score − lse), and
# the sum of grad · out, which is subtracted per row, is also that of the combined result. The
# gradients of queries are summed. Each range gives the gradients of its own keys and values; keys
# that no query sees have zero gradients. No tensor of shape [s, t] is created, and of the scores
# that are masked, only half of the square is computed.
#
# A mirrored part (`autopar.core.placements`) consists of two such ranges of queries with different
# start indices.
#
# There may be fewer keys than queries, if the decoder of a model reads another sequence causally.
# The second range then ends at the last key, or is empty.


def attend_placed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, start: int, mirrored_in: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of a part of the queries.

    Args:
        q: as for `attention`.
        k: as for `attention`.
        v: as for `attention`.
        scale: as for `attention`.
        start: global index of the first query.
        mirrored_in: as for `attention`.

    Returns:
        The result, ``[b, h, s, d]``, and the logsumexp of the scores, ``[b, h, s]``.
    """
    results = [
        _attend_range(q[:, :, rows], k, v, scale, first)
        for rows, first in _runs(q, start, mirrored_in)
    ]
    if len(results) == 1:
        return results[0]
    outs, sums = zip(*results, strict=True)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _attend_range(
    q: Tensor, k: Tensor, v: Tensor, scale: float, start: int
) -> tuple[Tensor, Tensor]:
    """Compute `attend_placed` of consecutive queries."""
    before, diagonal = _ranges(q.shape[2], k, start)
    if not _length(diagonal):
        return attend(q, k[:, :, before], v[:, :, before], None, False, scale)
    out, lse = attend(q, k[:, :, diagonal], v[:, :, diagonal], None, True, scale)
    if not _length(before):
        return out, lse
    return _join_ranges(out, lse, *attend(q, k[:, :, before], v[:, :, before], None, False, scale))


def attend_placed_backward(
    grad: Tensor, saved: Saved, scale: float, start: int, mirrored_in: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, and of all keys and values.

    Args:
        grad: gradient of the result, ``[b, h, s, d]``.
        saved: the operands and results of `attend_placed`.
        scale: as for `attend_placed`.
        start: as for `attend_placed`.
        mirrored_in: as for `attend_placed`.
    """
    q, k, v, out, lse = saved
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, first in _runs(q, start, mirrored_in):
        own_grad, own_q, own_out, own_lse = (x[:, :, rows] for x in (grad, q, out, lse))
        ranges = _ranges(own_q.shape[2], k, first)
        for keys, is_causal in zip(ranges, (False, True), strict=True):
            if not _length(keys):
                continue
            saved_part = Saved(own_q, k[:, :, keys], v[:, :, keys], own_out, own_lse)
            totals = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
            parts = attend_backward(own_grad, saved_part, None, is_causal, scale)
            for total, part in zip(totals, parts, strict=True):
                total.add_(part)
    return dq, dk, dv


def _runs(q: Tensor, start: int, mirrored_in: int | None) -> list[tuple[slice, int]]:
    """Return the ranges of consecutive queries, and the global index of the first query of each."""
    length = q.shape[2]
    if mirrored_in is None:
        return [(slice(0, length), start)]
    return [
        (slice(0, length // 2), start),
        (slice(length // 2, length), second_start(mirrored_in, length, start)),
    ]


def _ranges(num_queries: int, k: Tensor, start: int) -> tuple[slice, slice]:
    """Return the range of keys before the queries that start at `start`, and the range of keys at
    the indices of the queries."""
    length = k.shape[2]
    return slice(0, min(start, length)), slice(min(start, length), min(start + num_queries, length))


def _length(keys: slice) -> int:
    return int(keys.stop - keys.start)


def _join_ranges(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Combine the results for two ranges of keys, in the memory of `out`; computed in the dtype of
    `lse`, at least float32."""
    total = torch.logaddexp(lse, other_lse)
    share, rest = (lse - total).exp_().unsqueeze(-1), (other_lse - total).exp_().unsqueeze(-1)
    if out.dtype == lse.dtype:
        return out.mul_(share).addcmul_(other, rest), total
    return out.copy_((out * share).addcmul_(other, rest)), total


Heads = tuple[int, int, int]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    q_start: int | None = None,
    heads: Heads | None = None,
    mirrored_in: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``softmax(q kᵀ · scale + mask) v`` and the logsumexp of the scores.

    Args:
        q: queries, ``[b, h, s, d]``.
        k: keys, ``[b, g, t, d]``, where g divides h; query head i reads head i // (h / g).
        v: values, ``[b, g, t, d]``.
        mask: a bias that is added to the scores, or a boolean mask that is True for visible keys;
            broadcast to ``[b, h, s, t]``.
        is_causal: whether query i only sees keys 0…i; requires that `mask` is None.
        scale: factor of the scores.
        q_start: global index of the first query, if `q` is a part of the queries.
        heads: if `q` has a part of the heads and `k` and `v` do not have the corresponding part:
            the first head of `q`, the first head of `k`, and the number of query heads per head of
            `k`.
        mirrored_in: global number of queries, if `q` is a mirrored part
            (`autopar.core.placements`).

    Returns:
        The result, ``[b, h, s, d]``, and the logsumexp, ``[b, h, s]`` (float32 for half precision).
    """
    k, v = read_heads(k, q, heads), read_heads(v, q, heads)
    if q_start is None or not is_causal:
        return attend(q, k, v, mask, is_causal, scale)
    return attend_placed(q, k, v, scale, q_start, mirrored_in)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    q_start: int | None = None,
    heads: Heads | None = None,
    mirrored_in: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of `attention`.

    Args:
        grad: gradient of the result, ``[b, h, s, d]``.
        q: as for `attention`, like all arguments not listed here.
        out: the result of `attention`, ``[b, h, s, d]``.
        lse: its logsumexp, ``[b, h, s]``.
    """
    if heads is not None:
        keys_and_values = read_heads(k, q, heads), read_heads(v, q, heads)
        dq, dk, dv = attention_backward(
            grad, q, *keys_and_values, out, lse, mask, is_causal, scale, q_start, None, mirrored_in
        )
        return dq, to_heads(dk, k, q, heads), to_heads(dv, v, q, heads)
    saved = Saved(q, k, v, out, lse)
    if q_start is None or not is_causal:
        return attend_backward(grad, saved, mask, is_causal, scale)
    return attend_placed_backward(grad, saved, scale, q_start, mirrored_in)


def _heads_read(q: Tensor, heads: Heads) -> tuple[int, int, bool]:
    """Return the first head and the number of heads of `k` that the heads of `q` read, and whether
    each of them is read by the same number of consecutive heads."""
    first, k_first, group = heads
    low, high = first // group, (first + q.shape[1] - 1) // group + 1
    aligned = high - low == 1 or (first % group == 0 and q.shape[1] % group == 0)
    return low - k_first, high - low, aligned


def _head_index(q: Tensor, heads: Heads) -> Tensor:
    first, k_first, group = heads
    return (
        torch.arange(first, first + q.shape[1], device=q.device)
        .div_(group, rounding_mode="floor")
        .sub_(k_first)
    )


def read_heads(k: Tensor, q: Tensor, heads: Heads | None) -> Tensor:
    """Return the heads of `k` that the heads of `q` read: each once, or one per head of `q` if they
    are read by different numbers of heads.

    Args:
        k: keys or values, ``[b, g, t, d]``.
        q: queries, ``[b, h, s, d]``.
        heads: as for `attention`; None to return `k`.
    """
    if heads is None:
        return k
    low, count, aligned = _heads_read(q, heads)
    return k.narrow(1, low, count) if aligned else k.index_select(1, _head_index(q, heads))


def to_heads(grad: Tensor, k: Tensor, q: Tensor, heads: Heads) -> Tensor:
    """Return the gradient of all heads of `k`, with zeros for heads that are not read.

    Args:
        grad: gradient of the result of `read_heads`.
        k: as for `read_heads`.
        q: as for `read_heads`.
        heads: as for `read_heads`.
    """
    full_gradient = torch.zeros_like(k)
    low, count, aligned = _heads_read(q, heads)
    if aligned:
        full_gradient.narrow(1, low, count).copy_(grad)
        return full_gradient
    return full_gradient.index_add_(1, _head_index(q, heads), grad)
