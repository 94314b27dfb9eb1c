"""The parts of profiles: figures, measured curves and links.

A *figure* is one number of a profile. A *curve* is a set of measured (size, time) points.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

LINKS = ("intra", "inter")
KERNELS = ("all_gather_matmul", "matmul_reduce_scatter", "reduce_add_rmsnorm", "moe_route")
FLOP_KINDS = ("matmul", "attention", "attention_backward")
MEMORY_KINDS = ("elementwise", "transcendental", "reduction", "indexing")
WorkKind = Literal[
    "matmul",
    "attention",
    "attention_backward",
    "elementwise",
    "transcendental",
    "reduction",
    "indexing",
    "view",
]
"""`FLOP_KINDS`, `MEMORY_KINDS`, and ``view``, which takes no time."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit, its source, and the date (ISO) on which it was read or measured."""

    value: float
    unit: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured times over sizes, never falling.

    Between points both are interpolated on logarithmic scales; below the first point the time stays
    that of the first (latency), beyond the last it grows in proportion (bandwidth).
    """

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    @staticmethod
    def curve_through(points: Iterable[tuple[float, float]]) -> Curve:
        """Make the curve through (size, time_s) points: sorted, with the least time of equal sizes,
        and non-decreasing."""
        fastest: dict[float, float] = {}
        for size, time in points:
            fastest[size] = min(time, fastest.get(size, math.inf))
        sizes, times, longest = sorted(fastest), [], 0.0
        for size in sizes:
            longest = max(longest, fastest[size])
            times.append(longest)
        return Curve(tuple(sizes), tuple(times))

    def time_s(self, size: float) -> float:
        """Return the time at `size`, in seconds."""
        sizes, times = self.sizes, self.times
        if size <= sizes[0]:
            return times[0]
        if size >= sizes[-1]:
            return times[-1] * size / sizes[-1]
        i = bisect_right(sizes, size)
        low, high = sizes[i - 1], sizes[i]
        share = math.log(size / low) / math.log(high / low)
        return times[i - 1] * (times[i] / times[i - 1]) ** share


@dataclass(frozen=True, slots=True)
class Host:
    """A device's share of its host: the host memory and the link to it.

    Attributes:
        memory_bytes: host memory per device, in bytes.
        memory_bandwidth_bytes_per_s: bandwidth of the host's processors to this memory, per device,
            while they process the shares of all devices.
        latency_s, bandwidth_bytes_per_s: latency and bandwidth of a copy between device and host,
            in one direction.
    """

    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """A connection level.

    Attributes:
        latency_s: latency of one step of a collective.
        bandwidth_bytes_per_s: bandwidth per device in one direction, as a ring reaches it.
        all_to_all_efficiency: share of that bandwidth that an all_to_all reaches.
        curves: kind of collective → (number of devices → curve over bytes). Bytes are the larger of
            one rank's input and output.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    all_to_all_efficiency: float
    curves: Mapping[str, Mapping[int, Curve]]
