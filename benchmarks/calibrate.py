"""The efficiency of matmuls in whole training steps, fitted to half of the runs that
`benchmarks.published` planned and checked on the other half.

It reads the results of that benchmark and plans nothing. Let a run be predicted to take T seconds,
M of them in matmuls at efficiency e of the data sheet's peak. At efficiency x it takes T + M (e/x −
1). With the measured step R, its residual r(x) is the log of this time over R. For each chip

    x = argmin Σ (√(1 + (r(x)/S)²) − 1),   S = 0.1: squares of small residuals, absolute values of
                                           large ones; in steps of 0.01

over the fitted half. Halves consist of groups (source, GPU, model). A group is fitted if the first
byte of the SHA-256 of its names is even. This was fixed before any fit, so no model is in both
halves for the same GPU and source. In the fitted half, only runs count whose compute takes at least
90 % of their predicted step. Others depend on networks, and on overlap in other frameworks that
autopar's programs do not have.

These runs support only one figure per chip. A second figure for memory-bound ops was tried: it
improved the fitted half and worsened the held-out half. ``--write`` writes the figure to the chip's
profiles if it improves the whole held-out half: the median must be nearer to 1, more runs must be
within 10 %, and no fewer runs within 25 %. (The last condition was added when the first two would
have been met only narrowly, and the last one clearly not.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autopar.errors import AutoparError
from benchmarks import tables
from benchmarks.common import ROOT, Row, console_of
from benchmarks.runs.comparison import near, order_of

PROFILES = ROOT / "cost_models"
SCALE = 0.1  # S of the module docstring
LEAST_COMPUTE = 0.9  # least share of compute in a step
STEP = 0.01  # grid of efficiencies
COLUMNS = (
    "chip",
    "half",
    "efficiency",
    "runs",
    "median",
    "within 10 %",
    "within 25 %",
    "rank correlation",
)


@dataclass(frozen=True, slots=True)
class Chip:
    """Profiles with the same kind of matmul units.

    Attributes:
        name: name of the chip.
        gpus: beginning of the names of its GPUs in the runs.
        profiles: names of its profiles.
        before: efficiency that was assumed before any fit.
        why: source of that assumption.
    """

    name: str
    gpus: str
    profiles: tuple[str, ...]
    before: float
    why: str


CHIPS = (
    Chip(
        "A100",
        "A100",
        ("a100-sxm-80gb", "a100-sxm-40gb"),
        0.8,
        "the best shape alone reaches 271.2 TFLOP/s = 0.869 (stas00/ml-engineering@744d01e1"
        " compute/accelerator/README.md, MAMF, 1024x10240x5120, torch 2.6.0)",
    ),
    Chip(
        "H100",
        "H100",
        ("h100-sxm", "h200-sxm"),
        0.75,
        "the best shape alone reaches 794.5 TFLOP/s = 0.803 (stas00/ml-engineering@744d01e1"
        " compute/accelerator/README.md, MAMF, 2048x2048x13312, torch 2.7.0)",
    ),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """The result for a chip.

    Attributes:
        chip: the chip.
        efficiency: the fitted efficiency.
        spread: range of the efficiency if any one run is left out.
        fitted: the fitted runs that count.
        held_out: the whole other half.
    """

    chip: Chip
    efficiency: float
    spread: tuple[float, float]
    fitted: tuple[Row, ...]
    held_out: tuple[Row, ...]

    @property
    def improves(self) -> bool:
        """Whether the efficiency improves the held-out half."""
        before, after = (ratios(self.held_out, at) for at in (self.chip.before, self.efficiency))
        is_better = abs(math.log(statistics.median(after))) < abs(
            math.log(statistics.median(before))
        )
        return (
            is_better
            and near(after, 0.1) > near(before, 0.1)
            and near(after, 0.25) >= near(before, 0.25)
        )


def is_fitted(row: Row) -> bool:
    """Return whether a run belongs to the fitted half."""
    return (
        hashlib.sha256(f"{row['source']}|{row['gpu']}|{row['model']}".encode()).digest()[0] % 2 == 0
    )


def at_efficiency(row: Row, efficiency: float) -> float:
    """Return the predicted step in seconds if matmuls reach this share of the peak."""
    return float(row["predicted_s"] + row["matmul_s"] * (row["matmul_efficiency"] / efficiency - 1))


def ratios(rows: Sequence[Row], efficiency: float) -> list[float]:
    """Return predicted over measured steps."""
    return [at_efficiency(row, efficiency) / row["measured_s"] for row in rows]


def best_efficiency(rows: Sequence[Row]) -> float:
    """Return the efficiency that the module docstring defines."""
    tried = [round(STEP * num, 2) for num in range(30, 101)]
    return min(
        tried,
        key=lambda x: sum(math.hypot(1, math.log(ratio) / SCALE) - 1 for ratio in ratios(rows, x)),
    )


def fit(chip: Chip, rows: Sequence[Row]) -> Fit:
    """Return the fit of a chip.

    Raises:
        AutoparError: if fewer than two of its runs can be fitted, or if none is held out.
    """
    mine = [row for row in rows if row["gpu"].startswith(chip.gpus) and row.get("ratio")]
    fitted = tuple(row for row in mine if is_fitted(row) and row["compute_share"] >= LEAST_COMPUTE)
    held_out = tuple(row for row in mine if not is_fitted(row))
    if len(fitted) < 2 or not held_out:
        what = f"{len(fitted)} runs on {chip.name} can be fitted and {len(held_out)} are held out"
        raise AutoparError(what, remedy="run `python -m benchmarks.published` for more of them")
    others = [best_efficiency([*fitted[:at], *fitted[at + 1 :]]) for at in range(len(fitted))]
    return Fit(chip, best_efficiency(fitted), (min(others), max(others)), fitted, held_out)


def cells(found: Fit) -> list[tuple[str, ...]]:
    """Return the lines of both halves before and after the fit, and of the held-out runs that
    mostly compute."""
    computing = tuple(row for row in found.held_out if row["compute_share"] >= LEAST_COMPUTE)
    halves = (
        ("fitted", found.fitted),
        ("held out", found.held_out),
        ("held out, mostly computing", computing),
    )
    lines = []
    for label, rows in halves:
        for efficiency in (found.chip.before, found.efficiency) if rows else ():
            reached = ratios(rows, efficiency)
            words = (
                f"{statistics.median(reached):.2f}",
                *(f"{near(reached, share):.0%}" for share in (0.1, 0.25)),
            )
            predicted = [{**row, "predicted_s": at_efficiency(row, efficiency)} for row in rows]
            lines.append(
                (
                    found.chip.name,
                    label,
                    f"{efficiency:.2f}",
                    str(len(rows)),
                    *words,
                    order_of(predicted),
                )
            )
    return lines


def table_of(fits: Sequence[Fit]) -> str:
    """Return a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(line for found in fits for line in cells(found))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source_of(found: Fit) -> str:
    """Return the source of the figure, as text for profiles."""
    runs = ", ".join(sorted(row["row_id"] for row in found.fitted))
    before, after = (ratios(found.held_out, at) for at in (found.chip.before, found.efficiency))
    held = (
        f"held out {len(found.held_out)} others: predicted over measured step"
        f" {statistics.median(before):.2f} in the median before and "
    )
    held += (
        f"{statistics.median(after):.2f} after, within 10 % {near(before, 0.1):.0%} and"
        f" {near(after, 0.1):.0%}"
    )
    left = f"{found.spread[0]:.2f} to {found.spread[1]:.2f} with any one of them left out"
    what = (
        f"fitted by python -m benchmarks.calibrate to whole steps of {len(found.fitted)} published"
        f" runs ({runs}), {left}; {held}"
    )
    return f"{what}; it was {found.chip.before} before; {found.chip.why}"


