"""Which pipelines are tried: what is asked for, or every axis and some numbers of microbatches, pruned by their bounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.api.tracing import batch_size, trace_part
from autopar.capture import Trace
from autopar.constraints import Pipelined, check, pipeline_in
from autopar.errors import AutoparError, ConstraintError, InfeasibleError
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning import Planned, PlanOptions, TooSlow, make_plan, make_staged_plan
from autopar.planning.search import Progress
from autopar.run.orders import num_rounds

log = logging.getLogger("autopar")
_MOST_NUMBERS = 3  # of microbatches per axis
_MOST_ROUNDS = 8  # microbatches per stage: beyond, the pipeline waits for less than an eighth of its time


@dataclass(frozen=True, slots=True)
class Chooser:
    """A captured call that is to be planned; `plan` finds the fastest plan among those tried.

    Attributes:
        captured: traces of the same call on other numbers of samples, as they are needed.
    """

    model: nn.Module
    trace: Trace
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: Mesh
    profile: HardwareProfile
    options: PlanOptions
    progress: Progress = lambda _: None
    captured: dict[int, Trace] = field(default_factory=dict)

    def plan(self, limit_s: float = math.inf) -> Planned:
        """The plan.

        Args:
            limit_s: a plan that is no faster is not wanted.

        Raises:
            ConstraintError, InfeasibleError: of the last that was tried, where none has a plan.
            TooSlow: where bounds show that no plan beats the limit.
        """
        asked = pipeline_in(self.options.constraints, self.mesh)
        if asked is None and self.options.num_microbatches in (1, "auto"):
            try:
                return self._without(limit_s)
            except InfeasibleError as error:
                return self._in_parts(error, limit_s)
        if asked is not None and asked.axis:
            check(asked, self.mesh)
        wish = asked or Pipelined("", None, "1f1b", None, independent=False)
        best: Planned | None = None
        refusal: AutoparError | TooSlow | None = None
        for axis, num in self._candidates(wish):
            limit_s = limit_s if best is None else best.plan.prediction.step_s
            try:
                found = self._without(limit_s) if num == 0 else self._staged(wish, axis, num, limit_s)
            except TooSlow as error:
                refusal = refusal or error
                log.info("no plan of %d microbatches along %r is faster: at least %.4g s", num, axis, error.args[0])
                continue
            except (InfeasibleError, ConstraintError) as error:
                log.info("no plan of %d microbatches along %r: %s", num, axis, error.what)
                refusal = error
                continue
            if best is None or found.plan.prediction.step_s < best.plan.prediction.step_s:
                best = found
        if best is None:
            assert refusal is not None, "there is something to try"
            raise refusal
        return best

    def _in_parts(self, refusal: InfeasibleError, limit_s: float) -> Planned:
        """Where nothing fits, as few microbatches as do, one after another, if the batch may be cut.

        Raises:
            InfeasibleError: what was refused, where no number of microbatches helps.
        """
        samples = batch_size(self.args, self.kwargs) if self.options.num_microbatches == "auto" and self.options.batch == "global" else 1
        for num in (n for n in range(2, samples + 1) if samples % n == 0):
            try:
                found = self._staged(Pipelined("", num, "1f1b", None, independent=False), "", num, limit_s)
            except InfeasibleError as error:
                log.info("no plan of %d microbatches: %s", num, error.what)
            except ConstraintError as error:
                log.info("the batch is not cut into microbatches: %s", error.what)
                break
            else:
                log.warning("%s; in %d microbatches, one after another, it fits: %s", refusal.what, num, found.plan)
                return found
        raise refusal

    def _without(self, limit_s: float = math.inf) -> Planned:
        kept = tuple(c for c in self.options.constraints if not isinstance(c, Pipelined))
        options = self.options if len(kept) == len(self.options.constraints) else replace(self.options, constraints=kept)
        name = type(self.model).__name__
        return make_plan(self.trace, self.mesh, self.profile, options, model_name=name, progress=self.progress, limit_s=limit_s)

    def _staged(self, wish: Pipelined, axis: str, num: int, limit_s: float) -> Planned:
        here = replace(wish, axis=axis)
        call = self.args, self.kwargs
        part, how = trace_part(self.model, self.trace, *call, num, independent=here.independent, known=self.captured)
        return make_staged_plan(
            self.trace,
            part,
            how,
            self.mesh,
            self.profile,
            self.options,
            here,
            model_name=type(self.model).__name__,
            limit_s=limit_s,
            progress=self.progress,
        )

    def _candidates(self, wish: Pipelined) -> Iterator[tuple[str, int]]:
        """(axis, number of microbatches); 0 for no pipeline at all."""
        asked = wish.microbatches or (self.options.num_microbatches if isinstance(self.options.num_microbatches, int) else None)
        free = wish.axis is None
        if free and asked is None:
            yield "", 0
        axes = [axis.name for axis in self.mesh.axes if axis.size > 1] if wish.axis is None else [wish.axis]
        samples = batch_size(self.args, self.kwargs)
        for axis in axes:
            stages = self.mesh.shape[self.mesh.names.index(axis)] if axis else 1
            divisors = [n for n in range(1, samples + 1) if samples % n == 0]
            divisors = [n for n in divisors if num_rounds(stages, n)] if wish.chunks > 1 else divisors
            numbers = [n for n in divisors if stages <= n <= _MOST_ROUNDS * stages][-_MOST_NUMBERS:]
            numbers = numbers if axis else [1]
            yield from ((axis, num) for num in ([asked] if asked is not None else numbers or divisors[-1:] or [samples]))
