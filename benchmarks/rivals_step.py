"""Comparison of a training step of autopar's programs with torch's counterparts, on gloo processes:
data parallelism with DistributedDataParallel, full sharding with FSDP2, a 1F1B pipeline with
torch.distributed.pipelining, and the planner's choice with DistributedDataParallel.

All methods take turns in the same processes. A round runs each method once, in a random order. A
step is forward, backward, AdamW and zero_grad. Times are medians over the rounds: the wall time of
the slowest rank, and the CPU time of all ranks, which is more reliable on a busy machine. Ratios
are medians of the ratios of each round. Memory is that of the rank that needs most: the storages of
tensors that the method has created and holds between steps, and the peak from the start of forward
to the end of backward. The caller does not keep the model that it passes to a method.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from benchmarks.common import Row, parser, run_rows, specs_of
from benchmarks.models import ModelSpec
from benchmarks.ranks import run_ranks
from benchmarks.rivals.distributed import COUNTERPARTS, METHODS, Trained, memory_of

MESHES = ("2", "4")
MODEL = (
    'llama:{"num_hidden_layers":6,"hidden_size":256,"intermediate_size":1024,"vocab_size":4096,'
    '"num_attention_heads":8,"num_key_value_heads":8,"max_position_embeddings":512}'
)
COLUMNS = (
    "method",
    "against",
    "step_s",
    "wall_ratio",
    "cpu_s",
    "cpu_ratio",
    "optimizer_cpu_s",
    "resting_mib",
    "peak_mib",
    "loss",
)
MIB = 1 << 20
TOLERANCE = 1e-4  # relative difference of the last losses after equally many steps


def row(
    spec: dict[str, Any],
    mesh: str,
    batch: int,
    seq: int,
    rounds: int,
    methods: Sequence[str],
) -> list[Row]:
    """Return the rows of all methods on one number of processes."""
    size = int(mesh)
    microbatches = min(batch, 2 * size)
    by_rank = run_ranks(size, _measure, spec, batch, seq, rounds, methods, microbatches)
    walls = {m: _over_ranks(by_rank, m, "wall_s", max) for m in methods}
    processor = {m: _over_ranks(by_rank, m, "cpu_s", sum) for m in methods}
    base = {"mesh": mesh, "batch": batch, "seq": seq, "microbatches": microbatches}
    rows: list[Row] = []
    for method in methods:
        facts = [rank[method] for rank in by_rank]
        against = COUNTERPARTS.get(method)
        found = {
            **base,
            "method": method,
            "against": against,
            "step_s": statistics.median(walls[method]),
            "cpu_s": statistics.median(processor[method]),
            "optimizer_cpu_s": statistics.median(_over_ranks(by_rank, method, "optimizer_s", sum)),
            "resting_mib": max(fact["resting_bytes"] for fact in facts) / MIB,
            "peak_mib": max(fact["peak_bytes"] for fact in facts) / MIB,
            "loss": statistics.fmean(x for fact in facts if (x := fact["loss"]) is not None),
        }
        if against in walls:
            found["wall_ratio"] = _ratio(walls[method], walls[against])
            found["cpu_ratio"] = _ratio(processor[method], processor[against])
        error = abs(found["loss"] / (rows or [found])[0]["loss"] - 1)
        why = f"the last loss differs by {error:.1e} from that of {methods[0]}"
        rows.append(
            {**found, "ok": error <= TOLERANCE, "error": None if error <= TOLERANCE else why}
        )
    return rows


def _over_ranks(
    by_rank: Sequence[Any], method: str, clock: str, total: Callable[[Sequence[float]], float]
) -> list[float]:
    return [total(taken) for taken in zip(*(rank[method][clock] for rank in by_rank), strict=True)]


def _ratio(mine: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def _measure(
    rank: int,
    tell: Callable[[Any], None],
    spec: dict[str, Any],
    batch: int,
    seq: int,
    rounds: int,
    methods: Sequence[str],
    microbatches: int,
) -> dict[str, dict[str, Any]]:
    model, data = ModelSpec(**spec).build(batch=batch, seq=seq)
    model.config.use_cache = False  # type: ignore[union-attr, assignment]
    made: dict[str, Trained] = {}
    found: dict[str, dict[str, Any]] = {}
    for method in methods:
        made[method], memory = memory_of(method, model, data, microbatches)
        found[method] = {**memory, "wall_s": [], "cpu_s": [], "optimizer_s": []}
    order = random.Random(0)
    for _ in range(rounds):
        for method in order.sample(methods, len(methods)):
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            loss = made[method].run()
            before_optimizer = time.process_time()
            made[method].optimizer.step()
            end_optimizer = time.process_time()
            made[method].optimizer.zero_grad(set_to_none=True)
            found[method]["wall_s"].append(time.perf_counter() - start[0])
            found[method]["cpu_s"].append(time.process_time() - start[1])
            found[method]["optimizer_s"].append(end_optimizer - before_optimizer)
            found[method]["loss"] = None if loss is None else loss.item()
    return found


def main(arguments: list[str]) -> int:
    flags = parser("rivals_step", __doc__ or "", batch=8, seq=128, meshes=MESHES)
    flags.add_argument(
        "--rounds", type=int, default=20, help="number of steps of each method (default 20)"
    )
    flags.add_argument("--method", action="append", choices=METHODS, help="by default all")
    options = flags.parse_args(arguments)
    specs = specs_of(options, ()) or [ModelSpec("llama-6x256", MODEL)]
    shared = {
        "batch": options.batch,
        "seq": options.seq,
        "rounds": options.rounds,
        "methods": options.method or METHODS,
    }
    cases = [
        {"spec": spec.to_json(), "mesh": mesh, **shared}
        for spec in specs
        for mesh in options.mesh or MESHES
    ]
    return run_rows("rivals_step", cases, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
