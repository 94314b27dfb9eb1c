"""Which of a model's results is the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import CaptureError


def loss_leaf(returned: Any, leaves: tuple[tuple[str, Any], ...]) -> int:
    """Flat position of the loss in a model's return value.

    The loss is the return value itself where it is a scalar, its ``loss`` entry or attribute, or the first scalar floating
    tensor of a tuple. `leaves` are the (path, value) pairs of `returned`, in flat order.

    Raises:
        CaptureError: there is none, or it does not depend on any parameter.
    """
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(named, torch.Tensor):
        candidates = [named]
    elif isinstance(returned, torch.Tensor):
        candidates = [returned]
    elif isinstance(returned, (tuple, list)):
        candidates = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
    else:
        candidates = []
    scalars = [tensor for tensor in candidates if tensor.dim() == 0 and tensor.is_floating_point()]
    if not scalars:
        results = ", ".join(f"{path or 'the result'} {tuple(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, torch.Tensor))
        raise CaptureError(
            f"the model returns no loss (it returns {results or 'no tensor'})",
            remedy="pass labels so that the model computes its loss, or return the scalar loss (alone, first in a tuple, or as 'loss')",
        )
    if not scalars[0].requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient",
            remedy="set requires_grad on the parameters to train, and do not detach the loss",
        )
    return next(position for position, (_, leaf) in enumerate(leaves) if leaf is scalars[0])
