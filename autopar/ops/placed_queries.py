"""Causal attention of a part of the queries, which knows its place among all, without a mask.

The s queries that begin at place p see the p keys before them, all of them, and of the s keys beside them the first, the first two and so
on. So it is two attentions, one over each range of keys, which the kernels know: the first without a mask, the second square and causal.
What they give is joined by the logs of their softmax' sums, as Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
join two parts of a softmax, and Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, blocks of keys:

    lse = log(exp(lse₁) + exp(lse₂)),   out = out₁ · exp(lse₁ − lse) + out₂ · exp(lse₂ − lse)

In backward each range is given the whole's `out` and `lse`: a probability is exp(score − lse), and what each row's gradient is less of,
the sum of grad · out, is of the whole too. Gradients of queries add up; each range has its own part of the keys' and values', and what no
query here sees has zeros. No tensor of [s, t] is there, and what is seen by none is not computed, but for a half of the square.

A mirrored part (`autopar.mirrored`) is two such runs of queries, which differ in where they begin.

Keys may be fewer than queries, as where the decoder of a model reads another sequence causally: then the second range ends with them, or
is empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.mirrored import second_start
from autopar.ops import attention_kernels as kernels


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, start: int, mirrored_in: int | None = None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the queries `q`, the first of which is at `start`; tensors and `mirrored_in` as of `autopar.ops.attention`."""
    found = [_attended(q[:, :, rows], k, v, scale, first) for rows, first in _runs(q, start, mirrored_in)]
    if len(found) == 1:
        return found[0]
    outs, sums = zip(*found, strict=True)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, start: int) -> tuple[Tensor, Tensor]:
    """Of queries that lie one after another."""
    before, beside = _ranges(q.shape[2], k, start)
    if not _length(beside):
        return kernels.attend(q, k[:, :, before], v[:, :, before], None, False, scale)
    out, lse = kernels.attend(q, k[:, :, beside], v[:, :, beside], None, True, scale)
    if not _length(before):
        return out, lse
    return _joined(out, lse, *kernels.attend(q, k[:, :, before], v[:, :, before], None, False, scale))


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, start: int, mirrored_in: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of all of k and v."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, first in _runs(q, start, mirrored_in):
        own = [x[:, :, rows] for x in (grad, q, out, lse)]
        for keys, is_causal in zip(_ranges(own[0].shape[2], k, first), (False, True), strict=True):
            if _length(keys):
                _add_gradients((dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]), own, k[:, :, keys], v[:, :, keys], scale, is_causal)
    return dq, dk, dv


def _add_gradients(
    into: tuple[Tensor, Tensor, Tensor], rows: list[Tensor], k: Tensor, v: Tensor, scale: float, is_causal: bool
) -> None:  # fmt: skip
    """Add what queries that lie one after another have for one range of keys."""
    grad, q, out, lse = rows
    for sums, found in zip(into, kernels.attend_backward(grad, q, k, v, out, lse, None, is_causal, scale), strict=True):
        sums.add_(found)


def _runs(q: Tensor, start: int, mirrored_in: int | None) -> list[tuple[slice, int]]:
    """Queries that lie one after another, and where the first of them is."""
    length = q.shape[2]
    if mirrored_in is None:
        return [(slice(0, length), start)]
    return [(slice(0, length // 2), start), (slice(length // 2, length), second_start(mirrored_in, length, start))]


def _ranges(num_queries: int, k: Tensor, start: int) -> tuple[slice, slice]:
    """The keys before the queries that begin at `start`, and those beside them."""
    length = k.shape[2]
    return slice(0, min(start, length)), slice(min(start, length), min(start + num_queries, length))


def _length(keys: slice) -> int:
    return int(keys.stop - keys.start)


def _joined(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Of two ranges of keys what they give together, in `out`'s memory; in at least float32, which `lse` is in."""
    whole = torch.logaddexp(lse, other_lse)
    share, rest = (lse - whole).exp_().unsqueeze(-1), (other_lse - whole).exp_().unsqueeze(-1)
    if out.dtype == lse.dtype:
        return out.mul_(share).addcmul_(other, rest), whole
    return out.copy_((out * share).addcmul_(other, rest)), whole
