"""A call of stages or microbatches that runs again where its loss was multiplied by another factor than assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError
from autopar.run.loss_scale import LossScale, may_be_multiplied
from autopar.run.ranks import by_all
from autopar.run.stage_calls import StageCalls


class ScaledStep:
    """Forward and backward of one call, which can run once more with another factor.

    Args:
        parts: the inputs of each microbatch. buffers: local ones by name, as they are before the call. parameters: those held here.
    """

    def __init__(
        self,
        calls: StageCalls,
        scale: LossScale,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        self._calls, self._scale, self._assumed = calls, scale, scale.assumed
        self._operands: tuple[Any, ...] | None = (parts, buffers, parameters)
        self._before: dict[str, Tensor] | None = {}
        if calls.mutates:
            kept = calls.is_fp16 or scale.assumed != 1.0
            self._before = {name: buffers[name].clone() for name in calls.mutated} if kept else None
        self._versions = [(name, x, _version(x)) for name, x in self._read()]

    def run(self) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """The batch's outputs by path, and the gradients of this rank."""
        assert self._operands is not None, "a step lets go of its operands when its gradients are handed out"
        parts, buffers, parameters = self._operands
        return self._calls.step(parts, buffers, parameters, scale=self._assumed, keep=True)

    def gradients(self, tangent: Tensor, made: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients for this tangent of the loss.

        Args:
            made: those of `run`; emptied.

        Raises:
            RuntimeStateError: where the step has to run again and something that it reads was changed.
        """
        found, made[:] = [*made], []
        wanted = float(tangent)
        assumed = float(torch.tensor(self._assumed, dtype=tangent.dtype))
        if may_be_multiplied(assumed, wanted, is_fp16=self._calls.is_fp16):
            if assumed != wanted:
                for gradient in found:
                    if gradient is not None:
                        gradient.mul_(wanted / assumed)
            self._scale.confirm()
        else:
            found.clear()  # their memory is needed
            found = self._again(wanted)
            self._scale.learn(wanted)
        self._operands, self._before, self._versions = None, None, []
        return found

    def _again(self, tangent: float) -> list[Tensor | None]:
        """The gradients of a second run, which leaves buffers as they are."""
        assert self._operands is not None, "gradients are asked for once"
        parts, buffers, parameters = self._operands
        if self._before is None:
            what = f"the loss was multiplied by {tangent:g}, backward ran inside the call with {self._assumed:g}, and buffers have changed"
            raise RuntimeStateError(what, remedy="set pm.loss_scale = scaler.get_scale() before the first call")
        remedy = "run backward before whatever changes it, or set pm.loss_scale to the factor of the loss before the call"
        by_all(lambda: self._check_unchanged(tangent, remedy), "backward", remedy)  # all ranks run again, or none
        device = self._calls.device_type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return self._calls.step(parts, {**buffers, **self._before}, parameters, scale=tangent, keep=True, returns=False)[1]

    def _check_unchanged(self, tangent: float, remedy: str) -> None:
        changed = next(((name, before) for name, x, before in self._versions if before is None or _version(x) != before), None)
        if changed is not None:
            name, before = changed
            unknown = "was made under torch.inference_mode, which does not count changes"
            why = unknown if before is None else "was changed since the call"
            raise RuntimeStateError(
                f"the loss was multiplied by {tangent:g}, backward ran inside the call with {self._assumed:g}, and the step cannot run "
                f"again: {name} {why}",
                remedy=remedy,
            )

    def _read(self) -> list[tuple[str, Tensor]]:
        """What the user may change and a second run reads."""
        assert self._operands is not None, "the step has not run"
        parts, buffers, parameters = self._operands
        named = [(f"parameter {t.name!r}", x) for t, x in zip(self._calls.held, parameters, strict=True)]
        named += [(name, x.to_local()) for name, x in named if isinstance(x, DTensor)]
        named += [(f"buffer {name!r}", x) for name, x in buffers.items() if name not in self._calls.mutated]
        return named + [(f"input {name!r}", x) for part in parts for name, x in part.items()]


def _version(x: Tensor) -> int | None:
    """How often it was changed in place; None where that is not counted."""
    return None if x.is_inference() else x._version
