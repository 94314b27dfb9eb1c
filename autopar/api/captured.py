"""A captured call, and its plan where it is settled whether there are stages, how many microbatches, and how many rows of logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.analysis.microbatches import Microbatching
from autopar.api.tracing import batch_size, by_rows, trace_part
from autopar.api.tries import covering
from autopar.capture import Trace
from autopar.constraints import Pipelined
from autopar.hardware import Hardware
from autopar.mesh import Mesh
from autopar.planning import Planned, make_plan, make_staged_plan
from autopar.planning.clock import Progress
from autopar.planning.staged import check_order
from autopar.planning.tried import Elsewhere
from autopar.planning.units import check_parts
from autopar.request import PlanOptions
from autopar.schedules import AUTO
from autopar.stages.points import cut_points

ONE_STAGE = Pipelined("", None, "1f1b", None, independent=False)
WITHOUT_ASKING = Pipelined(None, None, AUTO, None, independent=False)
"""Stages that nobody asked for."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """What is planned, for what, and how.

    Attributes:
        captured: traces of the same call on other numbers of samples, as they are needed.
        rows: of logits that the loss has at a time, 0 for all.
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
        """Into how many microbatches the batch may be cut where it does not fit."""
        samples = batch_size(self.args, self.kwargs) if self.options.batch == "global" else 1
        return tuple(n for n in range(2, samples + 1) if samples % n == 0)

    def in_one_piece(self, limit_s: float = math.inf, elsewhere: Elsewhere | None = None) -> Planned:
        """The plan of all at once. Raises InfeasibleError and ConstraintError where there is none, TooSlow where none beats the limit.

        Args:
            elsewhere: as of `autopar.planning.tried.Elsewhere`.
        """
        options = self.unpiped()
        name = type(self.model).__name__
        trace = by_rows(self.trace, self.rows)
        found = make_plan(
            trace, self.mesh, self.hardware, options, model_name=name, progress=self.progress, limit_s=limit_s, elsewhere=elsewhere
        )
        return self.marked(found)

    def unpiped(self) -> PlanOptions:
        """The options of a plan without stages."""
        kept = tuple(c for c in self.options.constraints if not isinstance(c, Pipelined))
        return self.options if len(kept) == len(self.options.constraints) else replace(self.options, constraints=kept)

    def marked(self, found: Planned) -> Planned:
        """The plan says that its loss goes by rows."""
        if not self.rows:
            return found
        found = replace(found, plan=replace(found.plan, loss_rows=self.rows))
        return covering(found, f"a loss of {self.rows} rows of logits at a time; all at once it fits no memory or is slower")

    def num_ranks(self, wish: Pipelined) -> int:
        """Devices along the axis of stages; 1 where there is none."""
        return self.mesh.shape[self.mesh.names.index(wish.axis)] if wish.axis else 1

    def in_stages(self, here: Pipelined, num: int, limit_s: float) -> Planned:
        """The plan of this pipeline and number of microbatches; raises as `in_one_piece`."""
        if here.axis:
            num_stages = here.chunks * self.num_ranks(here)
            check_parts(len(cut_points(self.trace, num_stages - 1)) + 1, num_stages)
            check_order(self.trace, self.mesh, num, here)
        part, how = self.part(num, independent=here.independent)
        found = make_staged_plan(
            self.trace, by_rows(part, self.rows), how, self.mesh, self.hardware, self.options, here,
            model_name=type(self.model).__name__, limit_s=limit_s, progress=self.progress,
        )  # fmt: skip
        return self.marked(found)

    def part(self, num: int, *, independent: bool) -> tuple[Trace, Microbatching]:
        """As `trace_part`."""
        return trace_part(
            self.model, self.trace, self.args, self.kwargs, num, precision=self.options.precision, inference=self.options.inference,
            independent=independent, known=self.captured,
        )  # fmt: skip
