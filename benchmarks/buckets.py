"""The benefit of buckets on gloo processes: one plan with and without buckets for its small
collectives, alternating in the same processes.

The figures are for forward and backward of one training step: the median over the rounds, on the
slowest rank.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import constraints
from autopar.capture import capture
from autopar.emit import emit
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule
from benchmarks.common import Row, load_profile, parser, run_rows, specs_of
from benchmarks.models import ModelSpec
from benchmarks.ranks import run_ranks

MESHES = ("2", "4")
WAYS = ("ddp", "fsdp")
COLUMNS = (
    "way",
    "num_buckets",
    "members",
    "alone_s",
    "together_s",
    "speedup",
    "predicted_speedup",
    "equal",
)


def row(
    spec: dict[str, Any], mesh: str, way: str, hardware: str, batch: int, seq: int, rounds: int
) -> Row:
    """Compare both variants of one model, replicated or fully sharded."""
    model, example = ModelSpec(**spec).build(batch=batch, seq=seq)
    options = PlanOptions(constraints=(getattr(constraints, way)(),), outputs="dtensor")
    plan = make_plan(
        capture(model, (), example), autopar.Mesh.parse(mesh), load_profile(hardware), options
    ).plan
    facts = run_ranks(plan.mesh.num_devices, _timed, spec, batch, seq, plan.dumps(), rounds)
    alone_s, together_s = (max(fact[name] for fact in facts) for name in ("alone_s", "together_s"))
    p = plan.prediction
    return {
        "ok": all(fact["near"] for fact in facts),
        "error": None,
        "way": way,
        "num_buckets": len(plan.buckets),
        "members": sum(len(bucket.members) for bucket in plan.buckets),
        "alone_s": alone_s,
        "together_s": together_s,
        "speedup": alone_s / together_s,
        "predicted_speedup": (p.simulated_s + p.in_buckets_s) / p.simulated_s,
        "equal": all(fact["equal"] for fact in facts),
    }


def _timed(
    rank: int,
    tell: Callable[[Any], None],
    spec: dict[str, Any],
    batch: int,
    seq: int,
    text: str,
    rounds: int,
) -> dict[str, Any]:
    """Return the medians of both variants, and whether their gradients are the same: bit for bit,
    or up to the order in which the parts of ranks are added."""
    model, example = ModelSpec(**spec).build(batch=batch, seq=seq)
    plan, trace = Plan.loads(text), capture(model, (), example)
    mesh = device_mesh(plan.mesh)
    plans = {"alone_s": replace(plan, buckets=()), "together_s": plan}
    modules = {
        name: ParallelModule(emit(trace, p), mesh, copy.deepcopy(model), outputs="dtensor")
        for name, p in plans.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(rounds + 1):  # the first round is a warm-up
        for name, module in modules.items():
            module.zero_grad(set_to_none=True)
            dist.barrier()
            begin = time.perf_counter()
            module(**example).loss.backward()
            seconds[name].append(time.perf_counter() - begin)
    first, second = (gradients(module) for module in modules.values())
    return {
        **{name: statistics.median(all_s[1:]) for name, all_s in seconds.items()},
        "equal": all(torch.equal(first[name], x) for name, x in second.items()),
        "near": all(
            torch.allclose(first[name], x, rtol=1e-4, atol=1e-6) for name, x in second.items()
        ),
    }


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the gradients by name."""
    return {name: p.grad.to_local() for name, p in module.named_parameters() if p.grad is not None}


def main(arguments: list[str]) -> int:
    flags = parser("buckets", __doc__ or "", meshes=MESHES)
    flags.add_argument("--hardware", default="cpu-gloo")
    flags.add_argument("--rounds", type=int, default=15)
    options = flags.parse_args(arguments)
    shared = {
        "hardware": options.hardware,
        "batch": options.batch,
        "seq": options.seq,
        "rounds": options.rounds,
    }
    specs, meshes = specs_of(options, ("tiny-gpt2",)), options.mesh or MESHES
    cases = [
        {"spec": spec.to_json(), "mesh": mesh, "way": way, **shared}
        for spec in specs
        for mesh in meshes
        for way in WAYS
    ]
    return run_rows("buckets", cases, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
