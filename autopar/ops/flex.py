"""Attention whose scores go through functions (`torch.nn.attention.flex_attention`), as one op; on
a part of the batch, the heads or the queries.

    s = q kᵀ · scale,   s' = score(s, b, h, q, k) where mask(b, h, q, k), else −∞,   out =
    softmax(s') v,   lse = log Σ exp s'

The functions are text (`autopar.ops.elementwise`), what they capture are operands. A block mask
tells kernels what to skip, and changes no result: here the mask function alone decides, and a
kernel's block mask is made of it where it runs.

On a GPU the op calls torch's compiled ``flex_attention``, forward and backward. Its backward runs
forward again, since torch keeps what backward needs in its own graph. Elsewhere the scores of some
queries at a time are computed, from the first to the last key that one of them sees. These are a
kernel's scratch, as is what torch's kernels hold, so no prediction of memory counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.attending import read_heads, to_heads
from autopar.ops.flex_kernels import Scoring, attend, attend_backward


@torch.library.custom_op("autopar::flex_attention", mutates_args=())
def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: Sequence[Tensor],
    score: str,
    mask: str,
    scale: float,
    starts: Sequence[int],
    own: Sequence[int],
    heads: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """out [b, h, s, e] and lse [b, h, s], in at least float32; a query that sees no key has zeros
    and −∞.

    Args:
        q: [b, h, s, d]; k: [b or 1, g, t, d]; v: [b or 1, g, t, e], where g divides h and query
            head i reads head i // (h / g).
        captured: what the functions read. score, mask: texts of functions of ``score, b, h, q, k``
            and of ``b, h, q, k``.
        starts: where `q` is a part, its first batch entry, head and query; else zeros.
        own: tensor, dim, tensor, dim, …: dims of captured tensors that are parts as `q` is.
        heads: as of `autopar.ops.attention`; empty where `q` has as many parts as `k`.
    """
    how = Scoring(captured, score, mask, scale, starts, own)
    if heads:
        k, v = (read_heads(x, q, (heads[0], heads[1], heads[2])) for x in (k, v))
    return attend(q, k, v, how)


@torch.library.custom_op("autopar::flex_attention_backward", mutates_args=())
def _flex_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    captured: Sequence[Tensor],
    wanted: Sequence[int],
    score: str,
    mask: str,
    scale: float,
    starts: Sequence[int],
    own: Sequence[int],
    heads: Sequence[int],
) -> list[Tensor]:
    """Gradients of q, k and v, and of the captured tensors with the numbers `wanted`; given those
    of the results, of which that of `lse` may be missing.
    """
    how = Scoring(captured, score, mask, scale, starts, own)
    if not heads:
        return [
            x.contiguous() for x in attend_backward(q, k, v, out, lse, grad, grad_lse, wanted, how)
        ]
    read = heads[0], heads[1], heads[2]
    keys, values = (read_heads(x, q, read) for x in (k, v))
    dq, dk, dv, *others = attend_backward(q, keys, values, out, lse, grad, grad_lse, wanted, how)
    return [
        x.contiguous() for x in (dq, to_heads(dk, k, q, read), to_heads(dv, v, q, read), *others)
    ]


@_flex_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@_flex_attention_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    captured, wanted = rest[:2]
    return [x.new_empty(x.shape) for x in (q, k, v, *(captured[number] for number in wanted))]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, captured, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.num_captured = len(captured)
    ctx.wanted = [number for number, x in enumerate(captured) if x.requires_grad]
    ctx.save_for_backward(q, k, v, *output, *captured)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *captured = ctx.saved_tensors
    given = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, *found = flex_attention_backward(
        q, k, v, out, lse, given, grad_lse, captured, ctx.wanted, *ctx.settings
    )
    others: list[Tensor | None] = [None] * ctx.num_captured
    for number, gradient in zip(ctx.wanted, found, strict=True):
        others[number] = gradient
    return (
        dq,
        dk,
        dv,
        others,
        *[None] * 4,
        [],
        [],
    )  # lists that are empty have a structure for torch


_flex_attention.register_autograd(_differentiate, setup_context=_remember)
flex_attention = torch.ops.autopar.flex_attention.default
flex_attention_backward = torch.ops.autopar.flex_attention_backward.default
