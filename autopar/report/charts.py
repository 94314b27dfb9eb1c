"""Figures of layouts per module and of memory by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.plans import KERNELS_BUFFERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.distributed.tensor import Shard

from autopar.breakdown import INPUTS, ModulePart, breakdown, peak_kinds
from autopar.core.units import seconds, size
from autopar.plans import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


# --------------------------------------------------------------------------------------------------
# Colours, canvas and axes of all figures. matplotlib is imported when the first figure is drawn.

COLOURS = {
    "data": "#5b8db8",
    "sequence": "#5aa469",
    "space": "#3f8f8b",
    "heads": "#a77bb5",
    "experts": "#c9a227",
    "tensor": "#e8924a",
    "replicated": "#e3e3e3",
    "ZeRO-3": "#2f5d8a",
    "ZeRO-2": "#8fb4d6",
    "ZeRO-1": "#c5d9ec",
    "sharded": "#f0c08d",
    "whole": "#f1f1f1",
    "compute": "#4a4f57",
    "communication": "#d1605e",
}
MEMORY_COLOURS = {
    "parameters": "#5b8db8",
    "optimizer": "#8fb4d6",
    "copies": "#3f7a8c",
    KERNELS_BUFFERS: "#7a6f9b",
    "gradients": "#e8924a",
    "activations": "#5aa469",
    "transient": "#b9b9b9",
    "buffers": "#a77bb5",
    "inputs": "#cdb4d6",
}
# background colours on which text is dark
LIGHT = ("replicated", "whole", "sharded", "ZeRO-2", "ZeRO-1")
INK, FAINT = "#2b2b2b", "#8a8a8a"


def canvas(width: float, height: float, inside: SubFigure | None = None) -> Any:
    """Return a new figure, or the given part of a figure.

    Args:
        width, height: size of the figure in inches.
        inside: a part of another figure, which is returned unchanged.

    Raises:
        AutoparError: if matplotlib is missing.
    """
    if inside is not None:
        return inside
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutoparError(
            "figures need matplotlib, which is not installed", remedy='pip install "autopar[plot]"'
        ) from error
    figure: Figure = Figure(
        figsize=(width, height), dpi=110, facecolor="white", layout="constrained"
    )
    return figure


def quiet(axes: Axes, *keep: str) -> Axes:
    """Remove the tick marks and the frame, except for the named sides."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(FAINT)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    return axes


GIB = 2**30
_ROW_INCHES = 0.27


def shown(parts: Iterable[ModulePart]) -> tuple[ModulePart, ...]:
    """Return the parts to draw: all except the batch."""
    return tuple(part for part in parts if part.module != INPUTS)


def layouts_height(plan: Plan) -> float:
    """Return the height of `layouts` in inches."""
    return 1.5 + _ROW_INCHES * len(shown(breakdown(plan)))


def layouts(plan: Plan, *, inside: SubFigure | None = None, stage: str = "") -> Figure:
    """Draw one row per module, repeated layers merged: its parallelism on every mesh axis, the
    storage of its weights, and its time.

    Args:
        stage: name of the plan in the title if it is the plan of a stage; times are then those of
            one microbatch.
    """
    parts = shown(breakdown(plan))
    figure: Any = canvas(11.5, layouts_height(plan), inside)
    num_axes = len(plan.mesh.axes)
    computing, storage_axes, times = figure.subplots(
        1, 3, sharey=True, width_ratios=(1.05 * num_axes, 0.95 * num_axes, 3.6)
    )
    heads = [f"{axis.name}\n{axis.size}" for axis in plan.mesh.axes]
    _grid(
        computing,
        [p.parallelism for p in parts],
        [p.parallelism for p in parts],
        heads,
        "computes by",
    )
    _grid(
        storage_axes,
        [_describe_rest(p, num_axes) for p in parts],
        [_codes(p, num_axes) for p in parts],
        heads,
        "weights rest",
    )
    computing.set_yticks(range(len(parts)), [_row_name(p) for p in parts])
    computing.set_ylim(len(parts) - 0.5, -0.5)
    for tick, part in zip(computing.get_yticklabels(), parts, strict=True):
        tick.set_color(INK if len(part.instances) > 1 else "#5a5a5a")
    _times(times, parts, "microbatch" if stage else "step")
    used_words = {w for p in parts for w in (*p.parallelism, *_describe_rest(p, num_axes)) if w}
    _legend(
        figure,
        [kind for kind in COLOURS if kind in used_words or kind in ("compute", "communication")],
    )
    name = stage or plan.fingerprint.model_name or "model"
    of = "a microbatch" if stage else "step"
    figure.suptitle(
        f"{name} on {plan.mesh}: {of} {seconds(plan.prediction.step_s)}",
        fontsize=11,
        x=0.01,
        ha="left",
        color=INK,
    )
    figure_of_it: Figure = figure
    return figure_of_it


def _row_name(part: ModulePart) -> str:
    return f"{part.name}   ×{len(part.instances)}" if len(part.instances) > 1 else part.name


def _describe_rest(part: ModulePart, num_axes: int) -> tuple[str, ...]:
    """Return how the weights are stored, per axis: gathered for use, sharded as used, replicated;
    empty without weights.
    """
    if not part.weights:
        return ("",) * num_axes
    storage = _main_weight(part).storage
    return tuple(
        part.sharded[a] or ("sharded" if isinstance(storage.placements[a], Shard) else "whole")
        for a in range(num_axes)
    )


