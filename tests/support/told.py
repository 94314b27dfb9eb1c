"""Checks of the texts about a plan: faults of its explanation, its report, and its differences from
another plan, each as a sentence."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text
from torch import nn

from autopar.breakdown import CROSSING, ModulePart, breakdown, peak_kinds, rank_memory, step_parts
from autopar.explanation import Diff, Explanation, diff, explain
from autopar.explanation.module_tables import StageExplanation
from autopar.explanation.summary import Readable
from autopar.plans import Plan
from autopar.report import report

_RAW = re.compile(
    r"\bNone\b|\bTrue\b|\bFalse\b|\bnan\b|\binf\b|[+-]0\.00 |\b0\.00 [µmsGMKB]"
    r"|object at 0x|<autopar|<function|\{\d*\}|Shard\(|Replicate\(|Partial\(|Layout\(|frozenset"
)
_OF_THE_USER = ("constraints: ",)  # lines with calls written by the user
_ROUNDING = 1e-9
_NOTICED = 1e-4  # share of the step by which modules that are listed as equal may differ


def faults_of(plan: Plan, model: nn.Module | None, folder: Path) -> list[str]:
    """Return the faults of the texts about a plan.

    Args:
        model: the model of the plan, or None if it is not available.
        folder: folder for a page and a figure.
    """
    explanation = explain(plan)
    names = {name for name, _ in model.named_modules()} if model is not None else None
    loaded = plan.loads(plan.dumps())
    return [
        *_sums(plan),
        *_of_readable(explanation),
        *(f for part in _narrowed(explanation) for f in _of_module(plan, part)),
        *(f for part in explanation.parts for f in _unknown(part, names)),
        *(
            []
            if str(explain(loaded)) == str(explanation)
            else ["the file does not say all that is told"]
        ),
        *(f for section in explanation.sections for f in _shares(section.explanation)),
        *(f for line in explanation.summary() for f in _raw(line)),
        *_of_page(plan, folder),
    ]


def differences_of(first: Plan, second: Plan) -> list[str]:
    """Return the faults of the comparison of two plans."""
    difference = diff(first, second)
    faults = [*_of_readable(difference), *_accounts(difference)]
    if first is second and difference.changes:
        faults.append(f"{difference.changes[0].module} differs from itself")
    return faults


# Numbers.


def _sums(plan: Plan) -> Iterator[str]:
    """Check that the parts add up to the prediction, for each stage and the full plan."""
    for number, stage in enumerate(plan.stages):
        yield from (f"stage {number}: {wrong}" for wrong in _sums_of_stage(stage))
    parts, step_s = step_parts(plan), plan.prediction.simulated_s
    if not _close(parts.total_s, step_s, step_s):
        yield f"the step's parts are {parts.total_s} s, and it takes {step_s} s"
    yield from (f"{n} takes {t} s" for n, t in parts.items() if t < -_ROUNDING * step_s)
    if plan.pipeline:
        ranks = [rank_memory(plan.pipeline, rank) for rank in range(plan.pipeline.num_ranks)]
        yield from (
            wrong for peak, kinds in ranks for wrong in _peak(peak, peak_kinds(kinds, peak))
        )
    peak = plan.prediction.peak_bytes
    yield from _peak(peak, peak_kinds(plan.prediction.memory_bytes, peak))


def _sums_of_stage(plan: Plan) -> Iterator[str]:
    prediction, parts = plan.prediction, breakdown(plan)
    whole_s = prediction.serial_s
    for name in ("compute_s", "communication_s"):
        told_s, due_s = sum(getattr(p, name) for p in parts), getattr(prediction, name)
        if not _close(told_s, due_s, whole_s):
            yield f"modules have {name} {told_s}, and the plan {due_s}"
    kept_bytes, due = sum(p.kept_bytes for p in parts), prediction.memory_bytes["activations"]
    if kept_bytes != due:
        yield f"modules keep {kept_bytes} bytes, and the plan {due}"
    num_collectives = sum(t.num for p in parts for t in p.transfers if t.kind != "receive")
    if num_collectives != sum(len(c.instances) for c in plan.communications):
        yield f"modules have {num_collectives} collectives"
    listed_keys = Counter(entry.key for part in parts for entry in part.entries)
    decided = Counter(e.key for e in plan.entries if e.time_s or e.kind == "parameter")
    yield from (f"{key} is decided, and told in no module" for key in decided - listed_keys)
    names = Counter(part.name for part in parts)
    yield from (f"two parts are called {name}" for name, num in names.items() if num > 1)


def _peak(peak: int, kinds: dict[str, int]) -> Iterator[str]:
    if sum(kinds.values()) != peak:
        yield f"{kinds} are no peak of {peak} bytes"


def _shares(readable: StageExplanation) -> Iterator[str]:
    """Check that the shares of the kinds of parallelism add up to all of the work."""
    table = next(t for t in _stage_tables(readable) if t.title == "Parallelism")
    shares = [float(str(cell).rstrip(" %")) for cell in table.columns[1].cells]
    if abs(sum(shares) - 100.0) > 0.05 * len(shares) + 0.05:
        yield f"shares of the work are {shares}"


def _accounts(difference: Diff) -> Iterator[str]:
    """Check that the differences of the modules and of the other items add up to the total
    difference."""
    plans = difference.first, difference.second
    if difference.beside:
        for which, plan in enumerate(plans):
            shares = [c.shares[which] for c in difference.changes if c.shares]
            told_s = sum(s.time_s for s in shares if s) + sum(
                r[1 + which] for r in difference.beside
            )
            if not _close(told_s, plan.prediction.step_s, told_s):
                yield f"{told_s} s are told of a step of {plan.prediction.step_s} s"
        return
    before, after = ([s.prediction for s in plan.stages] for plan in plans)
    longest_s = max(p.step_s for p in (*before, *after))
    for name in ("compute_s", "communication_s"):
        told_s = sum(getattr(c, name) for c in difference.changes)
        due_s = sum(getattr(p, name) for p in after) - sum(getattr(p, name) for p in before)
        if abs(told_s - due_s) > _NOTICED * longest_s * (difference.num_equal + 1e-3):
            yield f"modules differ by {told_s} s of {name}, and the plans by {due_s} s"
    kept_bytes = sum(change.kept_bytes for change in difference.changes)
    due = sum(p.memory_bytes["activations"] for p in after)
    due -= sum(p.memory_bytes["activations"] for p in before)
    if kept_bytes != due:
        yield f"modules differ by {kept_bytes} bytes kept, and the plans by {due}"


def _close(one: float, other: float, whole: float) -> bool:
    return abs(one - other) <= _ROUNDING * max(whole, 1e-30)


# Words.


def _raw(text: str) -> Iterator[str]:
    """Report values that should not appear in a text."""
    for line in text.splitlines():
        match = None if line.startswith(_OF_THE_USER) else _RAW.search(line)
        if match:
            yield f"{match[0]!r} is in {line.strip()[:120]!r}"


def _of_readable(readable: Readable) -> Iterator[str]:
    yield from _raw(str(readable))
    if "<pre" not in readable._repr_html_():
        yield "a notebook shows no text"
    for table in _tables(readable):
        cells = [[str(cell) for cell in column.cells] for column in table.columns]
        if not table.row_count or not all(any(filter(str.strip, column)) for column in cells):
            yield f"{table.title!r} has an empty column, or no row"


def _tables(readable: Readable) -> Iterator[Table]:
    yield from (each for each in readable.renderables() if isinstance(each, Table))


def _stage_tables(stage: StageExplanation) -> list[Table]:
    return [each for each in stage.tables() if isinstance(each, Table)]


def _narrowed(readable: Explanation) -> Iterable[ModulePart]:
    """Return one part of each kind, since each part takes as long as the full plan."""
    kinds = {
        (bool(p.weights), bool(p.transfers), p.main_op, p.module in CROSSING): p
        for p in readable.parts
    }
    return kinds.values()


def _of_module(plan: Plan, part: ModulePart) -> Iterator[str]:
    """Check the explanation of a single module, except for source lines of the user, which may
    contain anything."""
    if not part.module:
        return
    explanation = explain(plan, module=part.module)
    if not all(each.matches(part.module) for each in explanation.parts):
        yield f"of {part.module} another module is told"
    if part.entries and not any(
        f"Decisions of {part.module}" in str(t.title) for t in _tables(explanation)
    ):
        yield f"of {part.module} no decision is told"
    for renderable in explanation.renderables():
        yield from _raw(renderable.plain) if isinstance(renderable, Text) else ()
    for table in _tables(explanation):
        columns = [c for c in table.columns if c.header != "line"]
        yield from (
            wrong for column in columns for cell in column.cells for wrong in _raw(str(cell))
        )


def _unknown(part: ModulePart, names: set[str] | None) -> Iterator[str]:
    if names is None or part.module.startswith("("):
        return
    stars = part.pattern.count("*")
    pattern = part.pattern.replace("*", "{}")
    for instance in part.instances:
        if len(instance) == stars and pattern.format(*instance) not in names:
            yield f"the model has no module {pattern.format(*instance)!r}"


def _of_page(plan: Plan, folder: Path) -> Iterator[str]:
    """Check the figure, the page, and the notebook output of a plan."""
    if not report(plan, folder / "plan.svg").stat().st_size:
        yield "the picture is empty"
    page = report(plan, folder / "plan.html").read_text(encoding="utf-8")
    if page.count("data:image/png") < 3 and not plan.pipeline:
        yield "the page lacks a figure"
    notebook_text = html.unescape(
        re.sub(r"<style>.*?</style>|<[^>]*>", "\n", plan._repr_html_(), flags=re.S)
    )
    yield from _raw(notebook_text)
    yield from _raw(html.unescape(re.sub(r'data:[^"]*|<[^>]*>', "", page)))
    for part in explain(plan).parts:
        if part.module not in html.unescape(page):
            yield f"the page does not tell of {part.module}"
