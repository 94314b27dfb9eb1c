"""One page with everything: a PNG, an SVG or PDF, or an HTML page that stands alone."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.explanation import explain
from autopar.plans import Plan
from autopar.report.canvas import canvas
from autopar.report.figures import layouts, layouts_height, memory
from autopar.report.timeline import timeline

_PICTURES = (".png", ".svg", ".pdf")
_HTML = """<!doctype html>
<html><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;margin:2em;max-width:1300px}} img{{max-width:100%;display:block;margin:1em 0}}</style>
</head><body>
{body}
</body></html>
"""
_HEIGHTS = (2.9, 4.0)  # of the memory figure and the time line, in inches


def report(plan: Plan, path: str | Path) -> Path:
    """Write layouts, memory and time line of `plan`: one picture (.png, .svg, .pdf), or a page (.html) with the tables too.

    Raises:
        AutoparError: for another suffix, where the file cannot be written, or matplotlib is missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (*_PICTURES, ".html"):
        raise AutoparError(
            f"a report cannot be written as {path.name!r}", remedy=f"name a file that ends in {', '.join(_PICTURES)} or .html"
        )
    try:
        if suffix == ".html":
            path.write_text(_page(plan), encoding="utf-8")
        else:
            picture(plan).savefig(path)
    except OSError as error:
        raise AutoparError(f"cannot write the report: {error.strerror}", where=str(path), remedy="check the path") from error
    return path


def picture(plan: Plan) -> Any:
    """All figures in one."""
    heights = (layouts_height(plan), *_HEIGHTS)
    figure = canvas(11.5, sum(heights))
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=heights)
    layouts(plan, inside=top)
    memory(plan, inside=middle)
    timeline(plan, inside=bottom)
    return figure


def _page(plan: Plan) -> str:
    title = html.escape(f"{plan.fingerprint.model_name or 'model'} on {plan.mesh}")
    figures = "\n".join(f'<img src="data:image/png;base64,{_png(draw(plan))}">' for draw in (layouts, memory, timeline))
    return _HTML.format(title=title, body=f"{figures}\n{explain(plan)._repr_html_()}")


def _png(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return base64.b64encode(out.getvalue()).decode()
