"""Choose the numbers of microbatches to try along an axis, one after another, and report them in
the plan.

A step of M microbatches in P stages, each of which takes t(M) through all stages, takes (M + P − 1)
· t(M) / P. More microbatches reduce waiting. Each has launches, latencies and gathers of its own,
so that M · t(M) rises with M. So the step falls with M, and then rises. Some of the largest numbers
are tried first, the smallest of these ahead. If that one is the fastest, smaller numbers are tried
as long as they are faster. If its bound rules it out against what was found before, smaller
numbers, which wait longer, are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.analysis.microbatches import Microbatching
from autopar.api.tracing import batch_size, by_rows, trace_part
from autopar.capture import Trace
from autopar.constraints import Pipelined
from autopar.core.hardware import Hardware
from autopar.core.mesh import Mesh
from autopar.core.schedules import AUTO
from autopar.core.units import microbatches, seconds
from autopar.planner import Planned, TooSlow, make_plan, make_staged_plan
from autopar.planner.candidates import Elsewhere
from autopar.planner.clock import Progress
from autopar.planner.pipeline.stage_construction import check_order
from autopar.planner.pipeline.stage_units import check_parts
from autopar.request import PlanOptions
from autopar.stages.placing import cut_points

_FIRST = 3  # of the largest numbers
MOST_ROUNDS = (
    8  # microbatches per stage: beyond, the pipeline waits for less than an eighth of its time
)


def numbers_of(divisors: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the numbers of microbatches that may be tried, rising: one, and those that fill the
    stages several times.

    Args:
        divisors: the numbers that divide the batch.
        num_stages: stages of the pipeline.
    """
    filling = [n for n in divisors if num_stages <= n <= MOST_ROUNDS * num_stages] or list(
        divisors[-1:]
    )
    return tuple(dict.fromkeys((*[n for n in divisors if n == 1], *filling)))


