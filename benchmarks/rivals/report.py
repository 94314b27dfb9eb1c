"""Report of the comparison: claims next to the rows, a table for the README, and a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import Row
from benchmarks.rivals.claims import (
    MIB,
    PEAKS,
    aims,
    at_most,
    claims,
    front,
    plans_of,
    rivals_of,
    to_beat,
)

KEY = PEAKS["activations"]
KINDS = {
    "eager": ("o", "checkpoints"),
    "graph": ("s", "memory budget, as a graph"),
    "chunked": ("^", "loss in chunks"),
    "fused": ("D", "Inductor"),
}


def tell(path: Path, console: Console) -> bool:
    """Write the claims and aims to a file of rows, and print those that do not hold.

    Returns:
        Whether each claim holds, or is known not to hold.
    """
    told = json.loads(path.read_text(encoding="utf-8"))
    told["claims"] = claims(told["rows"])
    told["aims"] = [
        aim
        for model in dict.fromkeys(row["model"] for row in told["rows"])
        for aim in aims(told["rows"], model)
    ]
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    for claim in told["claims"]:
        said = "holds" if claim["ok"] else f"KNOWN: {claim['known']}" if claim["known"] else "FAILS"
        console.print(
            f"{claim['model']}, {claim['counts']}: {claim['claim']}: {claim['detail']}: {said}",
            markup=False,
            soft_wrap=True,
        )
    for aim in told["aims"]:
        said = "no plan" if aim["extra_flops"] is None else f"{aim['extra_flops']:+.1%}"
        said = (
            f"{said} at {aim['activation_mib']} MiB, aim {aim['aim']:+.1%}:"
            f" {'reached' if aim['ok'] else 'missed'}"
        )
        console.print(f"{aim['model']}: {said}", markup=False, soft_wrap=True)
    return all(claim["ok"] or claim["known"] for claim in told["claims"])


def rivals_table(rows: Sequence[Row]) -> str:
    """Return a table with a line per model and method: its activation peak, extra flops and time,
    and those of autopar's plan at a peak that is not higher.

    Methods that another one of their kind beats in both peak and flops are omitted (see
    `claims.to_beat`).
    """
    lines = [
        (
            "| model | rival | activations, MiB | extra flops | time | autopar, MiB | extra flops |"
            " time |"
        ),
        f"|{'---|' * 8}",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        plans = plans_of(rows, model, "activations")
        for rival in to_beat(rivals_of(rows, model), KEY):
            ours = at_most(plans, KEY, rival[KEY])
            lines.append(
                f"| {model} | {rival['method']} | {_cells(rival)} |"
                f" {_cells(ours) if ours else 'no plan | | '} |"
            )
    return "\n".join(lines)


def _cells(row: Row) -> str:
    ratio = f"{row['cpu_ratio']:.2f}" if row.get("cpu_ratio") else ""
    return f"{row[KEY] / MIB:.1f} | {row['extra_flops']:+.1%} | {ratio}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw activation peak against extra flops, with a panel per model and the Pareto front of the
    other methods."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(7 * len(models), 5), squeeze=False, layout="constrained"
    )
    for panel, model in zip(panels[0], models, strict=True):
        _panel(panel, rows, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(panel: Any, rows: Sequence[Row], model: str) -> None:
    rivals, plans = rivals_of(rows, model), front(plans_of(rows, model, "activations"), KEY)
    for kind, (marker, label) in KINDS.items():
        here = [r for r in rivals if r["kind"] == kind]
        panel.scatter(*_points(here), marker=marker, label=label)
        for rival, *place in zip(here, *_points(here), strict=True):
            panel.annotate(
                rival["method"], place, fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
    panel.step(
        *_points(front(rivals, KEY)),
        where="pre",
        linestyle="--",
        color="grey",
        label="Pareto front of these",
    )
    panel.step(*_points(plans), where="pre", marker=".", color="black", label="autopar")
    panel.set(title=model, xlabel="peak of activations, MiB", ylabel="extra flops, %")
    panel.legend(fontsize=8)


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row[KEY] / MIB for row in rows], [100 * row["extra_flops"] for row in rows]
