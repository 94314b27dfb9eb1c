"""How long planning takes, phase by phase, and how close the plan is to the proven bound.

By default Llama-3 8B in bfloat16 on meta, sequence 8192, batch 64, on 32 nodes of 8 H100.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

import torch

from autopar.capture import capture
from autopar.mesh import Mesh
from autopar.planning import PlanOptions, make_plan
from benchmarks.common import Row, load_profile, parser, run_rows, specs_of
from benchmarks.models import ModelSpec

PHASES = ("trace_s", "enumerate_s", "price_s", "solve_s", "emit_s", "total_s", "cpu_s")
SIZES = ("peak_rss_bytes", "num_variables", "num_constraints", "objective_s", "bound_s", "gap", "peak_bytes")


def row(
    spec: dict[str, Any],
    mesh: str,
    dtype: str,
    batch: int,
    seq: int,
    hardware: str,
    memory_gib: float | None,
    gap: float,
    time_limit_s: float,
) -> Row:
    """Plan once. `total_s` runs from the trace to the plan without emission; the memory check of the program counts as
    emission. `cpu_s` is the processor time of everything, emission included: on a shared machine it says more than the clock."""
    model, data = ModelSpec(**spec).build(batch=batch, seq=seq, dtype=getattr(torch, dtype), meta=True)
    start, cpu = time.perf_counter(), time.process_time()
    trace = capture(model, (), data)
    trace_s = time.perf_counter() - start
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    options = PlanOptions(memory_bytes=memory, gap=gap, time_limit_s=time_limit_s)
    planned = make_plan(trace, Mesh.parse(mesh), load_profile(hardware), options, model_name=spec["name"])
    cpu_s = time.process_time() - cpu
    seconds, proof = planned.seconds, planned.plan.proof
    emit_s = seconds["emit"] + seconds["memory"]
    return {
        "ok": True,
        "error": None,
        "hardware": hardware,
        "dtype": dtype,
        "batch": batch,
        "seq": seq,
        "num_nodes": len(trace.graph.nodes),
        "folding": str(trace.folding),
        "trace_s": trace_s,
        "enumerate_s": seconds["enumerate"],
        "price_s": seconds["price"],
        "solve_s": seconds["solve"],
        "emit_s": emit_s,
        "total_s": trace_s + sum(seconds.values()) - emit_s,
        "cpu_s": cpu_s,
        "seconds": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "num_variables": proof.num_variables,
        "num_constraints": proof.num_constraints,
        "objective_s": proof.objective_s,
        "bound_s": proof.bound_s,
        "gap": proof.gap,
        "compute_s": planned.plan.prediction.compute_s,
        "communication_s": planned.plan.prediction.communication_s,
        "peak_bytes": planned.plan.prediction.peak_bytes,
        "memory_bytes": dict(planned.plan.prediction.memory_bytes),
    }


def main(arguments: list[str]) -> int:
    flags = parser("planning", __doc__ or "", batch=64, seq=8192, meshes=("node=32,gpu=8",))
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--hardware", default="h100-sxm")
    flags.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add_argument("--memory-gib", type=float, help="budget per device; by default the profile's memory less 10 %%")
    flags.add_argument("--gap", type=float, default=0.01)
    flags.add_argument("--time-limit", type=float, default=60.0, dest="time_limit_s", help="seconds per solve")
    options = flags.parse_args(arguments)
    named = ("dtype", "batch", "seq", "hardware", "memory_gib", "gap", "time_limit_s")
    shared = {name: getattr(options, name) for name in named}
    meshes = [str(Mesh.parse(mesh)) for mesh in options.mesh or ("node=32,gpu=8",)]
    cases = [{"spec": spec.to_json(), "mesh": mesh, **shared} for spec in specs_of(options, ("llama3-8b",)) for mesh in meshes]
    return run_rows("planning", cases, (*PHASES, *SIZES), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
