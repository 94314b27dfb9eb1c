"""Explain a stage module by module: its work, its costs and its alternatives. A plan without stages
counts as one stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from autopar.breakdown import CROSSING, INPUTS, ModulePart, Transfer, in_words, label
from autopar.core.collective import HOST_KINDS
from autopar.core.layout import Layout
from autopar.core.units import seconds, share, size
from autopar.explanation.link_prices import longer_step_s
from autopar.explanation.summary import table
from autopar.plans import Bucket, Communication, Entry, Fallback, Flip, Plan, RunnerUp

# --------------------------------------------------------------------------------------------------
# The collective-overlap kernels that were considered, and why each was chosen or not.

_FIELD = re.compile(r"\{\d+\}")


def kernels_considered(plan: Plan) -> Iterator[RenderableType]:
    """Yield a table with a row per collective next to a matrix product, if any."""
    rows = [
        _kernel_row(c, plan.mesh.names)
        for c in plan.communications
        if c.kernel is not None or c.why
    ]
    if rows:
        yield from table(
            "Collective-overlap kernels considered",
            ("<tensor", "collective", ">alone", "kernel", ">saves"),
            rows,
        )


def _kernel_row(c: Communication, names: tuple[str, ...]) -> tuple[str, ...]:
    num = len(c.instances)
    moved = (
        f"{c.phase} {c.collective.kind} over {names[c.collective.axis]} ({num}×,"
        f" {size(c.collective.bytes)})"
    )
    text, saved = f"none: {c.why}", ""
    if c.kernel is not None:
        product = _FIELD.sub("*", c.kernel.node).partition("/")[0]
        again = ", recomputed" if c.kernel.again else ""
        pieces = (
            "each rank's part as a whole"
            if c.kernel.num_chunks == 1
            else f"each rank's part in {c.kernel.num_chunks} chunks"
        )
        reason = f"; {c.why}" if c.why else ""
        how = "rows written directly to peers' memory" if c.own else pieces
        text, saved = (
            f"{c.kernel.name} of {product}{again}, {how}{reason}",
            seconds(num * c.kernel.saved_s),
        )
    return escape(_FIELD.sub("*", c.node)), moved, seconds(num * c.time_s), escape(text), saved


# --------------------------------------------------------------------------------------------------
# The communications that share a bucket, and the time that this saves.

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def in_buckets(plans: Sequence[Plan], of: str) -> Iterator[str]:
    """Yield the number of communications that share buckets, and the time saved, for a plan or
    stages.

    Args:
        plans: the plan, or the plans of all stages.
        of: ``step`` or ``microbatch``, the unit of the saved time.
    """
    buckets = [bucket for plan in plans for bucket in plan.buckets]
    if buckets:
        num = sum(len(bucket.members) for bucket in buckets)
        saved = ", ".join(seconds(plan.prediction.in_buckets_s) for plan in plans)
        simulated = ", ".join(seconds(plan.prediction.simulated_s) for plan in plans)
        by = f"a {of}{', by stages' if len(plans) > 1 else ''}"
        yield (
            f"{num} small communications share {len(buckets)}"
            f" bucket{'s' if len(buckets) > 1 else ''}, which saves {saved} of {by}: simulated, it"
            f" takes {simulated}; objective and bound count them as parts of full buckets"
        )


def buckets_of(plan: Plan) -> Iterator[RenderableType]:
    """Yield a table with a row per bucket; nothing if there is none."""
    columns = ("phase", "collective", "of", ">alone", ">in a bucket", ">saves")
    if rows := [_bucket_row(bucket, plan.mesh.names) for bucket in plan.buckets]:
        yield from table("Communications that share a bucket", columns, rows)


def _bucket_row(bucket: Bucket, names: tuple[str, ...]) -> tuple[str, ...]:
    c = bucket.collective
    when = (
        bucket.phase
        if bucket.phase != "step"
        else "end of step"
        if bucket.members[0].result
        else "start of step"
    )
    patterns: dict[str, int] = {}
    for member in bucket.members:
        name = _NUMBER.sub(
            "*", member.node.rpartition("/")[0] if member.node.endswith("/storage") else member.node
        )
        patterns[name] = patterns.get(name, 0) + 1
    of = "\n".join(
        f"{escape(name)}{f' ({num}×)' if num > 1 else ''}" for name, num in patterns.items()
    )
    moved = (
        f"{c.kind} over {names[c.axis]} of {c.dtype} ({len(bucket.members)} in one,"
        f" {size(c.bytes)})"
    )
    times = (bucket.time_s + bucket.saved_s, bucket.time_s, bucket.saved_s)
    return when, moved, of, *map(seconds, times)


# --------------------------------------------------------------------------------------------------
# ZeRO-3: weights that backward gathers again, and what their copies would cost in memory.


def regathered_weights(plan: Plan) -> Iterator[RenderableType]:
    """Yield a table with a row per module whose weights are gathered in forward and again in
    backward; nothing if there is none. It compares the time of the second gather with the memory of
    a copy that is kept instead."""
    weights = {c.node for e in plan.entries if e.kind == "parameter" for c in e.nodes}
    gathers = [
        c for c in plan.communications if c.node in weights and c.collective.kind == "all_gather"
    ]
    in_forward = {c.node for c in gathers if c.phase == "forward"}
    communications: dict[str, list[Communication]] = {}
    for c in gathers:
        if c.phase == "backward" and c.node in in_forward:
            communications.setdefault(c.module.rpartition(".")[0], []).append(c)
    if communications:
        yield from table(
            "Weights gathered again in backward (ZeRO-3)",
            ("<module", ">second gather", ">keeping the copy takes", ">time per GiB"),
            [_again_row(module, arcs, plan) for module, arcs in communications.items()],
        )


def _again_row(module: str, arcs: Sequence[Communication], plan: Plan) -> tuple[str, ...]:
    """A row of `regathered_weights`, from all backward gathers of the weights of a module."""
    on_the_way = {(c.node, c.source) for c in arcs}  # a chain over several axes leaves one copy
    copies = [c for c in arcs if (c.node, c.target) not in on_the_way]
    time_s = sum(c.time_s * len(c.instances) for c in arcs)
    num_bytes = sum(
        c.collective.output_bytes(c.collective.size_in(plan.mesh.shape)) * len(c.instances)
        for c in copies
    )
    return (
        escape(module or "(model)"),
        seconds(time_s),
        size(num_bytes),
        seconds(time_s / num_bytes * 2**30),
    )


_BATCH, _RECEIVED = "the batch", "received from other stages"
_SHOWN = 5e-4  # share of the work below which it would print as 0.0 %
_NO_OTHER = "No alternatives: the constraints leave no choice that another strategy could take"


@dataclass(frozen=True, slots=True)
class StageExplanation:
    """A stage in tables.

    Attributes:
        full_plan: the plan that the stage belongs to.
        number: number of the stage.
        plan: plan of the stage.
        parts: its parts, or the requested ones.
        pattern: the requested module pattern; None for all modules.
        flips: the hardware changes that change choices, if requested.
    """

    full_plan: Plan
    number: int
    plan: Plan
    parts: tuple[ModulePart, ...]
    pattern: str | None
    flips: tuple[Flip, ...]

    @property
    def of(self) -> str:
        """The unit of times and shares: ``step`` or ``microbatch``."""
        return self.full_plan.unit

    def tables(self) -> Iterator[RenderableType]:
        """Yield parallelism, layouts, costs and runner-ups; for a pattern, every decision of its
        modules.
        """
        names = self.plan.mesh.names
        if self.pattern is None:
            yield from table(
                "Parallelism",
                ("found", f">share of the {self.of}'s work", "modules"),
                self._parallelism(),
            )
        columns: tuple[str, ...] = (
            "<module",
            ">×",
            "weights: storage → as used",
            "activations: in → out",
        )
        yield from table("Layouts", columns, [_layouts(p, names) for p in self.parts])
        columns = (
            "<module",
            ">compute",
            ">communication",
            "of which (bytes sent per device)",
            ">kept",
            "run again",
        )
        yield from table(
            f"Costs, per device and {self.of}, all copies of a module together",
            columns,
            [_costs(p, names) for p in self.parts],
        )
        if self.pattern is None:
            columns = ("<module", "op", "chosen", "runner-up, all else equal", *self._longer())
            rows = list(self._runner_ups())
            yield from (
                table("Best alternatives", columns, rows) if rows else (Text(), Text(_NO_OTHER))
            )
            yield from regathered_weights(self.plan)
            yield from kernels_considered(self.plan)
            yield from buckets_of(self.plan)
        else:
            columns = (
                "decision",
                "layouts",
                ">time",
                "runner-up, all else equal",
                *self._longer(),
                "line",
            )
            for part in self.parts:
                yield from table(
                    f"Decisions of {part.name}", columns, [self._decision(e) for e in part.entries]
                )
        if self.flips:
            columns = ("decision", "would take", f">{self.of} now", "from")
            title = "Hardware changes that would change close choices, each alone"
            rows = [
                (escape(f.key), f.strategy, seconds(f.delta_s, signed=True), f.change)
                for f in self.flips
            ]
            yield from table(title, columns, rows)
        yield from self._replicated_ops()

    def _parallelism(self) -> list[tuple[str, str, str]]:
        """Return each kind of parallelism with its share of the step and its modules, the largest
        share first. The shares add up to the whole."""
        parts_by_kind: dict[str, list[ModulePart]] = {}
        for part in self.parts:
            others = {INPUTS: _BATCH, **dict.fromkeys(CROSSING, _RECEIVED)}
            parts_by_kind.setdefault(
                others.get(part.module) or label(part, self.plan.mesh.names), []
            ).append(part)
        step_s = max(self.plan.prediction.serial_s, 1e-30)
        rows = [
            (sum(p.compute_s + p.communication_s for p in parts) / step_s, said, parts)
            for said, parts in parts_by_kind.items()
        ]
        rows = [row for row in rows if row[1] != _BATCH or row[0] >= _SHOWN]
        rows.sort(key=lambda row: -row[0])
        return [
            (said, share(part_of), escape(", ".join(p.name for p in parts)))
            for part_of, said, parts in rows
        ]

    def _runner_ups(self) -> Iterator[tuple[str, ...]]:
        for part in self.parts:
            if part.runner_up is not None and part.main is not None and part.main in part.entries:
                chosen = _describe_choice(part.main)
                yield escape(part.name), part.main.op, chosen, *self._other(part.runner_up)

    def _decision(self, entry: Entry) -> tuple[str, ...]:
        again = " (and again in backward)" if entry.recompute else ""
        source = entry.source.partition(": ")[2] or entry.source
        op = (
            f"{entry.op} {entry.phase}{again}"
            if entry.kind == "compute"
            else f"{entry.module.rpartition('.')[2]} {entry.kind}"
        )
        return (
            escape(op),
            _describe_choice(entry),
            seconds(entry.time_s * len(entry.instances)),
            *self._other(entry.runner_up),
            escape(source),
        )

    def _longer(self) -> tuple[str, ...]:
        """Return the names of the columns for the cost of a runner-up."""
        of_step = ">step, about" if self.full_plan.as_pipeline.num_chunks > 1 else ">step"
        return tuple(dict.fromkeys((f">{self.of}", of_step)))

    def _other(self, runner_up: RunnerUp | None) -> tuple[str, ...]:
        """Return a runner-up, and the time by which it lengthens a step, or a microbatch and the
        step.
        """
        num = len(self._longer())
        if runner_up is None:
            return "", *("" for _ in range(num))
        delta_s = runner_up.delta_s
        longer = (delta_s, longer_step_s(self.full_plan, self.number, delta_s))
        return runner_up.strategy, *(seconds(each_s, signed=True) for each_s in longer[:num])

    def _replicated_ops(self) -> Iterator[RenderableType]:
        """Yield tables of the ops that run replicated because they have no sharding rule, and of
        those whose rule was discovered by experiment.
        """
        entries = [entry for part in self.parts for entry in part.entries]
        columns = ("op", "module", f">share of the {self.of}'s work", "line")
        rows = [
            (*self._cost(fallback.op, entry), escape(fallback.reason))
            for entry in entries
            if entry.replicated
            for fallback in entry.fallbacks or (Fallback(entry.op, ""),)  # of an earlier version
        ]
        if rows:
            title = "Ops that run replicated because they have no sharding rule"
            yield from table(title, (*columns, "why"), rows)
        elif self.pattern is None:
            yield Text("Every op has a sharding rule; none runs replicated for lack of a rule.")
        if rows := [self._cost(op, entry) for entry in entries for op in entry.discovered]:
            yield from table("Ops whose sharding rule was discovered by experiment", columns, rows)

    def _cost(self, op: str, entry: Entry) -> tuple[str, ...]:
        step_s = max(self.plan.prediction.serial_s, 1e-30)
        return (
            op,
            escape(entry.module),
            share(entry.time_s * len(entry.instances) / step_s),
            escape(entry.source),
        )


_HOSTS = {"fetch": " from the host", "store": " to the host"}
_OVER_SPACE = ("convolution", "max_pool", "avg_pool", "upsample")


def _layouts(part: ModulePart, names: tuple[str, ...]) -> tuple[str, ...]:
    large = [w for w in part.weights if w.name != "bias"] or list(part.weights)
    weights = [f"{w.name}: {_change((w.storage, *w.compute), names, 'weight')}" for w in large]
    shown = tuple(layout for layout in (part.enters, part.leaves) if layout is not None)
    role = "image" if part.main_op.startswith(_OVER_SPACE) else part.role
    return (
        escape(part.name),
        str(len(part.instances)),
        "\n".join(weights),
        _change(shown, names, role) if shown else "",
    )


def _change(layouts: tuple[Layout, ...], names: tuple[str, ...], role: str) -> str:
    """Return the codes of layouts, and their description in a second line; one of each if nothing
    changes.
    """
    steps = tuple(dict.fromkeys(layouts))
    return (
        f"{' → '.join(map(str, steps))}\n "
        f" {' → '.join(in_words(layout, names, role) for layout in steps)}"
    )


def _costs(part: ModulePart, names: tuple[str, ...]) -> tuple[str, ...]:
    transfers = sorted(part.transfers, key=lambda t: (t.phase != "forward", -t.time_s))
    again = f"{', '.join(part.recomputed)} ({seconds(part.recompute_s)})" if part.recomputed else ""
    lines = "\n".join(_transfer(t, names) for t in transfers if t.kind != "slice")
    return (
        escape(part.name),
        seconds(part.compute_s),
        seconds(part.communication_s),
        lines,
        size(part.kept_bytes),
        again,
    )


def _transfer(t: Transfer, names: tuple[str, ...]) -> str:
    if t.axis < 0:
        moved = f" ({t.num}×, {size(t.bytes)})" if t.kind in HOST_KINDS else ""
        return f"{t.phase} {t.kind}{_HOSTS.get(t.kind, '')}: {seconds(t.time_s)}{moved}"
    return (
        f"{t.phase} {t.kind} over {names[t.axis]}: {seconds(t.time_s)} ({t.num}×, {size(t.bytes)})"
    )


def _describe_choice(entry: Entry) -> str:
    """Return the layouts at the boundary of a decision: those that the first op reads and the last
    op returns.
    """
    first, last = entry.nodes[0].strategy, entry.nodes[-1].strategy
    return f"{', '.join(map(str, first.inputs))} -> {', '.join(map(str, last.outputs))}"
