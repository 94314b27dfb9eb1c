"""One rank of a measurement: ``python -m autopar.run.measure_worker RANK WORLD_SIZE FOLDER``, started by `measure`.

All ranks measure the same thing at the same time, since ranks of one machine share its cores and its memory bandwidth. A time
is the mean over a window, so that time slices of other ranks count; of several rounds the fastest counts; of the ranks the mean.
Rank 0 prints one line per finished measurement and writes the result to FOLDER/result.json.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar import ops
from autopar.kernels.collectives import AxisGroup, all_gather, all_reduce, all_to_all, reduce_scatter, use_groups

ROUNDS = 2
WINDOW_S = 0.1  # of one measurement of an op; some scheduler slices
COLLECTIVE_S = 0.15  # of one measurement of a collective
DTYPES = ("float32", "bfloat16", "float64")
MATMULS = ((16, 64, 64), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 256, 1024), (512, 1024, 1024))
ATTENTIONS = ((1, 2, 32, 16), (1, 4, 64, 32), (2, 4, 128, 32), (2, 4, 256, 64))  # batch, heads, length, head size
NUMELS = (256, 4096, 65536, 524288, 2097152)
BYTES = (1024, 16384, 131072, 1048576, 8388608)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

Point = dict[str, Any]
Measurement = tuple[str, Point, Callable[[], Any]]  # kind, the point without its time, what to run


def _matmul(m: int, n: int, k: int, dtype: str) -> Callable[[], Any]:
    """A linear layer's product and its two gradients; a third of their time is a point's."""
    x, w, g = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((m, k), (n, k), (m, n)))

    def run() -> None:
        ops.dot("mk,nk->mn", x, w)
        ops.dot("mn,nk->mk", g, w)
        ops.dot("mn,mk->nk", g, x)

    return run


def _attention(batch: int, heads: int, length: int, size: int, dtype: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v, grad = (torch.randn(batch, heads, length, size).to(getattr(torch, dtype)) for _ in range(4))
    out, lse = ops.attention(q, k, v, None, False, size**-0.5)
    return (
        lambda: ops.attention(q, k, v, None, False, size**-0.5),
        lambda: ops.attention_backward(grad, q, k, v, out, lse, None, False, size**-0.5),
    )


def _memory_bound(numel: int) -> Iterator[Measurement]:
    """One op of each kind on float32; the bytes are those that `autopar.analysis.work` counts."""
    x, y = torch.randn(numel), torch.randn(numel)
    rows = x.view(-1, min(numel, 256))
    ids = torch.randint(rows.shape[0], (rows.shape[0],))
    weight = torch.ones(rows.shape[1])
    yield "elementwise", {"bytes": 12 * numel}, lambda: torch.add(x, y)
    yield "transcendental", {"bytes": 8 * numel}, lambda: torch.nn.functional.gelu(x)
    yield "reduction", {"bytes": 8 * numel}, lambda: torch.nn.functional.layer_norm(rows, weight.shape, weight, weight)
    yield "indexing", {"bytes": 8 * numel + 8 * len(ids)}, lambda: ops.embedding(rows, ids)


def compute_measurements() -> Iterator[Measurement]:
    """Everything that needs no communication."""
    for dtype in DTYPES:
        for m, n, k in MATMULS:
            yield "matmul", {"m": m, "n": n, "k": k, "dtype": dtype}, _matmul(m, n, k, dtype)
        for batch, heads, length, size in ATTENTIONS:
            flops = 4 * batch * heads * length * length * size
            forward, backward = _attention(batch, heads, length, size, dtype)
            yield "attention", {"flops": flops, "dtype": dtype}, forward
            yield "attention_backward", {"flops": 5 * flops // 2, "dtype": dtype}, backward
    for numel in NUMELS:
        yield from _memory_bound(numel)


def collective_measurements(rank: int, world_size: int) -> Iterator[Measurement]:
    """Each kind on axes of 2 ranks and of all; the groups of an axis run side by side, as on a mesh."""
    for size in sorted({2, world_size}):
        if world_size % size:
            continue
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world_size, size)]
        axis = AxisGroup(groups[rank // size].group_name, size, rank % size)
        for kind in COLLECTIVES:
            for num_bytes in BYTES:
                yield kind, {"num_devices": size, "bytes": num_bytes}, _collective(kind, num_bytes, axis)


def _collective(kind: str, num_bytes: int, axis: AxisGroup) -> Callable[[], Any]:
    """`num_bytes` is the larger of the input and the output of one rank."""
    x = torch.zeros(num_bytes // 4 // (axis.size if kind == "all_gather" else 1)).view(axis.size, -1)

    def run() -> None:
        with use_groups((axis,)):
            if kind == "all_reduce":
                all_reduce(x, "sum", 0)
            elif kind == "all_gather":
                all_gather(x, 0, 0)
            elif kind == "reduce_scatter":
                reduce_scatter(x, 0, "sum", 0)
            else:
                all_to_all(x, 1, 0, 0)

    return run


def _window_s(run: Callable[[], Any], window_s: float) -> float:
    """Mean time of `run` over a window; the window ends by the clock, so ranks need not agree on a count."""
    dist.barrier()
    start, count, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < window_s:
        run()
        count += 1
        elapsed = time.perf_counter() - start
    return elapsed / count


def _counted_s(run: Callable[[], Any], window_s: float) -> float:
    """Mean time of `run` over a count that all ranks agree on, as collectives need."""
    run()
    dist.barrier()
    start = time.perf_counter()
    run()
    first = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(first, dist.ReduceOp.MAX)
    count = max(2, min(200, math.ceil(window_s / first.item())))
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def _measure(measurements: list[Measurement], timer: Callable[[Callable[[], Any], float], float], window_s: float) -> list[float]:
    """Best of the rounds, mean of the ranks, in seconds per measurement."""
    best = torch.full((len(measurements),), torch.inf, dtype=torch.float64)
    for _ in range(ROUNDS):
        for i, (_, _, run) in enumerate(measurements):
            best[i] = min(best[i].item(), timer(run, window_s / ROUNDS))
            if dist.get_rank() == 0:
                print("measured", flush=True)
    dist.all_reduce(best)
    return (best / dist.get_world_size()).tolist()


def main(rank: int, world_size: int, folder: Path) -> None:
    """Measure, and write {kind: [points]} as rank 0."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    try:
        compute, collectives = list(compute_measurements()), list(collective_measurements(rank, world_size))
        if rank == 0:
            print(f"total {ROUNDS * (len(compute) + len(collectives))}", flush=True)
        times = _measure(compute, _window_s, WINDOW_S) + _measure(collectives, _counted_s, COLLECTIVE_S)
        points: dict[str, list[Point]] = {}
        for (kind, point, _), time_s in zip(compute + collectives, times, strict=True):
            share = 3 if kind == "matmul" else 1
            points.setdefault(kind, []).append({**point, "time_s": float(f"{time_s / share:.4g}")})
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(points), encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
