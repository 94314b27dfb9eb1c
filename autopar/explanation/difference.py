"""`diff`: compare two plans module by module.

If both plans have the same cuts, their stages are compared in order, by times of one microbatch. If
the cuts differ, or one plan has no stages, modules are compared by their shares of the step. The
rest of the step, which belongs to no module, has separate rows, so that the rows add up to the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from autopar.breakdown import CROSSING, ModulePart, Weight, breakdown, copies_of, label, owner
from autopar.constraints import read_constraint
from autopar.constraints.words import in_words
from autopar.core.units import seconds, share, size
from autopar.explanation.summary import Readable, as_emitted, table
from autopar.plans import Communication, Entry, Kept, Pipeline, Plan

# --------------------------------------------------------------------------------------------------
# The share of each module in the step, for two plans with different stages, or of which one has no
# stages.  Terms. With M microbatches and P ranks of a pipeline (P = 1 without one), a module that
# takes t seconds of a microbatch on a device of its stage has a *share* of M · t / P of the step:
# seconds per device, summed over microbatches and averaged over all devices, including those of
# other stages, which do not run it. With τ seconds per microbatch of a stage,  step = Σ of all
# shares − M / P · Σ (time of a stage's parts less τ: the hidden time) + average waiting time of a
# device + time of sending outputs to all stages  so the shares add up to the step, and those of
# plans with different cuts can be compared. Copies of a module that are together in both plans
# share a row.

HIDDEN = "(hidden: overlapped communication, and time saved by kernels)"
WAITING = "(waiting for other stages)"
OUTPUT_BROADCAST = "(sending outputs to all stages)"
_Place = tuple[tuple[int, int], ...]  # stages, and the index of the part in each
_Split = TypeVar("_Split", Entry, Communication, Kept)


@dataclass(frozen=True, slots=True)
class Share:
    """A module's share of a step, as defined in the comment above.

    Attributes:
        stages: the stages that contain the module; () if there is one stage on the whole mesh.
        kept_bytes: bytes saved for backward on a device of its stage, for all microbatches in
            flight; the largest if several stages contain it.
        part, axes: the part with the largest share, with its layouts over the axes of these names:
            the axes of both plans except that of the stages.
    """

    stages: tuple[int, ...]
    compute_s: float
    communication_s: float
    kept_bytes: int
    part: ModulePart
    axes: tuple[str, ...]

    @property
    def time_s(self) -> float:
        """Compute and communication, in seconds."""
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """A module, or some of its copies, in two plans; None if a plan does not contain it."""

    module: str
    first: Share | None
    second: Share | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stage of a plan.

    Attributes:
        runs: how often a device runs it per step, averaged over all devices.
        in_flight: number of microbatches whose activations it keeps at a time.
    """

    plan: Plan
    runs: float
    in_flight: int


def rows(first: Plan, second: Plan) -> tuple[DifferenceRow, ...]:
    """Return the modules of both plans: in forward order of the first plan, then those only in the
    second.
    """
    places = _places(first), _places(second)

    def cell(module: str, instance: tuple[int, ...]) -> tuple[_Place, _Place]:
        """Return the places of a module's copy in both plans; empty if a plan lacks it."""
        # named after the tensor that crosses the cut, which differs between cuts
        if module in CROSSING:
            return (), ()
        return places[0].get((module, instance), ()), places[1].get((module, instance), ())

    both, axes = (
        (_collect_parts(first, cell), _collect_parts(second, cell)),
        axes_of([_pieces(plan)[0].plan for plan in (first, second)]),
    )
    keys = list(dict.fromkeys((*both[0], *both[1])))
    several = {module for module, _ in keys if sum(module == other for other, _ in keys) > 1}
    changed = []
    for key in keys:
        parts = [part for side in both for _, _, part in side.get(key, ())]
        shares = (
            _share(plan, side.get(key, []), axes)
            for plan, side in zip((first, second), both, strict=True)
        )
        module = (
            parts[0].module if len({part.module for part in parts}) == 1 else key[0]
        )  # a stage may contain only one of the layers
        instances = tuple(i for part in parts for i in part.instances)
        copies = copies_of(instances, module, key[0]) if key[0] in several else ""
        changed.append(DifferenceRow(replace(parts[0], module=module, copies=copies).name, *shares))
    return tuple(changed)


