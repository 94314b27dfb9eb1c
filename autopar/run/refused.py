"""Outputs that the plain model has a gradient of and a program has none of: whoever differentiates one is told so.

They come as if they had a gradient, as the plain model's do, and backward through one is refused: detached, they would take part in a sum
of losses and leave nothing in any gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.errors import RuntimeStateError
from autopar.run.derivatives import first_derivatives_only


def refusing(name: str, value: Tensor, loss: Tensor) -> Tensor:
    """The output `value`, in the same memory, whose backward is refused; as it is where the call's loss has no gradient either."""
    if not loss.requires_grad or value.requires_grad or not torch.is_grad_enabled():
        return value
    found: Tensor = _Refused.apply(loss, [value], name)
    return found


class _Refused(torch.autograd.Function):
    """Of a value that is no argument, since it would be a view of one then, which cannot be changed in place."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: list[Tensor], name: str) -> Tensor:
        ctx.name = name
        return value.pop()

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, tangent: Tensor) -> Any:
        raise RuntimeStateError(
            f"backward goes through the output {ctx.name!r}, and a program has the gradient of its loss alone",
            remedy="add up in the model's forward what is to be differentiated, and return the sum as its loss; or return a dict without "
            "an entry 'loss', of which any loss may be computed; or detach this output",
        )
