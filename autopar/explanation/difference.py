"""`diff`: what changed from one plan to another, module by module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from autopar.breakdown import Part, breakdown, label
from autopar.constraints import read_constraint
from autopar.constraints.words import in_words
from autopar.explanation.rendering import Readable, table
from autopar.plans import Pipeline, Plan
from autopar.units import seconds, share, size

_NOTICED = 1e-4  # share of the step from which on a difference of time alone is told


@dataclass(frozen=True, slots=True)
class Change:
    """A module in two plans; None where one of them has no such module.

    Attributes:
        said: what changed, one line per fact.
        compute_s, communication_s, kept_bytes: second minus first.
    """

    module: str
    said: tuple[str, ...]
    compute_s: float
    communication_s: float
    kept_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Diff(Readable):
    """What differs between two plans: prints, renders in rich and in notebooks.

    Attributes:
        changes: modules whose layouts, recomputation or costs differ. num_equal: modules that are the same in both.
    """

    first: Plan
    second: Plan
    changes: tuple[Change, ...]
    num_equal: int

    def renderables(self) -> Iterator[RenderableType]:
        """What the plans were made for, totals, and the modules that differ."""
        yield from map(Text, self.header())
        rows = [
            (
                escape(c.module), "\n".join(c.said), seconds(c.compute_s, signed=True), seconds(c.communication_s, signed=True),
                size(c.kept_bytes, signed=True),
            )
            for c in self.changes
        ]  # fmt: skip
        if rows:
            of = "; times of one microbatch" if self.first.pipeline else ""
            yield from table(f"Modules that differ{of}", ("module", "change", ">compute", ">communication", ">kept"), rows)
        if (self.first.pipeline is None) != (self.second.pipeline is None):
            yield Text("modules are not compared: one plan has layouts per stage, for a microbatch, the other for the whole step")
        else:
            of = ", stages matched by order" if self.first.pipeline else ""
            yield Text(f"{self.num_equal} modules are the same{of}")

    def header(self) -> Iterator[str]:
        """How stages differ, what the plans were made for where that differs, then step time and memory, one line each."""
        a, b = self.first, self.second
        yield from _pipelines(a.pipeline, b.pipeline)
        facts = {
            "model": (a.fingerprint.model_name, b.fingerprint.model_name),
            "model's structure": (a.fingerprint.model, b.fingerprint.model),
            "mesh": (str(a.mesh), str(b.mesh)),
            "hardware": (a.fingerprint.profile, b.fingerprint.profile),
        }
        options = sorted({*a.options, *b.options})
        facts |= {name: (_option(name, a.options.get(name)), _option(name, b.options.get(name))) for name in options}
        yield from (f"{name}: {before} → {after}" for name, (before, after) in facts.items() if before != after)
        p, q = a.prediction, b.prediction
        yield (
            f"step {seconds(p.step_s)} → {seconds(q.step_s)} ({_relative(p.step_s, q.step_s)}):"
            f" compute {seconds(q.compute_s - p.compute_s, signed=True)},"
            f" communication {seconds(q.communication_s - p.communication_s, signed=True)}"
        )
        kinds = {k: q.memory_bytes.get(k, 0) - p.memory_bytes.get(k, 0) for k in sorted({*p.memory_bytes, *q.memory_bytes})}
        moved = ", ".join(f"{kind} {size(delta, signed=True)}" for kind, delta in kinds.items() if delta)
        yield f"peak {size(p.peak_bytes)} → {size(q.peak_bytes)} ({_relative(p.peak_bytes, q.peak_bytes)}){': ' + moved if moved else ''}"


def diff(first: Plan, second: Plan) -> Diff:
    """What changed from `first` to `second`: layouts, recomputation, time and memory, per module."""
    a, b = first.pipeline, second.pipeline
    if (a is None) != (b is None):
        return Diff(first, second, (), 0)
    stages = zip_longest(a.stages, b.stages) if a and b else ((first, second),)
    changes, equal = [], 0
    for number, (one, other) in enumerate(stages):
        found, same = _of_stage(one, other, f"stage {number}: " if a else "")
        changes += found
        equal += same
    return Diff(first, second, tuple(changes), equal)


def _of_stage(first: Plan | None, second: Plan | None, prefix: str) -> tuple[list[Change], int]:
    """Modules that differ between two plans or two stages, one of which may not be there, and the number of those that do not."""
    some_plan = first or second
    assert some_plan is not None, "one of them is there"
    names = some_plan.mesh.names
    before = {(p.module, p.copies): p for p in (breakdown(first) if first else ())}
    after = {(p.module, p.copies): p for p in (breakdown(second) if second else ())}
    changes, equal = [], 0
    noticed_s = _NOTICED * max(plan.prediction.step_s for plan in (first, second) if plan)
    for key in dict.fromkeys((*before, *after)):
        a, b = before.get(key), after.get(key)
        said = tuple(_said(a, b, first.mesh.names if first else names, second.mesh.names if second else names))
        costs = _minus(b, a)
        if said or costs[2] or max(abs(costs[0]), abs(costs[1])) > noticed_s:
            some = a or b
            assert some is not None
            changes.append(Change(prefix + some.name, said or ("same layouts",), *costs))
        else:
            equal += 1
    return changes, equal


def _minus(b: Part | None, a: Part | None) -> tuple[float, float, int]:
    x, y = ((p.compute_s, p.communication_s, p.kept_bytes) if p else (0.0, 0.0, 0) for p in (b, a))
    return x[0] - y[0], x[1] - y[1], x[2] - y[2]


def _said(a: Part | None, b: Part | None, first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[str]:
    if a is None or b is None:
        yield "only in the first plan" if b is None else "only in the second plan"
        return
    labels = label(a, first), label(b, second)
    if labels[0] != labels[1]:
        yield f"{labels[0]} → {labels[1]}"
    if (a.enters, a.leaves) != (b.enters, b.leaves):
        yield f"activations {a.enters} → {a.leaves}, now {b.enters} → {b.leaves}"
    weights = {w.name: w for w in b.weights}
    for weight in a.weights:
        now = weights.get(weight.name)
        if now is not None and (weight.storage, weight.compute) != (now.storage, now.compute):
            used = (", ".join(map(str, w.compute)) for w in (weight, now))
            yield f"{weight.name}: {weight.storage} used as {next(used)}, now {now.storage} used as {next(used)}"
    if a.recomputed != b.recomputed:
        yield f"run again in backward: {', '.join(a.recomputed) or 'nothing'}, now {', '.join(b.recomputed) or 'nothing'}"


def _pipelines(a: Pipeline | None, b: Pipeline | None) -> Iterator[str]:
    """What differs in stages, cuts, microbatches and schedule."""
    facts = zip(_PIPELINE, _facts(a), _facts(b), strict=True)
    yield from (f"{name}: {before} → {after}" for name, before, after in facts if before != after)


_PIPELINE = ("stages", "cuts before", "microbatches", "schedule", "microbatches in flight")


def _facts(p: Pipeline | None) -> tuple[str, ...]:
    if p is None:
        return "none", "nothing", "1", "none", "1"
    flying = " ".join(map(str, p.num_in_flight))
    along = f"{len(p.stages)} along {p.axis}" if p.axis else "one, on the whole mesh"
    return along, ", ".join(p.modules) or "nothing", str(p.num_microbatches), p.schedule if p.axis else "none", flying


def _option(name: str, value: object) -> str:
    if name == "constraints":
        every = value if isinstance(value, Sequence) else ()
        return ", ".join(in_words(read_constraint(constraint)) for constraint in every) or "none"
    return size(float(str(value))) if name == "memory_bytes" and value is not None else str(value)


def _relative(before: float, after: float) -> str:
    return share((after - before) / before, signed=True) if before else "from 0"
