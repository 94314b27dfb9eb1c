"""A call of stages of a model that returns no loss: forwards at the call, backwards when the user's loss comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.run.agreement import announced
from autopar.run.derivatives import as_given, first_derivatives_only, ran_twice, which_are_plain
from autopar.run.returned import parts_of
from autopar.run.stage_calls import StageCalls
from autopar.run.stage_work import StageWork


class Answered(torch.autograd.Function):
    """The forwards of all microbatches and, as their derivative, the backwards."""

    @staticmethod
    def forward(
        ctx: Any, calls: StageCalls, parts: list[dict[str, Tensor]], buffers: Mapping[str, Tensor], anchor: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs of the batch that are kept.

        Args:
            anchor: has a gradient, so that backward comes to ranks whose parameters are all frozen.
        """
        works = calls.new_works()
        with torch.autocast(anchor.device.type, enabled=False):
            calls.begin(works, parts, 1.0, buffers, parameters, keep=True)
            calls.runner(works).forward()
            outputs = calls.returned(works)
        ctx.calls, ctx.works, ctx.parameters = calls, works, parameters
        ctx.watched = calls.watched_of(works, parameters, outputs)
        ctx.are_plain = which_are_plain(parameters)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[t.name] for t in calls.kept if not t.has_gradient))
        return tuple(outputs[t.name] for t in calls.kept)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        """The gradients of this rank's parameters."""
        calls, works, parameters = ctx.calls, ctx.works, ctx.parameters
        ctx.works = ctx.parameters = None
        if works is None:
            raise ran_twice()
        with announced("runs backward", calls.world):
            return (None, None, None, None, *as_given(Answered._gradients(ctx, works, parameters, tangents), ctx.are_plain))

    @staticmethod
    def _gradients(
        ctx: Any, works: dict[int, StageWork], parameters: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        calls = ctx.calls
        calls.check_returned(tangents, ctx.watched)
        returned = {t.name: x for t, x in zip(calls.kept, tangents, strict=True) if t.has_gradient}
        absent = [name for name, x in returned.items() if x is None]
        (work,) = works.values()
        with torch.autocast(work.device.type, enabled=False):
            parts = parts_of({name: x for name, x in returned.items() if x is not None}, calls.program.microbatches)
            unused = calls.unused(frozenset(absent))
            work.answer(parts, unused.tangents[calls.rank], unused.gradients[calls.rank])
            calls.runner(works).backward()
            found: Sequence[Tensor | None] = calls.wrapped(calls.finish(works, parameters, keep=True), unused.parameters)
        return found
