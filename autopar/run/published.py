"""The loss of a step whose backward has run: what `backward` of it does is to hand out gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError


class Stepped(Protocol):
    """What is needed of the module whose step it was (`autopar.run.staged_module.StagedModule`)."""

    loss_scale: float

    def wrapped(self, gradients: Sequence[Tensor | None], without: frozenset[str] = frozenset()) -> list[DTensor | None]:
        """One per parameter that is held; None for those `without` one."""


class Published(torch.autograd.Function):
    """The loss, whose backward hands out gradients that are known already."""

    @staticmethod
    def forward(
        ctx: Any, module: Stepped, loss: list[Tensor], gradients: list[Tensor], anchor: Tensor, *parameters: Tensor
    ) -> Tensor:
        """The loss, which comes in a list, so that it is no input: those are returned as views, which could not be changed in place.

        Args:
            anchor: has a gradient, so that backward comes to ranks whose parameters are all frozen.
        """
        ctx.module, ctx.gradients, ctx.scale = module, gradients, module.loss_scale
        return loss[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        """The gradients that are there."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeStateError(
                "backward ran a second time through one call, and its gradients have been handed out",
                remedy="call the module again before each backward; one call gives one backward",
            )
        factor = float(tangent) / ctx.scale
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        return (None, None, None, None, *ctx.module.wrapped(gradients))
