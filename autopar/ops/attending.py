"""Attention as one op on every device, and on a part of the queries or of the heads."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops import placed_queries as placed
from autopar.ops.attention_kernels import attend, attend_backward

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
        q: [b, h, s, d]; k, v: [b, g, t, d], where g divides h and query head i reads head i // (h / g).
        mask: added to the scores, or where boolean says what is seen; broadcasts to [b, h, s, t].
        is_causal: query i sees keys 0…i (without a mask).
        q_start: where `q` is a part of the queries, the place of its first one.
        heads: where `q` has fewer of the heads than `k` and `v`: its first head, the first head of `k`, and how many query heads
            read one head of `k`.
        mirrored_in: where `q` is a mirrored part (`autopar.mirrored`), the number of all queries.

    Returns:
        out [b, h, s, d] and lse [b, h, s] (float32 for half types).
    """
    k, v = read_heads(k, q, heads), read_heads(v, q, heads)
    if q_start is None or not is_causal:
        return attend(q, k, v, mask, is_causal, scale)
    return placed.attend(q, k, v, scale, q_start, mirrored_in)


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
    """Gradients of q, k and v, given that of `attention`'s result and what it returned; shapes and parts as there."""
    if heads is not None:
        own = read_heads(k, q, heads), read_heads(v, q, heads)
        dq, dk, dv = attention_backward(grad, q, *own, out, lse, mask, is_causal, scale, q_start, None, mirrored_in)
        return dq, to_heads(dk, k, q, heads), to_heads(dv, v, q, heads)
    if q_start is None or not is_causal:
        return attend_backward(grad, q, k, v, out, lse, mask, is_causal, scale)
    return placed.attend_backward(grad, q, k, v, out, lse, scale, q_start, mirrored_in)


def _heads_read(q: Tensor, heads: Heads) -> tuple[int, int, bool]:
    """First head and number of heads of `k` that q's heads read; whether each is read by equally many, in order."""
    first, k_first, group = heads
    low, high = first // group, (first + q.shape[1] - 1) // group + 1
    aligned = high - low == 1 or (first % group == 0 and q.shape[1] % group == 0)
    return low - k_first, high - low, aligned


def _head_index(q: Tensor, heads: Heads) -> Tensor:
    first, k_first, group = heads
    return torch.arange(first, first + q.shape[1], device=q.device).div_(group, rounding_mode="floor").sub_(k_first)


def read_heads(k: Tensor, q: Tensor, heads: Heads | None) -> Tensor:
    """The heads of `k` that q's heads read: few, or where they are shared unequally, one for each."""
    if heads is None:
        return k
    low, count, aligned = _heads_read(q, heads)
    return k.narrow(1, low, count) if aligned else k.index_select(1, _head_index(q, heads))


def to_heads(grad: Tensor, k: Tensor, q: Tensor, heads: Heads) -> Tensor:
    """The gradient of all of `k`, given that of the heads that were read."""
    whole = torch.zeros_like(k)
    low, count, aligned = _heads_read(q, heads)
    if aligned:
        whole.narrow(1, low, count).copy_(grad)
        return whole
    return whole.index_add_(1, _head_index(q, heads), grad)
