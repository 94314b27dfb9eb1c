"""Pictures of a plan with a pipeline: its schedule, and the memory of its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.breakdown import rank_memory
from autopar.planning.schedules import simulate
from autopar.planning.steps import simulated_phases_s
from autopar.plans import Pipeline, Plan
from autopar.report.canvas import COLOURS, FAINT, INK, MEMORY_COLOURS, canvas, quiet
from autopar.report.figures import GIB, peak_bar
from autopar.units import microbatches, seconds, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_SHADES = {"forward": "#5b8db8", "backward": "#5aa469"}
_LIGHTER = 0.55  # opacity of a device's last stage, where it holds several; those before lie between it and full
_NUMBERED = 0.006  # share of the step from which on a bar is wide enough for its number
_ROW_INCHES = 0.34


def schedule_height(plan: Plan) -> float:
    """Inches that `schedule` needs; `stage_memory` needs as much."""
    return 1.3 + _ROW_INCHES * _pipeline(plan).num_ranks


def schedule(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """One row per rank: forward and backward of each microbatch, with its number, as soon as they can run; lighter for a later stage of
    the rank.

    A microbatch's share of the optimizer's time, with which stages are priced, is drawn in its backward.
    """
    pipeline = _pipeline(plan)
    figure: Any = canvas(11.5, schedule_height(plan), inside)
    axes: Axes = figure.subplots()
    times = [simulated_phases_s(stage) for stage in pipeline.stages]
    rows, chunks = pipeline.num_ranks, pipeline.num_chunks
    bars = simulate(pipeline.schedule, [f for f, _ in times], [b for _, b in times], pipeline.num_microbatches, chunks)
    end = max(bar.start_s + bar.duration_s for bar in bars)
    for bar in bars:
        row, opacity = bar.stage % rows, 1.0 - (1.0 - _LIGHTER) * (bar.stage // rows) / max(chunks - 1, 1)
        colour = (_SHADES[bar.phase], opacity)
        axes.barh(row, bar.duration_s, 0.8, left=bar.start_s, color=colour, edgecolor="white", linewidth=0.6)
        if bar.duration_s > _NUMBERED * end:
            axes.text(bar.start_s + bar.duration_s / 2, row, str(bar.microbatch), ha="center", va="center", fontsize=7, color="white")
    quiet(axes, "bottom")
    axes.set_yticks(range(rows), [_row_name(pipeline, number) for number in range(rows)])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xticks([end * part / 4 for part in range(5)], [seconds(end * part / 4) for part in range(5)])
    title = f"{pipeline.schedule}, {microbatches(pipeline.num_microbatches)}: {seconds(end)}; priced at {seconds(plan.prediction.step_s)}"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    _legend(axes)
    figure_of_it: Figure = figure
    return figure_of_it


def stage_memory(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """Predicted peak of each rank's devices, with what makes it up, and the budget; a rank holds one stage or several."""
    pipeline = _pipeline(plan)
    figure: Any = canvas(11.5, schedule_height(plan), inside)
    axes: Axes = figure.subplots()
    ranks = [rank_memory(pipeline, rank) for rank in range(pipeline.num_ranks)]
    peaks = [peak / GIB for peak, _ in ranks]
    budgets = [plan.budget_of(rank) / GIB for rank in range(len(ranks))]
    near = 0 < max(budgets) < 4 * max(peaks)
    width = 1.18 * max(*peaks, max(budgets) if near else 0.0)
    for number, (peak, kinds) in enumerate(ranks):
        peak_bar(axes, kinds, number)
        said = f"{size(peak)}, {' and '.join(map(str, pipeline.num_in_flight[number :: len(ranks)]))} in flight"
        axes.text(peaks[number] + 0.006 * width, number, said, va="center", fontsize=8, color=INK)
    if near:
        colour, rows = COLOURS["communication"], range(len(ranks))
        axes.vlines(budgets, [row - 0.5 for row in rows], [row + 0.5 for row in rows], color=colour, linestyle="--", linewidth=1.2)
    quiet(axes, "left")
    axes.set_yticks(range(len(peaks)), [_row_name(pipeline, number) for number in range(len(peaks))])
    axes.set_ylim(len(peaks) - 0.5, -0.5)
    axes.set_xlim(0, width)
    axes.set_xticks([])
    of = f", budget {' and '.join(size(budget * GIB) for budget in dict.fromkeys(budgets))}" if max(budgets) else ""
    each = "rank" if pipeline.rank_bytes else "stage"
    axes.set_title(f"peak per device of each {each}, predicted{of}", fontsize=10, color=INK, loc="left")
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=kind) for kind, colour in MEMORY_COLOURS.items()]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=len(patches), fontsize=8, frameon=False)
    figure_of_it: Figure = figure
    return figure_of_it


def _pipeline(plan: Plan) -> Pipeline:
    assert plan.pipeline is not None, "only a plan with stages has a schedule"
    return plan.pipeline


def _row_name(pipeline: Pipeline, number: int) -> str:
    """Of a rank: the parts of the model with which its stages begin."""
    begins = [pipeline.modules[stage - 1] if stage else "the model" for stage in range(number, len(pipeline.stages), pipeline.num_ranks)]
    return f"{number}  {', '.join(begins)}"


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=phase) for phase, colour in _SHADES.items()]
    axes.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, labelcolor=FAINT,
    )  # fmt: skip
