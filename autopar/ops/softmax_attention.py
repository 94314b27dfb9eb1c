"""Attention as one op on every device, and on a part of the queries or of the heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autopar.core.placements import second_start

# --------------------------------------------------------------------------------------------------
# Softmax attention by the kernel that fits: torch's kernel for the CPU; on a GPU that of cuDNN,
# FlashAttention or the memory-efficient one; else matrix products.

aten = torch.ops.aten


class Saved(NamedTuple):
    """The operands and results of an attention, which its backward reads.

    Attributes:
        q: queries [b, h, s, d].
        k, v: keys and values [b, g, t, d], where g divides h.
        out: the result [b, h, s, d].
        lse: the log of the softmax's sum [b, h, s], at least float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `autopar.ops.attention` of whole queries and heads.

    Args:
        q, k, v, mask, is_causal, scale: as for `attention`.

    Returns:
        The result [b, h, s, d] and the log of the softmax's sum [b, h, s].
    """
    q, k, v = _contiguous_rows(q, k, v)
    bias = _bias(mask, q.dtype)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return out, lse.to(
            torch.promote_types(out.dtype, torch.float32)
        )  # as it is, but for fakes of float64 under torch 2.11
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
        grad: gradient of the result [b, h, s, d].
        saved: the operands and results of `attend`. The results may be of more keys than `saved.k`;
            the gradients are then the share of these keys.
        mask, is_causal, scale: as for `attention`.
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
        )  # of the random generator, which no dropout reads
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
        )  # of the random generator, which no dropout reads
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
    """Operands whose last dim has stride 1, copied if it has another: all kernels assume it and
    none checks it.

    `torch.nn.functional.scaled_dot_product_attention` calls no such kernel with other strides.
    """
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
    """Whether torch itself prefers cuDNN's kernel, of sizes for which it has a backward, too; a
    compiler does not ask."""
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
    """FlashAttention lets the last query see the last key, here the first query sees the first:
    these differ where lengths do."""
    alike = not is_causal or q.shape[2] == k.shape[2]
    return (
        alike
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
    """`bias` for all heads; the efficient kernel wants rows that begin at multiples of 8
    elements."""
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
    )  # the kernel's own padding, which `attention` cut off
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, False]
    return backward(
        grad, q, k, v, bias, out, rows, state, state, 0.0, wanted, is_causal, scale=scale
    )[:3]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """In at least fp32: fp16 overflows, and the log of a sum is to have more digits than 16-bit
    types."""
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
# Causal attention of a part of the queries, which knows its place among all, without a mask.
#
# The s queries that begin at place p see the p keys before them, all of them, and of the s keys
# beside them the first, the first two and so on. So it is two attentions, one over each range of
# keys, which the kernels know: the first without a mask, the second square and causal. What they
# give is joined by the logs of their softmax' sums, as Milakov and Gimelshein, "Online normalizer
# calculation for softmax", 2018, join two parts of a softmax, and Liu et al., "Ring Attention
# with Blockwise Transformers for Near-Infinite Context", 2023, blocks of keys:
#
# lse = log(exp(lse₁) + exp(lse₂)), out = out₁ · exp(lse₁ − lse) + out₂ · exp(lse₂ − lse)
#
# In backward each range is given the whole's `out` and `lse`: a probability is exp(score − lse),
# and what each row's gradient is less of, the sum of grad · out, is of the whole too. Gradients
# of queries add up; each range has its own part of the keys' and values', and what no query here
# sees has zeros. No tensor of [s, t] is there, and what is seen by none is not computed, but for
# a half of the square.
#
# A mirrored part (`autopar.core.placements`) is two such runs of queries, which differ in where
# they begin.
#
# Keys may be fewer than queries, as where the decoder of a model reads another sequence causally:
# then the second range ends with them, or is empty.


def attend_placed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, start: int, mirrored_in: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of a part of the queries.

    Args:
        start: place of the first query among all.
        q, k, v, scale, mirrored_in: as for `attention`.

    Returns:
        The result [b, h, s, d] and the log of the softmax's sum [b, h, s].
    """
    found = [
        _attend_range(q[:, :, rows], k, v, scale, first)
        for rows, first in _runs(q, start, mirrored_in)
    ]
    if len(found) == 1:
        return found[0]
    outs, sums = zip(*found, strict=True)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _attend_range(
    q: Tensor, k: Tensor, v: Tensor, scale: float, start: int
) -> tuple[Tensor, Tensor]:
    """`attend_placed` of consecutive queries."""
    before, beside = _ranges(q.shape[2], k, start)
    if not _length(beside):
        return attend(q, k[:, :, before], v[:, :, before], None, False, scale)
    out, lse = attend(q, k[:, :, beside], v[:, :, beside], None, True, scale)
    if not _length(before):
        return out, lse
    return _join_ranges(out, lse, *attend(q, k[:, :, before], v[:, :, before], None, False, scale))


