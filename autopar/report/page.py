"""Write a report with all figures: a PNG, an SVG, a PDF, or a self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from autopar.core.text_files import write_file
from autopar.errors import AutoparError
from autopar.explanation import explain
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
_MEMORY_HEIGHT, _TIMELINE_HEIGHT = 2.9, 4.0  # inches


def report(plan: Plan, path: str | Path, *, flips: Sequence[Flip] = ()) -> Path:
    """Write layouts, memory and timeline of `plan`, and the schedule of a pipeline. The result is a
    picture (.png, .svg, .pdf), or a page (.html) that also has the tables, including `flips`
    (`autopar.flips`).

    Raises:
        AutoparError: if the suffix is unknown, the file cannot be written, or matplotlib is
            missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (*_PICTURES, ".html"):
        raise AutoparError(
            f"cannot write a report to {path.name!r}",
            remedy=f"pass a file name that ends in {', '.join(_PICTURES)} or .html",
        )
    content = _page(plan, flips) if suffix == ".html" else _picture_file(plan, suffix[1:])
    write_file(path, content, "the report")
    return path


def _picture_file(plan: Plan, kind: str) -> bytes:
    """Return the content of a file with all figures of a plan.

    Args:
        plan: the plan.
        kind: the format: ``"png"``, ``"svg"`` or ``"pdf"``.
    """
    content = io.BytesIO()
    picture(plan).savefig(content, format=kind)
    return content.getvalue()


def picture(plan: Plan) -> Any:
    """Draw all figures of a plan as one picture."""
    figures = [each for each in _figures(plan) if each.is_in_picture]
    heights = [each.height for each in figures]
    figure = canvas(11.5, sum(heights))
    places = figure.subfigures(len(heights), 1, height_ratios=heights)
    for inner_figure, inside in zip(figures, places, strict=True):
        inner_figure.draw(inside=inside)
    return figure


class _Figure(NamedTuple):
    """A figure of a report, with its height in inches."""

    height: float
    draw: Callable[..., Any]
    is_in_picture: bool = True


def _figures(plan: Plan) -> list[_Figure]:
    """Return the figures in the order of the page. Of equal stages, only the first is drawn."""
    if plan.pipeline is None:
        return [
            _Figure(layouts_height(plan), partial(layouts, plan)),
            _Figure(_MEMORY_HEIGHT, partial(memory, plan)),
            _Figure(_TIMELINE_HEIGHT, partial(timeline, plan)),
        ]
    figures = [
        _Figure(schedule_height(plan), partial(draw, plan)) for draw in (schedule, stage_memory)
    ]
    for section in explain(plan).sections:
        stage = section.explanation.plan
        figures += (
            _Figure(layouts_height(stage), partial(layouts, stage, stage=section.name)),
            _Figure(_TIMELINE_HEIGHT, partial(timeline, stage), is_in_picture=False),
        )
    return figures


def _page(plan: Plan, flips: Sequence[Flip]) -> str:
    title = html.escape(f"{plan.fingerprint.model_name or 'model'} on {plan.mesh}")
    figures = "\n".join(
        f'<img src="data:image/png;base64,{_png(each.draw())}">' for each in _figures(plan)
    )
    return _HTML.format(title=title, body=f"{figures}\n{explain(plan, flips=flips)._repr_html_()}")


def _png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return base64.b64encode(out.getvalue()).decode()
