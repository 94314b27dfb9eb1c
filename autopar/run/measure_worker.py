"""One process of a measurement: ``python -m autopar.run.measure_worker RANK WORLD_SIZE FOLDER DEVICE``, started by `measure`.

On ``cpu`` all ranks measure the same thing at the same time, since ranks of one machine share its cores and its memory bandwidth.
A time is the mean over a window, so that time slices of other ranks count; of several rounds the fastest counts; of the ranks the
mean.

Any other device is measured by one process, which has it to itself. A time is the mean over a window of calls, issued back to back
between two synchronisations: the longer of what the host needs to issue a call and what the device needs to work it off, as in an
eager step. So small ops show the host's time, large ones the device's. Of several rounds the median counts: the fastest would be
that of a cool chip.

Rank 0 prints one line per finished measurement and writes the result to FOLDER/result.json.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.kernels.collectives import AxisGroup, all_gather, all_reduce, all_to_all, reduce_scatter, use_groups
from autopar.run.measure_host import measure_host
from autopar.run.measure_ops import CPU, GPU, Measurement, Point, Run, compute_measurements

ROUNDS = 2
WINDOW_S = 0.1  # of one measurement of an op; some scheduler slices
COLLECTIVE_S = 0.15  # of one measurement of a collective
DEVICE_ROUNDS = 3
DEVICE_WINDOW_S = 0.02  # of one round; a synchronisation is a thousandth of it
WARM_UP_CALLS = 3  # a kernel is loaded and chosen, and its memory found, at its first call
BYTES = (1024, 16384, 131072, 1048576, 8388608)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collective_measurements(rank: int, world_size: int) -> Iterator[Measurement]:
    """Each kind on axes of 2 ranks and of all; the groups of an axis run side by side, as on a mesh."""
    for size in sorted({2, world_size}):
        if world_size % size:
            continue
        groups = [dist.new_group(list(range(start, start + size))) for start in range(0, world_size, size)]
        axis = AxisGroup(groups[rank // size].group_name, size, rank % size)
        for kind in COLLECTIVES:
            for num_bytes in BYTES:
                yield kind, {"num_devices": size, "bytes": num_bytes}, partial(_collective, kind, num_bytes, axis)


def _collective(kind: str, num_bytes: int, axis: AxisGroup) -> Run:
    """`num_bytes` is the larger of the input and the output of one rank."""
    x = torch.randn(num_bytes // 4 // (axis.size if kind == "all_gather" else 1)).view(axis.size, -1)

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


def _window_s(run: Run, window_s: float) -> float:
    """Mean time of `run` over a window; the window ends by the clock, so ranks need not agree on a count."""
    dist.barrier()
    start, count, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < window_s:
        run()
        count += 1
        elapsed = time.perf_counter() - start
    return elapsed / count


def _counted_s(run: Run, window_s: float) -> float:
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


def _measure_together(measurements: list[Measurement], timer: Callable[[Run, float], float], window_s: float) -> list[float]:
    """Best of the rounds, mean of the ranks, in seconds per measurement."""
    runs = [make() for _, _, make in measurements]
    best = torch.full((len(runs),), torch.inf, dtype=torch.float64)
    for _ in range(ROUNDS):
        for i, run in enumerate(runs):
            best[i] = min(best[i].item(), timer(run, window_s / ROUNDS))
            if dist.get_rank() == 0:
                print("measured", flush=True)
    dist.all_reduce(best)
    return (best / dist.get_world_size()).tolist()


def measure_alone(measurements: Sequence[Measurement], device: str, window_s: float = DEVICE_WINDOW_S) -> list[float]:
    """Median of the rounds, in seconds per measurement, of one process that has the device to itself."""
    times: list[list[float]] = [[] for _ in measurements]
    for _ in range(DEVICE_ROUNDS):
        for found, (_, _, make) in zip(times, measurements, strict=True):
            found.append(_back_to_back_s(make(), device, window_s))
            print("measured", flush=True)
    return [statistics.median(found) for found in times]


def _back_to_back_s(run: Run, device: str, window_s: float) -> float:
    """Mean time of calls that follow one another without a wait; how many fill the window is estimated first."""
    for _ in range(WARM_UP_CALLS):
        run()
    estimate_s = _calls_s(run, WARM_UP_CALLS, device)
    return _calls_s(run, max(WARM_UP_CALLS, math.ceil(window_s / estimate_s)), device)


def _calls_s(run: Run, count: int, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / count


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def timed(measurements: Sequence[Measurement], times: Sequence[float]) -> dict[str, list[Point]]:
    """Kind → points, each with its time."""
    points: dict[str, list[Point]] = {}
    for (kind, point, _), time_s in zip(measurements, times, strict=True):
        share = 3 if kind == "matmul" else 1
        points.setdefault(kind, []).append({**point, "time_s": float(f"{time_s / share:.4g}")})
    return points


def _together(rank: int, world_size: int, folder: Path) -> dict[str, list[Point]]:
    """The points of one rank among several on CPUs."""
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    try:
        compute, collectives = list(compute_measurements(CPU)), list(collective_measurements(rank, world_size))
        if rank == 0:
            print(f"total {ROUNDS * (len(compute) + len(collectives))}", flush=True)
        times = _measure_together(compute, _window_s, WINDOW_S) + _measure_together(collectives, _counted_s, COLLECTIVE_S)
        return timed(compute + collectives, times)
    finally:
        dist.destroy_process_group()


def _alone(device: str) -> dict[str, list[Point]]:
    """The points of one device that is no CPU, and of its host."""
    compute = list(compute_measurements(GPU, device))
    print(f"total {DEVICE_ROUNDS * len(compute) + 1}", flush=True)
    points = timed(compute, measure_alone(compute, device))
    points["host"] = [measure_host(device)]
    print("measured", flush=True)
    return points


def main(rank: int, world_size: int, folder: Path, device: str) -> None:
    """Measure, and write {kind: [points]} as rank 0."""
    torch.set_num_threads(1)
    points: Any = _together(rank, world_size, folder) if device == "cpu" else _alone(device)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(points), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