def attend_placed_backward(
    grad: Tensor, saved: Saved, scale: float, start: int, mirrored_in: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, and of all keys and values.

    Args:
        grad: gradient of the result [b, h, s, d].
        saved: the operands and results of `attend_placed`.
        scale, start, mirrored_in: as for `attend_placed`.
    """
    q, k, v, out, lse = saved
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, first in _runs(q, start, mirrored_in):
        own_grad, own_q, own_out, own_lse = (x[:, :, rows] for x in (grad, q, out, lse))
        ranges = _ranges(own_q.shape[2], k, first)  # of keys
        for keys, is_causal in zip(ranges, (False, True), strict=True):
            if not _length(keys):
                continue
            own = Saved(own_q, k[:, :, keys], v[:, :, keys], own_out, own_lse)
            totals = dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]
            parts = attend_backward(own_grad, own, None, is_causal, scale)
            for total, part in zip(totals, parts, strict=True):
                total.add_(part)
    return dq, dk, dv


def _runs(q: Tensor, start: int, mirrored_in: int | None) -> list[tuple[slice, int]]:
    """Ranges of consecutive queries, and the place of the first query of each."""
    length = q.shape[2]
    if mirrored_in is None:
        return [(slice(0, length), start)]
    return [
        (slice(0, length // 2), start),
        (slice(length // 2, length), second_start(mirrored_in, length, start)),
    ]


def _ranges(num_queries: int, k: Tensor, start: int) -> tuple[slice, slice]:
    """The keys before the queries that begin at `start`, and those beside them."""
    length = k.shape[2]
    return slice(0, min(start, length)), slice(min(start, length), min(start + num_queries, length))


def _length(keys: slice) -> int:
    return int(keys.stop - keys.start)


def _join_ranges(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Of two ranges of keys what they give together, in `out`'s memory; in at least float32,
    which `lse` is in."""
    whole = torch.logaddexp(lse, other_lse)
    share, rest = (lse - whole).exp_().unsqueeze(-1), (other_lse - whole).exp_().unsqueeze(-1)
    if out.dtype == lse.dtype:
        return out.mul_(share).addcmul_(other, rest), whole
    return out.copy_((out * share).addcmul_(other, rest)), whole


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
    """``softmax(q kᵀ · scale + mask) v`` and the log of the softmax' sum.

    Args:
        q: [b, h, s, d]; k, v: [b, g, t, d], where g divides h and query head i reads head i // (h /
            g).
        mask: added to the scores, or where boolean says what is seen; broadcasts to [b, h, s, t].
        is_causal: query i sees keys 0…i (without a mask).
        q_start: where `q` is a part of the queries, the place of its first one.
        heads: where `q` has fewer of the heads than `k` and `v`: its first head, the first head of
            `k`, and how many query heads read one head of `k`.
        mirrored_in: where `q` is a mirrored part (`autopar.core.placements`), the number of all
            queries.

    Returns:
        out [b, h, s, d] and lse [b, h, s] (float32 for half types).
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
        grad: gradient [b, h, s, d] of the result.
        out, lse: the results [b, h, s, d] and [b, h, s] of `attention`.
        q, k, v, mask, is_causal, scale, q_start, heads, mirrored_in: its arguments.
    """
    if heads is not None:
        own = read_heads(k, q, heads), read_heads(v, q, heads)
        dq, dk, dv = attention_backward(
            grad, q, *own, out, lse, mask, is_causal, scale, q_start, None, mirrored_in
        )
        return dq, to_heads(dk, k, q, heads), to_heads(dv, v, q, heads)
    saved = Saved(q, k, v, out, lse)
    if q_start is None or not is_causal:
        return attend_backward(grad, saved, mask, is_causal, scale)
    return attend_placed_backward(grad, saved, scale, q_start, mirrored_in)


def _heads_read(q: Tensor, heads: Heads) -> tuple[int, int, bool]:
    """First head and number of heads of `k` that q's heads read; whether each is read by equally
    many, in order."""
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
    """Return the heads of `k` that q's heads read: each once, or if they are shared unequally one
    for each head of `q`.

    Args:
        k: keys or values [b, g, t, d].
        q: queries [b, h, s, d].
        heads: as for `attention`; None if `q` has all heads.
    """
    if heads is None:
        return k
    low, count, aligned = _heads_read(q, heads)
    return k.narrow(1, low, count) if aligned else k.index_select(1, _head_index(q, heads))


def to_heads(grad: Tensor, k: Tensor, q: Tensor, heads: Heads) -> Tensor:
    """Return the gradient of all of `k`, with zeros for heads that are not read.

    Args:
        grad: gradient of the result of `read_heads`.
        k, q, heads: the arguments of `read_heads`.
    """
    whole = torch.zeros_like(k)
    low, count, aligned = _heads_read(q, heads)
    if aligned:
        whole.narrow(1, low, count).copy_(grad)
        return whole
    return whole.index_add_(1, _head_index(q, heads), grad)
