"""Quality of the chosen plan, and agreement of the predicted and the measured order of plans.

The planner's plan and many random legal plans of one model run on gloo processes of this machine.
All plans run in the same processes and take turns step by step, so that other load on the machine
affects all of them equally. A step is forward, backward and AdamW, between barriers. Its time is
the median over the rounds. Random plans are emitted with buckets, as the planner's are. `predicted`
is the objective, which assumes buckets; `simulated` is the step of the emitted program.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import emit
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.profiler.measure import measure
from autopar.program.abstract_executor import LiveBytes
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule
from benchmarks.common import Row, load_profile, parser, run_rows, specs_of
from benchmarks.models import ModelSpec
from benchmarks.random_plans import prepare, random_plan
from benchmarks.ranks import run_ranks

# A shape whose step takes some hundredths of a second: long compared with barriers, and short
# enough for some thousand steps.
SHAPE = """gpt2:{"n_embd": 192, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}"""  # noqa: E501
LOUDNESS = (-1.0, 1.0)  # from plans close to the best to arbitrary ones
LEAST_RANK, MOST_OVER_BEST, MOST_PEAK_ERROR = (
    0.9,
    1.05,
    0.01,
)  # limits that must hold for 30 random plans
COLUMNS = (
    "num_plans",
    "spearman",
    "spearman_simulated",
    "place",
    "chosen_over_best",
    "worst_over_best",
    "peak_rel_err",
    "rounds",
)
Step = tuple[ParallelModule, torch.optim.Optimizer]


def row(
    spec: dict[str, Any],
    mesh: str,
    batch: int,
    seq: int,
    hardware: str,
    num_random: int,
    rounds: int,
) -> Row:
    """Return the whole comparison. `plans` in it has one entry per plan, the planner's first."""
    built, grid, profile = (
        ModelSpec(**spec),
        Mesh.parse(mesh),
        _profile(hardware, Mesh.parse(mesh).num_devices),
    )
    model, data = built.build(batch=batch, seq=seq)
    prepared = prepare(model, data, grid, profile)
    plans = [
        ("planner", make_plan(prepared.trace, grid, profile, PlanOptions(memory_bytes=2**40)).plan)
    ]
    plans += [
        (f"random-{seed}", random_plan(prepared, seed, loudness=LOUDNESS, in_order=True)[0])
        for seed in range(num_random)
    ]
    ranks = run_ranks(
        grid.num_devices, run, built, [plan.dumps() for _, plan in plans], batch, seq, rounds
    )
    found = [
        _entry(name, plan, [rank[i] for rank in ranks]) for i, (name, plan) in enumerate(plans)
    ]
    predicted, measured = [e["predicted_s"] for e in found], [e["measured_s"] for e in found]
    order = sorted(range(len(found)), key=lambda i: measured[i])
    peaks = [
        abs(e["predicted_peak_bytes"] - e["measured_peak_bytes"]) / e["measured_peak_bytes"]
        for e in found
    ]
    rank, over_best = spearman(predicted, measured), measured[0] / measured[order[0]]
    return {
        "ok": rank >= LEAST_RANK and over_best <= MOST_OVER_BEST and max(peaks) <= MOST_PEAK_ERROR,
        "error": None,
        "hardware": profile.name,
        "batch": batch,
        "seq": seq,
        "num_plans": len(found),
        "rounds": rounds,
        "spearman": rank,
        "spearman_simulated": spearman([e["simulated_s"] for e in found], measured),
        "place": order.index(0) + 1,
        "chosen_over_best": over_best,
        "worst_over_best": measured[order[-1]] / measured[order[0]],
        "peak_rel_err": max(peaks),
        "plans": found,
    }


def _profile(hardware: str, num_devices: int) -> HardwareProfile:
    """Return a profile. ``measure`` measures this machine now, for as many processes as will
    run."""
    if hardware != "measure":
        return load_profile(hardware)
    with tempfile.TemporaryDirectory() as folder:
        return measure(world_size=num_devices, out=Path(folder) / "local.json", name="measured")


