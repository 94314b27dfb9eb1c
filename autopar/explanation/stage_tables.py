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
from autopar.core.units import seconds, share, size
from autopar.explanation.link_prices import LinkValue
from autopar.explanation.module_tables import StageExplanation, in_buckets
from autopar.explanation.step_lines import describe_step, summarize_step, waiting_share
from autopar.explanation.summary import (
    Readable,
    at_best,
    describe_coverage,
    fullest,
    idle,
    made_for,
    memory,
    objective,
    of_dispatch,
    of_loss,
    on_hosts,
    table,
    unequal,
)
from autopar.plans import Flip, Pipeline, Plan


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive equal stages, from `first` to `last`, with the explanation of the first."""

    first: int
    last: int
    explanation: StageExplanation

    @property
    def name(self) -> str:
        """``stage 0``, or ``stages 1 to 3, each``; empty for a plan without stages."""
        if self.explanation.plan is self.explanation.whole:
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
        which = f" of {pipeline.rank_word} {fullest(plan)}" if pipeline.axis else ""
        yield f"peak{which} {memory(plan)}"
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
            where = f" of stage {number}" if self.pipeline.axis else ""
            worth_s = seconds(price)
            yield (
                f"an additional GiB on each device{where} saves about {worth_s} per step (dual "
                "value of the relaxation, not solved again)"
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
