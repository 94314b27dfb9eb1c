"""What has to hold of all that is told of a plan: faults of its explanation, its report and its
differences from another plan, each in a sentence."""

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
_OF_THE_USER = ("constraints: ",)  # lines that are written as calls
_ROUNDING = 1e-9
_NOTICED = 1e-4  # of the step: modules told as the same may differ by as much


def faults_of(plan: Plan, model: nn.Module | None, folder: Path) -> list[str]:
    """What is wrong with what is told of a plan.

    Args:
        model: of which it is; None where that is not at hand. folder: where a page and a picture
            are written.
    """
    found = explain(plan)
    names = {name for name, _ in model.named_modules()} if model is not None else None
    again = plan.loads(plan.dumps())
    return [
        *_sums(plan),
        *_of_readable(found),
        *(f for part in _narrowed(found) for f in _of_module(plan, part)),
        *(f for part in found.parts for f in _unknown(part, names)),
        *([] if str(explain(again)) == str(found) else ["the file does not say all that is told"]),
        *(f for section in found.sections for f in _shares(section.explanation)),
        *(f for line in found.summary() for f in _raw(line)),
        *_of_page(plan, folder),
    ]


def differences_of(first: Plan, second: Plan) -> list[str]:
    """What is wrong with what is told of two plans."""
    found = diff(first, second)
    wrong = [*_of_readable(found), *_accounts(found)]
    if first is second and found.changes:
        wrong.append(f"{found.changes[0].module} differs from itself")
    return wrong


# Numbers.


def _sums(plan: Plan) -> Iterator[str]:
    """Parts add up to what is predicted, in every stage and as a whole."""
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
    kept, due = sum(p.kept_bytes for p in parts), prediction.memory_bytes["activations"]
    if kept != due:
        yield f"modules keep {kept} bytes, and the plan {due}"
    sent = sum(t.num for p in parts for t in p.transfers if t.kind != "receive")
    if sent != sum(len(c.instances) for c in plan.communications):
        yield f"modules have {sent} collectives"
    told = Counter(entry.key for part in parts for entry in part.entries)
    decided = Counter(e.key for e in plan.entries if e.time_s or e.kind == "parameter")
    yield from (f"{key} is decided, and told in no module" for key in decided - told)
    names = Counter(part.name for part in parts)
    yield from (f"two parts are called {name}" for name, num in names.items() if num > 1)


def _peak(peak: int, kinds: dict[str, int]) -> Iterator[str]:
    if sum(kinds.values()) != peak:
        yield f"{kinds} are no peak of {peak} bytes"


def _shares(found: StageExplanation) -> Iterator[str]:
    """Kinds of parallelism have all of the work."""
    table = next(t for t in _stage_tables(found) if t.title == "Parallelism")
    shares = [float(str(cell).rstrip(" %")) for cell in table.columns[1].cells]
    if abs(sum(shares) - 100.0) > 0.05 * len(shares) + 0.05:
        yield f"shares of the work are {shares}"


def _accounts(found: Diff) -> Iterator[str]:
    """What modules differ by, and what is told beside them, is the whole difference."""
    plans = found.first, found.second
    if found.beside:
        for which, plan in enumerate(plans):
            shares = [c.shares[which] for c in found.changes if c.shares]
            told_s = sum(s.time_s for s in shares if s) + sum(r[1 + which] for r in found.beside)
            if not _close(told_s, plan.prediction.step_s, told_s):
                yield f"{told_s} s are told of a step of {plan.prediction.step_s} s"
        return
    before, after = ([s.prediction for s in plan.stages] for plan in plans)
    longest_s = max(p.step_s for p in (*before, *after))
    for name in ("compute_s", "communication_s"):
        told_s = sum(getattr(c, name) for c in found.changes)
        due_s = sum(getattr(p, name) for p in after) - sum(getattr(p, name) for p in before)
        if abs(told_s - due_s) > _NOTICED * longest_s * (found.num_equal + 1e-3):
            yield f"modules differ by {told_s} s of {name}, and the plans by {due_s} s"
    told = sum(change.kept_bytes for change in found.changes)
    due = sum(p.memory_bytes["activations"] for p in after)
    due -= sum(p.memory_bytes["activations"] for p in before)
    if told != due:
        yield f"modules differ by {told} bytes kept, and the plans by {due}"


def _close(one: float, other: float, whole: float) -> bool:
    return abs(one - other) <= _ROUNDING * max(whole, 1e-30)


# Words.


def _raw(text: str) -> Iterator[str]:
    """What no text should have in it."""
    for line in text.splitlines():
        found = None if line.startswith(_OF_THE_USER) else _RAW.search(line)
        if found:
            yield f"{found[0]!r} is in {line.strip()[:120]!r}"


def _of_readable(found: Readable) -> Iterator[str]:
    yield from _raw(str(found))
    if "<pre" not in found._repr_html_():
        yield "a notebook shows no text"
    for table in _tables(found):
        cells = [[str(cell) for cell in column.cells] for column in table.columns]
        if not table.row_count or not all(any(filter(str.strip, column)) for column in cells):
            yield f"{table.title!r} has an empty column, or no row"


def _tables(found: Readable) -> Iterator[Table]:
    yield from (each for each in found.renderables() if isinstance(each, Table))


def _stage_tables(stage: StageExplanation) -> list[Table]:
    return [each for each in stage.tables() if isinstance(each, Table)]


def _narrowed(found: Explanation) -> Iterable[ModulePart]:
    """One part of every kind of what is told of it, since each takes as long as the whole."""
    kinds = {
        (bool(p.weights), bool(p.transfers), p.main_op, p.module in CROSSING): p
        for p in found.parts
    }
    return kinds.values()


def _of_module(plan: Plan, part: ModulePart) -> Iterator[str]:
    """What is told of a module by itself, but for lines of the user's, which may say anything."""
    if not part.module:
        return
    found = explain(plan, module=part.module)
    if not all(each.matches(part.module) for each in found.parts):
        yield f"of {part.module} another module is told"
    if part.entries and not any(
        f"Decisions of {part.module}" in str(t.title) for t in _tables(found)
    ):
        yield f"of {part.module} no decision is told"
    for renderable in found.renderables():
        yield from _raw(renderable.plain) if isinstance(renderable, Text) else ()
    for table in _tables(found):
        told = [c for c in table.columns if c.header != "line"]
        yield from (wrong for column in told for cell in column.cells for wrong in _raw(str(cell)))


def _unknown(part: ModulePart, names: set[str] | None) -> Iterator[str]:
    if names is None or part.module.startswith("("):
        return
    stars = part.pattern.count("*")
    pattern = part.pattern.replace("*", "{}")
    for instance in part.instances:
        if len(instance) == stars and pattern.format(*instance) not in names:
            yield f"the model has no module {pattern.format(*instance)!r}"


def _of_page(plan: Plan, folder: Path) -> Iterator[str]:
    """A picture, a page, and what a notebook shows of the plan."""
    if not report(plan, folder / "plan.svg").stat().st_size:
        yield "the picture is empty"
    page = report(plan, folder / "plan.html").read_text(encoding="utf-8")
    if page.count("data:image/png") < 3 and not plan.pipeline:
        yield "the page lacks a figure"
    shown = html.unescape(
        re.sub(r"<style>.*?</style>|<[^>]*>", "\n", plan._repr_html_(), flags=re.S)
    )
    yield from _raw(shown)
    yield from _raw(html.unescape(re.sub(r'data:[^"]*|<[^>]*>', "", page)))
    for part in explain(plan).parts:
        if part.module not in html.unescape(page):
            yield f"the page does not tell of {part.module}"
