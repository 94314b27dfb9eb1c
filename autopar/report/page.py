"""One page with everything: a PNG, an SVG or PDF, or an HTML page that stands alone."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.explanation import StagedExplanation, explain
from autopar.plans import Flip, Plan
from autopar.report.charts import canvas, layouts, layouts_height, memory
from autopar.report.timelines import schedule, schedule_height, stage_memory, timeline

_PICTURES = (".png", ".svg", ".pdf")
_HTML = """<!doctype html>
<html><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;margin:2em;max-width:1300px}} \
img{{max-width:100%;display:block;margin:1em 0}}</style>
</head><body>
{body}
</body></html>
"""
_HEIGHTS = (2.9, 4.0)  # of the memory figure and the time line, in inches


def report(plan: Plan, path: str | Path, *, flips: Sequence[Flip] = ()) -> Path:
    """Write layouts, memory and time line of `plan`, of a pipeline its schedule too: one picture
    (.png, .svg, .pdf), or a page (.html) with the tables too, `flips` among them (`autopar.flips`).

    Raises:
        AutoparError: for another suffix, where the file cannot be written, or matplotlib is
            missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (*_PICTURES, ".html"):
        raise AutoparError(
            f"a report cannot be written as {path.name!r}",
            remedy=f"name a file that ends in {', '.join(_PICTURES)} or .html",
        )
    try:
        if suffix == ".html":
            path.write_text(_page(plan, flips), encoding="utf-8")
        else:
            picture(plan).savefig(path)
    except OSError as error:
        raise AutoparError(
            f"cannot write the report: {error.strerror}", where=str(path), remedy="check the path"
        ) from error
    return path


def picture(plan: Plan) -> Any:
    """Draw all figures of a plan in one."""
    if plan.pipeline is not None:
        return _staged_picture(plan)
    heights = (layouts_height(plan), *_HEIGHTS)
    figure = canvas(11.5, sum(heights))
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=heights)
    layouts(plan, inside=top)
    memory(plan, inside=middle)
    timeline(plan, inside=bottom)
    return figure


def _staged_picture(plan: Plan) -> Any:
    """Draw the schedule, the stages' memory, and the layouts of each stage; of equal neighbours the
    first."""
    sections = _sections(plan)
    heights = [schedule_height(plan)] * 2 + [layouts_height(stage) for _, stage in sections]
    figure = canvas(11.5, sum(heights))
    first, second, *others = figure.subfigures(len(heights), 1, height_ratios=heights)
    schedule(plan, inside=first)
    stage_memory(plan, inside=second)
    for (name, stage), inside in zip(sections, others, strict=True):
        layouts(stage, inside=inside, stage=name)
    return figure


def _sections(plan: Plan) -> list[tuple[str, Plan]]:
    """Return the stages that differ from the stage before them, with their names."""
    explained = explain(plan)
    assert isinstance(explained, StagedExplanation), "the plan has stages"
    return [(section.name, section.explanation.plan) for section in explained.sections]


def _figures(plan: Plan) -> Iterator[Any]:
    """Yield the figures one by one, in the order of a page."""
    if plan.pipeline is None:
        yield from (layouts(plan), memory(plan), timeline(plan))
        return
    yield from (schedule(plan), stage_memory(plan))
    for name, stage in _sections(plan):
        yield from (layouts(stage, stage=name), timeline(stage))


def _page(plan: Plan, flips: Sequence[Flip]) -> str:
    title = html.escape(f"{plan.fingerprint.model_name or 'model'} on {plan.mesh}")
    figures = "\n".join(
        f'<img src="data:image/png;base64,{_png(figure)}">' for figure in _figures(plan)
    )
    return _HTML.format(title=title, body=f"{figures}\n{explain(plan, flips=flips)._repr_html_()}")


def _png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return base64.b64encode(out.getvalue()).decode()
