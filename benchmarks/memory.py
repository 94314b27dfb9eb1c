"""Predicted and measured peak of live tensor bytes, from the start of forward to the end of
backward.

One plan has an ample budget. Another has a share of that plan's peak as its budget, so that values
are recomputed and parameters are stored sharded. The peak includes the state of the optimizer.
Neither figure includes scratch memory of kernels.

With --rivals: one process, compared with the alternatives of a user (`benchmarks.rivals`), with the
expected results of that comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from autopar.capture import capture
from autopar.core.mesh import Mesh
from autopar.emit import emit
from autopar.errors import InfeasibleError
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule
from benchmarks import tables
from benchmarks.common import Row, console_of, load_profile, parser, run_rows, specs_of
from benchmarks.models import ModelSpec
from benchmarks.random_plans import Prepared, prepare, random_plan
from benchmarks.ranks import run_ranks
from benchmarks.regret import peak_of, step, step_of
from benchmarks.rivals import report

MESHES = ("1", "a=2,b=2")
TOLERANCE = 0.01
COLUMNS = (
    "plan",
    "budget_share",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "rel_err",
    "num_recomputed",
    "num_collectives",
)
SHARES = (0.7, 0.9)
LIMIT_S = 15.0  # seconds per solve; a feasible plan is sufficient here
RIVALS_COLUMNS = (
    "method",
    "counts",
    "budget_bytes",
    "activation_peak_bytes",
    "peak_above_parameters_bytes",
    "extra_flops",
    "cpu_ratio",
)
RIVALS_LIMIT_S = 5400.0
LLAMA = """llama:{"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0}"""  # noqa: E501
GPT2 = """gpt2:{"n_layer": 12, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 512, "bos_token_id": 0, "eos_token_id": 0}"""  # noqa: E501
RIVALS_MODELS = (ModelSpec("llama-12x512", LLAMA), ModelSpec("gpt2-12x512", GPT2))


def row(spec: dict[str, Any], mesh: str, plan: str, batch: int, seq: int, hardware: str) -> Row:
    """Run one plan on real processes."""
    built, grid = ModelSpec(**spec), Mesh.parse(mesh)
    model, data = built.build(batch=batch, seq=seq)
    made, share = _plan(prepare(model, data, grid, load_profile(hardware)), plan)
    measured = run_ranks(grid.num_devices, run, built, made.dumps(), batch, seq)
    predicted = made.prediction.peak_bytes
    error = abs(predicted - max(measured)) / max(measured)  # ranks with shorter parts use less
    return {
        "ok": error <= TOLERANCE,
        "error": None,
        "plan": plan,
        "budget_share": share,
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": max(measured),
        "rel_err": error,
        "memory_bytes": dict(made.prediction.memory_bytes),
        "num_recomputed": sum(len(e.instances) for e in made.entries if e.recompute),
        "num_collectives": sum(
            len(c.instances) for c in made.communications if c.collective.kind != "slice"
        ),
    }


def _plan(ready: Prepared, name: str) -> tuple[Plan, float | None]:
    """Return the plan of a name: ``ample``; ``tight``, under the first feasible share of the ample
    plan's peak; or ``recompute``, a random legal plan with as much recomputation as possible.

    Raises:
        InfeasibleError: if no share is feasible.
    """
    if name == "recompute":
        return random_plan(ready, 0, recompute_share=1.0)[0], None

    def planned(budget: int | None) -> Plan:
        return make_plan(
            ready.trace,
            ready.mesh,
            ready.profile,
            PlanOptions(memory_bytes=budget, time_limit_s=LIMIT_S),
        ).plan

    ample = planned(None)
    if name == "ample":
        return ample, None
    for share in SHARES[:-1]:
        try:
            return planned(int(share * ample.prediction.peak_bytes)), share
        except InfeasibleError:
            continue
    return planned(int(SHARES[-1] * ample.prediction.peak_bytes)), SHARES[-1]


def run(rank: int, tell: Any, spec: ModelSpec, text: str, batch: int, seq: int) -> int:
    """Return the measured peak on this rank."""
    model, data = spec.build(batch=batch, seq=seq)
    plan = Plan.loads(text)
    module = ParallelModule(
        emit(capture(model, (), data), plan), device_mesh(plan.mesh), model, outputs="dtensor"
    )
    made = step_of(module)
    step(made, data)
    return peak_of(made, data)


def main(arguments: list[str]) -> int:
    flags = parser("memory", __doc__ or "", meshes=MESHES)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.set_defaults(batch=None, seq=None)  # 8 and 32; with --rivals 1 and 512
    flags.add_argument("--hardware", default="cpu-gloo")
    flags.add_argument(
        "--plan", action="append", choices=("ample", "tight", "recompute"), help="by default all"
    )
    flags.add_argument(
        "--rivals", action="store_true", help="compare with other methods in one process"
    )
    flags.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="with --rivals: number of timed steps of each variant; 0 for none",
    )
    flags.add_argument(
        "--no-inductor",
        action="store_false",
        dest="inductor",
        help="with --rivals: omit Inductor",
    )
    flags.add_argument(
        "--figure", metavar="FILE.png", help="with --rivals: plot peak against flops"
    )
    options = flags.parse_args(arguments)
    if options.rivals:
        return _rivals(options)
    shared = {"batch": options.batch or 8, "seq": options.seq or 32, "hardware": options.hardware}
    meshes = [str(Mesh.parse(mesh)) for mesh in options.mesh or MESHES]
    plans = options.plan or ("ample", "tight", "recompute")
    cases = [
        {"spec": s.to_json(), "mesh": m, "plan": p, **shared}
        for s in specs_of(options)
        for m in meshes
        for p in plans
    ]
    return run_rows("memory", cases, COLUMNS, options.json)


def _rivals(options: argparse.Namespace) -> int:
    shared: dict[str, Any] = {"batch": options.batch or 1, "seq": options.seq or 512}
    shared |= {name: getattr(options, name) for name in ("hardware", "rounds", "inductor")}
    named = specs_of(options, ())
    cases = [{"spec": spec.to_json(), "mesh": "d=1", **shared} for spec in named or RIVALS_MODELS]
    published = not named and not options.json
    with tempfile.TemporaryDirectory() as folder:
        path = tables.RIVALS_RESULTS if published else Path(options.json or f"{folder}/rows.json")
        status = run_rows("rivals.comparison", cases, RIVALS_COLUMNS, str(path), RIVALS_LIMIT_S)
        good = report.tell(path, console_of())
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    if published:
        tables.put("benchmarks.memory --rivals", report.rivals_table(rows))
    if options.figure:
        report.draw(rows, Path(options.figure))
    return status if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
