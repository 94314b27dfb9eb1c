"""A profile with slow links, slow products and cheap launches, so that kernels are chosen for small
models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.core.hardware import HardwareProfile

REACHED = {"all_gather_matmul": 0.9, "matmul_reduce_scatter": 0.9}
NORMING = {**REACHED, "reduce_add_rmsnorm": 0.9}


def overlapping(
    *,
    link_bytes_per_s: float = 3e7,
    flops_per_s: float = 5e8,
    kernels: Mapping[str, float] = REACHED,
    slowdown: float = 0.4,
) -> HardwareProfile:
    """Return a profile with the memory and efficiencies of the H100, but with the given bandwidth
    of links and flops of the device."""
    real = HardwareProfile.load("h100-sxm")
    links = {
        n: replace(x, latency_s=0.0, bandwidth_bytes_per_s=link_bytes_per_s, curves={})
        for n, x in real.links.items()
    }
    figures = f"{link_bytes_per_s}/{flops_per_s}/{sorted(kernels.items())}/{slowdown}"
    return replace(
        real,
        name="overlapping",
        launch_overhead_s=0.0,
        matmul_half_flops=0.0,
        memory_bandwidth_bytes_per_s=1e11,
        links=links,
        curves={},
        peak_flops_per_s=dict.fromkeys(real.peak_flops_per_s, flops_per_s),
        kernels=kernels,
        overlap_slowdown=slowdown,
        hash=figures,
    )