def parts_outside_modules(plan: Plan) -> dict[str, float]:
    """Return the parts of a step that belong to no module: name → seconds per device, averaged over
    all devices.
    """
    pieces = _pieces(plan)
    parts_s = sum(
        piece.runs * sum(p.compute_s + p.communication_s for p in breakdown(piece.plan))
        for piece in pieces
    )
    busy_s = sum(piece.runs * piece.plan.prediction.step_s for piece in pieces)
    handed_s = plan.as_pipeline.handed_s
    return {
        HIDDEN: busy_s - parts_s,
        WAITING: plan.prediction.step_s - busy_s - handed_s,
        OUTPUT_BROADCAST: handed_s,
    }


def _pieces(plan: Plan) -> tuple[_Piece, ...]:
    pipeline = plan.as_pipeline
    runs = pipeline.num_microbatches / pipeline.num_ranks
    return tuple(
        _Piece(stage, runs, flying)
        for stage, flying in zip(pipeline.stages, pipeline.num_in_flight, strict=True)
    )


def _places(plan: Plan) -> Mapping[tuple[str, tuple[int, ...]], _Place]:
    """Map (module, indices of a copy) to the parts that contain it."""
    places: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for stage, piece in enumerate(_pieces(plan)):
        for number, part in enumerate(breakdown(piece.plan)):
            for instance in part.instances:
                places[part.pattern, instance] = (
                    *places.get((part.pattern, instance), ()),
                    (stage, number),
                )
    return places


_Cell = Callable[[str, tuple[int, ...]], tuple[_Place, _Place]]
_Found = dict[tuple[str, tuple[_Place, _Place]], list[tuple[int, _Piece, ModulePart]]]


def _collect_parts(plan: Plan, cell: _Cell) -> _Found:
    """Map (module, cell) to the stages that contain it and its part there. Parts are split so that
    the copies of a cell stay together.
    """
    parts_by_place: _Found = {}
    for stage, piece in enumerate(_pieces(plan)):
        for part in breakdown(_split(piece.plan, cell)):
            parts_by_place.setdefault(
                (part.pattern, cell(part.pattern, part.instances[0])), []
            ).append((stage, piece, part))
    return parts_by_place


def _split(plan: Plan, cell: _Cell) -> Plan:
    """Return the plan with separate decisions, kept values and communications for copies of
    different cells."""

    def each(facts: tuple[_Split, ...], node: Callable[[_Split], str]) -> Iterator[_Split]:
        """Yield the records, split so that all copies of each are in one cell."""
        for fact in facts:
            cells: dict[tuple[_Place, _Place], list[tuple[int, ...]]] = {}
            for instance in fact.instances:
                cells.setdefault(cell(owner(node(fact)), instance), []).append(instance)
            yield from (replace(fact, instances=tuple(instances)) for instances in cells.values())

    entries = tuple(each(plan.entries, lambda entry: entry.nodes[0].node))
    moves, kept_values = (
        tuple(each(plan.communications, lambda c: c.node)),
        tuple(each(plan.kept, lambda k: k.node)),
    )
    return replace(plan, entries=entries, communications=moves, kept=kept_values)


