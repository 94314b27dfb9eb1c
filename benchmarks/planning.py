"""Planning time by phase, and the gap between the plan and the proven bound.

The default cases are those of the table below, in bfloat16 on meta, on H100. ``--inter-gbits`` sets
the bandwidth between nodes, in Gb/s per device. ``--slow-links`` plans Llama-3 8B and 70B on 4x8 to
32x8 devices at 10 and 25 Gb/s, with float32 weights, bfloat16 compute, and without pipelines.
``--requests`` measures `autopar.plan` as a user calls it, for large models and clusters.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autopar.api.alternatives import WorkBudget
from autopar.api.arguments import as_mesh
from autopar.api.chooser import Chooser
from autopar.api.mesh_search import shapes
from autopar.api.plan_search import PlanSearch
from autopar.api.planning import plan_model
from autopar.api.tracing import as_wanted, trace_call
from autopar.capture import Trace, capture
from autopar.constraints import Constraint, offload, pipeline
from autopar.core.mesh import Mesh, is_unshaped, read_mesh
from autopar.planner import PlanOptions
from autopar.plans import Plan
from benchmarks.common import (
    ROOT,
    Row,
    load_profile,
    parser,
    run_rows,
    specs_of,
    with_inter_gbits,
)
from benchmarks.models import ModelSpec

FREE = "free"  # tries a pipeline along each axis, and no pipeline
_UNET = ModelSpec("ddpm-256", module=str(ROOT / "benchmarks/zoo/vision.py") + ":ddpm256")
# (model, mesh, batch, length, pipeline axis, microbatches, gap)
DEFAULTS: tuple[tuple[ModelSpec, str, int, int, str, int | None, float], ...] = (
    (ModelSpec.known("gpt2"), "gpu=8", 64, 1024, "", None, 0.001),
    (ModelSpec.known("llama3-8b"), "node=32,gpu=8", 64, 8192, "", None, 0.01),
    (ModelSpec.known("llama3-8b"), "node=4,gpu=8", 64, 4096, "node", 16, 0.01),
    (ModelSpec.known("llama3-70b"), "node=64,gpu=8", 64, 8192, FREE, None, 0.01),
    (ModelSpec.known("llama3-70b"), "stage=8,node=8,gpu=8", 64, 8192, "stage", 16, 0.01),
    (ModelSpec.known("mixtral-8x7b"), "node=8,gpu=8", 64, 4096, "", None, 0.01),
    (ModelSpec.known("t5-11b"), "node=8,gpu=8", 64, 512, "", None, 0.01),
    (_UNET, "node=8,gpu=8", 64, 0, "", None, 0.01),
    (ModelSpec.known("llama3-405b"), "node=2048,gpu=8", 2048, 8192, FREE, None, 0.01),
)
Precision = Literal["bf16", "fp16"]
SLOW_LINKS = tuple(
    (ModelSpec.known(model), f"node={nodes},gpu=8", gbits)
    for model in ("llama3-8b", "llama3-70b")
    for nodes in (4, 8, 16, 32)
    for gbits in (25.0, 10.0)
)


@dataclass(frozen=True, slots=True)
class Request:
    """A call of `autopar.plan` with a user's defaults: bfloat16 precision, and the loss as the only
    output.

    Attributes:
        model: the model, with float32 weights on meta.
        mesh: the mesh as text.
        batch: number of samples.
        seq: number of tokens per sample, if the model has a length.
        limit_s: CPU seconds that planning may take.
        limit_gap: gap that the plan may have.
        hardware: name of the profile.
        inter_gbits: Gb/s between nodes, per device; by default the profile's.
        constraint: "offload", "pipeline" (free: along any axis, or none), or "" for none.
    """

    model: ModelSpec
    mesh: str
    batch: int
    seq: int
    limit_s: float = 30.0
    limit_gap: float = 0.01
    hardware: str = "h100-sxm"
    inter_gbits: float | None = None
    constraint: str = ""

    def as_case(self) -> dict[str, Any]:
        """Return the arguments of `row`."""
        return {"spec": self.model.to_json(), "mesh": self.mesh, "request": self._settings()}

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in REQUEST_SETTINGS}


CONSTRAINTS: Mapping[str, tuple[Constraint, ...]] = {
    "": (),
    "offload": (offload(),),
    "pipeline": (pipeline(),),
}
REQUEST_SETTINGS = (
    "batch",
    "seq",
    "limit_s",
    "limit_gap",
    "hardware",
    "inter_gbits",
    "constraint",
)


_GPT3 = 'gpt2:{"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}'
_VIT22B = (
    'vit/AutoModelForImageClassification:{"num_hidden_layers": 48, "hidden_size": 6144,'
    ' "intermediate_size": 24576, "num_attention_heads": 48, "patch_size": 14, "num_labels": 1000}'
)
_SDXL = ModelSpec("sdxl-unet", module=str(ROOT / "benchmarks/zoo/large.py") + ":sdxl_unet")
_8B, _70B, _405B = (ModelSpec.known(f"llama3-{size}") for size in ("8b", "70b", "405b"))
REQUESTS = (
    Request(ModelSpec("gpt3-175b", _GPT3), "node=16,gpu=8", 512, 2048),
    Request(ModelSpec("vit-22b", _VIT22B), "node=8,gpu=8", 512, 0),
    Request(_SDXL, "gpu=8", 64, 0),
    Request(_8B, "gpu=8", 1, 3_700_000, constraint="offload"),
    Request(_405B, "node=2048,gpu=8", 2048, 8192, limit_s=60.0, constraint="pipeline"),
    Request(_70B, "node=8,gpu=8", 64, 8192),
    Request(_70B, "node=4,gpu=8", 32, 4096, hardware="a100-sxm-80gb"),
    Request(_8B, "node=4,gpu=8", 64, 4096, limit_s=60.0, limit_gap=0.03, inter_gbits=25.0),
)
REQUEST_COLUMNS = (
    "num_stages",
    "cpu_s",
    "limit_s",
    "gap",
    "limit_gap",
    "emit_s",
    "peak_rss_bytes",
    "num_variables",
    "step_s",
)
PHASES = ("trace_s", "enumerate_s", "price_s", "solve_s", "emit_s", "total_s", "cpu_s")
SIZES = (
    "peak_rss_bytes",
    "num_variables",
    "num_constraints",
    "objective_s",
    "simulated_s",
    "bound_s",
    "gap",
    "certified_gap",
    "peak_bytes",
)


def row(spec: dict[str, Any], mesh: str, **case: Any) -> Row:
    """Plan once, in one of two ways (see `phases_row` and `request_row`)."""
    if (request := case.pop("request", None)) is not None:
        return request_row(Request(ModelSpec(**spec), mesh, **request))
    return phases_row(spec, mesh, **case)


def request_row(request: Request) -> Row:
    """Call `autopar.plan` once, without its caches.

    `cpu_s` is the CPU time of the call, from capture to the emitted plan. `peak_rss_bytes` is that
    of the process.
    """
    os.environ["AUTOPAR_CACHE"] = "0"
    model, data = request.model.build(batch=request.batch, seq=request.seq, meta=True)
    profile = load_profile(request.hardware)
    if request.inter_gbits is not None:
        profile = with_inter_gbits(profile, request.inter_gbits)
    start, cpu = time.perf_counter(), time.process_time()
    _, planned = plan_model(
        model,
        as_mesh(read_mesh(request.mesh)),
        example_inputs=data,
        hardware=profile,
        precision="bf16",
        outputs="loss",
        constraints=CONSTRAINTS[request.constraint],
    )
    total_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    plan, seconds = planned.plan, planned.seconds
    return {
        "ok": cpu_s <= request.limit_s and plan.proof.gap <= request.limit_gap,
        "error": None,
        **{name: getattr(request, name) for name in REQUEST_SETTINGS},
        "total_s": total_s,
        "cpu_s": cpu_s,
        "emit_s": seconds["emit"] + seconds["memory"],
        "seconds": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_s": plan.prediction.step_s,
        "covers": plan.proof.covers,
        "plan_hash": plan.hash,
        **_chosen(plan),
    }


def phases_row(
    spec: dict[str, Any],
    mesh: str,
    dtype: str,
    batch: int,
    seq: int,
    hardware: str,
    memory_gib: float | None,
    gap: float,
    time_limit_s: float | None,
    axis: str = "",
    microbatches: int | None = None,
    inter_gbits: float | None = None,
    precision: Precision | None = None,
) -> Row:
    """Plan once, and return the time of each phase.

    `total_s` is the time from the trace to the plan, without its emission. The memory check of the
    program counts as emission. `cpu_s` is the CPU time of everything, including emission, which is
    more precise than wall time on a shared machine. If pipelines or shapes of the mesh are tried (a
    count or 4x8 leaves the shape to the planner), the phases are those of the chosen plan, and
    `total_s` and `cpu_s` include all tried plans. With a `precision`, a user's call is planned: its
    loss is the only output, in one microbatch.
    """
    model, data = ModelSpec(**spec).build(
        batch=batch, seq=seq, dtype=getattr(torch, dtype), meta=True
    )
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    asked = (pipeline(None if axis == FREE else axis, microbatches=microbatches),) if axis else ()
    options = PlanOptions(
        memory_bytes=memory, gap=gap, time_limit_s=time_limit_s or math.inf, constraints=asked
    )
    if precision is not None:
        options = replace(options, precision=precision, outputs="loss", num_microbatches=1)
    options = options.begun()
    start, cpu = time.perf_counter(), time.process_time()
    if precision is None:
        trace = capture(model, (), data)
    else:
        trace = as_wanted(trace_call(model, (), data, precision, inference=False), "loss")
    trace_s = time.perf_counter() - start
    captured, budget = dict[int, Trace](), WorkBudget.of(options)
    given, profile = read_mesh(mesh), load_profile(hardware)
    if inter_gbits is not None:
        profile = with_inter_gbits(profile, inter_gbits)

    def choose(shape: Mesh) -> Chooser:
        return Chooser(
            model, trace, (), data, shape, profile, options, captured=captured, budget=budget
        )

    meshes = shapes(given) if is_unshaped(given) else (as_mesh(given),)
    planned = (
        PlanSearch(choose, options, meshes, budget=budget)
        .run()
        .closer_proven(in_time=not options.is_late)
    )
    all_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    seconds = planned.seconds
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
        "total_s": all_s - emit_s,
        "pipeline": axis,
        "inter_gbits": inter_gbits,
        "cpu_s": cpu_s,
        "seconds": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **_chosen(planned.plan),
    }


def _chosen(plan: Plan) -> Row:
    """Return the figures of the plan for a row."""
    proof, prediction = plan.proof, plan.prediction
    return {
        "shape": str(plan.mesh),
        "num_stages": len(plan.stages),
        "num_microbatches": plan.num_microbatches,
        "num_variables": proof.num_variables,
        "num_constraints": proof.num_constraints,
        "objective_s": proof.objective_s,
        "bound_s": proof.bound_s,
        "gap": proof.gap,
        "certified_gap": proof.certified_gap,
        "compute_s": prediction.compute_s,
        "communication_s": prediction.communication_s,
        "simulated_s": prediction.simulated_s,
        "peak_bytes": prediction.peak_bytes,
        "memory_bytes": dict(prediction.memory_bytes),
    }


def main(arguments: list[str]) -> int:
    flags = parser("planning", __doc__ or "", batch=64, seq=8192, meshes=("node=32,gpu=8",))
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--hardware", default="h100-sxm")
    flags.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    flags.add_argument(
        "--memory-gib",
        type=float,
        help="budget per device; by default 90 %% of the profile's memory",
    )
    flags.add_argument("--gap", type=float, default=0.01)
    flags.add_argument(
        "--time-limit",
        type=float,
        dest="time_limit_s",
        help="time limit for planning each row, in seconds; by default none",
    )
    flags.add_argument(
        "--pipeline",
        default="",
        dest="axis",
        help="the mesh axis of pipeline stages; free: any axis, or none",
    )
    flags.add_argument(
        "--microbatches",
        type=int,
        help="number of microbatches of the pipeline; by default the planner's choice",
    )
    flags.add_argument("--inter-gbits", type=float, help="Gb/s between nodes, per device")
    flags.add_argument("--slow-links", action="store_true", help="plan the cases with slow links")
    flags.add_argument(
        "--requests", action="store_true", help="plan large requests as users make them"
    )
    options = flags.parse_args(arguments)
    if options.requests:
        zoo = [
            Request(spec, "a=2,b=2,c=2", 64, 0, limit_s=15.0, limit_gap=0.025)
            for spec in (specs_of(options, ()) if options.zoo is not None else ())
        ]
        wanted = zoo or [r for r in REQUESTS if not options.model or r.model.name in options.model]
        cases = [request.as_case() for request in wanted]
        return run_rows("planning", cases, REQUEST_COLUMNS, options.json)
    shared = {
        name: getattr(options, name)
        for name in ("dtype", "hardware", "memory_gib", "time_limit_s", "inter_gbits")
    }
    meshes = [
        mesh if is_unshaped(read_mesh(mesh)) else str(Mesh.parse(mesh))
        for mesh in options.mesh or ("node=32,gpu=8",)
    ]
    asked = options.batch, options.seq, options.axis, options.microbatches, options.gap
    named = [(spec, mesh, *asked) for spec in specs_of(options, ()) for mesh in meshes] or DEFAULTS
    keys = ("batch", "seq", "axis", "microbatches", "gap")
    cases = [
        {"spec": spec.to_json(), "mesh": mesh, **dict(zip(keys, rest, strict=True)), **shared}
        for spec, mesh, *rest in named
    ]
    if options.slow_links:
        slow = {**shared, "dtype": "float32", "precision": "bf16", "batch": 64, "seq": 4096}
        cases = [
            {**slow, "spec": spec.to_json(), "mesh": mesh, "gap": options.gap, "inter_gbits": gbits}
            for spec, mesh, gbits in SLOW_LINKS
        ]
    return run_rows("planning", cases, ("num_stages", *PHASES, *SIZES), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
