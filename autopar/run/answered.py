"""A call of stages of a model that returns no loss: forwards at the call, backwards when the user's loss comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError
from autopar.run.forwards_first import ForwardsFirst
from autopar.run.program import ProgramTensor, StagedProgram
from autopar.run.returned import parts_of
from autopar.run.stage_work import StageWork
from autopar.run.unused import Unused
from autopar.run.watched import Watched


class Stages(Protocol):
    """What a call needs of the module that it is a call of (`autopar.run.staged_module.StagedModule`)."""

    program: StagedProgram
    kept: Sequence[ProgramTensor]
    rank: int

    def new_works(self) -> Mapping[int, StageWork]:
        """Of this rank, one stage's."""

    def runner(self, works: Mapping[int, StageWork]) -> ForwardsFirst:
        """Of that stage's work."""

    def begin(
        self,
        works: Mapping[int, StageWork],
        parameters: Sequence[Tensor],
        parts: list[dict[str, Tensor]],
        weights: list[float],
        *,
        keep: bool,
    ) -> None:
        """Before forwards."""

    def joined(self, works: Mapping[int, StageWork], weights: list[float]) -> dict[str, Tensor]:
        """After forwards: outputs of this rank's stage."""

    def spread(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same of all stages."""

    def finish(self, works: Mapping[int, StageWork], parameters: Sequence[Tensor], *, keep: bool) -> list[Tensor | None]:
        """After backwards: gradients of what this rank holds."""

    def wrapped(self, gradients: Sequence[Tensor | None], without: frozenset[str] = frozenset()) -> list[DTensor | None]:
        """One per parameter that is held; None for those `without` one."""

    def check_returned(self, tangents: Sequence[Tensor | None], watched: Watched) -> None:
        """That nothing that is watched has changed, and that all ranks computed the same loss."""

    def unused(self, absent: frozenset[str]) -> Unused:
        """What follows from these outputs alone, which have no part in the loss."""

    def watched_of(self, works: Mapping[int, StageWork], parameters: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> Watched:
        """What the user holds and backward reads."""


class Answered(torch.autograd.Function):
    """The forwards of all microbatches and, as their derivative, the backwards."""

    @staticmethod
    def forward(ctx: Any, stages: Stages, parts: list[dict[str, Tensor]], anchor: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the batch that are kept.

        Args:
            anchor: has a gradient, so that backward comes to ranks whose parameters are all frozen.
        """
        works, weights = stages.new_works(), [1.0] * len(parts)
        with torch.autocast(anchor.device.type, enabled=False):
            stages.begin(works, parameters, parts, weights, keep=True)
            stages.runner(works).forward()
            outputs = stages.spread(stages.joined(works, weights))
        ctx.stages, ctx.works, ctx.parameters = stages, works, parameters
        ctx.watched = stages.watched_of(works, parameters, outputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[t.name] for t in stages.kept if not t.has_gradient))
        return tuple(outputs[t.name] for t in stages.kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        """The gradients of this rank's parameters."""
        stages, works, parameters = ctx.stages, ctx.works, ctx.parameters
        ctx.works = ctx.parameters = None
        if works is None:
            raise RuntimeStateError(
                "backward ran a second time through one call, and what it needs has been freed",
                remedy="call the module again before each backward; one call gives one backward",
            )
        stages.check_returned(tangents, ctx.watched)
        returned = {t.name: x for t, x in zip(stages.kept, tangents, strict=True) if t.has_gradient}
        absent = [name for name, x in returned.items() if x is None]
        (work,) = works.values()
        with torch.autocast(work.device.type, enabled=False):
            parts = parts_of({name: x for name, x in returned.items() if x is not None}, stages.program.microbatches)
            unused = stages.unused(frozenset(absent))
            work.answer(parts, unused.tangents[stages.rank], unused.gradients[stages.rank])
            stages.runner(works).backward()
            gradients = stages.wrapped(stages.finish(works, parameters, keep=True), unused.parameters)
        return (None, None, None, *gradients)
