"""Which of a model's results are differentiated: its loss, or, where it has none, those from which the user computes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Flat positions in a model's return value.

    Attributes:
        loss: of the loss, None where the model returns none.
        positions: of what is differentiated: the loss alone, or, without one, everything that has a gradient; nothing where nothing has.
    """

    loss: int | None
    positions: tuple[int, ...]


def differentiated(returned: Any, leaves: tuple[tuple[str, Any], ...], computed: Callable[[torch.Tensor], bool]) -> Differentiated:
    """What backward goes through.

    The loss is the return value itself where it is a scalar, its ``loss`` entry or attribute, or the first scalar floating tensor of a
    tuple that parameters and the batch have a part in (the scale of logits, or a penalty on weights, is none), as far as it depends on a
    parameter that requires a gradient, or nothing does.

    Args:
        returned, leaves: what the model returns, and its (path, value) pairs in flat order.
        computed: whether a tensor depends on a parameter and on the batch.
    """
    tensors = {position: leaf for position, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    having = tuple(position for position, leaf in tensors.items() if leaf.requires_grad)
    candidates = {id(tensor) for tensor in _candidates(returned, leaves, computed)}
    for position in having or tensors:
        leaf = tensors[position]
        if id(leaf) in candidates and leaf.dim() == 0 and leaf.is_floating_point():
            return Differentiated(position, (position,) if having else ())
    return Differentiated(None, having)


def _candidates(returned: Any, leaves: tuple[tuple[str, Any], ...], computed: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(named, torch.Tensor):
        return [named]
    if isinstance(returned, torch.Tensor):
        return [returned]
    scalars = (leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 0)
    return [leaf for leaf in scalars if computed(leaf)] if isinstance(returned, tuple | list) else []
