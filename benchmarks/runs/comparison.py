"""Predicted and measured steps of published runs, as a table and as a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rich.table import Table

from benchmarks.common import Row, console_of
from benchmarks.regret import spearman

COLUMNS = (
    "source",
    "device",
    "runs",
    "median",
    "least",
    "most",
    "within 10 %",
    "within 25 %",
    "rank correlation",
)


def published_table(rows: Sequence[Row]) -> str:
    """Return the summary in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *summary(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def summarize(rows: Sequence[Row]) -> None:
    """Print, per source and device, predicted over measured seconds, and the agreement of their
    orders."""
    table = Table(title="predicted seconds of a step over measured ones")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("source", "device") else "right")
    for cells in summary(rows):
        table.add_row(*cells)
    console_of().print(table)


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the cells of `summarize`. The last line covers all runs."""
    groups = by_source(rows)
    timed = [row for some in groups.values() for row in some]
    return [_cells(*key, some) for key, some in (*groups.items(), (("all", ""), timed)) if some]


def by_source(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return (source, device) → runs that have both times."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("ratio"):
            found.setdefault((row["source"], row["gpu"]), []).append(row)
    return found


def _per_token(rows: Sequence[Row], scale: float) -> list[list[float]]:
    """Return the predicted and the measured time per token and device. Seconds of a step vary with
    the batch; the time per token varies with the plan."""
    tokens = [row["batch"] * row["seq"] / row["num_devices"] for row in rows]
    return [
        [scale * row[name] / num for row, num in zip(rows, tokens, strict=True)]
        for name in ("predicted_s", "measured_s")
    ]


def near(ratios: Sequence[float], share: float) -> float:
    """Return the share of ratios that are within `share` of 1."""
    return sum(abs(math.log(ratio)) <= math.log(1 + share) for ratio in ratios) / len(ratios)


def order_of(rows: Sequence[Row]) -> str:
    """Return the rank correlation of predicted and measured time per token and device; empty for
    one or two runs."""
    return f"{spearman(*_per_token(rows, 1.0)):.2f}" if len(rows) > 2 else ""


def _cells(source: str, gpu: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ratios = sorted(row["ratio"] for row in rows)
    words = f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
    return (
        source,
        gpu,
        str(len(rows)),
        *words,
        *(f"{near(ratios, share):.0%}" for share in (0.1, 0.25)),
        order_of(rows),
    )


def draw(rows: Sequence[Row], path: str) -> None:
    """Draw a point per run: microseconds per token and device, measured on the horizontal axis and
    predicted on the vertical one. Between the dotted lines they are within 25 % of each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    axes, ends = figure.add_subplot(), [math.inf, 0.0]
    for source, some in by_source(rows).items():
        predicted, measured = _per_token(some, 1e6)
        axes.scatter(
            measured, predicted, s=16, alpha=0.8, label=f"{' '.join(source)} ({len(some)})"
        )
        ends = [min(ends[0], *predicted, *measured), max(ends[1], *predicted, *measured)]
    ends = [ends[0] * 0.8, ends[1] * 1.25]
    for factor, style in ((1.0, "-"), (1.25, ":"), (0.8, ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="0.5", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="measured, µs per token and device",
        ylabel="predicted",
    )
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
