"""Does a plan compute what the model computes?

Mode ``lockstep``: all ranks in one process; largest relative error of loss, outputs and every gradient against the plain model.
Mode ``gloo``: one process per device; the loss over 20 AdamW steps against the same steps on one process.

``--random N`` adds N random legal plans per model and mesh: the planner's own would avoid most layouts. Profiles named
``...-frictionless`` make communication cheap, so that even a tiny model's own plan is sharded.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

import autopar
from autopar.errors import VerificationError
from autopar.mesh import Mesh
from autopar.planning import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.run.program import Program
from autopar.verification import verify_program
from benchmarks.common import Row, load_profile, parser, run_rows, specs_of
from benchmarks.models import ModelSpec
from benchmarks.random_plans import Prepared, prepare, random_plan
from benchmarks.ranks import run_ranks

MESHES = ("4", "a=2,b=2", "a=2,b=4", "8")
COLUMNS = ("plan", "mode", "dtype", "tolerance", "max_rel_err", "traced_rel_err", "num_collectives", "note")
FLOAT32_PARTS = "model has float32 parts"
STEPS, LEARNING_RATE = 20, 1e-3
LOSS_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


def make(spec: ModelSpec, mesh: Mesh, plan: str, dtype: torch.dtype, batch: int, seq: int, hardware: str) -> tuple[Prepared, Plan, Program]:
    """The plan of that name: ``planner`` or ``random-SEED``."""
    model, data = spec.build(batch=batch, seq=seq, dtype=dtype)
    prepared = prepare(model, data, mesh, load_profile(hardware))
    if plan.startswith("random-"):
        return prepared, *random_plan(prepared, int(plan.removeprefix("random-")))
    planned = make_plan(prepared.trace, mesh, prepared.profile, PlanOptions(), model_name=spec.name)
    return prepared, planned.plan, planned.program


def row(spec: dict[str, Any], mesh: str, plan: str, mode: str, dtype: str, batch: int, seq: int, hardware: str) -> Row:
    """One row of the table."""
    known = {"plan": plan, "dtype": dtype, "backend": "eager", "mode": mode, "hardware": hardware}
    measure = _lockstep if mode == "lockstep" else _gloo
    return {**known, **measure(ModelSpec(**spec), Mesh.parse(mesh), plan, dtype, batch, seq, hardware)}


def _lockstep(spec: ModelSpec, mesh: Mesh, plan: str, dtype: str, batch: int, seq: int, hardware: str) -> Row:
    """The model stays in float32 and is promoted to `dtype`, so that the plan is the one that would run."""
    prepared, _, program = make(spec, mesh, plan, torch.float32, batch, seq, hardware)
    model, data = spec.build(batch=batch, seq=seq)
    try:
        found = verify_program(prepared.trace, program, model, (), data, dtype=getattr(torch, dtype))
    except VerificationError as error:
        return {"ok": False, "error": str(error)}
    return {
        "ok": found.ok,
        "error": None,
        "tolerance": found.tolerance,
        "max_rel_err": found.max_error,
        "traced_rel_err": found.traced,
        "worst": found.worst,
        "num_collectives": found.num_collectives,
        "note": FLOAT32_PARTS if found.lower_parts else "",
    }


def _gloo(spec: ModelSpec, mesh: Mesh, plan: str, dtype: str, batch: int, seq: int, hardware: str) -> Row:
    kind: torch.dtype = getattr(torch, dtype)
    prepared, made, program = make(spec, mesh, plan, kind, batch, seq, hardware)
    model, data = spec.build(batch=batch, seq=seq, dtype=kind)
    lower = verify_program(prepared.trace, program, model, (), data).lower_parts if dtype == "float64" else ()
    alone = train(model, data)
    losses = run_ranks(mesh.num_devices, _rank, spec, made.dumps(), dtype, batch, seq)
    errors = [max(abs(a - b) / abs(b) for a, b in zip(rank, alone, strict=True)) for rank in losses]
    tolerance = 2e-6 if lower else LOSS_TOLERANCES[dtype]
    return {
        "ok": max(errors) <= tolerance,
        "error": None,
        "tolerance": tolerance,
        "max_rel_err": max(errors),
        "traced_rel_err": None,
        "num_collectives": sum(c.kind != "slice" for _, _, c in program.collectives),
        "note": f"loss {alone[0]:.3f} to {alone[-1]:.3f}" + (f"; {FLOAT32_PARTS}" if lower else ""),
    }


def train(model: Any, data: dict[str, torch.Tensor]) -> list[float]:
    """The losses of `STEPS` steps of AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**data)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _rank(rank: int, tell: Any, spec: ModelSpec, plan: str, dtype: str, batch: int, seq: int) -> list[float]:
    model, data = spec.build(batch=batch, seq=seq, dtype=getattr(torch, dtype))
    loaded = Plan.loads(plan)
    return train(autopar.compile(model, loaded.mesh, example_inputs=data, plan=loaded), data)


def main(arguments: list[str]) -> int:
    flags = parser("parity", __doc__ or "", meshes=MESHES)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--random", type=int, default=2, metavar="N", help="random legal plans per model and mesh (default 2)")
    flags.add_argument("--mode", choices=("lockstep", "gloo", "both"), default="both")
    flags.add_argument("--dtype", choices=("float64", "float32"), action="append", help="by default float64 in lockstep, both in gloo")
    flags.add_argument("--hardware", default="cpu-gloo-frictionless")
    options = flags.parse_args(arguments)
    meshes = [str(Mesh.parse(mesh)) for mesh in options.mesh or MESHES]
    plans = ["planner", *(f"random-{seed}" for seed in range(options.random))]
    shared = {"batch": options.batch, "seq": options.seq, "hardware": options.hardware}
    cases = []
    for spec in specs_of(options):
        for mesh in meshes:
            base = {"spec": spec.to_json(), "mesh": mesh, **shared}
            if options.mode != "gloo":
                cases += [{**base, "plan": p, "mode": "lockstep", "dtype": d} for p in plans for d in options.dtype or ("float64",)]
            if options.mode != "lockstep" and Mesh.parse(mesh).num_devices == 4:
                # a random plan too, once: it has layouts that the planner avoids
                wanted = [("planner", d) for d in options.dtype or ("float64", "float32")] + [(p, "float64") for p in plans[1:2]]
                cases += [{**base, "plan": p, "mode": "gloo", "dtype": d} for p, d in wanted]
    return run_rows("parity", cases, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