def write(found: Fit, date: str, folder: Path = PROFILES) -> None:
    """Write the figure to the profiles of its chip.

    Raises:
        AutoparError: if a profile does not contain exactly one such figure.
    """
    for name in found.chip.profiles:
        path = folder / f"{name}.json"
        text = path.read_text(encoding="utf-8")
        for dtype, prefix in (("bfloat16", ""), ("float16", "as bfloat16: ")):
            old = json.loads(text)["efficiency"]["matmul"][dtype]
            new = {
                "value": found.efficiency,
                "unit": "1",
                "source": prefix + source_of(found),
                "date": date,
            }
            if text.count(_block(dtype, old)) != 1:
                raise AutoparError(
                    f"{path.name} does not contain the matmul efficiency of {dtype} exactly once",
                    remedy="indent it by two spaces",
                )
            text = text.replace(_block(dtype, old), _block(dtype, new))
        path.write_text(text, encoding="utf-8")


def _block(dtype: str, figure: dict[str, Any]) -> str:
    """Return a figure as formatted below ``efficiency.matmul``."""
    body = json.dumps(figure, indent=2, ensure_ascii=False).replace("\n", "\n      ")
    return f'      "{dtype}": {body}'


def main(arguments: list[str]) -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=__doc__)
    flags.add_argument(
        "--results",
        default=str(tables.PUBLISHED_RESULTS),
        metavar="FILE",
        help="of benchmarks.published",
    )
    flags.add_argument(
        "--write",
        action="store_true",
        help="write figures to the profiles, and the table to the benchmarks' README",
    )
    options = flags.parse_args(arguments)
    results = json.loads(Path(options.results).read_text(encoding="utf-8"))
    fits = [fit(chip, results["rows"]) for chip in CHIPS]
    table = Table(title="predicted over measured steps, by the efficiency of matmuls")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for line in (line for found in fits for line in cells(found)):
        table.add_row(*line)
    console = console_of()
    console.print(table)
    for found in fits:
        taken = "taken" if found.improves else "rejected: the held-out half does not improve"
        low, high = found.spread
        console.print(
            f"{found.chip.name}: {found.efficiency:.2f} ({low:.2f} to {high:.2f} with any one run"
            f" left out), {taken}"
        )
        if found.improves and options.write:
            write(found, results["env"]["date"])
    if options.write:
        tables.put("benchmarks.calibrate", table_of(fits))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
