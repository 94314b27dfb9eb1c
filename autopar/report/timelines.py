"""Figures of time: the timeline of a step with lanes for compute and communication, and the
schedule and memory of a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autopar.core.units import seconds
from autopar.plans import Plan
from autopar.report.charts import COLOURS, FAINT, INK, canvas, quiet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


from typing import TYPE_CHECKING

from autopar.breakdown import rank_memory
from autopar.core.units import microbatches, size
from autopar.planner.pipeline.step_schedule import simulate, simulated_phases_s
from autopar.plans import Pipeline
from autopar.report.charts import GIB, MEMORY_COLOURS, peak_bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


Bar = tuple[str, str, str, float, float]  # as in `Prediction.timeline`
_LANES = ("compute", "communication")
_SHADES = {
    "compute": ("#4a4f57", "#8d949e"),
    "communication": ("#d1605e", "#eaa9a6"),
}  # neighbouring layers differ


def timeline(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """Draw the whole step and, if layers repeat, forward and backward of one layer below it.
    Overlapped communication is drawn as simulated.
    """
    bars = plan.prediction.timeline
    figure: Any = canvas(11.5, 4.0, inside)
    layer = _typical_layer(bars)
    phases = [
        phase for phase in ("forward", "backward") if any(bar[:2] == (layer, phase) for bar in bars)
    ]
    rows = figure.subplots(2 if layer else 1, len(phases) if layer else 1, squeeze=False)
    if layer:
        grid = rows[0][0].get_gridspec()
        for axes in rows[0]:
            axes.remove()
        step_axes = figure.add_subplot(grid[0, :])
        for axes, phase in zip(rows[1], phases, strict=True):
            _zoom(
                axes,
                [bar for bar in bars if bar[0] == layer and bar[1] == phase],
                f"{layer}, {phase}",
            )
    else:
        step_axes = rows[0][0]
    _draw_step(step_axes, bars)
    figure_of_it: Figure = figure
    return figure_of_it


def _typical_layer(bars: Sequence[Bar]) -> str:
    """Return the middle one of the labels that end in a number; empty if there is none."""
    layers = list(dict.fromkeys(label for label, *_ in bars if label.rpartition(".")[2].isdigit()))
    return layers[len(layers) // 2] if len(layers) > 1 else ""


def _draw_step(axes: Axes, bars: Sequence[Bar]) -> None:
    """Draw every bar. Layers alternate in shade; a line marks the start of backward, if any."""
    order = {label: i for i, label in enumerate(dict.fromkeys(bar[0] for bar in bars))}
    end = max((start + duration for *_, start, duration in bars), default=1.0)
    for lane, kind in enumerate(_LANES):
        for shade in (0, 1):
            spans = [(b[3], b[4]) for b in bars if b[2] == kind and order[b[0]] % 2 == shade]
            axes.broken_barh(
                spans, (lane - 0.36, 0.72), facecolors=_SHADES[kind][shade], linewidth=0
            )
    turn = next((bar[3] for bar in bars if bar[1] == "backward"), end)
    phases = [(0.0, turn, "forward")]
    if turn < end:  # inference has no backward
        axes.axvline(turn, color=INK, linewidth=0.9, linestyle=":")
        phases.append((turn, end, "backward"))
    for start, stop, phase in phases:
        axes.text(
            (start + stop) / 2,
            -0.62,
            f"{phase} {seconds(stop - start)}",
            ha="center",
            fontsize=8,
            color=FAINT,
        )
    totals = (sum(bar[4] for bar in bars if bar[2] == kind) for kind in _LANES)
    _lanes(
        axes,
        0.0,
        end,
        [f"{kind}\n{seconds(total)}" for kind, total in zip(_LANES, totals, strict=True)],
    )
    axes.set_title(
        "one step, layers in alternating shades", fontsize=10, color=INK, loc="left", pad=14
    )


def _zoom(axes: Axes, bars: Sequence[Bar], title: str) -> None:
    """Draw one layer in one phase as consecutive bars."""
    start, end = min(bar[3] for bar in bars), max(bar[3] + bar[4] for bar in bars)
    for lane, kind in enumerate(_LANES):
        spans = [(bar[3], bar[4]) for bar in bars if bar[2] == kind]
        axes.broken_barh(
            spans, (lane - 0.36, 0.72), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.4
        )
    _lanes(axes, start, end, list(_LANES))
    axes.set_xticks(
        list(_ticks(start, end)), [seconds(tick - start) for tick in _ticks(start, end)]
    )
    axes.set_title(f"{title}: {seconds(end - start)}", fontsize=9, color=INK, loc="left")


def _lanes(axes: Axes, start: float, end: float, names: Sequence[str]) -> None:
    quiet(axes, "bottom")
    axes.set_yticks(range(len(_LANES)), names)
    axes.set_ylim(len(_LANES) - 0.5, -0.7)
    axes.set_xlim(start, end)
    axes.set_xticks(list(_ticks(start, end)), [seconds(tick) for tick in _ticks(start, end)])


def _ticks(start: float, end: float) -> Iterator[float]:
    yield from (start + (end - start) * part / 4 for part in range(5))


# --------------------------------------------------------------------------------------------------
# Figures of a plan with a pipeline: its schedule, and the memory of its stages.

_STAGE_SHADES = {"forward": "#5b8db8", "backward": "#5aa469"}
# opacity of the last stage of a device with several stages; earlier stages lie between it and 1
_LIGHTER = 0.55
_NUMBERED = 0.006  # share of the step above which a bar is wide enough for its number
_ROW_INCHES = 0.34


def schedule_height(plan: Plan) -> float:
    """Return the height of `schedule` and `stage_memory` in inches."""
    return 1.3 + _ROW_INCHES * plan.as_pipeline.num_ranks


def schedule(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """Draw one row per rank: forward and backward of each numbered microbatch, as early as
    possible; later stages of a rank are lighter.

    Backward includes the microbatch's share of the optimizer time, which is part of the price of
    stages.
    """
    pipeline = plan.as_pipeline
    figure: Any = canvas(11.5, schedule_height(plan), inside)
    axes: Axes = figure.subplots()
    times = [simulated_phases_s(stage) for stage in pipeline.stages]
    rows, chunks = pipeline.num_ranks, pipeline.num_chunks
    bars = simulate(
        pipeline.schedule,
        [f for f, _ in times],
        [b for _, b in times],
        pipeline.num_microbatches,
        chunks,
    )
    end = max(bar.start_s + bar.duration_s for bar in bars)
    for bar in bars:
        row, opacity = (
            bar.stage % rows,
            1.0 - (1.0 - _LIGHTER) * (bar.stage // rows) / max(chunks - 1, 1),
        )
        colour = (_STAGE_SHADES[bar.phase], opacity)
        axes.barh(
            row,
            bar.duration_s,
            0.8,
            left=bar.start_s,
            color=colour,
            edgecolor="white",
            linewidth=0.6,
        )
        if bar.duration_s > _NUMBERED * end:
            axes.text(
                bar.start_s + bar.duration_s / 2,
                row,
                str(bar.microbatch),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
    quiet(axes, "bottom")
    axes.set_yticks(range(rows), [_row_name(pipeline, number) for number in range(rows)])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xticks(
        [end * part / 4 for part in range(5)], [seconds(end * part / 4) for part in range(5)]
    )
    title = (
        f"{pipeline.schedule}, {microbatches(pipeline.num_microbatches)}: {seconds(end)}; "
        f"predicted {seconds(plan.prediction.step_s)}"
    )
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    _legend(axes)
    figure_of_it: Figure = figure
    return figure_of_it


def stage_memory(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """Draw the predicted peak of each rank's devices by kind, and the budget. A rank holds one
    stage or several.
    """
    pipeline = plan.as_pipeline
    figure: Any = canvas(11.5, schedule_height(plan), inside)
    axes: Axes = figure.subplots()
    ranks = [rank_memory(pipeline, rank) for rank in range(pipeline.num_ranks)]
    peaks = [peak / GIB for peak, _ in ranks]
    budgets = [plan.budget_of(rank) / GIB for rank in range(len(ranks))]
    near = 0 < max(budgets) < 4 * max(peaks)
    width = 1.18 * max(*peaks, max(budgets) if near else 0.0)
    for number, (peak, kinds) in enumerate(ranks):
        peak_bar(axes, kinds, peak, number)
        text = (
            f"{size(peak)}, {' and '.join(map(str, pipeline.num_in_flight[number :: len(ranks)]))}"
            " in flight"
        )
        axes.text(peaks[number] + 0.006 * width, number, text, va="center", fontsize=8, color=INK)
    if near:
        colour, rows = COLOURS["communication"], range(len(ranks))
        axes.vlines(
            budgets,
            [row - 0.5 for row in rows],
            [row + 0.5 for row in rows],
            color=colour,
            linestyle="--",
            linewidth=1.2,
        )
    quiet(axes, "left")
    axes.set_yticks(
        range(len(peaks)), [_row_name(pipeline, number) for number in range(len(peaks))]
    )
    axes.set_ylim(len(peaks) - 0.5, -0.5)
    axes.set_xlim(0, width)
    axes.set_xticks([])
    of = (
        f", budget {' and '.join(size(budget * GIB) for budget in dict.fromkeys(budgets))}"
        if max(budgets)
        else ""
    )
    title = f"peak per device of each {pipeline.rank_word}, predicted{of}"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=kind) for kind, colour in MEMORY_COLOURS.items()]
    axes.legend(
        handles=patches,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.02),
        ncols=len(patches),
        fontsize=8,
        frameon=False,
    )
    figure_of_it: Figure = figure
    return figure_of_it


def _row_name(pipeline: Pipeline, number: int) -> str:
    """Return the name of a rank's row: the modules with which its stages begin."""
    begins = [
        pipeline.modules[stage - 1] if stage else "the model"
        for stage in range(number, len(pipeline.stages), pipeline.num_ranks)
    ]
    return f"{number}  {', '.join(begins)}"


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=phase) for phase, colour in _STAGE_SHADES.items()]
    axes.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=2,
        fontsize=8,
        frameon=False,
        labelcolor=FAINT,
    )