def _entry(name: str, plan: Plan, by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = by_rank[0]["times_s"]
    return {
        "plan": name,
        "predicted_s": plan.prediction.step_s,
        "simulated_s": plan.prediction.simulated_s,
        "compute_s": plan.prediction.compute_s,
        "communication_s": plan.prediction.communication_s,
        "measured_s": statistics.median(times),
        "fastest_s": min(times),
        "predicted_peak_bytes": plan.prediction.peak_bytes,
        "measured_peak_bytes": max(rank["peak_bytes"] for rank in by_rank),
        "num_collectives": sum(
            len(c.instances) for c in plan.communications if c.collective.kind != "slice"
        ),
        "num_buckets": len(plan.buckets),
        "num_recomputed": sum(len(e.instances) for e in plan.entries if e.recompute),
    }


def run(
    rank: int, tell: Any, spec: ModelSpec, plans: list[str], batch: int, seq: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the times and the peak of every plan on this rank."""
    model, data = spec.build(batch=batch, seq=seq)
    trace, loaded = capture(model, (), data), [Plan.loads(text) for text in plans]
    devices = device_mesh(loaded[0].mesh)
    steps = [
        step_of(ParallelModule(emit(trace, plan), devices, model, outputs="dtensor"))
        for plan in loaded
    ]
    for made in steps:
        step(made, data)  # creates the state of the optimizer
    peaks = [peak_of(made, data) for made in steps]
    times: list[list[float]] = [[] for _ in steps]
    order = random.Random(0)
    for _ in range(rounds):
        for i in order.sample(range(len(steps)), len(steps)):
            dist.barrier()
            start = time.perf_counter()
            step(steps[i], data)
            dist.barrier()
            times[i].append(time.perf_counter() - start)
    return [{"times_s": t, "peak_bytes": peak} for t, peak in zip(times, peaks, strict=True)]


def step_of(module: ParallelModule) -> Step:
    return module, torch.optim.AdamW(module.parameters(), lr=1e-4)


def step(made: Step, data: Mapping[str, torch.Tensor]) -> None:
    module, optimizer = made
    module(**data)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_of(made: Step, data: Mapping[str, torch.Tensor]) -> int:
    """Return the peak of live tensor bytes from the start of forward to the end of backward,
    including the state of the optimizer.

    The thread of gloo may hold an operand for a moment after the wait, so the least of several
    steps counts. Their number is fixed, since the ranks run together.
    """
    return min(_peak_of_step(made, data) for _ in range(5))


def _peak_of_step(made: Step, data: Mapping[str, torch.Tensor]) -> int:
    module, optimizer = made
    # Each parameter also has a scalar step count, which is not a part of the model's memory.
    state = [
        x
        for values in optimizer.state.values()
        for x in values.values()
        if isinstance(x, torch.Tensor) and x.dim() > 0
    ]
    with LiveBytes() as memory:
        memory.register([*module.parameters(), *module.buffers(), *data.values(), *state])
        memory.reset_peak()
        outputs = module(**data)  # held until backward ends, as in a training loop
        outputs["loss"].backward()
        peak = memory.peak_bytes
    optimizer.zero_grad()
    return peak


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation. Equal values share their mean rank."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def main(arguments: list[str]) -> int:
    flags = parser("regret", __doc__ or "", seq=128, meshes=("a=2,b=2",))
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument(
        "--random",
        type=int,
        default=30,
        dest="num_random",
        help="number of random legal plans (default 30)",
    )
    flags.add_argument(
        "--rounds", type=int, default=15, help="number of steps of each plan (default 15)"
    )
    flags.add_argument(
        "--hardware",
        default="measure",
        help="a profile; measure (the default) measures this machine now",
    )
    options = flags.parse_args(arguments)
    shared = {
        name: getattr(options, name)
        for name in ("batch", "seq", "hardware", "num_random", "rounds")
    }
    specs = specs_of(options, ()) or [ModelSpec("gpt2-small", SHAPE)]
    meshes = [str(Mesh.parse(mesh)) for mesh in options.mesh or ("a=2,b=2",)]
    cases = [{"spec": spec.to_json(), "mesh": mesh, **shared} for spec in specs for mesh in meshes]
    return run_rows("regret", cases, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
