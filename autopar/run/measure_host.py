"""What a GPU's host does for it: an optimizer's step over what rests there, and copies between the two.

All of the machine's processors step at once, and each GPU has its share of what they reach: so it is in a step of training, where what
every GPU keeps on the host is worked on at the same time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

STEP_NUMEL, COPY_BYTES = 2**26, 2**28  # more than the processors' caches hold
STEP_PASSES = 7  # of Adam over memory as large as its parameters: four are read, three written
ROUNDS = 5


def measure_host(device: str, numel: int = STEP_NUMEL, copy_bytes: int = COPY_BYTES) -> dict[str, float]:
    """``step_bytes_per_s``: what the processors reach in memory, in one pass of AdamW in float32 (`fused=True`).
    ``copy_bytes_per_s``: of the slower way between page-locked memory and the device."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        step_s = _step_s(numel)
    finally:
        torch.set_num_threads(before)
    host = torch.zeros(copy_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    there = torch.empty(copy_bytes, dtype=torch.uint8, device=device)
    ways = (lambda: there.copy_(host, non_blocking=True)), (lambda: host.copy_(there, non_blocking=True))
    copy_s = max(_median_s(way, device) for way in ways)
    return {"step_bytes_per_s": STEP_PASSES * 4 * numel / step_s, "copy_bytes_per_s": copy_bytes / copy_s}


def _step_s(numel: int) -> float:
    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.ones(numel)
    return _median_s(torch.optim.AdamW([parameter], fused=True).step, "cpu")


def _median_s(run: Callable[[], object], device: str) -> float:
    """Seconds, without the first time, when memory is found."""
    times = []
    for _ in range(1 + ROUNDS):
        begun = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
