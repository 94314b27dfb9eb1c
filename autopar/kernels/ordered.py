"""Sums in one fixed order: the definition of what `autopar_csrc/include/sums.h` computes, in torch, equal to the last bit.

Elements come in groups of `GROUP` neighbours; group g belongs to lane g mod `LANES`. A lane adds its elements one by one, then the
lanes are added in halves. The order depends on nothing but the number of elements, so neither threads nor the device change the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 8
LANES = 256
STRIPE = LANES * GROUP


def ordered_sum(x: Tensor) -> Tensor:
    """The sum over the last dim, in the dtype of `x`: [..., n] → [...]."""
    lead = x.shape[:-1]
    stripes = -(-x.shape[-1] // STRIPE)
    filled = torch.nn.functional.pad(x, (0, stripes * STRIPE - x.shape[-1])).view(*lead, stripes, LANES, GROUP)
    lanes = x.new_zeros(*lead, LANES)
    for stripe in range(stripes):
        for place in range(GROUP):
            lanes = lanes + filled[..., stripe, :, place]
    return add_lanes(lanes)


def add_all(values: Tensor) -> Tensor:
    """The sum of single values over the last dim, where value i belongs to lane i mod `LANES`: [..., n] → [...]."""
    lead = values.shape[:-1]
    turns = -(-values.shape[-1] // LANES)
    filled = torch.nn.functional.pad(values, (0, turns * LANES - values.shape[-1])).view(*lead, turns, LANES)
    lanes = values.new_zeros(*lead, LANES)
    for turn in range(turns):
        lanes = lanes + filled[..., turn, :]
    return add_lanes(lanes)


def add_lanes(lanes: Tensor) -> Tensor:
    """[..., LANES] → [...], in halves."""
    half = LANES // 2
    while half > 0:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]
