"""Pictures of a plan with a pipeline: its schedule, and the memory of its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.planning.schedules import simulate
from autopar.plans import Pipeline, Plan
from autopar.report.canvas import COLOURS, FAINT, INK, MEMORY_COLOURS, canvas, quiet
from autopar.report.figures import GIB, peak_bar
from autopar.units import seconds, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_SHADES = {"forward": "#5b8db8", "backward": "#5aa469"}
_NUMBERED = 0.006  # share of the step from which on a bar is wide enough for its number
_ROW_INCHES = 0.34


def schedule_height(plan: Plan) -> float:
    """Inches that `schedule` needs; `stage_memory` needs as much."""
    return 1.3 + _ROW_INCHES * len(_pipeline(plan).stages)


def schedule(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """One row per stage: forward and backward of each microbatch, with its number, as soon as they can run.

    A microbatch's share of the optimizer's time, with which stages are priced, is drawn in its backward.
    """
    pipeline = _pipeline(plan)
    figure: Any = canvas(11.5, schedule_height(plan), inside)
    axes: Axes = figure.subplots()
    times = [_phases(stage) for stage in pipeline.stages]
    bars = simulate(pipeline.schedule, [f for f, _ in times], [b for _, b in times], pipeline.num_microbatches)
    end = max(bar.start_s + bar.duration_s for bar in bars)
    for bar in bars:
        axes.barh(bar.stage, bar.duration_s, 0.8, left=bar.start_s, color=_SHADES[bar.phase], edgecolor="white", linewidth=0.6)
        if bar.duration_s > _NUMBERED * end:
            axes.text(bar.start_s + bar.duration_s / 2, bar.stage, str(bar.microbatch), ha="center", va="center", fontsize=7, color="white")
    quiet(axes, "bottom")
    axes.set_yticks(range(len(times)), [_row_name(pipeline, number) for number in range(len(times))])
    axes.set_ylim(len(times) - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.set_xticks([end * part / 4 for part in range(5)], [seconds(end * part / 4) for part in range(5)])
    title = f"{pipeline.schedule}, {pipeline.num_microbatches} microbatches: {seconds(end)}; priced at {seconds(plan.prediction.step_s)}"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    _legend(axes)
    figure_of_it: Figure = figure
    return figure_of_it


def stage_memory(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """Predicted peak of each stage's devices, with what makes it up, and the budget."""
    pipeline = _pipeline(plan)
    figure: Any = canvas(11.5, schedule_height(plan), inside)
    axes: Axes = figure.subplots()
    peaks = [stage.prediction.peak_bytes / GIB for stage in pipeline.stages]
    budget = float(plan.options.get("memory_bytes") or 0.0) / GIB
    near = 0 < budget < 4 * max(peaks)
    width = 1.18 * max(*peaks, budget if near else 0.0)
    for number, stage in enumerate(pipeline.stages):
        peak_bar(axes, {kind: stage.prediction.memory_bytes.get(kind, 0) / GIB for kind in MEMORY_COLOURS}, number)
        said = f"{size(stage.prediction.peak_bytes)}, {pipeline.num_in_flight[number]} in flight"
        axes.text(peaks[number] + 0.006 * width, number, said, va="center", fontsize=8, color=INK)
    if near:
        axes.axvline(budget, color=COLOURS["communication"], linestyle="--", linewidth=1.2)
    quiet(axes, "left")
    axes.set_yticks(range(len(peaks)), [_row_name(pipeline, number) for number in range(len(peaks))])
    axes.set_ylim(len(peaks) - 0.5, -0.5)
    axes.set_xlim(0, width)
    axes.set_xticks([])
    of = f", budget {size(budget * GIB)}" if budget else ""
    axes.set_title(f"peak per device of each stage, predicted{of}", fontsize=10, color=INK, loc="left")
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=kind) for kind, colour in MEMORY_COLOURS.items()]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=len(patches), fontsize=8, frameon=False)
    figure_of_it: Figure = figure
    return figure_of_it


def _pipeline(plan: Plan) -> Pipeline:
    assert plan.pipeline is not None, "only a plan with stages has a schedule"
    return plan.pipeline


def _phases(stage: Plan) -> tuple[float, float]:
    """Seconds of forward and of the rest of a microbatch."""
    whole_s = stage.prediction.simulated_s
    forward_s = min((bar[3] for bar in stage.prediction.timeline if bar[1] == "backward"), default=whole_s)
    return forward_s, whole_s - forward_s


def _row_name(pipeline: Pipeline, number: int) -> str:
    return f"{number}  {pipeline.modules[number - 1]}" if number else "0  the model"


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=phase) for phase, colour in _SHADES.items()]
    axes.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False, labelcolor=FAINT,
    )  # fmt: skip
