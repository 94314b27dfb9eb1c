"""One process of a measurement: ``python -m autopar.profiler.worker RANK WORLD_SIZE FOLDER
DEVICE``, started by `measure`.

On ``cpu`` all ranks measure the same op at the same time, since ranks of one machine share its
cores and its memory bandwidth. A time is the mean over a window, so that it includes time slices of
other ranks. The result is the fastest of several rounds, averaged over the ranks.

Any other device is measured by one process without competition. A time is the mean over a window of
calls, issued back to back between two synchronisations. It is the larger of the host's time to
issue a call and the device's time to execute it, as in an eager step: the host's time for small
ops, the device's for large ones. The result is the median of several rounds, since the fastest
round would be that of a cool chip.

Rank 0 prints one line per finished measurement and writes the result to FOLDER/result.json.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import ops
from autopar.kernels.collectives import (
    AxisGroup,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    use_groups,
)

# --------------------------------------------------------------------------------------------------
# The host of a GPU: an optimizer step over offloaded states, and copies between host and device.
#
# All processors of the machine execute the step, and each GPU is assigned its share of their
# throughput. In training, too, the offloaded states of all GPUs are updated at the same time.

STEP_NUMEL, COPY_BYTES = 2**26, 2**28  # larger than the processors' caches
STEP_PASSES = 7  # Adam reads four and writes three buffers of the parameters' size
HOST_ROUNDS = 5


def measure_host(
    device: str, numel: int = STEP_NUMEL, copy_bytes: int = COPY_BYTES
) -> dict[str, float]:
    """Measure the host of a device.

    Args:
        device: the device that memory is copied to and from.
        numel: the number of float32 parameters of the optimizer step.
        copy_bytes: the size of a copy, in bytes.

    Returns:
        ``step_bytes_per_s``: the memory throughput of the processors in a step of AdamW in float32
        (`fused=True`). ``copy_bytes_per_s``: the bandwidth between page-locked memory and the
        device, in the slower direction.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        step_s = _step_s(numel)
    finally:
        torch.set_num_threads(before)
    host = torch.zeros(copy_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    there = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    ways = (
        (lambda: there.copy_(host, non_blocking=True)),
        (lambda: host.copy_(there, non_blocking=True)),
    )
    copy_s = max(_median_s(way, device) for way in ways)
    return {
        "step_bytes_per_s": STEP_PASSES * 4 * numel / step_s,
        "copy_bytes_per_s": copy_bytes / copy_s,
    }


def _step_s(numel: int) -> float:
    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.ones(numel)
    return _median_s(torch.optim.AdamW([parameter], fused=True).step, "cpu")


def _median_s(run: Callable[[], object], device: str) -> float:
    """Return the median time in seconds, without the first call, which allocates memory."""
    times = []
    for _ in range(1 + HOST_ROUNDS):
        begun = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


# --------------------------------------------------------------------------------------------------
# The measured ops, their sizes on a CPU and on a GPU, and the point that each yields.
#
# Data is random, never zeros: a chip that multiplies zeros draws less power and runs faster than
# in training.

Point = dict[str, Any]
Run = Callable[[], Any]
# kind, the point without its time, and a function that makes the data and returns the op to run
Measurement = tuple[str, Point, Callable[[], Run]]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that are measured on one kind of device, from one dominated by the launch of an op
    to one that fills the device.

    Attributes:
        matmuls: dtype name → (m, n, k) of linear layers.
        attentions: dtype name → (batch, heads, length, head size).
        numels: numbers of float32 elements, for the kinds that are bound by memory bandwidth.
        row: the number of elements of a row that is normalised or looked up.
    """

    matmuls: Mapping[str, Shapes]
    attentions: Mapping[str, Shapes]
    numels: tuple[int, ...]
    row: int


_CPU_MATMULS = (
    (16, 64, 64),
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 256, 1024),
    (512, 1024, 1024),
)
_CPU_ATTENTIONS = ((1, 2, 32, 16), (1, 4, 64, 32), (2, 4, 128, 32), (2, 4, 256, 64))
_CPU_DTYPES = ("float32", "bfloat16", "float64")
CPU = Sizes(
    matmuls=dict.fromkeys(_CPU_DTYPES, _CPU_MATMULS),
    attentions=dict.fromkeys(_CPU_DTYPES, _CPU_ATTENTIONS),
    numels=(256, 4096, 65536, 524288, 2097152),
    row=256,
)
# No side of a product falls from one size to the next: a curve is over flops alone, and a thin
# product would hide the next ones.
_GPU_MATMULS = (
    (128, 256, 256),
    (128, 1024, 1024),
    (512, 1024, 1024),
    (1024, 1024, 2048),
    (1024, 2048, 2048),
    (2048, 2048, 4096),
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
)
_GPU_ATTENTIONS = (
    (1, 8, 128, 64),
    (1, 32, 256, 128),
    *((1, 32, length, 128) for length in (512, 1024, 2048, 4096, 8192)),
)
# The wide dtypes stop earlier: they are many times slower, on consumer GPUs float64 by 64. In
# float64 attention keeps its scores.
GPU = Sizes(
    matmuls={
        "float32": _GPU_MATMULS[:-1],
        "bfloat16": _GPU_MATMULS,
        "float16": _GPU_MATMULS,
        "float64": _GPU_MATMULS[:6],
    },
    attentions={
        "float32": _GPU_ATTENTIONS[:-2],
        "bfloat16": _GPU_ATTENTIONS,
        "float16": _GPU_ATTENTIONS,
        "float64": _GPU_ATTENTIONS[:4],
    },
    numels=(
        256,
        4096,
        65536,
        2**19,
        2**21,
        2**23,
        2**25,
        2**27,
    ),  # the last ones well over any cache
    row=4096,
)


def compute_measurements(sizes: Sizes, device: str = "cpu") -> Iterator[Measurement]:
    """Yield the measurements without communication. The data of each is made when it runs, since
    the data of all may exceed the memory of a device."""
    for dtype, shapes in sizes.matmuls.items():
        for m, n, k in shapes:
            yield (
                "matmul",
                {"m": m, "n": n, "k": k, "dtype": dtype},
                partial(_matmul, m, n, k, dtype, device),
            )
    for dtype, shapes in sizes.attentions.items():
        for shape in shapes:
            batch, heads, length, size = shape
            flops = 4 * batch * heads * length * length * size
            yield (
                "attention",
                {"flops": flops, "dtype": dtype},
                partial(_attention, shape, dtype, device),
            )
            yield (
                "attention_backward",
                {"flops": 5 * flops // 2, "dtype": dtype},
                partial(_attention_backward, shape, dtype, device),
            )
    for numel in sizes.numels:
        yield from _memory_bound(numel, min(numel, sizes.row), device)


def _random_tensor(shape: tuple[int, ...], dtype: str, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, dtype))


def _matmul(m: int, n: int, k: int, dtype: str, device: str) -> Run:
    """Return the product of a linear layer with its two gradients. The time of a point is a third
    of theirs."""
    x, w, g = (_random_tensor(shape, dtype, device) for shape in ((m, k), (n, k), (m, n)))

    def run() -> None:
        """Compute the product and the gradients."""
        ops.dot("mk,nk->mn", x, w)
        ops.dot("mn,nk->mk", g, w)
        ops.dot("mn,mk->nk", g, x)

    return run


def _attention(shape: tuple[int, ...], dtype: str, device: str) -> Run:
    q, k, v = (_random_tensor(shape, dtype, device) for _ in range(3))
    return lambda: ops.attention(q, k, v, None, False, shape[-1] ** -0.5)


def _attention_backward(shape: tuple[int, ...], dtype: str, device: str) -> Run:
    q, k, v, grad = (_random_tensor(shape, dtype, device) for _ in range(4))
    out, lse = ops.attention(q, k, v, None, False, shape[-1] ** -0.5)
    return lambda: ops.attention_backward(grad, q, k, v, out, lse, None, False, shape[-1] ** -0.5)


def _memory_bound(numel: int, row: int, device: str) -> Iterator[Measurement]:
    """Yield one op of each memory-bound kind on float32. The bytes are those that
    `autopar.analysis.work` counts."""

    def addition() -> Run:
        """Make the data of an addition."""
        x, y = (
            _random_tensor((numel,), "float32", device),
            _random_tensor((numel,), "float32", device),
        )
        return lambda: torch.add(x, y)

    def gelu() -> Run:
        """Make the data of a GELU."""
        x = _random_tensor((numel,), "float32", device)
        return lambda: torch.nn.functional.gelu(x)

    def norm() -> Run:
        """Make the data of a layer norm over rows."""
        rows, weight = (
            _random_tensor((numel // row, row), "float32", device),
            _random_tensor((row,), "float32", device),
        )
        return lambda: torch.nn.functional.layer_norm(rows, weight.shape, weight, weight)

    def lookup() -> Run:
        """Make the data of an embedding with random ids."""
        rows = _random_tensor((numel // row, row), "float32", device)
        ids = torch.randint(numel // row, (numel // row,), device=device)
        return lambda: ops.embedding(rows, ids)

    yield "elementwise", {"bytes": 12 * numel}, addition
    yield "transcendental", {"bytes": 8 * numel}, gelu
    yield "reduction", {"bytes": 8 * numel}, norm
    yield "indexing", {"bytes": 8 * numel + 8 * (numel // row)}, lookup


ROUNDS = 2
WINDOW_S = 0.1  # for one measurement of an op; several time slices of the scheduler
COLLECTIVE_S = 0.15  # for one measurement of a collective
DEVICE_ROUNDS = 3
DEVICE_WINDOW_S = 0.02  # for one round; a synchronisation takes a thousandth of it
WARM_UP_CALLS = 3  # the first calls load and select a kernel, and allocate its memory
BYTES = (1024, 16384, 131072, 1048576, 8388608)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collective_measurements(rank: int, world_size: int) -> Iterator[Measurement]:
    """Yield the measurements of each kind of collective on axes of 2 ranks and of all ranks. The
    groups of an axis run at the same time, as on a mesh."""
    for size in sorted({2, world_size}):
        if world_size % size:
            continue
        groups = [
            dist.new_group(list(range(start, start + size))) for start in range(0, world_size, size)
        ]
        axis = AxisGroup(groups[rank // size].group_name, size, rank % size)
        for kind in COLLECTIVES:
            for num_bytes in BYTES:
                yield (
                    kind,
                    {"num_devices": size, "bytes": num_bytes},
                    partial(_collective, kind, num_bytes, axis),
                )


def _collective(kind: str, num_bytes: int, axis: AxisGroup) -> Run:
    """Make the data of a collective; `num_bytes` is the larger of the input and the output of one
    rank."""
    x = torch.randn(num_bytes // 4 // (axis.size if kind == "all_gather" else 1)).view(
        axis.size, -1
    )

    def run() -> None:
        """Run the collective."""
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
    """Return the mean time of `run` over a window, in seconds. The window ends by the clock, so
    that ranks need not agree on a count."""
    dist.barrier()
    start, count, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < window_s:
        run()
        count += 1
        elapsed = time.perf_counter() - start
    return elapsed / count


def _counted_s(run: Run, window_s: float) -> float:
    """Return the mean time of `run`, in seconds, over a count that all ranks agree on, as
    collectives require."""
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


def _measure_together(
    measurements: list[Measurement], timer: Callable[[Run, float], float], window_s: float
) -> list[float]:
    """Return the time of each measurement in seconds: the best of the rounds, averaged over the
    ranks."""
    runs = [make() for _, _, make in measurements]
    best = torch.full((len(runs),), torch.inf, dtype=torch.float64)
    for _ in range(ROUNDS):
        for i, run in enumerate(runs):
            best[i] = min(best[i].item(), timer(run, window_s / ROUNDS))
            if dist.get_rank() == 0:
                print("measured", flush=True)
    dist.all_reduce(best)
    return (best / dist.get_world_size()).tolist()


def measure_alone(
    measurements: Sequence[Measurement], device: str, window_s: float = DEVICE_WINDOW_S
) -> list[float]:
    """Measure a device in one process without competition.

    Args:
        measurements: the measurements.
        device: the device, such as ``"cuda"``.
        window_s: the length of one round of a measurement, in seconds.

    Returns:
        The median of the rounds, in seconds, of each measurement.
    """
    times: list[list[float]] = [[] for _ in measurements]
    for _ in range(DEVICE_ROUNDS):
        for window_times, (_, _, make) in zip(times, measurements, strict=True):
            window_times.append(_back_to_back_s(make(), device, window_s))
            print("measured", flush=True)
    return [statistics.median(found) for found in times]


def _back_to_back_s(run: Run, device: str, window_s: float) -> float:
    """Return the mean time of back-to-back calls, in seconds. The number of calls that fill the
    window is estimated first."""
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


def group_points(
    measurements: Sequence[Measurement], times: Sequence[float]
) -> dict[str, list[Point]]:
    """Return the points of each kind, each with its time in seconds."""
    points: dict[str, list[Point]] = {}
    for (kind, point, _), time_s in zip(measurements, times, strict=True):
        share = 3 if kind == "matmul" else 1
        points.setdefault(kind, []).append({**point, "time_s": float(f"{time_s / share:.4g}")})
    return points


def _together(rank: int, world_size: int, folder: Path) -> dict[str, list[Point]]:
    """Measure as one of several ranks on a CPU, and return the points by kind."""
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    try:
        compute, collectives = (
            list(compute_measurements(CPU)),
            list(collective_measurements(rank, world_size)),
        )
        if rank == 0:
            print(f"total {ROUNDS * (len(compute) + len(collectives))}", flush=True)
        times = _measure_together(compute, _window_s, WINDOW_S) + _measure_together(
            collectives, _counted_s, COLLECTIVE_S
        )
        return group_points(compute + collectives, times)
    finally:
        dist.destroy_process_group()


def _alone(device: str) -> dict[str, list[Point]]:
    """Measure a device other than a CPU and its host, and return the points by kind."""
    compute = list(compute_measurements(GPU, device))
    print(f"total {DEVICE_ROUNDS * len(compute) + 1}", flush=True)
    points = group_points(compute, measure_alone(compute, device))
    points["host"] = [measure_host(device)]
    print("measured", flush=True)
    return points


def main(rank: int, world_size: int, folder: Path, device: str) -> None:
    """Measure; rank 0 writes {kind: [points]} to ``result.json``.

    Args:
        rank: the rank of this process.
        world_size: the number of processes.
        folder: the folder of the result, and of the file store of the process group.
        device: ``"cpu"``, or the device to measure.
    """
    torch.set_num_threads(1)
    points: Any = _together(rank, world_size, folder) if device == "cpu" else _alone(device)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(points), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
