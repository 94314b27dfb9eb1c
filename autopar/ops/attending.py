"""Attention as one op on every device, and on a part of the queries or of the heads."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
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
) -> tuple[Tensor, Tensor]:
    """``softmax(q kᵀ · scale + mask) v`` and the log of the softmax' sum.

    Args:
        q: [b, h, s, d]; k, v: [b, g, t, d], where g divides h and query head i reads head i // (h / g).
        mask: added to the scores, or where boolean says what is seen; broadcasts to [b, h, s, t].
        is_causal: query i sees keys 0…i (without a mask).
        q_start: where `q` is a part of the queries, the place of its first one.
        heads: where `q` has fewer of the heads than `k` and `v`: its first head, the first head of `k`, and how many query heads
            read one head of `k`.

    Returns:
        out [b, h, s, d] and lse [b, h, s] (float32 for half types).
    """
    k, v = _read_heads(k, q, heads), _read_heads(v, q, heads)
    mask, is_causal = _placed(q, k, mask, is_causal, q_start)
    bias = _bias(mask, q.dtype)
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    if _flash_fits(q, k, bias, is_causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, False, scale=scale)
        return out, lse
    if _efficient_fits(q):
        keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
        wide = _aligned_bias(bias, q, k)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(q, keys, values, wide, True, 0.0, is_causal, scale=scale)
        return out, lse[..., : q.shape[2]]
    scores = _scores(q, _repeat_heads(k, q), bias, is_causal, scale)
    return torch.matmul(scores.softmax(-1).to(v.dtype), _repeat_heads(v, q)), scores.logsumexp(-1)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of `attention`'s result and what it returned; shapes and parts as there."""
    if heads is not None:
        own = _read_heads(k, q, heads), _read_heads(v, q, heads)
        dq, dk, dv = attention_backward(grad, q, *own, out, lse, mask, is_causal, scale, q_start)
        return dq, _to_heads(dk, k, q, heads), _to_heads(dv, v, q, heads)
    mask, is_causal = _placed(q, k, mask, is_causal, q_start)
    bias = _bias(mask, q.dtype)
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return backward(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale)
    if _flash_fits(q, k, bias, is_causal):
        backward = aten._scaled_dot_product_flash_attention_backward.default
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the random generator, which no dropout reads
        return backward(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, state, state[0], scale=scale)
    keys, values = _repeat_heads(k, q), _repeat_heads(v, q)
    if _efficient_fits(q):
        dq, dk, dv = _efficient_backward(grad, q, keys, values, out, lse, _aligned_bias(bias, q, k), is_causal, scale)
    else:
        dq, dk, dv = _plain_backward(grad, q, keys, values, out, lse, bias, is_causal, scale)
    return dq, _sum_heads(dk, k), _sum_heads(dv, v)


def _heads_read(q: Tensor, heads: Heads) -> tuple[int, int, bool]:
    """First head and number of heads of `k` that q's heads read; whether each is read by equally many, in order."""
    first, k_first, group = heads
    low, high = first // group, (first + q.shape[1] - 1) // group + 1
    aligned = high - low == 1 or (first % group == 0 and q.shape[1] % group == 0)
    return low - k_first, high - low, aligned


def _head_index(q: Tensor, heads: Heads) -> Tensor:
    first, k_first, group = heads
    return torch.arange(first, first + q.shape[1], device=q.device).div_(group, rounding_mode="floor").sub_(k_first)


def _read_heads(k: Tensor, q: Tensor, heads: Heads | None) -> Tensor:
    """The heads of `k` that q's heads read: few, or where they are shared unequally, one for each."""
    if heads is None:
        return k
    low, count, aligned = _heads_read(q, heads)
    return k.narrow(1, low, count) if aligned else k.index_select(1, _head_index(q, heads))


def _to_heads(grad: Tensor, k: Tensor, q: Tensor, heads: Heads) -> Tensor:
    """The gradient of all of `k`, given that of the heads that were read."""
    whole = torch.zeros_like(k)
    low, count, aligned = _heads_read(q, heads)
    if aligned:
        whole.narrow(1, low, count).copy_(grad)
        return whole
    return whole.index_add_(1, _head_index(q, heads), grad)


def _placed(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, q_start: int | None) -> tuple[Tensor | None, bool]:
    """Mask and `is_causal`; the places of a part of the queries are written into the mask."""
    if q_start is None or not is_causal:
        return mask, is_causal
    rows = torch.arange(q_start, q_start + q.shape[2], device=q.device)
    return rows.unsqueeze(1) >= torch.arange(k.shape[2], device=q.device), False


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _flash_fits(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> bool:
    """FlashAttention lets the last query see the last key, here the first query sees the first: these differ where lengths do."""
    alike = not is_causal or q.shape[2] == k.shape[2]
    return alike and bias is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _efficient_fits(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.shape[-1] % 8 == 0


def _repeat_heads(k: Tensor, q: Tensor) -> Tensor:
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _sum_heads(grad: Tensor, k: Tensor) -> Tensor:
    return grad if grad.shape == k.shape else grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _aligned_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """`bias` for all heads; the efficient kernel wants rows that begin at multiples of 8 elements."""
    if bias is None:
        return None
    length = k.shape[2]
    padded = torch.nn.functional.pad(bias.to(q.dtype), (0, -length % 8)) if bias.shape[-1] == length else bias.to(q.dtype)
    return padded[..., :length].expand(q.shape[0], q.shape[1], q.shape[2], length)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))  # the kernel's own padding, which `attention` cut off
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, False]
    return backward(grad, q, k, v, bias, out, rows, state, state, 0.0, wanted, is_causal, scale=scale)[:3]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """In at least fp32: fp16 overflows, and the log of a sum is to have more digits than 16-bit types."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-2, -1)).mul_(scale)
    if bias is not None:
        scores = scores.add_(bias)
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
    return scores


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _scores(q, k, bias, is_causal, scale).sub_(lse.unsqueeze(-1)).exp_().to(q.dtype)
    inner = torch.matmul(grad, v.transpose(-2, -1)).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return torch.matmul(inner, k), torch.matmul(inner.transpose(-2, -1), q), torch.matmul(weights.transpose(-2, -1), grad)
