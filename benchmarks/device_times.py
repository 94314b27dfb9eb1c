"""How long calls take on a CUDA device, and how long the host needs to enqueue them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UP, ROUNDS = 3, 20
CYCLES_PER_S = 2.0e9  # at least those of any device's clock


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: on the device when the host is far ahead, and on the host until all is enqueued."""

    device_s: float
    host_s: float


def measure(calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, Times]:
    """The medians of some rounds, in each of which every call runs once, so that all see the same clocks and the same heat.

    The device first sleeps for longer than the host needs to enqueue a call: in a training step, too, the host is ahead, and else short
    calls would show the host's time. What the host needs is given beside it.
    """
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            longest = max((host for _, host in found[name]), default=5e-3)
            found[name].append(_once(call, ahead_s=2 * longest + 1e-4))
    return {name: Times(*(statistics.median(values) for values in zip(*pairs, strict=True))) for name, pairs in found.items()}


def _once(call: Callable[[], object], ahead_s: float) -> tuple[float, float]:
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(ahead_s * CYCLES_PER_S))
    start.record()
    began = time.perf_counter()
    call()
    host_s = time.perf_counter() - began
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, host_s
