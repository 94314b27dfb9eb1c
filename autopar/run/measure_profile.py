"""From measured points to a profile's JSON. Each figure says where it comes from: what was measured on which machine by which
command, or, where one device cannot tell (its links), whatever the profile says that it was taken from."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.hardware import FLOP_KINDS, FORMAT, MEMORY_KINDS, VERSION

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Points = Mapping[str, list[dict[str, Any]]]
Json = dict[str, Any]
_LINKED = ("links", "overlap_slowdown", "kernels", "host")  # what a device alone cannot tell


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        text: device, host, versions, and how many processes measured at once.
        command: what was called.
        date: of the measurement, ISO.
        memory_bytes: of one device; memory_source: how that is known.
    """

    device_type: str
    text: str
    command: str
    date: str
    memory_bytes: int
    memory_source: str

    @property
    def source(self) -> str:
        return f"measured by {self.command}: {self.text}"

    def figure(self, value: float, unit: str, how: str) -> Json:
        """A measured number to four digits, a count as it is."""
        rounded = value if isinstance(value, int) else float(f"{value:.4g}")
        return {"value": rounded, "unit": unit, "source": f"{self.source}; {how}", "date": self.date}

    def curves(self, points: Points, kinds: tuple[str, ...]) -> Json:
        return {kind: {"unit": "s", "source": self.source, "date": self.date, "points": points[kind]} for kind in kinds}


def profile_json(points: Points, machine: Machine, name: str, linked: Json, note: str = "") -> Json:
    """The profile's JSON; `linked` holds the fields of links, as `measured_links` or `links_from` gives them, `note` says more of them."""
    figure = machine.figure
    peaks = _best_rates(points["matmul"], lambda p: 2.0 * p["m"] * p["n"] * p["k"])
    rates = {kind: points[kind][-1]["bytes"] / points[kind][-1]["time_s"] for kind in MEMORY_KINDS}
    bandwidth = max(rates.values())
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "description": f"this machine: {machine.text}{note}",
        "device_type": machine.device_type,
        "device_memory_bytes": figure(machine.memory_bytes, "bytes", machine.memory_source),
        "memory_bandwidth_bytes_per_s": figure(bandwidth, "bytes/s", "best of the kinds of work that memory bounds, largest size"),
        "launch_overhead_s": figure(min(p["time_s"] for p in points["elementwise"]), "s", "smallest addition"),
        "matmul_half_flops": figure(0, "flops", "0, since the measured points show the speed of small sizes"),
        "peak_flops_per_s": {d: figure(rate, "flops/s", "best matmul measured") for d, rate in peaks.items()},
        "efficiency": {
            "matmul": {d: figure(1, "1", "1, since the peak is what was measured") for d in peaks},
            **{kind: _attention(points[kind], peaks, figure) for kind in FLOP_KINDS[1:]},
            **{kind: figure(rates[kind] / bandwidth, "1", "largest size over the best kind") for kind in MEMORY_KINDS},
        },
        "measured": machine.curves(points, (*FLOP_KINDS, *MEMORY_KINDS)),
        **linked,
    }


def measured_links(points: Points, machine: Machine, world_size: int) -> Json:
    """Latency of the smallest all_reduce and bandwidth of the largest all_gather, over all ranks; both links are this one."""
    whole = {kind: [p for p in points[kind] if p["num_devices"] == world_size] for kind in COLLECTIVES}
    steps = 2 * math.ceil(math.log2(world_size))
    gather, exchange = whole["all_gather"][-1], whole["all_to_all"][-1]
    bandwidth = (world_size - 1) / world_size * gather["bytes"] / gather["time_s"]
    efficiency = min(1.0, gather["time_s"] / exchange["time_s"])
    note = "; the processes share one machine, which stands for both links"
    link = {
        "latency_s": machine.figure(whole["all_reduce"][0]["time_s"] / steps, "s", f"smallest all_reduce over {steps} steps{note}"),
        "bandwidth_bytes_per_s": machine.figure(bandwidth, "bytes/s", f"largest all_gather{note}"),
        "all_to_all_efficiency": machine.figure(efficiency, "1", f"largest all_to_all over all_gather{note}"),
        "measured": machine.curves(points, COLLECTIVES),
    }
    return {"links": {"intra": link, "inter": link}}


def links_from(base: Json) -> Json:
    """The links of another profile with what goes on beside compute, word for word: every figure keeps its own source."""
    return {name: copy.deepcopy(base[name]) for name in _LINKED if name in base}


def measured_host(base: Json, found: Mapping[str, float], machine: Machine, memory_bytes: int, num_gpus: int) -> Json:
    """A GPU's share of its host, as measured (`autopar.run.measure_host`); only a copy's latency is the base's.

    Args:
        memory_bytes: of the whole host, which has so many GPUs.
    """
    share = f"; shared evenly by {num_gpus} GPUs" if num_gpus > 1 else ""
    return {
        "memory_bytes": machine.figure(memory_bytes // num_gpus, "bytes", f"the host's memory{share}"),
        "memory_bandwidth_bytes_per_s": machine.figure(found["step_bytes_per_s"] / num_gpus, "bytes/s", f"fused AdamW on all cores{share}"),
        "latency_s": copy.deepcopy(base["latency_s"]),
        "bandwidth_bytes_per_s": machine.figure(found["copy_bytes_per_s"], "bytes/s", "a copy of page-locked memory, the slower way"),
    }


def _attention(points: list[Json], peaks: Mapping[str, float], figure: Callable[[float, str, str], Json]) -> Json:
    rates = _best_rates(points, lambda p: p["flops"])
    return {d: figure(min(1.0, rate / peaks[d]), "1", "best measured over best matmul") for d, rate in rates.items()}


def _best_rates(points: list[Json], size: Callable[[Json], float]) -> dict[str, float]:
    """Dtype → best size per second."""
    dtypes = dict.fromkeys(p["dtype"] for p in points)
    return {d: max(size(p) / p["time_s"] for p in points if p["dtype"] == d) for d in dtypes}


def dumps(data: Json) -> str:
    """Indented JSON with one measured point a line."""
    lines: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, dict) and "time_s" in value:
            lines.append(json.dumps(value))
            return f"@{len(lines) - 1}@"
        if isinstance(value, dict):
            return {key: mark(v) for key, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    text = json.dumps(mark(data), indent=2)
    for i, line in enumerate(lines):
        text = text.replace(f'"@{i}@"', line, 1)
    return text + "\n"
