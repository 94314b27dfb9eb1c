"""A captured call, and its plan for given stages, a given number of microbatches, and given rows of
logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.analysis.microbatches import Microbatching
from autopar.api.tracing import batch_size, by_rows, refuse_unproven, trace_part
from autopar.capture import Trace
from autopar.constraints import Pipelined
from autopar.core.hardware import Hardware
from autopar.core.mesh import Mesh
from autopar.core.schedules import AUTO
from autopar.planner import Planned, make_plan, make_staged_plan
from autopar.planner.clock import Progress
from autopar.planner.pipeline.pipeline_request import PipelineRequest, check_order
from autopar.planner.pipeline.stage_units import check_parts
from autopar.request import PlanOptions
from autopar.stages.placing import cut_points


def add_coverage(planned: Planned, line: str) -> Planned:
    """Return the plan with an additional line on the scope of its proof."""
    plan = replace(
        planned.plan, proof=replace(planned.plan.proof, covers=(*planned.plan.proof.covers, line))
    )
    return replace(planned, plan=plan, program=replace(planned.program, plan_hash=plan.hash))


ONE_STAGE = Pipelined("", None, "1f1b", None, independent=False)
NOT_REQUESTED = Pipelined(None, None, AUTO, None, independent=False)
"""A pipeline that was not requested."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A captured call, and the settings of its planning.

    Attributes:
        captured: traces of the same call for other numbers of samples, added as needed.
        rows: number of logits rows that the loss processes at a time; 0 for all.
    """

    model: nn.Module
    trace: Trace
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: Mesh
    hardware: Hardware
    options: PlanOptions
    progress: Progress = lambda _: None
    captured: dict[int, Trace] = field(default_factory=dict)
    rows: int = 0

    def parts(self) -> tuple[int, ...]:
        """Return the numbers of microbatches to try if the batch does not fit."""
        samples = batch_size(self.args, self.kwargs) if self.options.batch == "global" else 1
        return tuple(n for n in range(2, samples + 1) if samples % n == 0)

    def in_one_piece(self, limit_s: float = math.inf) -> Planned:
        """Plan the whole batch at once, without stages.

        Args:
            limit_s: step time that the plan has to beat, in seconds.

        Raises:
            InfeasibleError, ConstraintError: if there is no plan.
            TooSlow: if no plan beats the limit.
        """
        options = self.options_without_stages()
        name = type(self.model).__name__
        trace = by_rows(self.trace, self.rows)
        planned = make_plan(
            trace,
            self.mesh,
            self.hardware,
            options,
            model_name=name,
            progress=self.progress,
            limit_s=limit_s,
        )
        return self.note_loss_rows(planned)

    def options_without_stages(self) -> PlanOptions:
        """Return the options without constraints on pipelines."""
        constraints = tuple(c for c in self.options.constraints if not isinstance(c, Pipelined))
        return (
            self.options
            if len(constraints) == len(self.options.constraints)
            else replace(self.options, constraints=constraints)
        )

    def note_loss_rows(self, planned: Planned) -> Planned:
        """Record in a plan that its loss processes rows in parts; unchanged if it does not."""
        if not self.rows:
            return planned
        planned = replace(planned, plan=replace(planned.plan, loss_rows=self.rows))
        return add_coverage(
            planned,
            f"a loss of {self.rows} rows of logits at a time; all at once it fits no memory or is "
            "slower",
        )

    def num_ranks(self, pipelined: Pipelined) -> int:
        """Return the size of the axis of the stages; 1 if there is none."""
        return self.mesh.shape[self.mesh.names.index(pipelined.axis)] if pipelined.axis else 1

    def in_stages(self, here: Pipelined, num: int, limit_s: float) -> Planned:
        """Plan one pipeline with one number of microbatches; raises as `in_one_piece`.

        Args:
            here: the pipeline, with its axis.
            num: number of microbatches.
            limit_s: step time that the plan has to beat, in seconds.
        """
        if here.axis:
            num_stages = here.chunks * self.num_ranks(here)
            check_parts(len(cut_points(self.trace, num_stages - 1)) + 1, num_stages)
            check_order(self.trace, self.mesh, num, here)
        # If there is a plan, the bound excludes most sequential microbatches in less time than it
        # takes to show that they form the batch. The bound of stages also excludes other numbers of
        # microbatches, so stages are validated before.
        later = not here.axis and math.isfinite(limit_s)
        part, microbatching = self.part(num, independent=here.independent, validated=not later)
        request = self._request(here, part, microbatching)
        planned = make_staged_plan(request, progress=self.progress, limit_s=limit_s)
        if later:
            refuse_unproven(self.trace, part, microbatching, promised=here.independent)
        return self.note_loss_rows(planned)

    def pipeline_request(self, pipelined: Pipelined, num: int) -> PipelineRequest:
        """Return the request for a pipeline with a number of microbatches.

        Args:
            pipelined: the pipeline, with its axis.
            num: number of microbatches.
        """
        part, microbatching = self.part(num, independent=pipelined.independent, validated=True)
        return self._request(pipelined, part, microbatching)

    def _request(
        self, pipelined: Pipelined, part: Trace, microbatching: Microbatching
    ) -> PipelineRequest:
        return PipelineRequest(
            self.trace,
            by_rows(part, self.rows),
            microbatching,
            self.mesh,
            self.hardware,
            self.options,
            pipelined,
            type(self.model).__name__,
        )

    def part(self, num: int, *, independent: bool, validated: bool) -> tuple[Trace, Microbatching]:
        """Return the trace of one microbatch, and how `num` of them make the batch; see
        `trace_part`."""
        return trace_part(
            self.model,
            self.trace,
            self.args,
            self.kwargs,
            num,
            precision=self.options.precision,
            inference=self.options.inference,
            independent=independent,
            known=self.captured,
            validated=validated,
        )