def axes_of(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return the names of the axes with more than one device of both plans or their stages; if
    there are none, all axes of the first plan.
    """
    axes = (axis for plan in plans for axis in plan.mesh.axes)
    return tuple(dict.fromkeys(axis.name for axis in axes if axis.size > 1)) or plans[0].mesh.names


def over_axes(part: ModulePart, names: tuple[str, ...], axes: tuple[str, ...]) -> ModulePart:
    """Return a part with its layouts over other axes.

    Tensors are replicated over axes that the part's own mesh lacks.

    Args:
        part: a part of a plan or stage.
        names: names of the axes of the part's mesh.
        axes: names of the axes of the new layouts.
    """
    places = [names.index(axis) if axis in names else None for axis in axes]
    none = "replicated" if any(part.parallelism) else ""
    enters, leaves = (
        layout.over(places) if layout is not None else None for layout in (part.enters, part.leaves)
    )
    weights = tuple(
        replace(
            w,
            storage=w.storage.over(places),
            compute=tuple(dict.fromkeys(x.over(places) for x in w.compute)),
            working=w.working.over(places),
            sums=w.sums.over(places),
        )
        for w in part.weights
    )
    along = tuple(none if axis is None else part.parallelism[axis] for axis in places)
    sharded = tuple("" if axis is None else part.sharded[axis] for axis in places)
    return replace(
        part, enters=enters, leaves=leaves, weights=weights, parallelism=along, sharded=sharded
    )


def _share(
    plan: Plan, parts: list[tuple[int, _Piece, ModulePart]], axes: tuple[str, ...]
) -> Share | None:
    if not parts:
        return None
    _, piece, main = max(parts, key=lambda found: found[2].compute_s + found[2].communication_s)
    return Share(
        tuple(dict.fromkeys(stage for stage, _, _ in parts)) if plan.stage_axis else (),
        sum(piece.runs * part.compute_s for _, piece, part in parts),
        sum(piece.runs * part.communication_s for _, piece, part in parts),
        max(piece.in_flight * part.kept_bytes for _, piece, part in parts),
        over_axes(main, piece.plan.mesh.names, axes),
        axes,
    )


_SHARES = (
    "Modules; seconds of a step per device, summed over microbatches and averaged over all "
    "devices, including those of other stages; kept: bytes on a device of its stage"
)
_DIGITS = 12  # digits of a hash
_ROUNDING = 1e-12  # share of the step
_NOTICED = 1e-4  # share of the step below which a difference of time alone is not shown


@dataclass(frozen=True, slots=True)
class Change:
    """A module in two plans; None for a plan that does not contain it.

    Attributes:
        said: the changes, one line each.
        compute_s, communication_s, kept_bytes: second minus first.
        shares: shares of the step in both plans, if the plans have different cuts.
    """

    module: str
    said: tuple[str, ...]
    compute_s: float
    communication_s: float
    kept_bytes: int
    shares: tuple[Share | None, Share | None] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Readable):
    """The differences between two plans. Prints as text, and renders in rich and in notebooks.

    Attributes:
        changes: modules whose layouts, stage, recomputation or costs differ. num_equal: modules
            that are the same in both.
        beside: if changes have shares of the step, the other parts of the step: name, seconds in
            the first plan and in the second. Unchanged modules are one of them.
    """

    first: Plan
    second: Plan
    changes: tuple[Change, ...]
    num_equal: int
    beside: tuple[tuple[str, float, float], ...] = ()

    def renderables(self) -> Iterator[RenderableType]:
        """Yield what the plans were made for, the totals, and the modules that differ."""
        yield from map(Text, self.header())
        if self.beside:
            yield from table(
                _SHARES,
                ("module", "change", ">of the step", ">of it communication", ">kept"),
                list(self._shares()),
            )
            return
        changed = [
            (
                escape(c.module),
                "\n".join(c.said),
                seconds(c.compute_s, signed=True),
                seconds(c.communication_s, signed=True),
                size(c.kept_bytes, signed=True),
            )
            for c in self.changes
        ]
        if changed:
            of = "; times of one microbatch" if self.first.num_microbatches > 1 else ""
            yield from table(
                f"Modules that differ{of}",
                ("module", "change", ">compute", ">communication", ">kept"),
                changed,
            )
        of = ", stages matched by order" if self.first.stage_axis else ""
        yield Text(f"{_modules(self.num_equal)} the same{of}")

    def _shares(self) -> Iterator[tuple[str, ...]]:
        """Yield a row per module that differs, per other part of the step, and for the step."""
        for change in self.changes:
            a, b = change.shares or (None, None)
            times = [
                _pair(*(seconds(getattr(s, name)) if s else "–" for s in (a, b)))
                for name in ("time_s", "communication_s")
            ]
            kept_text = _pair(*(size(s.kept_bytes) if s else "–" for s in (a, b)))
            yield escape(change.module), "\n".join(change.said), *times, kept_text
        for name, before_s, after_s in self.beside:
            yield name, "", _pair(seconds(before_s), seconds(after_s)), "", ""
        yield (
            "the step",
            "",
            _pair(*(seconds(plan.prediction.step_s) for plan in (self.first, self.second))),
            "",
            "",
        )

    def header(self) -> Iterator[str]:
        """Yield differences in stages and in what the plans were made for, then step time and
        memory, one line each.
        """
        a, b = self.first, self.second
        yield from _pipelines(a.as_pipeline, b.as_pipeline)
        facts = {
            "model": (a.fingerprint.model_name, b.fingerprint.model_name),
            "model's structure": (a.fingerprint.model[:_DIGITS], b.fingerprint.model[:_DIGITS]),
            "mesh": (str(a.mesh), str(b.mesh)),
            "hardware": (a.fingerprint.profile, b.fingerprint.profile),
        }
        options = sorted({*a.options, *b.options})
        facts |= {
            name: (_option(name, a.options.get(name)), _option(name, b.options.get(name)))
            for name in options
        }
        yield from (
            f"{name}: {before} → {after}"
            for name, (before, after) in facts.items()
            if before != after
        )
        p, q = a.prediction, b.prediction
        yield (
            f"step {seconds(p.step_s)} → {seconds(q.step_s)} ({_relative(p.step_s, q.step_s)}):"
            f" compute {seconds(q.compute_s - p.compute_s, signed=True)}, communication"
            f" {seconds(q.communication_s - p.communication_s, signed=True)}"
            f"{self._unattributed_difference()}"
        )
        if p.simulated_s and q.simulated_s and (as_emitted(a) or as_emitted(b)):
            pair = _pair(seconds(p.simulated_s), seconds(q.simulated_s))
            yield f"simulated as emitted {pair} ({_relative(p.simulated_s, q.simulated_s)})"
        kinds = {
            k: q.memory_bytes.get(k, 0) - p.memory_bytes.get(k, 0)
            for k in sorted({*p.memory_bytes, *q.memory_bytes})
        }
        moved = ", ".join(
            f"{kind} {size(delta, signed=True)}" for kind, delta in kinds.items() if delta
        )
        yield (
            f"peak {size(p.peak_bytes)} → {size(q.peak_bytes)}"
            f" ({_relative(p.peak_bytes, q.peak_bytes)}){': ' + moved if moved else ''}"
        )

    def _unattributed_difference(self) -> str:
        """Return the part of the difference that is neither compute nor communication, as text;
        empty if there is none."""
        plans = self.first, self.second
        before_s, after_s = (plan.prediction.step_s - plan.prediction.serial_s for plan in plans)
        if abs(after_s - before_s) <= _ROUNDING * max(plan.prediction.step_s for plan in plans):
            return ""
        waits = any(plan.stage_axis for plan in plans)
        other_text = "waiting for other stages less what runs at once" if waits else "both at once"
        return f", {other_text} {seconds(after_s - before_s, signed=True)}"


def diff(first: Plan | str | Path, second: Plan | str | Path) -> Diff:
    """Compare two plans, or their files, module by module: layouts, stages, recomputation, time and
    memory."""
    first, second = Plan.of(first), Plan.of(second)
    if _cuts(first) != _cuts(second):
        return _by_shares(first, second)
    changes, equal = [], 0
    for number, (one, other) in enumerate(zip_longest(first.stages, second.stages)):
        stage_changes, same = _of_stage(one, other, f"stage {number}: " if first.stage_axis else "")
        changes += stage_changes
        equal += same
    return Diff(first, second, tuple(changes), equal)


def _cuts(plan: Plan) -> tuple[tuple[str, ...], bool]:
    """Return the facts that must agree for a comparison of stages in order: the cuts, and whether
    the figures are those of a microbatch.
    """
    pipeline = plan.as_pipeline
    return pipeline.modules, pipeline.num_microbatches > 1


def _by_shares(first: Plan, second: Plan) -> Diff:
    """Compare plans with different cuts."""
    noticed_s = _NOTICED * max(plan.prediction.step_s for plan in (first, second))
    changes, equal_s, num_equal = [], [0.0, 0.0], 0
    for row in rows(first, second):
        a, b = row.first, row.second
        descriptions = tuple(_said_of(a, b))
        times = [
            (s.compute_s, s.communication_s, s.kept_bytes) if s else (0.0, 0.0, 0) for s in (a, b)
        ]
        compute_s, moved_s, kept_bytes = (
            after - before for before, after in zip(*times, strict=True)
        )
        if descriptions or kept_bytes or max(abs(compute_s), abs(moved_s)) > noticed_s:
            changes.append(
                Change(
                    row.module,
                    descriptions or ("same layouts",),
                    compute_s,
                    moved_s,
                    int(kept_bytes),
                    (a, b),
                )
            )
        else:
            num_equal += 1
            equal_s = [total + sum(each[:2]) for total, each in zip(equal_s, times, strict=True)]
    before, after = parts_outside_modules(first), parts_outside_modules(second)
    least_s = _ROUNDING * max(plan.prediction.step_s for plan in (first, second))
    others = tuple(
        (name, before[name], after[name])
        for name in before
        if max(abs(before[name]), abs(after[name])) > least_s
    )
    same = ((f"({_modules(num_equal, ' that')} the same)", *equal_s),) if num_equal else ()
    return Diff(first, second, tuple(changes), num_equal, (*same, *others))


def _said_of(a: Share | None, b: Share | None) -> Iterator[str]:
    axes = next(share.axes for share in (a, b) if share)
    yield from _describe_change(a.part if a else None, b.part if b else None, axes)
    places = [_describe_place(share) for share in (a, b) if share]
    if len(places) == 2 and places[0] != places[1]:
        yield f"{places[0]} → {places[1]}"
    elif len(places) == 1:
        yield places[0]


def _describe_place(share: Share) -> str:
    """Return the devices that run a module, as text."""
    return (
        f"stage{'s' if len(share.stages) > 1 else ''} {', '.join(map(str, share.stages))}"
        if share.stages
        else "all devices"
    )


def _pair(before: str, after: str) -> str:
    return f"{before} → {after}"


def _of_stage(first: Plan | None, second: Plan | None, prefix: str) -> tuple[list[Change], int]:
    """Return the modules that differ between two plans or two stages, one of which may be missing,
    and the number of equal modules.
    """
    plans = [plan for plan in (first, second) if plan is not None]
    axes = axes_of(plans)
    before, after = (
        (
            {(p.module, p.copies): over_axes(p, plan.mesh.names, axes) for p in breakdown(plan)}
            if plan
            else {}
        )
        for plan in (first, second)
    )
    changes, equal = [], 0
    noticed_s = _NOTICED * max(plan.prediction.step_s for plan in plans)
    for key in dict.fromkeys((*before, *after)):
        a, b = before.get(key), after.get(key)
        descriptions = tuple(_describe_change(a, b, axes))
        costs = _minus(b, a)
        if descriptions or costs[2] or max(abs(costs[0]), abs(costs[1])) > noticed_s:
            some = a or b
            assert some is not None
            changes.append(Change(prefix + some.name, descriptions or ("same layouts",), *costs))
        else:
            equal += 1
    return changes, equal


def _minus(b: ModulePart | None, a: ModulePart | None) -> tuple[float, float, int]:
    x, y = ((p.compute_s, p.communication_s, p.kept_bytes) if p else (0.0, 0.0, 0) for p in (b, a))
    return x[0] - y[0], x[1] - y[1], x[2] - y[2]


def _layouts_by_name(weights: Iterable[Weight]) -> dict[str, list[str]]:
    """Return the layouts of weights as text, by the name of the weight. Copies of a module that
    differ in shape have decisions of their own, so a name may stand for several weights."""
    layouts_by_name: dict[str, set[str]] = {}
    for weight in weights:
        used = ", ".join(map(str, weight.compute))
        layouts_by_name.setdefault(weight.name, set()).add(f"{weight.storage} used as {used}")
    return {name: sorted(layouts) for name, layouts in layouts_by_name.items()}


def _describe_change(
    a: ModulePart | None, b: ModulePart | None, axes: tuple[str, ...]
) -> Iterator[str]:
    if a is None or b is None:
        yield "only in the first plan" if b is None else "only in the second plan"
        return
    labels = label(a, axes), label(b, axes)
    if labels[0] != labels[1]:
        yield f"{labels[0]} → {labels[1]}"
    if (a.enters, a.leaves) != (b.enters, b.leaves):
        yield f"activations {a.enters} → {a.leaves}, now {b.enters} → {b.leaves}"
    before, now = _layouts_by_name(a.weights), _layouts_by_name(b.weights)
    for name in before:
        if name in now and before[name] != now[name]:
            yield f"{name}: {' and '.join(before[name])}, now {' and '.join(now[name])}"
    if a.recomputed != b.recomputed:
        yield (
            f"recomputed in backward: {', '.join(a.recomputed) or 'nothing'}, now "
            f"{', '.join(b.recomputed) or 'nothing'}"
        )


def _pipelines(a: Pipeline, b: Pipeline) -> Iterator[str]:
    """Yield the differences in stages, cuts, microbatches and schedule."""
    facts = zip(_PIPELINE, _facts(a), _facts(b), strict=True)
    yield from (f"{name}: {before} → {after}" for name, before, after in facts if before != after)


_PIPELINE = ("stages", "cuts before", "microbatches", "schedule", "microbatches in flight")


def _facts(p: Pipeline) -> tuple[str, ...]:
    flying = " ".join(map(str, p.num_in_flight))
    return (
        f"{len(p.stages)} along {p.axis}" if p.axis else "none",
        ", ".join(p.modules) or "nothing",
        str(p.num_microbatches),
        p.schedule if p.axis else "none",
        flying,
    )


def _option(name: str, value: object) -> str:
    """Return an option's value in the notation of `autopar plan`."""
    if name == "constraints":
        every = value if isinstance(value, Sequence) else ()
        return ", ".join(in_words(read_constraint(constraint)) for constraint in every) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return size(float(str(value))) if name == "memory_bytes" else str(value)


def _modules(num: int, that: str = "") -> str:
    return f"{num} module{that} is" if num == 1 else f"{num} modules{that} are"


def _relative(before: float, after: float) -> str:
    return share((after - before) / before, signed=True) if before else "from 0"