def first_of(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers that are tried first, regardless of their results, unless bounds rule them
    out."""
    return tuple(
        numbers[max(len(numbers) - _FIRST, 1 if numbers[0] == 1 and len(numbers) > 1 else 0) :]
    )


def walk(numbers: Sequence[int], found_s: Mapping[int, float]) -> Iterator[int]:
    """Yield the numbers to try.

    Args:
        numbers: those that may be tried, rising.
        found_s: the step (seconds) of each number that was tried; infinite if there is no plan, or
            none that is fast enough. The caller updates it between the numbers.
    """
    first = first_of(numbers)
    yield from first
    higher = first[0] if first else 0
    for num in reversed(numbers[: len(numbers) - len(first)]):
        least_s = min(found_s.values(), default=math.inf)
        if found_s.get(higher, math.inf) > least_s or math.isinf(least_s):
            return
        yield num
        higher = num


@dataclass
class Tries:
    """The plans that were tried, as text, and the fastest one."""

    best: Planned | None = None
    told: list[str] = field(default_factory=list)

    def add(self, axis: str, num: int, found: Planned) -> float:
        """Record a plan and return the seconds of its step.

        Args:
            axis: of the stages; `""` for microbatches one after another.
            num: number of microbatches; 0 for none.
            found: the plan.
        """
        step_s, pipeline = found.plan.prediction.step_s, found.plan.pipeline
        per_device = pipeline.num_chunks if pipeline else 1
        self.told.append(f"{_named(axis, num, per_device)} ({seconds(step_s)})")
        if self.best is None or step_s < self.best.plan.prediction.step_s:
            self.best = found
        return step_s

    def join(self, others: Tries, saved: float) -> None:
        """Record what was tried elsewhere.

        Args:
            others: its fastest plan is taken if it saves enough.
            saved: the share of the step that it has to save.
        """
        self.told += others.told
        if (
            others.best is not None
            and others.best.plan.prediction.step_s <= (1.0 - saved) * self.best_s
        ):
            self.best = others.best
        elif others.best_s < self.best_s:
            self.told.append(
                f"stages that save less than {100 * saved:g} % are not taken where none are"
                " asked for"
            )

    @property
    def best_s(self) -> float:
        """The step of the fastest plan (seconds); infinite if there is none."""
        return math.inf if self.best is None else self.best.plan.prediction.step_s

    def add_too_slow(self, axis: str, num: int, error: TooSlow) -> float:
        """Record that no plan is faster than what was found, and return the bound that shows it
        (seconds).

        Args:
            axis, num: as for `add`.
            error: its argument is the bound.
        """
        self.told.append(f"{_named(axis, num)} (at least {seconds(error.args[0])})")
        return float(error.args[0])

    def add_refused(self, axis: str, num: int) -> float:
        """Record that there is no plan, and return infinity."""
        self.told.append(f"{_named(axis, num)} (none)")
        return math.inf

    def fastest(self) -> Planned:
        """Return the fastest plan, with a note on the plans that it was chosen from."""
        assert self.best is not None, "a plan was found"
        if len(self.told) < 2:
            return self.best
        line = (
            "this number of microbatches and these stages alone; tried, with the step found for"
            f" each: {'; '.join(self.told)}"
        )
        return add_coverage(self.best, line)


def add_coverage(found: Planned, line: str) -> Planned:
    """Return the plan with an additional line on what its proof covers."""
    plan = replace(
        found.plan, proof=replace(found.plan.proof, covers=(*found.plan.proof.covers, line))
    )
    return replace(found, plan=plan, program=replace(found.program, plan_hash=plan.hash))


def _named(axis: str, num: int, per_device: int = 1) -> str:
    if not num:
        return "no microbatches"
    parts = microbatches(num)
    stages = f" in stages along {axis}" if axis else " one after another"
    return parts + stages + (f", {per_device} a device" if per_device > 1 else "")


# --------------------------------------------------------------------------------------------------
# A captured call, and its plan for given stages, a given number of microbatches, and given rows of
# logits.

ONE_STAGE = Pipelined("", None, "1f1b", None, independent=False)
WITHOUT_ASKING = Pipelined(None, None, AUTO, None, independent=False)
"""Stages that nobody asked for."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A captured call, and the settings that it is planned with.

    Attributes:
        captured: traces of the same call on other numbers of samples, added when they are needed.
        rows: rows of logits that the loss processes at a time; 0 for all.
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
        """Return the numbers of microbatches that the batch may be cut into if it does not fit."""
        samples = batch_size(self.args, self.kwargs) if self.options.batch == "global" else 1
        return tuple(n for n in range(2, samples + 1) if samples % n == 0)

    def in_one_piece(
        self, limit_s: float = math.inf, elsewhere: Elsewhere | None = None
    ) -> Planned:
        """Plan the whole batch at once, without stages.

        Args:
            limit_s: seconds of a step that the plan has to beat.
            elsewhere: see `autopar.planner.candidates.Elsewhere`.

        Raises:
            InfeasibleError, ConstraintError: if there is no plan.
            TooSlow: if no plan beats the limit.
        """
        options = self.options_without_stages()
        name = type(self.model).__name__
        trace = by_rows(self.trace, self.rows)
        found = make_plan(
            trace,
            self.mesh,
            self.hardware,
            options,
            model_name=name,
            progress=self.progress,
            limit_s=limit_s,
            elsewhere=elsewhere,
        )
        return self.note_loss_rows(found)

    def options_without_stages(self) -> PlanOptions:
        """Return the options without constraints on pipelines."""
        kept = tuple(c for c in self.options.constraints if not isinstance(c, Pipelined))
        return (
            self.options
            if len(kept) == len(self.options.constraints)
            else replace(self.options, constraints=kept)
        )

    def note_loss_rows(self, found: Planned) -> Planned:
        """Record in a plan that its loss processes rows in parts; unchanged if it does not."""
        if not self.rows:
            return found
        found = replace(found, plan=replace(found.plan, loss_rows=self.rows))
        return add_coverage(
            found,
            f"a loss of {self.rows} rows of logits at a time; all at once it fits no memory or is"
            " slower",
        )

    def num_ranks(self, wish: Pipelined) -> int:
        """Return the number of devices along the axis of stages; 1 if there is none."""
        return self.mesh.shape[self.mesh.names.index(wish.axis)] if wish.axis else 1

    def in_stages(self, here: Pipelined, num: int, limit_s: float) -> Planned:
        """Plan one pipeline with one number of microbatches; raises as `in_one_piece`.

        Args:
            here: the pipeline, with its axis.
            num: number of microbatches.
            limit_s: seconds of a step that the plan has to beat.
        """
        if here.axis:
            num_stages = here.chunks * self.num_ranks(here)
            check_parts(len(cut_points(self.trace, num_stages - 1)) + 1, num_stages)
            check_order(self.trace, self.mesh, num, here)
        part, how = self.part(num, independent=here.independent)
        found = make_staged_plan(
            self.trace,
            by_rows(part, self.rows),
            how,
            self.mesh,
            self.hardware,
            self.options,
            here,
            model_name=type(self.model).__name__,
            limit_s=limit_s,
            progress=self.progress,
        )
        return self.note_loss_rows(found)

    def part(self, num: int, *, independent: bool) -> tuple[Trace, Microbatching]:
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
        )
