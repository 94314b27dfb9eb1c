"""The time line of a step: forward and backward, compute and communication in lanes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autopar.plans import Plan
from autopar.report.canvas import COLOURS, FAINT, INK, canvas, quiet
from autopar.units import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Bar = tuple[str, str, str, float, float]  # as in `Prediction.timeline`
_LANES = ("compute", "communication")
_SHADES = {"compute": ("#4a4f57", "#8d949e"), "communication": ("#d1605e", "#eaa9a6")}  # neighbouring layers differ


def timeline(plan: Plan, *, inside: SubFigure | None = None) -> Figure:
    """The whole step, and below it one layer's forward, and its backward if it has one, where layers repeat; with what runs beside
    compute, as simulated."""
    bars = plan.prediction.timeline
    figure: Any = canvas(11.5, 4.0, inside)
    layer = _typical_layer(bars)
    phases = [phase for phase in ("forward", "backward") if any(bar[:2] == (layer, phase) for bar in bars)]
    rows = figure.subplots(2 if layer else 1, len(phases) if layer else 1, squeeze=False)
    if layer:
        grid = rows[0][0].get_gridspec()
        for axes in rows[0]:
            axes.remove()
        whole = figure.add_subplot(grid[0, :])
        for axes, phase in zip(rows[1], phases, strict=True):
            _zoom(axes, [bar for bar in bars if bar[0] == layer and bar[1] == phase], f"{layer}, {phase}")
    else:
        whole = rows[0][0]
    _whole(whole, bars)
    figure_of_it: Figure = figure
    return figure_of_it


def _typical_layer(bars: Sequence[Bar]) -> str:
    """The label in the middle of those that end in a number, or an empty text."""
    layers = list(dict.fromkeys(label for label, *_ in bars if label.rpartition(".")[2].isdigit()))
    return layers[len(layers) // 2] if len(layers) > 1 else ""


def _whole(axes: Axes, bars: Sequence[Bar]) -> None:
    """Every bar; stretches of one layer alternate in shade; a line where backward begins, if it does."""
    order = {label: i for i, label in enumerate(dict.fromkeys(bar[0] for bar in bars))}
    end = max((start + duration for *_, start, duration in bars), default=1.0)
    for lane, kind in enumerate(_LANES):
        for shade in (0, 1):
            spans = [(b[3], b[4]) for b in bars if b[2] == kind and order[b[0]] % 2 == shade]
            axes.broken_barh(spans, (lane - 0.36, 0.72), facecolors=_SHADES[kind][shade], linewidth=0)
    turn = next((bar[3] for bar in bars if bar[1] == "backward"), end)
    phases = [(0.0, turn, "forward")]
    if turn < end:  # inference has no backward
        axes.axvline(turn, color=INK, linewidth=0.9, linestyle=":")
        phases.append((turn, end, "backward"))
    for start, stop, phase in phases:
        axes.text((start + stop) / 2, -0.62, f"{phase} {seconds(stop - start)}", ha="center", fontsize=8, color=FAINT)
    totals = (sum(bar[4] for bar in bars if bar[2] == kind) for kind in _LANES)
    _lanes(axes, 0.0, end, [f"{kind}\n{seconds(total)}" for kind, total in zip(_LANES, totals, strict=True)])
    axes.set_title("one step, layers in alternating shades", fontsize=10, color=INK, loc="left", pad=14)


def _zoom(axes: Axes, bars: Sequence[Bar], title: str) -> None:
    """One layer in one phase, bars one after the other."""
    start, end = min(bar[3] for bar in bars), max(bar[3] + bar[4] for bar in bars)
    for lane, kind in enumerate(_LANES):
        spans = [(bar[3], bar[4]) for bar in bars if bar[2] == kind]
        axes.broken_barh(spans, (lane - 0.36, 0.72), facecolors=COLOURS[kind], edgecolor="white", linewidth=0.4)
    _lanes(axes, start, end, list(_LANES))
    axes.set_xticks(list(_ticks(start, end)), [seconds(tick - start) for tick in _ticks(start, end)])
    axes.set_title(f"{title}: {seconds(end - start)}", fontsize=9, color=INK, loc="left")


def _lanes(axes: Axes, start: float, end: float, names: Sequence[str]) -> None:
    quiet(axes, "bottom")
    axes.set_yticks(range(len(_LANES)), names)
    axes.set_ylim(len(_LANES) - 0.5, -0.7)
    axes.set_xlim(start, end)
    axes.set_xticks(list(_ticks(start, end)), [seconds(tick) for tick in _ticks(start, end)])


def _ticks(start: float, end: float) -> Iterator[float]:
    yield from (start + (end - start) * part / 4 for part in range(5))
