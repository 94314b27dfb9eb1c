"""Causal attention of a part of the queries, which knows its place among all, without a mask.

The s queries that begin at place p see the p keys before them, all of them, and of the s keys beside them the first, the first two and so
on. So it is two attentions, one over each range of keys, which the kernels know: the first without a mask, the second square and causal.
What they give is joined by the logs of their softmax' sums, as Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
join two parts of a softmax, and Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, blocks of keys:

    lse = log(exp(lse₁) + exp(lse₂)),   out = out₁ · exp(lse₁ − lse) + out₂ · exp(lse₂ − lse)

In backward each range is given the whole's `out` and `lse`: a probability is exp(score − lse), and what each row's gradient is less of,
the sum of grad · out, is of the whole too. Gradients of queries add up; each range has its own part of the keys' and values', and what no
query here sees has zeros. No tensor of [s, t] is there, and what is seen by none is not computed, but for a half of the square.

Keys may be fewer than queries, as where the decoder of a model reads another sequence causally: then the second range ends with them, or
is empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops import attention_kernels as kernels


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, start: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the queries `q`, the first of which is at `start`; tensors as of `autopar.ops.attention`."""
    before, beside = _ranges(q, k, start)
    if not _length(beside):
        return kernels.attend(q, k[:, :, before], v[:, :, before], None, False, scale)
    out, lse = kernels.attend(q, k[:, :, beside], v[:, :, beside], None, True, scale)
    if not _length(before):
        return out, lse
    return _joined(out, lse, *kernels.attend(q, k[:, :, before], v[:, :, before], None, False, scale))


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of all of k and v."""
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dq: Tensor | None = None
    before, beside = _ranges(q, k, start)
    for keys, is_causal in ((before, False), (beside, True)):
        if _length(keys):
            found = kernels.attend_backward(grad, q, k[:, :, keys], v[:, :, keys], out, lse, None, is_causal, scale)
            dq = found[0] if dq is None else dq.add_(found[0])
            dk[:, :, keys], dv[:, :, keys] = found[1:]
            del found
    assert dq is not None, "the first query sees the first key"
    for gradient in (dk, dv):
        gradient[:, :, beside.stop :].zero_()
    return dq, dk, dv


def _ranges(q: Tensor, k: Tensor, start: int) -> tuple[slice, slice]:
    """The keys before the queries, and those beside them."""
    length = k.shape[2]
    return slice(0, min(start, length)), slice(min(start, length), min(start + q.shape[2], length))


def _length(keys: slice) -> int:
    return int(keys.stop - keys.start)


def _joined(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Of two ranges of keys what they give together, in `out`'s memory; in at least float32, which `lse` is in."""
    whole = torch.logaddexp(lse, other_lse)
    share, rest = (lse - whole).exp_().unsqueeze(-1), (other_lse - whole).exp_().unsqueeze(-1)
    if out.dtype == lse.dtype:
        return out.mul_(share).addcmul_(other, rest), whole
    return out.copy_((out * share).addcmul_(other, rest)), whole
