"""Explain a plan: its time, memory and proof, its stages and schedule, the tensors that cross
between stages, then each stage. A plan without stages counts as one stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from autopar.breakdown import ModulePart, in_words, receiving_s
from autopar.core.units import microbatches, seconds, share, size
from autopar.explanation.link_prices import LinkValue
from autopar.explanation.module_tables import StageExplanation, in_buckets
from autopar.explanation.summary import (
    Readable,
    as_emitted,
    at_best,
    describe_coverage,
    fullest,
    idle,
    made_for,
    memory,
    num_kernels,
    objective,
    of_dispatch,
    of_loss,
    on_hosts,
    overlap_lines,
    spent,
    table,
    unequal,
)
from autopar.plans import Flip, Pipeline, Plan, forward_load

# --------------------------------------------------------------------------------------------------
# Lines about the composition of the step time.
#
# All devices of a stage do the same work. A stage *waits* while its devices are idle: with times τ
# of a microbatch per stage and M microbatches, stage s waits for step − M · τ_s (the bubble, and
# the difference to the slowest stage). If a device holds several stages, their times are added.


_ROUNDING = 1e-12  # share of the step


def describe_step(plan: Plan) -> Iterator[str]:
    """Yield the composition of the step time in a few lines."""
    if plan.pipeline is None:
        yield from _describe_one_piece(plan)
        return
    yield from _describe_schedule(plan)
    yield from _describe_overlap(plan)
    yield from spent(plan)


def summarize_step(plan: Plan) -> Iterator[str]:
    """Yield the composition of the step time in one line or two."""
    if plan.pipeline is None:
        p = plan.prediction
        saved = f", {seconds(_saved_s(plan))} saved by overlap" if _saves(plan) else ""
        parts = f"compute {seconds(p.compute_s)}, communication {seconds(p.communication_s)}{saved}"
        yield f"step {seconds(p.step_s)}: {parts}{as_emitted(plan)}"
        return
    yield f"step {seconds(plan.prediction.step_s)}: {_schedule(plan.pipeline)}{as_emitted(plan)}"
    yield from spent(plan)


def waiting_share(plan: Plan, stage: int) -> float:
    """Return the share of the step for which a stage's devices wait."""
    pipeline = plan.as_pipeline
    step_s = max(plan.prediction.step_s, 1e-30)
    works_s = sum(each.prediction.step_s for each in pipeline.ranks[stage % pipeline.num_ranks])
    return 1 - pipeline.num_microbatches * works_s / step_s


# --------------------------------------------------------------------------------------------------
# The whole batch at once.


def _describe_one_piece(plan: Plan) -> Iterator[str]:
    p = plan.prediction
    saved = f" − {seconds(_saved_s(plan))} saved by overlap"
    yield (
        f"step {seconds(p.step_s)} = compute {seconds(p.compute_s)} + communication"
        f" {seconds(p.communication_s)} ({share(p.communication_s / max(p.serial_s, 1e-30))})"
        f"{saved if _saves(plan) else ''}"
    )
    yield from overlap_lines(plan)


def _saved_s(plan: Plan) -> float:
    return plan.prediction.serial_s - plan.prediction.step_s


def _saves(plan: Plan) -> bool:
    """Return whether overlap of compute and communication saves more than rounding error."""
    return _saved_s(plan) > _ROUNDING * plan.prediction.serial_s


# --------------------------------------------------------------------------------------------------
# Microbatches through stages, or sequentially.


def _schedule(pipeline: Pipeline) -> str:
    num = pipeline.num_microbatches
    if not pipeline.axis:
        return "one microbatch" if num == 1 else f"{num} sequential microbatches"
    chunks_text = f", {pipeline.num_chunks} on each device" if pipeline.num_chunks > 1 else ""
    through = f"{microbatches(num)} through {len(pipeline.stages)} stages along {pipeline.axis}"
    return f"{through}{chunks_text}, schedule {pipeline.schedule}"


def _describe_schedule(plan: Plan) -> Iterator[str]:
    """Yield the schedule, and the formula of the step."""
    pipeline, step = plan.as_pipeline, seconds(plan.prediction.step_s)
    times, num = [stage.prediction.step_s for stage in pipeline.stages], pipeline.num_microbatches
    if not pipeline.axis:
        yield f"{_schedule(pipeline)}, on the whole mesh"
        yield f"step {step} = {num} × {seconds(times[0])}"
        return
    yield _schedule(pipeline)
    waiting = sum(waiting_share(plan, stage) for stage in range(len(times))) / len(times)
    waits = f"devices wait for {share(waiting)} of it on average"
    if pipeline.num_chunks > 1:
        busy = [num * sum(times[r :: pipeline.num_ranks]) for r in range(pipeline.num_ranks)]
        most = max(range(len(busy)), key=busy.__getitem__)
        yield (
            f"step {step}, simulated; the devices of rank {most}, the busiest, work for "
            f"{seconds(busy[most])} of it; {waits}"
        )
        return
    yield (
        f"step {step} = {num - 1} × {_longest(pipeline, times)} + {seconds(sum(times))} (one"
        f" microbatch through all stages){_output_time(pipeline)}; {waits}"
    )


