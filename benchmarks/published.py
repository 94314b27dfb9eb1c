"""Comparison of predicted steps with steps of published runs. Their plans are forced, on profiles
of their clusters, without a GPU.

The data, and the assumptions for facts that sources omit, are in `benchmarks.runs`. Nothing is
fitted to these runs, except that the matmul efficiency of `h100-sxm` is between the best shape and
the best of DGX Cloud's steps. `benchmarks.calibrate` shows the effect of a fit. `predicted_s` is
the step of the emitted program as stated in plans, and `matmul_s` the time of its matmuls.
``--free`` adds the time of the plan that the planner would choose for the same model, batch and
cluster. With ``--kernels``, H100s have the overlap kernels that were measured on one of them
(`h100-sxm-measured`). Their own profile has none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from autopar import hf
from autopar.api.options import PlanRequest
from autopar.api.planning import plan_call
from autopar.api.tracing import as_planned, planned_part
from autopar.constraints import Constraint, pipeline
from autopar.core.hardware import HardwareProfile
from autopar.errors import InfeasibleError
from autopar.planner import PlanOptions
from autopar.planner.reprice import reprice_plan
from autopar.plans import Plan
from benchmarks import tables
from benchmarks.common import ROOT, Row, console_of, run_rows
from benchmarks.runs import RUNS, Run, Setup, setup_of, why_skipped
from benchmarks.runs.comparison import draw, published_table, summarize

SAMPLE: Mapping[str, int] = {
    "MosaicML": 3,
    "InternEvo": 2,
    "DGX Cloud": 9,
    "tr11": 7,
    "nanotron": 3,
}
"""Source → n: by default every n-th of its runs is planned, as runs of a source are similar, and
those with many stages take minutes."""
FIGURE = ROOT / "benchmarks" / "results" / "published.png"
SLOWER = 0.8  # factor of the efficiency of matmuls, from which `matmul_s` is derived
COLUMNS = (
    "row_id",
    "framework",
    "gpu",
    "batch",
    "seq",
    "predicted_s",
    "measured_s",
    "ratio",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "free_plan_s",
    "skipped",
)


def row(spec: dict[str, str], mesh: str, free: bool, kernels: bool = False) -> Row:
    """Plan one run. `kernels` is that of ``--kernels``."""
    run = next(run for run in RUNS if run.row_id == spec["row_id"])
    setup = setup_of(run)
    if kernels and setup.profile.name == "h100-sxm":
        setup = replace(setup, profile=with_kernels(setup.profile))
    shared: Row = {
        "row_id": run.row_id,
        "source": run.source,
        "framework": run.framework,
        "gpu": run.gpu,
        "batch": run.batch,
        "seq": run.seq,
        "num_devices": run.num_devices,
        "measured_s": run.step_s,
        "measured_peak_bytes": run.peak_bytes,
        "constraints": [str(c) for c in setup.constraints],
        "ok": True,
        "error": None,
        "skipped": None,
    }
    try:
        plan, matmul_s = _planned(setup, setup.constraints, setup.memory_bytes)
    except InfeasibleError as error:
        return {**shared, "skipped": f"no plan of this kind fits: {str(error).splitlines()[0]}"}
    predicted_s = plan.prediction.simulated_s or plan.prediction.step_s
    found = {
        "predicted_s": predicted_s,
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "gap": plan.proof.gap,
        "matmul_s": matmul_s,
        "matmul_efficiency": setup.profile.efficiency["matmul"]["bfloat16"],
        "compute_share": plan.prediction.compute_s / predicted_s,
    }
    if run.step_s:
        found["ratio"] = predicted_s / run.step_s
    if free:
        chosen, _ = _planned(setup, (pipeline(),), None)
        found["free_plan_s"] = chosen.prediction.simulated_s or chosen.prediction.step_s
    return {**shared, **found}


def _planned(
    setup: Setup, constraints: Sequence[Constraint], memory_bytes: int | None
) -> tuple[Plan, float]:
    """Return the plan, and the seconds of its step that matmuls take."""
    model, batch = hf.build(
        setup.spec, batch=setup.batch, seq=setup.seq, dtype=torch.float32, device="meta"
    )
    options = PlanOptions(
        memory_bytes=memory_bytes,
        constraints=tuple(constraints),
        precision="bf16",
        outputs="loss",
        gap=0.02,
    )
    trace, planned = plan_call(PlanRequest(model, setup.mesh, setup.profile, options), (), batch)
    plan = planned.plan
    part = (
        as_planned(trace, plan)
        if plan.pipeline is None
        else planned_part(plan, model, trace, (), batch)[0]
    )
    slower_s = reprice_plan(plan, part, plan.mesh, with_matmuls(setup.profile, SLOWER), options)
    return plan, (slower_s - plan.prediction.step_s) / (1 / SLOWER - 1)


def with_matmuls(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """Return the profile with its efficiency of matmuls multiplied by `factor`."""
    slower = {dtype: share * factor for dtype, share in profile.efficiency["matmul"].items()}
    return replace(
        profile,
        efficiency={**profile.efficiency, "matmul": slower},
        hash=f"{profile.hash}-matmul-{factor:g}",
    )


def with_kernels(profile: HardwareProfile) -> HardwareProfile:
    """Return the profile with the figures of kernels that were measured on one H100."""
    return replace(
        profile,
        kernels=HardwareProfile.load("h100-sxm-measured").kernels,
        hash=f"{profile.hash}-kernels",
    )


def main(arguments: list[str]) -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    flags.add_argument("--json", metavar="FILE", help="write {env, rows} to this file")
    flags.add_argument(
        "--rows", nargs="*", metavar="ID", help="only these runs, by their row_id in the data"
    )
    flags.add_argument(
        "--source", default="", help="only runs whose source or framework contains this text"
    )
    flags.add_argument(
        "--every",
        type=int,
        metavar="N",
        help="every N-th run of each source; by default a sample of each source",
    )
    flags.add_argument("--free", action="store_true", help="also plan without forced layouts")
    flags.add_argument(
        "--kernels",
        action="store_true",
        help="use overlap kernels on H100s, with the figures measured on one",
    )
    flags.add_argument("--summary", metavar="FILE", help="only summarize the rows in this file")
    flags.add_argument(
        "--figure", metavar="FILE.png", help="plot predicted over measured steps to this file"
    )
    options = flags.parse_args(arguments)
    if options.summary:
        _show(options.summary, options.figure)
        return 0
    asked = [run for run in RUNS if options.rows is None or run.row_id in options.rows]
    if unknown := set(options.rows or ()) - {run.row_id for run in RUNS}:
        flags.error(
            f"the data has no {', '.join(sorted(unknown))}: rows are {RUNS[0].row_id} to"
            f" {RUNS[-1].row_id}"
        )
    asked = [
        run for run in asked if options.source.lower() in f"{run.source} {run.framework}".lower()
    ]
    planned = list(
        _sample(
            [run for run in asked if why_skipped(run) is None], 1 if options.rows else options.every
        )
    )
    ready = [_skipped(run, reason) for run in asked if (reason := why_skipped(run)) is not None]
    wanted = {"free": options.free, "kernels": options.kernels}
    cases = [
        {
            "spec": {"name": run.model, "row_id": run.row_id},
            "mesh": str(setup_of(run).mesh),
            **wanted,
        }
        for run in planned
    ]
    for reason, count in Counter(row["skipped"] for row in ready).most_common():
        console_of().print(f"left out: {count:4d}  {reason}", markup=False)
    if not cases:
        flags.error("none of the requested runs can be planned")
    everything = (
        options.rows is None
        and not options.source
        and options.every is None
        and options.json is None
        and not options.kernels
    )
    with tempfile.TemporaryDirectory() as folder:
        path = (
            str(tables.PUBLISHED_RESULTS)
            if everything
            else options.json or str(Path(folder) / "rows.json")
        )
        status = run_rows("published", cases, COLUMNS, path, ready=ready)
        _show(path, str(FIGURE) if everything else options.figure)
    if everything and not status:
        put()
    return status


def _sample(runs: Sequence[Run], every: int | None) -> Iterator[Run]:
    """Yield every n-th run of each source."""
    seen: Counter[str] = Counter()
    for run in runs:
        step = every or next((step for name, step in SAMPLE.items() if name in run.source), 1)
        if seen[run.source] % step == 0:
            yield run
        seen[run.source] += 1


def put() -> None:
    """Write the table of the results to the benchmarks' README."""
    rows = json.loads(tables.PUBLISHED_RESULTS.read_text(encoding="utf-8"))["rows"]
    tables.put("benchmarks.published", published_table(rows))


def _show(path: str, figure: str | None) -> None:
    rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    summarize(rows)
    if figure:
        draw(rows, figure)


def _skipped(run: Run, reason: str) -> Row:
    what = {
        "model": run.model,
        "mesh": "",
        "ok": True,
        "error": None,
        "row_id": run.row_id,
        "source": run.source,
        "gpu": run.gpu,
    }
    return {
        **what,
        "measured_s": run.step_s,
        "measured_peak_bytes": run.peak_bytes,
        "skipped": reason,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
