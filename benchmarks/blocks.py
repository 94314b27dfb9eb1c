"""Time to solve the relaxation of one layer, on which the rest of the search depends.

The default cases are one layer of Llama-3 8B and one of Mixtral 8×7B (`benchmarks/zoo/blocks.py`:
true sizes, batch 64, length 4096), in bfloat16 on meta, on meshes with two and with three axes. Ops
that only follow their input are merged and dominated strategies are dropped, as in planning. Then
only the relaxation without budget rows is solved, in two ways: by the simplex method, and by dual
ascent (`autopar.solve.dual_ascent`). Planning begins with dual ascent if the program has some
hundred thousand columns, since dual ascent does not need the program.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from autopar.capture import capture
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.cost.price import price
from autopar.planner import PlanOptions
from autopar.sharding import classes_of
from autopar.solve.dual_ascent import Ascent
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.highs import Engine
from benchmarks import tables
from benchmarks.common import ROOT, Row, load_profile, parser, run_rows, specs_of
from benchmarks.models import ModelSpec

MESHES = ("node=8,gpu=8", "node=8,a=2,b=4")
_LAYERS = str(ROOT / "benchmarks/zoo/blocks.py")
DEFAULTS = (
    ModelSpec("llama3-8b layer", module=f"{_LAYERS}:llama3_8b"),
    ModelSpec("mixtral-8x7b layer", module=f"{_LAYERS}:mixtral_8x7b"),
)
SIZES = ("num_nodes", "num_ops", "num_strategies", "num_variables", "num_constraints")
TIMES = (
    "trace_s",
    "enumerate_s",
    "price_s",
    "write_s",
    "relax_s",
    "potentials_s",
    "ascent_s",
    "close_s",
)
COLUMNS = (*SIZES, *TIMES, "bound_s", "share_mixed")
_TIMES = 3
_LIMIT_S = 600.0
_SWEEPS = 200
_LEAST = 1e-6  # smaller shares of an op count as zero


def row(spec: dict[str, Any], mesh: str, dtype: str, batch: int, seq: int, hardware: str) -> Row:
    """Measure one layer on one mesh.

    `write_s` is the time to create the program's columns and rows. For the figures of the
    relaxation see `relaxed`.
    """
    model, data = ModelSpec(**spec).build(
        batch=batch, seq=seq, dtype=getattr(torch, dtype), meta=True
    )
    grid, profile, at = Mesh.parse(mesh), load_profile(hardware), [time.perf_counter()]
    trace = capture(model, (), data)
    at.append(time.perf_counter())
    classes = classes_of(trace, grid.shape)
    at.append(time.perf_counter())
    problem = price(
        trace, classes, grid, profile, budget_bytes=PlanOptions().budget(profile)
    ).problem
    at.append(time.perf_counter())
    program = Formulation(problem)
    at.append(time.perf_counter())
    simplex = relaxed(program)
    trace_s, enumerate_s, price_s, write_s = (
        after - before for before, after in itertools.pairwise(at)
    )
    return {
        "ok": True,
        "error": None,
        "dtype": dtype,
        "hardware": hardware,
        "num_nodes": len(trace.graph.nodes),
        "num_ops": len(problem.ops),
        "num_strategies": sum(len(op.strategies) for op in problem.ops),
        "num_variables": program.num_variables,
        "num_constraints": program.num_constraints,
        "trace_s": trace_s,
        "enumerate_s": enumerate_s,
        "price_s": price_s,
        "write_s": write_s,
        **simplex,
        **ascended(problem, simplex["bound_s"]),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def relaxed(program: Formulation) -> Row:
    """Solve the relaxation without budget rows several times from scratch.

    `relax_s` is the least CPU time of the solver's thread, which is more precise than wall time on
    a shared machine. `relax_wall_s` is the least wall time. `share_mixed` is the share of ops with
    several fractional strategies; it is 0 if the relaxation is integral.
    """
    times: list[tuple[float, float]] = []
    for _ in range(_TIMES):
        engine = Engine(program.model, _LIMIT_S)
        wall, cpu = time.perf_counter(), time.process_time()
        found = engine.relax()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    assert found is not None and not engine.limit.timed_out, "some assignment of layouts is legal"
    values = dict(zip(engine.names, found.values.tolist(), strict=True))
    mixed = [any(_LEAST < values[x.name] < 1.0 - _LEAST for x in columns) for columns in program.x]
    relax_s, wall_s = (min(each) for each in zip(*times, strict=True))
    figures = {
        "relax_s": relax_s,
        "relax_wall_s": wall_s,
        "num_iterations": engine.vertex.num_iterations,
    }
    return {**figures, "bound_s": found.bound / SCALE, "share_mixed": sum(mixed) / len(mixed)}


def ascended(problem: Problem, optimum_s: float) -> Row:
    """Measure dual ascent: the CPU time of its setup, and of the sweeps until its bound is within 1
    % and within 0.1 % of the optimum."""
    cpu = time.process_time()
    ascent = Ascent(problem)
    found: Row = {
        "potentials_s": time.process_time() - cpu,
        "ascent_s": None,
        "close_s": None,
        "num_sweeps": 0,
        "ascent_bound_s": 0.0,
    }
    cpu = time.process_time()
    while found["close_s"] is None and found["num_sweeps"] < _SWEEPS:
        ascent.sweep()
        found["num_sweeps"] += 1
        found["ascent_bound_s"] = ascent.bound_s
        for name, share in (("ascent_s", 1e-2), ("close_s", 1e-3)):
            if found[name] is None and ascent.bound_s >= optimum_s * (1 - share):
                found[name] = time.process_time() - cpu
    return found


def blocks_table(rows: Sequence[Row]) -> str:
    """Return a table with a line per layer and mesh."""
    lines = [
        (
            "| layer | mesh | ops of the graph | merged | strategies | variables | constraints |"
            " written, s | relaxed, s | ops it mixes | potentials, s | sweeps to 1 %, s | to 0.1"
            " %, s |"
        ),
        f"|{'---|' * 13}",
    ]
    for row in rows:
        sizes = " | ".join(f"{row[name]:,}" for name in SIZES)
        simplex = f"{row['write_s']:.2f} | {row['relax_s']:.2f} | {row['share_mixed']:.0%}"
        ascent = (
            f"{row['potentials_s']:.2f} | {_or_none(row['ascent_s'])} | {_or_none(row['close_s'])}"
        )
        lines.append(f"| {row['model']} | {row['mesh']} | {sizes} | {simplex} | {ascent} |")
    return "\n".join(lines)


def _or_none(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main(arguments: list[str]) -> int:
    flags = parser("blocks", __doc__ or "", batch=64, seq=4096, meshes=MESHES)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--hardware", default="h100-sxm")
    flags.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = flags.parse_args(arguments)
    specs = specs_of(options, ()) or DEFAULTS
    meshes = [str(Mesh.parse(mesh)) for mesh in options.mesh or MESHES]
    shared = {name: getattr(options, name) for name in ("dtype", "batch", "seq", "hardware")}
    cases = [{"spec": spec.to_json(), "mesh": mesh, **shared} for spec in specs for mesh in meshes]
    published = specs is DEFAULTS and not options.mesh and not options.json
    status = run_rows(
        "blocks", cases, COLUMNS, str(tables.BLOCKS_RESULTS) if published else options.json
    )
    if published and not status:
        rows = json.loads(tables.BLOCKS_RESULTS.read_text(encoding="utf-8"))["rows"]
        tables.put("benchmarks.blocks", blocks_table(rows))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
