"""What the figures share: colours, an empty canvas, quiet axes. matplotlib is imported when the first figure is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.plans import KERNELS_BUFFERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

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
LIGHT = ("replicated", "whole", "sharded", "ZeRO-2", "ZeRO-1")  # colours on which text is dark
INK, FAINT = "#2b2b2b", "#8a8a8a"


def canvas(width: float, height: float, inside: SubFigure | None = None) -> Any:
    """A figure of `width` × `height` inches, or the part of one that is given.

    Raises:
        AutoparError: where matplotlib is missing.
    """
    if inside is not None:
        return inside
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutoparError("figures need matplotlib, which is not installed", remedy='pip install "autopar[plot]"') from error
    figure: Figure = Figure(figsize=(width, height), dpi=110, facecolor="white", layout="constrained")
    return figure


def quiet(axes: Axes, *keep: str) -> Axes:
    """Take off the frame but for the sides that are named, and the tick marks."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_color(FAINT)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    return axes
