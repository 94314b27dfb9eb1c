"""Check that plans compute the same as the model.

Mode ``lockstep``: all ranks run in one process. The figure is the largest relative error of the
loss, outputs and every gradient against the plain model. Mode ``gloo``: one process per device. The
figure is the loss over 20 AdamW steps against the same steps on one process.

``--zoo`` checks the whole zoo in lockstep on meshes of 2, 3 and 4 devices (with 3, splits are
uneven) and writes its table of results. ``--unseen`` checks a list of architectures of transformers
outside the zoo, on one mesh, under the planner's plan and a random one. ``--libraries`` does the
same with models of torchvision, timm and diffusers, if these are installed.

``--use outputs`` calls models without labels, and backward starts from all their outputs. Models
that need labels are left out. ``--use inference`` plans forward alone, in eval mode. Both run in
lockstep.

``--random N`` adds N random legal plans per model and mesh, since the planner's own plans avoid
most layouts. Every second one is for `cpu-gloo`, with buckets. Profiles named ``...-frictionless``
make communication cheap, so that the planner shards even a tiny model.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

import torch
from torch import nn

import autopar
from autopar.core.mesh import Mesh
from autopar.hf.batches import LABELS, unlabelled
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.program.program import Program
from autopar.verification import verify_program
from benchmarks import tables
from benchmarks.common import (
    LIMIT_S,
    Row,
    console_of,
    failed,
    load_profile,
    parser,
    run_rows,
    specs_of,
)
from benchmarks.models import ModelSpec
from benchmarks.random_plans import Prepared, prepare, prepared_trace, random_plan
from benchmarks.ranks import run_ranks

MESHES = ("4", "a=2,b=2", "a=2,b=4", "8")
ZOO_MESHES = ("2", "4", "a=2,b=2", "3")
ZOO_RANDOM = 5
UNSEEN_MESHES, UNSEEN_RANDOM = ("a=2,b=2",), 1
UNSEEN_LIMIT_S = 300.0  # per model; a longer run counts as a failure
COLUMNS = (
    "plan",
    "mode",
    "dtype",
    "tolerance",
    "max_rel_err",
    "traced_rel_err",
    "num_collectives",
    "note",
)
FLOAT32_PARTS = "model has float32 parts"
STEPS, LEARNING_RATE = 20, 1e-3
LOSS_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


def make(prepared: Prepared, plan: str, name: str) -> tuple[Plan, Program]:
    """Return the plan of a name: ``planner`` or ``random-SEED``."""
    if plan.startswith("random-"):
        seed = int(plan.removeprefix("random-"))
        if seed % 2:  # a profile with latencies, so that there are buckets
            return random_plan(
                prepared_trace(prepared.trace, prepared.mesh, load_profile("cpu-gloo")),
                seed,
                in_order=True,
            )
        return random_plan(prepared, seed)
    planned = make_plan(
        prepared.trace, prepared.mesh, prepared.profile, PlanOptions(), model_name=name
    )
    return planned.plan, planned.program


def row(
    spec: dict[str, Any],
    mesh: str,
    plans: list[str],
    mode: str,
    dtypes: list[str],
    batch: int,
    seq: int,
    hardware: str,
    use: str = "step",
) -> list[Row]:
    """Return the rows of one model on one mesh: every plan in every dtype."""
    built, grid, profile = ModelSpec(**spec), Mesh.parse(mesh), load_profile(hardware)
    measure = _lockstep if mode == "lockstep" else _gloo
    rows = []
    for dtype in dtypes:
        # lockstep promotes a float32 model, so that the plan is the one that users run
        kind: torch.dtype = torch.float32 if mode == "lockstep" else getattr(torch, dtype)
        model, data = built.build(batch=batch, seq=seq, dtype=kind)
        data = used(model, data, use)
        prepared = prepare(model, data, grid, profile, inference=use == "inference")
        for plan in plans:
            try:
                found = measure(
                    built, prepared, *make(prepared, plan, built.name), dtype, batch, seq, use
                )
            except Exception as error:  # every error is a result of the plan
                found = failed(error)
            rows.append(
                {
                    "plan": plan,
                    "dtype": dtype,
                    "backend": "eager",
                    "mode": mode,
                    "hardware": hardware,
                    "use": use,
                    **found,
                }
            )
    return rows


def used(model: nn.Module, data: dict[str, Any], use: str) -> dict[str, Any]:
    """Return the batch for a use of the model, and set the mode of the model."""
    if use == "inference":
        model.eval()
    return unlabelled(model, data) if use == "outputs" else data


def may_lack_labels(model: nn.Module) -> bool:
    """Return whether a model can be called without labels."""
    entry = inspect.signature(model.forward).parameters.get(LABELS)
    return entry is not None and entry.default is None


def _lockstep(
    spec: ModelSpec,
    prepared: Prepared,
    plan: Plan,
    program: Program,
    dtype: str,
    batch: int,
    seq: int,
    use: str,
) -> Row:
    model, data = spec.build(batch=batch, seq=seq)
    data = used(model, data, use)
    found = verify_program(prepared.trace, program, model, (), data, dtype=getattr(torch, dtype))
    return {
        "ok": found.ok,
        "error": None,
        "tolerance": found.tolerance,
        "max_rel_err": found.max_error,
        "traced_rel_err": found.traced,
        "worst": found.worst,
        "num_collectives": found.num_collectives,
        "note": (
            f"not in {dtype}: {found.instead_of}"
            if found.instead_of
            else FLOAT32_PARTS
            if found.lower_parts
            else ""
        ),
    }


def _gloo(
    spec: ModelSpec,
    prepared: Prepared,
    plan: Plan,
    program: Program,
    dtype: str,
    batch: int,
    seq: int,
    use: str,
) -> Row:
    kind: torch.dtype = getattr(torch, dtype)
    model, data = spec.build(batch=batch, seq=seq, dtype=kind)
    lower = (
        verify_program(prepared.trace, program, model, (), data).lower_parts
        if dtype == "float64"
        else ()
    )
    alone = train(model, data)
    losses = run_ranks(prepared.mesh.num_devices, _rank, spec, plan.dumps(), dtype, batch, seq)
    errors = [max(abs(a - b) / abs(b) for a, b in zip(rank, alone, strict=True)) for rank in losses]
    tolerance = 2e-6 if lower else LOSS_TOLERANCES[dtype]
    return {
        "ok": max(errors) <= tolerance,
        "error": None,
        "tolerance": tolerance,
        "max_rel_err": max(errors),
        "traced_rel_err": None,
        "num_collectives": sum(c.kind != "slice" for _, _, c in program.stages[0].collectives),
        "note": f"loss {alone[0]:.3f} to {alone[-1]:.3f}" + (f"; {FLOAT32_PARTS}" if lower else ""),
    }


def train(model: Any, data: dict[str, torch.Tensor]) -> list[float]:
    """Return the losses of `STEPS` steps of AdamW on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = model(**data)
        loss = (
            result
            if isinstance(result, torch.Tensor)
            else result[0 if isinstance(result, tuple) else "loss"]
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _rank(
    rank: int, tell: Any, spec: ModelSpec, plan: str, dtype: str, batch: int, seq: int
) -> list[float]:
    model, data = spec.build(batch=batch, seq=seq, dtype=getattr(torch, dtype))
    loaded = Plan.loads(plan)
    return train(autopar.compile(model, loaded.mesh, example_inputs=data, plan=loaded), data)


def main(arguments: list[str]) -> int:
    flags = parser("parity", __doc__ or "", meshes=MESHES)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument(
        "--random",
        type=int,
        metavar="N",
        help=(
            f"random legal plans (default 2; {ZOO_RANDOM} for the zoo, {UNSEEN_RANDOM} for these"
            " lists)"
        ),
    )
    flags.add_argument(
        "--mode",
        choices=("lockstep", "gloo", "both"),
        help="by default both; only lockstep for --zoo, --unseen and --libraries",
    )
    flags.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        action="append",
        help="by default float64 in lockstep, both in gloo",
    )
    flags.add_argument("--hardware", default="cpu-gloo-frictionless")
    flags.add_argument("--use", choices=("step", "outputs", "inference"), default="step")
    options = flags.parse_args(arguments)
    zoo, unseen = (
        options.zoo is not None,
        options.unseen is not None or options.libraries is not None,
    )
    mode = options.mode or ("lockstep" if zoo or unseen or options.use != "step" else "both")
    if options.use != "step" and mode != "lockstep":
        flags.error(f"--use {options.use} is supported in lockstep only")
    default_meshes, default_random = (
        (ZOO_MESHES, ZOO_RANDOM)
        if zoo
        else (UNSEEN_MESHES, UNSEEN_RANDOM)
        if unseen
        else (MESHES, 2)
    )
    meshes = [str(Mesh.parse(mesh)) for mesh in options.mesh or default_meshes]
    num_random = default_random if options.random is None else options.random
    plans = ["planner", *(f"random-{seed}" for seed in range(num_random))]
    shared = {
        "batch": options.batch,
        "seq": options.seq,
        "hardware": options.hardware,
        "use": options.use,
    }
    cases = []
    for spec in specs_of(options):
        if options.use == "outputs" and not may_lack_labels(
            spec.build(batch=options.batch, seq=options.seq, meta=True)[0]
        ):
            console_of().print(f"{spec.name} is not called without {LABELS!r}", markup=False)
            continue
        for mesh in meshes:
            base = {"spec": spec.to_json(), "mesh": mesh, **shared}
            if mode != "gloo":
                cases.append(
                    {
                        **base,
                        "plans": plans,
                        "mode": "lockstep",
                        "dtypes": options.dtype or ["float64"],
                    }
                )
            if mode != "lockstep" and Mesh.parse(mesh).num_devices == 4:
                # one random plan as well, since it has layouts that the planner avoids
                cases.append(
                    {
                        **base,
                        "plans": ["planner"],
                        "mode": "gloo",
                        "dtypes": options.dtype or ["float64", "float32"],
                    }
                )
                cases += [
                    {**base, "plans": [p], "mode": "gloo", "dtypes": ["float64"]}
                    for p in plans[1:2]
                ]
    trained = options.use == "step"
    whole_zoo = options.zoo == [] and not options.mesh and trained
    lists = {"unseen": tables.UNSEEN_RESULTS, "libraries": tables.LIBRARIES_RESULTS}
    whole_list = next(
        (
            path
            for name, path in lists.items()
            if getattr(options, name) == [] and not zoo and trained
        ),
        None,
    )
    results = options.json or (
        str(tables.ZOO_RESULTS) if whole_zoo else str(whole_list) if whole_list else None
    )
    status = run_rows(
        "parity", cases, COLUMNS, results, limit_s=UNSEEN_LIMIT_S if unseen else LIMIT_S
    )
    if whole_zoo and not options.json:
        tables.put_zoo()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
