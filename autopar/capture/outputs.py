"""Which of a model's results are differentiated: its loss, or, where it has none, those from which the user computes one."""

from __future__ import annotations

from collections.abc import Mapping
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


def differentiated(returned: Any, leaves: tuple[tuple[str, Any], ...]) -> Differentiated:
    """What backward goes through.

    The loss is the return value itself where it is a scalar, its ``loss`` entry or attribute, or the first scalar floating tensor of a
    tuple, as far as it depends on a parameter that requires a gradient, or nothing does. `leaves` are the (path, value) pairs of
    `returned`, in flat order.
    """
    tensors = {position: leaf for position, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    having = tuple(position for position, leaf in tensors.items() if leaf.requires_grad)
    candidates = {id(tensor) for tensor in _candidates(returned, leaves)}
    for position in having or tensors:
        leaf = tensors[position]
        if id(leaf) in candidates and leaf.dim() == 0 and leaf.is_floating_point():
            return Differentiated(position, (position,) if having else ())
    return Differentiated(None, having)


def _candidates(returned: Any, leaves: tuple[tuple[str, Any], ...]) -> list[Any]:
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(named, torch.Tensor):
        return [named]
    return [leaf for _, leaf in leaves] if isinstance(returned, torch.Tensor | tuple | list) else []
