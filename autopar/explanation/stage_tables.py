"""Explain a plan with a pipeline: its stages and schedule, what crosses between stages, then each
stage as a plan of its own.

All devices of a stage do the same. A stage *waits* while its devices have nothing to do: with times
τ of a microbatch per stage and M microbatches, stage s waits step − M · τ_s (the bubble, and the
difference to the slowest stage). If a device holds several stages, the sum of their times counts.
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
from autopar.explanation.plan_tables import Explanation, in_buckets
from autopar.explanation.summary import (
    Readable,
    as_emitted,
    at_best,
    describe_coverage,
    idle,
    made_for,
    memory,
    num_kernels,
    objective,
    of_dispatch,
    of_loss,
    on_hosts,
    spent,
    table,
    unequal,
)
from autopar.plans import Flip, Pipeline, Plan, forward_load


@dataclass(frozen=True, slots=True)
class Section:
    """Neighbouring stages that do the same, from `first` to `last`, with the explanation of the
    first."""

    first: int
    last: int
    explanation: Explanation

    @property
    def name(self) -> str:
        """``stage 0``, or ``stages 1 to 3, each``."""
        return (
            f"stage {self.first}"
            if self.first == self.last
            else f"stages {self.first} to {self.last}, each"
        )


@dataclass(frozen=True, slots=True, repr=False)
class StagedExplanation(Readable):
    """A plan with a pipeline as text and tables: prints, renders in rich and in notebooks.

    Attributes:
        sections: its stages, equal neighbours together.
        pattern: the module pattern asked for, or None for all.
        worth: the worth of faster links.
    """

    plan: Plan
    sections: tuple[Section, ...]
    pattern: str | None = None
    worth: LinkValue = LinkValue()  # noqa: RUF009 - frozen

    @property
    def pipeline(self) -> Pipeline:
        """The plan's pipeline."""
        assert self.plan.pipeline is not None, "a plan without stages has an Explanation"
        return self.plan.pipeline

    @property
    def parts(self) -> tuple[ModulePart, ...]:
        """The parts of all sections."""
        return tuple(part for section in self.sections for part in section.explanation.parts)

    @property
    def flips(self) -> tuple[Flip, ...]:
        """The flips of all sections."""
        return tuple(flip for section in self.sections for flip in section.explanation.flips)

    def renderables(self) -> Iterator[RenderableType]:
        """Header, stages, what crosses; then per section the tables of a plan. For a pattern the
        sections that have such modules."""
        if self.pattern is None:
            yield from map(Text, self.header())
            columns: tuple[str, ...] = (
                ">stage",
                "begins with",
                ">a microbatch",
                ">compute",
                ">communication",
                ">receiving",
                ">waits of the step",
                ">in flight",
                ">peak",
            )
            phases = (
                "forward alone" if self.plan.options.get("inference") else "forward and backward"
            )
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
            yield from self.worth.renderables()
        for section in self.sections:
            yield Text()
            yield Text(f"── {section.name} ──", style="bold")
            yield from section.explanation.tables()

    def header(self) -> Iterator[str]:
        """What was planned, its schedule, time, memory and proof, one line each."""
        plan, pipeline = self.plan, self.pipeline
        times = [stage.prediction.step_s for stage in pipeline.stages]
        num, slowest = pipeline.num_microbatches, max(range(len(times)), key=times.__getitem__)
        yield made_for(plan)
        step = seconds(plan.prediction.step_s)
        if pipeline.axis:
            waiting = sum(self._waits(s) for s in range(len(times))) / len(times)
            yield self._schedule()
        if pipeline.num_chunks > 1:
            busy = [num * sum(times[rank :: self._num_ranks]) for rank in range(self._num_ranks)]
            most = max(range(self._num_ranks), key=busy.__getitem__)
            waits = f"devices wait {share(waiting)} of it on average"
            yield (
                f"step {step}, simulated; the devices of rank {most}, which do most, work"
                f" {seconds(busy[most])} of it; {waits}"
            )
        elif pipeline.axis:
            longest = f"{seconds(times[slowest])} (stage {slowest}, the slowest)"
            yield (
                f"step {step} = {num - 1} ×"
                f" {self._waves() if pipeline.schedule == 'gpipe' and num > 1 else longest} +"
                f" {seconds(sum(times))} (one microbatch through all stages){self._output_time()};"
                f" devices wait {share(waiting)} of it on average"
            )
        else:
            yield f"{_in_turn(num)}, on the whole mesh"
            yield f"step {step} = {num} × {seconds(times[0])}"
        saving = [(stage.prediction.in_kernels_s, num_kernels(stage)) for stage in pipeline.stages]
        if any(number for _, number in saving):
            saved = ", ".join(seconds(saved_s) for saved_s, _ in saving)
            yield (
                f"{saved} of a microbatch are saved by collective-overlap kernels, by stages:"
                f" {sum(n for _, n in saving)} in all"
            )
        if plan.prediction.hidden_s:
            hidden_s = [stage.prediction.hidden_s for stage in pipeline.stages]
            simulated = seconds(plan.prediction.simulated_s)
            yield (
                f"{', '.join(map(seconds, hidden_s))} of a microbatch run beside compute, by"
                f" stages: simulated, a step takes {simulated}"
            )
        yield from in_buckets(pipeline.stages, "microbatch")
        yield from spent(plan)
        peaks = pipeline.rank_bytes or [stage.prediction.peak_bytes for stage in pipeline.stages]
        which = "rank" if pipeline.rank_bytes else "stage"
        fullest = max(range(len(peaks)), key=peaks.__getitem__)
        yield f"peak{f' of {which} {fullest}' if pipeline.axis else ''} {memory(plan)}"
        yield from unequal(plan)
        yield from on_hosts(plan)
        yield from of_loss(plan)
        yield from of_dispatch(plan)
        yield objective(plan)
        yield from self._prices()
        yield from describe_coverage(plan)

    def _waves(self) -> str:
        """Return the slowest stage of forward and that of backward, which all other stages wait
        for."""
        stages = self.pipeline.stages
        forward = [forward_load(stage).least_s(stage.overlap.slowdown) for stage in stages]
        waves = {
            "forward": forward,
            "the rest": [s.prediction.step_s - f for s, f in zip(stages, forward, strict=True)],
        }
        slowest = (
            f"{seconds(max(s))} (stage {s.index(max(s))}, the slowest in {phase})"
            for phase, s in waves.items()
        )
        return f"({' + '.join(slowest)})"

    def _output_time(self) -> str:
        """Return the time of sending outputs to every rank, as text; empty if there are none."""
        handed = self.pipeline.handed_bytes
        return (
            f" + {seconds(self.pipeline.handed_s)} (outputs, {size(handed)}, handed to all stages)"
            if handed
            else ""
        )

    def summary(self) -> Iterator[str]:
        """Yield the header in few lines."""
        plan, pipeline = self.plan, self.pipeline
        yield made_for(plan)
        how = self._schedule() if pipeline.axis else _in_turn(pipeline.num_microbatches)
        yield f"step {seconds(plan.prediction.step_s)}: {how}{as_emitted(plan)}"
        yield from spent(plan)
        yield from idle(plan)
        yield f"peak {memory(plan)}"
        yield from unequal(plan)
        yield from on_hosts(plan)
        yield at_best(plan)
        yield from self._prices()

    def _schedule(self) -> str:
        pipeline = self.pipeline
        each = f", {pipeline.num_chunks} on each device" if pipeline.num_chunks > 1 else ""
        through = (
            f"{microbatches(pipeline.num_microbatches)} through {len(pipeline.stages)} stages along"
            f" {pipeline.axis}"
        )
        return f"{through}{each}, schedule {pipeline.schedule}"

    def _prices(self) -> Iterator[str]:
        """Yield what memory is worth."""
        priced = {
            number: price
            for number in range(len(self.pipeline.stages))
            if (price := self.price_s_per_gib(number)) > 0
        }
        for number, price in priced.items():
            where = f" of stage {number}" if self.pipeline.axis else ""
            worth_s = seconds(price)
            yield (
                f"memory is worth about {worth_s} a step per GiB more on each device{where} (dual"
                " of the relaxation, not solved again)"
            )
        if not priced:
            yield "memory does not bind: more of it would not make the step faster"

    def price_s_per_gib(self, stage: int) -> float:
        """Return the seconds of a step that an additional GiB on the devices of one stage would
        save.

        The stage's microbatch counts M times in the step if it alone is the slowest stage, else
        once.
        """
        times = [s.prediction.step_s for s in self.pipeline.stages]
        times = [sum(times[rank :: self._num_ranks]) for rank in range(self._num_ranks)]
        rank = stage % self._num_ranks
        alone = all(times[rank] > other for number, other in enumerate(times) if number != rank)
        return self.pipeline.stages[stage].proof.memory_price_s_per_gib * (
            self.pipeline.num_microbatches if alone else 1
        )

    @property
    def _num_ranks(self) -> int:
        return len(self.pipeline.stages) // self.pipeline.num_chunks

    def _waits(self, stage: int) -> float:
        """Return the share of the step in which a stage's devices wait."""
        whole = max(self.plan.prediction.step_s, 1e-30)
        chunks = self.pipeline.stages[stage % self._num_ranks :: self._num_ranks]
        return (
            1
            - self.pipeline.num_microbatches
            * sum(chunk.prediction.step_s for chunk in chunks)
            / whole
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
                share(self._waits(number)),
                flying,
                size(p.peak_bytes),
            )
            rank = number % self._num_ranks
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
                back = f"comes back: {size(crossed.bytes)}" if crossed.returns else "none"
                yield str(number), escape(crossed.node), layout, size(crossed.bytes), back


def sections_of(explanations: tuple[Explanation, ...]) -> tuple[Section, ...]:
    """Return the sections of the stages' explanations, in order. Stages without any of the
    requested parts have none."""
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
    """Return whether two stages do the same, except for the numbers of their layers."""
    return len(parts) == len(others) and all(
        _facts(a) == _facts(b) for a, b in zip(parts, others, strict=True)
    )


def _facts(part: ModulePart) -> ModulePart:
    """A part without what names its copies and its decisions."""
    copies = tuple((i,) for i in range(len(part.instances)))
    return replace(part, instances=copies, copies="", main=None, entries=())


def _in_turn(num_microbatches: int) -> str:
    return (
        "one microbatch"
        if num_microbatches == 1
        else f"{num_microbatches} microbatches, one after another"
    )