def _longest(pipeline: Pipeline, times: list[float]) -> str:
    """Return the slowest stage, as text; under GPipe that of forward and that of the rest."""
    if pipeline.schedule != "gpipe" or pipeline.num_microbatches == 1:
        slowest = max(range(len(times)), key=times.__getitem__)
        return f"{seconds(times[slowest])} (stage {slowest}, the slowest)"
    stages = pipeline.stages
    forward = [forward_load(stage).least_s(stage.overlap.slowdown) for stage in stages]
    rest = [time_s - forward_s for time_s, forward_s in zip(times, forward, strict=True)]
    waves = (
        f"{seconds(max(s))} (stage {s.index(max(s))}, the slowest in {phase})"
        for phase, s in (("forward", forward), ("the rest", rest))
    )
    return f"({' + '.join(waves)})"


def _output_time(pipeline: Pipeline) -> str:
    """Return the time of sending outputs to every rank, as text; empty if there are none."""
    handed = pipeline.handed_bytes
    sent = f"{seconds(pipeline.handed_s)} (outputs, {size(handed)}, sent to all stages)"
    return f" + {sent}" if handed else ""


def _describe_overlap(plan: Plan) -> Iterator[str]:
    """Yield the time saved by kernels and the overlapped communication, per microbatch of each
    stage.
    """
    saving = [(stage.prediction.in_kernels_s, num_kernels(stage)) for stage in plan.stages]
    if any(number for _, number in saving):
        saved = ", ".join(seconds(saved_s) for saved_s, _ in saving)
        yield (
            f"{sum(n for _, n in saving)} collective-overlap kernels save {saved} per microbatch"
            " (one time per stage)"
        )
    if plan.prediction.hidden_s:
        hidden = ", ".join(seconds(stage.prediction.hidden_s) for stage in plan.stages)
        yield (
            f"{hidden} of communication per microbatch overlap with compute, by stage: simulated, "
            f"a step takes {seconds(plan.prediction.simulated_s)}"
        )


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive equal stages, from `first` to `last`, with the explanation of the first."""

    first: int
    last: int
    explanation: StageExplanation

    @property
    def name(self) -> str:
        """``stage 0``, or ``stages 1 to 3, each``; empty for a plan without stages."""
        if self.explanation.plan is self.explanation.full_plan:
            return ""
        several = f"stages {self.first} to {self.last}, each"
        return several if self.last > self.first else f"stage {self.first}"


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Readable):
    """A plan as text and tables. Prints as text, and renders in rich and in notebooks.

    Attributes:
        sections: its stages, with consecutive equal stages merged.
        pattern: the requested module pattern; None for all modules.
        worth: the value of faster links.
    """

    plan: Plan
    sections: tuple[Section, ...]
    pattern: str | None = None
    worth: LinkValue = LinkValue()  # noqa: RUF009 - frozen

    @property
    def pipeline(self) -> Pipeline:
        """The plan as a pipeline."""
        return self.plan.as_pipeline

    @property
    def parts(self) -> tuple[ModulePart, ...]:
        """The parts of all sections."""
        return tuple(part for section in self.sections for part in section.explanation.parts)

    @property
    def flips(self) -> tuple[Flip, ...]:
        """The flips of all sections."""
        return tuple(flip for section in self.sections for flip in section.explanation.flips)

    def renderables(self) -> Iterator[RenderableType]:
        """Yield the header, the stages and the crossing tensors, then the tables of each section.
        With a pattern, only sections with matching modules are shown.
        """
        if self.pattern is None:
            yield from map(Text, self.header())
            yield from self._overview() if self.plan.pipeline else ()
            yield from self.worth.renderables()
        for section in self.sections:
            if section.name:
                yield Text()
                yield Text(f"── {section.name} ──", style="bold")
            yield from section.explanation.tables()

    def _overview(self) -> Iterator[RenderableType]:
        """Yield the tables of stages and of the tensors that cross between them."""
        columns: tuple[str, ...] = (
            ">stage",
            "begins with",
            ">a microbatch",
            ">compute",
            ">communication",
            ">receiving",
            ">share of the step waiting",
            ">in flight",
            ">peak",
        )
        phases = "forward alone" if self.plan.options.get("inference") else "forward and backward"
        yield from table(f"Stages; times of one microbatch, {phases}", columns, self._stages())
        columns = (
            ">from stage",
            "value",
            "crosses as",
            ">sent per device and microbatch",
            "gradient",
        )
        if rows := list(self._crossing_rows()):
            yield from table("Between stages", columns, rows)

    def header(self) -> Iterator[str]:
        """Yield the planned model, the schedule, time, memory and proof, one line each."""
        plan, pipeline = self.plan, self.pipeline
        yield made_for(plan)
        yield from describe_step(plan)
        yield from in_buckets(plan.stages, plan.unit)
        rank_text = f" of {pipeline.rank_word} {fullest(plan)}" if pipeline.axis else ""
        yield f"peak{rank_text} {memory(plan)}"
        yield from unequal(plan)
        yield from on_hosts(plan)
        yield from of_loss(plan)
        yield from of_dispatch(plan)
        yield objective(plan)
        yield from self._prices()
        yield from describe_coverage(plan)

    def summary(self) -> Iterator[str]:
        """Yield a short header: the planned model, the step time, the memory, the bound, and the
        value of memory.
        """
        plan = self.plan
        yield made_for(plan)
        yield from summarize_step(plan)
        yield from idle(plan)
        yield f"peak {memory(plan)}"
        yield from unequal(plan)
        yield from on_hosts(plan)
        yield at_best(plan)
        yield from self._prices()

    def _prices(self) -> Iterator[str]:
        """Yield the value of additional memory."""
        priced = {
            number: price
            for number in range(len(self.pipeline.stages))
            if (price := self.price_s_per_gib(number)) > 0
        }
        for number, price in priced.items():
            stage_text = f" of stage {number}" if self.pipeline.axis else ""
            worth_s = seconds(price)
            yield (
                f"an additional GiB on each device{stage_text} saves about {worth_s} per step "
                "(dual value of the relaxation, not solved again)"
            )
        if not priced:
            yield "memory is not the bottleneck: a larger budget would not make the step faster"

    def price_s_per_gib(self, stage: int) -> float:
        """Return the seconds of a step that an additional GiB on the devices of one stage would
        save.

        The stage's microbatch counts M times in the step if it alone is the slowest stage, else
        once.
        """
        times = [sum(s.prediction.step_s for s in stages) for stages in self.pipeline.ranks]
        rank = stage % len(times)
        alone = all(times[rank] > other for number, other in enumerate(times) if number != rank)
        return self.pipeline.stages[stage].proof.memory_price_s_per_gib * (
            self.pipeline.num_microbatches if alone else 1
        )

    def _stages(self) -> list[tuple[str, ...]]:
        rows = []
        for number, stage in enumerate(self.pipeline.stages):
            p = stage.prediction
            begins = self.pipeline.modules[number - 1] if number else "the model"
            receiving = receiving_s(stage)
            times = (p.step_s, p.compute_s, p.communication_s - receiving, receiving)
            flying = str(self.pipeline.num_in_flight[number])
            row = (
                escape(begins),
                *map(seconds, times),
                share(waiting_share(self.plan, number)),
                flying,
                size(p.peak_bytes),
            )
            rank = number % self.pipeline.num_ranks
            rows.append(
                (f"{number} on rank {rank}" if self.pipeline.num_chunks > 1 else str(number), *row)
            )
        return rows

    def _crossing_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a row per tensor that crosses from a stage to the next."""
        for number, crossings in enumerate(self.pipeline.crossings):
            names = self.pipeline.stages[number].mesh.names
            for crossed in crossings:
                layout = f"{crossed.layout}, {in_words(crossed.layout, names, 'activation')}"
                back = f"sent back: {size(crossed.bytes)}" if crossed.returns else "none"
                yield str(number), escape(crossed.node), layout, size(crossed.bytes), back


def sections_of(explanations: tuple[StageExplanation, ...]) -> tuple[Section, ...]:
    """Return the sections of the stages' explanations, in order. Stages without any of the
    requested parts are omitted.
    """
    sections: list[Section] = []
    for number, explanation in enumerate(explanations):
        before = sections[-1] if sections else None
        if (
            before
            and before.last == number - 1
            and _same(before.explanation.parts, explanation.parts)
        ):
            sections[-1] = replace(before, last=number)
        elif explanation.parts:
            sections.append(Section(number, number, explanation))
    return tuple(sections)


def _same(parts: tuple[ModulePart, ...], others: tuple[ModulePart, ...]) -> bool:
    """Return whether two stages are equal except for the numbers of their layers."""
    return len(parts) == len(others) and all(
        _facts(a) == _facts(b) for a, b in zip(parts, others, strict=True)
    )


def _facts(part: ModulePart) -> ModulePart:
    """Return a part without the names of its copies and decisions."""
    copies = tuple((i,) for i in range(len(part.instances)))
    return replace(part, instances=copies, copies="", main=None, entries=())
