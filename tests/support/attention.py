"""Attention computed by its formula."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Compute what `autopar.ops.attention` computes. Each head of `k` and `v` is read by an equal
    number of heads of `q`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, -math.inf)
    return scores.softmax(-1) @ v
