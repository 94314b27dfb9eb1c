"""The time of calls on a CUDA device, and the time that the host needs to enqueue them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UP, ROUNDS = 3, 20
CYCLES_PER_S = 2.0e9  # no device has a faster clock
# A device's queue holds about a thousand launches. A host that fills it waits, even if the
# device sleeps for longer.
MOST_AHEAD_S = 0.02


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call: on the device if the host is ahead, and on the host until everything is
    enqueued."""

    device_s: float
    host_s: float


def in_turn(*calls: Callable[[], object]) -> Callable[[], None]:
    """Return a function that makes several calls one after another."""

    def run() -> None:
        for call in calls:
            call()

    return run


def measure(calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, Times]:
    """Return the medians over several rounds. Each round runs every call once, so that all calls
    have the same clocks and temperature.

    The device first sleeps for longer than the host needs to enqueue a call. The host is also ahead
    in a training step; otherwise short calls would show the time of the host. The time of the host
    is measured before, on an idle device.
    """
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    hosts = {
        name: statistics.median(_host_s(call) for _ in range(WARM_UP))
        for name, call in calls.items()
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_device_s(call, min(2 * hosts[name] + 1e-4, MOST_AHEAD_S)))
    return {name: Times(statistics.median(values), hosts[name]) for name, values in found.items()}


def _host_s(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _device_s(call: Callable[[], object], ahead_s: float) -> float:
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(ahead_s * CYCLES_PER_S))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
