"""Are steps of runs that others published as long as predicted? Their plans, forced, on their clusters' profiles, without a GPU.

The data, and what is assumed where sources are silent, are in `benchmarks.runs`. Nothing is fitted to these runs but what a profile says
of its own figures. `predicted_s` is of the emitted program, as plans tell it. With ``--free`` also the time of the plan that the planner
would choose for the same model, batch and cluster.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from autopar import hf
from autopar.api.planning import plan_call
from autopar.constraints import Constraint, pipeline
from autopar.errors import InfeasibleError
from autopar.planning import PlanOptions
from autopar.plans import Plan
from benchmarks.common import Row, console_of, run_rows
from benchmarks.regret import spearman
from benchmarks.runs import RUNS, Run, Setup, setup_of, why_skipped

COLUMNS = (
    "row_id", "framework", "gpu", "batch", "seq", "predicted_s", "measured_s", "ratio", "predicted_peak_bytes", "measured_peak_bytes",
    "free_plan_s", "skipped",
)  # fmt: skip


def row(spec: dict[str, str], mesh: str, free: bool) -> Row:
    """One run."""
    run = next(run for run in RUNS if run.row_id == spec["row_id"])
    setup = setup_of(run)
    shared: Row = {
        "row_id": run.row_id, "source": run.source, "framework": run.framework, "gpu": run.gpu, "batch": run.batch, "seq": run.seq,
        "num_devices": run.num_devices,
        "measured_s": run.step_s, "measured_peak_bytes": run.peak_bytes, "constraints": [str(c) for c in setup.constraints],
        "ok": True, "error": None, "skipped": None,
    }  # fmt: skip
    try:
        plan = _planned(setup, setup.constraints, setup.memory_bytes)
    except InfeasibleError as error:
        return {**shared, "skipped": f"no plan of this kind fits: {str(error).splitlines()[0]}"}
    predicted_s = plan.prediction.simulated_s or plan.prediction.step_s
    found = {"predicted_s": predicted_s, "predicted_peak_bytes": plan.prediction.peak_bytes, "gap": plan.proof.gap}
    if run.step_s:
        found["ratio"] = predicted_s / run.step_s
    if free:
        chosen = _planned(setup, (pipeline(),), None)
        found["free_plan_s"] = chosen.prediction.simulated_s or chosen.prediction.step_s
    return {**shared, **found}


def _planned(setup: Setup, constraints: Sequence[Constraint], memory_bytes: int | None) -> Plan:
    model, batch = hf.build(setup.spec, batch=setup.batch, seq=setup.seq, dtype=torch.float32, device="meta")
    options = PlanOptions(memory_bytes=memory_bytes, constraints=tuple(constraints), precision="bf16", outputs="loss", gap=0.02)
    return plan_call(model, setup.mesh, (), batch, setup.profile, options)[1].plan


def main(arguments: list[str]) -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    flags.add_argument("--json", metavar="FILE", help="write {env, rows} here")
    flags.add_argument("--rows", nargs="*", metavar="ID", help="those alone, by the data's row_id")
    flags.add_argument("--source", default="", help="those alone whose source or framework has this in it")
    flags.add_argument("--every", type=int, default=1, metavar="N", help="every N-th of them")
    flags.add_argument("--free", action="store_true", help="also what the planner would choose by itself")
    flags.add_argument("--summary", metavar="FILE", help="only the summary of the rows in this file")
    options = flags.parse_args(arguments)
    if options.summary:
        summarize(json.loads(Path(options.summary).read_text(encoding="utf-8"))["rows"])
        return 0
    asked = [run for run in RUNS if options.rows is None or run.row_id in options.rows]
    asked = [run for run in asked if options.source.lower() in f"{run.source} {run.framework}".lower()]
    planned = [run for run in asked if why_skipped(run) is None][:: options.every]
    ready = [_skipped(run, reason) for run in asked if (reason := why_skipped(run)) is not None]
    cases = [
        {"spec": {"name": run.model, "row_id": run.row_id}, "mesh": str(setup_of(run).mesh), "free": options.free} for run in planned
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or str(Path(folder) / "rows.json")
        status = run_rows("published", cases, COLUMNS, path, ready=ready)
        if cases:
            summarize(json.loads(Path(path).read_text(encoding="utf-8"))["rows"])
    return status


def _skipped(run: Run, reason: str) -> Row:
    what = {"model": run.model, "mesh": "", "ok": True, "error": None, "row_id": run.row_id, "source": run.source, "gpu": run.gpu}
    return {**what, "measured_s": run.step_s, "measured_peak_bytes": run.peak_bytes, "skipped": reason}


def summarize(rows: Sequence[Row]) -> None:
    """Per source and device: predicted over measured seconds, and how alike their orders are."""
    table = Table(title="predicted seconds of a step over measured ones")
    for column in ("source", "device", "runs", "median", "least", "most", "within 10 %", "within 25 %", "rank correlation"):
        table.add_column(column, justify="left" if column in ("source", "device") else "right")
    for cells in summary(rows):
        table.add_row(*cells)
    console_of().print(table)


def summary(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The cells of `summarize`, all runs together last."""
    timed = [row for row in rows if row.get("ratio")]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in timed:
        groups.setdefault((row["source"], row["gpu"]), []).append(row)
    return [_cells(*key, some) for key, some in (*groups.items(), (("all", ""), timed)) if some]


def _cells(source: str, gpu: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ratios = sorted(row["ratio"] for row in rows)
    near = [sum(abs(math.log(ratio)) <= math.log(1 + share) for ratio in ratios) / len(ratios) for share in (0.1, 0.25)]
    # seconds of a step vary by the batch: of a token on a device they are what plans differ in
    per_token = [[row[name] * row["num_devices"] / (row["batch"] * row["seq"]) for row in rows] for name in ("predicted_s", "measured_s")]
    alike = f"{spearman(*per_token):.2f}" if len(rows) > 2 else ""
    words = f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
    return source, gpu, str(len(rows)), *words, *(f"{share:.0%}" for share in near), alike


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