def _codes(part: ModulePart, num_axes: int) -> tuple[str, ...]:
    """Return the storage layout as a code per axis; the last code shows whether it is in host
    memory.
    """
    if not part.weights:
        return ("",) * num_axes
    storage = _main_weight(part).storage
    *first, last = str(storage.on_device()).split()
    return (*first, f"{last} host" if storage.host else last)


def _main_weight(part: ModulePart) -> Any:
    return next((w for w in part.weights if w.name != "bias"), part.weights[0])


def _grid(
    axes: Axes,
    kinds: Sequence[Sequence[str]],
    texts: Sequence[Sequence[str]],
    heads: Sequence[str],
    title: str,
) -> None:
    """Draw coloured cells, a row per module and a column per mesh axis."""
    from matplotlib.patches import Rectangle

    for row, (row_kinds, row_texts) in enumerate(zip(kinds, texts, strict=True)):
        for column, (kind, text) in enumerate(zip(row_kinds, row_texts, strict=True)):
            if kind:
                axes.add_patch(
                    Rectangle(
                        (column - 0.48, row - 0.44),
                        0.96,
                        0.88,
                        facecolor=COLOURS[kind],
                        edgecolor="none",
                    )
                )
                ink = INK if kind in LIGHT else "white"
                axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=ink)
    quiet(axes)
    axes.set_xlim(-0.5, len(heads) - 0.5)
    axes.set_xticks(range(len(heads)), heads)
    axes.xaxis.tick_top()
    axes.set_title(title, fontsize=9, color=INK, pad=8)


def _times(axes: Axes, parts: Sequence[ModulePart], of: str) -> None:
    """Draw compute and communication per module, all copies together."""
    rows = range(len(parts))
    compute = [p.compute_s * 1e3 for p in parts]
    communication = [p.communication_s * 1e3 for p in parts]
    axes.barh(rows, compute, 0.66, color=COLOURS["compute"])
    axes.barh(rows, communication, 0.66, left=compute, color=COLOURS["communication"])
    longest = max((c + m for c, m in zip(compute, communication, strict=True)), default=1.0)
    for row, part in zip(rows, parts, strict=True):
        total = part.compute_s + part.communication_s
        if total > 0:
            axes.text(
                total * 1e3 + 0.01 * longest,
                row,
                seconds(total),
                va="center",
                fontsize=7,
                color=FAINT,
            )
    quiet(axes)
    axes.set_xlim(0, 1.14 * longest)
    axes.set_xticks([])
    axes.set_title(f"time per {of}, all copies", fontsize=9, color=INK, pad=8)


def _legend(figure: Any, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    names = {
        "sharded": "sharded as used",
        "ZeRO-1": "copy kept for the step (ZeRO-1)",
        "ZeRO-2": "copy kept to backward (ZeRO-2)",
        "ZeRO-3": "copy freed after use (ZeRO-3)",
    }
    patches = [Patch(facecolor=COLOURS[kind], label=names.get(kind, kind)) for kind in kinds]
    figure.legend(
        handles=patches,
        loc="outside lower left",
        ncols=len(patches),
        fontsize=8,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.4,
    )


def memory(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """Draw the predicted bytes per device by kind, and their sum at the peak against the budget."""
    figure: Any = canvas(11.5, 2.9, inside)
    axes: Axes = figure.subplots()
    kinds = {kind: plan.prediction.memory_bytes.get(kind, 0) / GIB for kind in MEMORY_COLOURS}
    kinds = {kind: value for kind, value in kinds.items() if value > 0}
    peak = plan.prediction.peak_bytes
    rows = list(kinds)
    for row, kind in enumerate(rows, start=1):
        axes.barh(row, kinds[kind], 0.66, color=MEMORY_COLOURS[kind])
    peak_bar(axes, plan.prediction.memory_bytes, peak)
    limit = max(peak / GIB, *kinds.values()) if kinds else 1.0
    budget = float(plan.options.get("memory_bytes") or 0.0)
    near = 0 < budget / GIB < 4 * limit
    width = 1.18 * max(limit, budget / GIB) if near else 1.3 * limit
    for row, value in enumerate((peak / GIB, *kinds.values())):
        axes.text(value + 0.006 * width, row, size(value * GIB), va="center", fontsize=8, color=INK)
    if near:
        axes.axvline(budget / GIB, color=COLOURS["communication"], linestyle="--", linewidth=1.2)
        axes.text(
            budget / GIB,
            -0.62,
            f"budget {size(budget)} ",
            ha="right",
            fontsize=8,
            color=COLOURS["communication"],
        )
    elif budget:
        axes.text(
            width,
            0,
            f"budget {size(budget)} →",
            ha="right",
            va="center",
            fontsize=8,
            color=COLOURS["communication"],
        )
    quiet(axes, "left")
    axes.set_yticks(range(len(rows) + 1), ["peak", *rows])
    axes.set_ylim(len(rows) + 0.5, -0.9)
    axes.set_xlim(0, width)
    axes.set_xticks([])
    axes.set_title("memory per device, predicted", fontsize=10, color=INK, loc="left")
    figure_of_it: Figure = figure
    return figure_of_it


def peak_bar(axes: Axes, kinds: Mapping[str, int], peak_bytes: int, row: int = 0) -> None:
    """Draw the peak as a stack of its kinds of memory.

    Args:
        axes: axes to draw on; the horizontal axis is in GiB.
        kinds: bytes by kind.
        peak_bytes: the peak in bytes.
        row: vertical position.
    """
    start = 0.0
    for kind, num_bytes in peak_kinds(kinds, peak_bytes).items():
        axes.barh(row, num_bytes / GIB, 0.66, left=start, color=MEMORY_COLOURS[kind])
        start += num_bytes / GIB
