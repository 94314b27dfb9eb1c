"""The loss of a step whose backward has run: what `backward` of it does is to hand out gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.run.agreement import announced
from autopar.run.derivatives import as_given, first_derivatives_only, ran_twice, which_are_plain
from autopar.run.scaled_step import ScaledStep
from autopar.run.stage_calls import StageCalls


class Published(torch.autograd.Function):
    """The loss, whose backward hands out gradients that are known already, or runs the step again for another factor of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: StageCalls,
        step: ScaledStep,
        loss: list[Tensor],
        gradients: list[Tensor | None],
        anchor: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """The loss, which comes in a list, so that it is no input: those are returned as views, which could not be changed in place.

        Args:
            step: that made it. anchor: has a gradient, so that backward comes to ranks whose parameters are all frozen.
        """
        ctx.calls, ctx.gradients, ctx.step, ctx.are_plain = calls, gradients, step, which_are_plain(parameters)
        return loss[0]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        """The gradients for this tangent."""
        made, step, ctx.gradients, ctx.step = ctx.gradients, ctx.step, None, None
        if made is None:
            raise ran_twice()
        with announced("runs backward", ctx.calls.world):
            ctx.calls.check_tangent(tangent)
            gradients = ctx.calls.wrapped(step.gradients(tangent, made))
        return (None, None, None, None, None, *as_given(gradients, ctx.are_plain))
