"""Losses of two tensors element by element, averaged, summed or neither: the rules, and what a rank computes of an average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.rules.call import Call, argument, slots
from autopar.rules.notation import Factors, parse

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
_REDUCTION = 2  # position of that argument, of all of them
LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)
IN_ITS_OWN = frozenset({"mse_loss", "smooth_l1_loss", "soft_margin_loss"})
LOSS_GRADIENTS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)


def loss(call: Call) -> Factors:
    """Every dim is parallel; a sum over it, or a share of a mean, is partial."""
    terms = ", ".join("..." for _ in slots(call))
    return parse(f"{terms} -> {'' if argument(call, 'reduction', MEAN) else '...'}", call)


def loss_gradient(call: Call) -> Factors:
    """Every dim is parallel; the gradient that comes in is a scalar where the loss was."""
    rest = ", ".join("..." for _ in slots(call)[1:])
    return parse(f"{'...' if call.inputs[0].shape else ''}, {rest} -> ...", call, linear=((0,),))


def reduced_loss(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """A mean or a sum of a loss, in memory of its own: torch's kernels of `IN_ITS_OWN` reduce into that of the unreduced loss, which is as
    large as the scores, and held as long as what is reduced."""
    reduction = args[_REDUCTION] if len(args) > _REDUCTION else kwargs.get("reduction", MEAN)
    further = {key: value for key, value in kwargs.items() if key != "reduction"}
    each: Tensor = getattr(aten, name).default(*args[:_REDUCTION], NONE, *args[_REDUCTION + 1 :], **further)
    return each.mean() if reduction == MEAN else each.sum()


def mean_loss_part(name: str, count: int, *args: Any, **kwargs: Any) -> Tensor:
    """A rank's share of a mean loss of `count` elements, or its part of that loss' gradient: the sum's, over `count`.

    Half types are computed in float32, whose range their sums may need.
    """
    first = next(a for a in args if isinstance(a, Tensor))
    half = first.dtype in (torch.float16, torch.bfloat16)
    wide = tuple(a.float() if half and isinstance(a, Tensor) else a for a in args)
    result: Tensor = reduced_loss(name, *wide, **kwargs) if name in IN_ITS_OWN else getattr(aten, name).default(*wide, **kwargs)
    return result.div_(count).to(first.dtype)
