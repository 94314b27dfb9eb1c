"""What explanations have in common: lines and tables that print in a terminal, as text and in a notebook."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 150  # columns of the text form; a terminal's own width is used where there is one
_HTML = '<pre style="line-height:1.15;font-family:monospace;white-space:pre;overflow-x:auto">{code}</pre>'


class Readable:
    """Something that renders as a sequence of rich renderables: `str`, `rich.print` and notebooks show the same."""

    def renderables(self) -> Iterator[RenderableType]:
        """Lines and tables, from top to bottom."""
        raise NotImplementedError

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=WIDTH, color_system=None, highlight=False, legacy_windows=False, force_jupyter=False)
        console.print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from self.renderables()

    def _repr_html_(self) -> str:
        console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_jupyter=False)
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_HTML)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[RenderableType]:
    """An empty line and a table; a column whose name starts with ``>`` is set to the right, one with ``<`` is not wrapped. A column that
    has nothing in any row is left out, and so is a table without rows."""
    if not rows:
        return
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    told = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    for column in (columns[place] for place in told):
        right, fixed = column.startswith(">"), column.startswith("<")
        made.add_column(column.lstrip("<>"), justify="right" if right else "left", no_wrap=right or fixed, overflow="fold")
    for row in rows:
        made.add_row(*(row[place] for place in told))
    yield Text()
    yield made
