"""Unequal devices: one profile per index along a mesh axis, and the times of the slowest of several
profiles.

If pipeline stages are along that axis, each is priced on its own devices. Along any other axis all
devices run the same program in lockstep: each op and each collective takes as long as on the
slowest device, and each device holds at most what the smallest can hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from autopar.core.hardware.figures import Figure, Host, Link
from autopar.core.hardware.profile import HardwareProfile


@dataclass(frozen=True, slots=True)
class Mixed:
    """Devices that differ along one mesh axis.

    Attributes:
        axis: name of the axis.
        profiles: the profiles of the devices at each index along it.
    """

    axis: str
    profiles: tuple[HardwareProfile, ...]

    @property
    def name(self) -> str:
        """The name as the command line takes it: ``stage=h100-sxm,a100-sxm-80gb``."""
        return f"{self.axis}={','.join(profile.name for profile in self.profiles)}"

    @property
    def hash(self) -> str:
        """The fingerprint of all profiles, in order."""
        return _combined_hash(profile.hash for profile in self.profiles)


Hardware: TypeAlias = HardwareProfile | Mixed


def slowest(hardware: Hardware) -> HardwareProfile:
    """Return the profile with whose figures all devices run one program in lockstep."""
    return slowest_of(hardware.profiles) if isinstance(hardware, Mixed) else hardware


def profile_of(hardware: Hardware, axis: str, stage: int) -> HardwareProfile:
    """Return the profile of the devices of a stage. Along `axis` with n devices, stage k is on
    device k mod n.

    Args:
        hardware: the hardware.
        axis: the pipeline axis; empty for one stage on the whole mesh.
        stage: index k of the stage.
    """
    if isinstance(hardware, Mixed) and axis == hardware.axis:
        return hardware.profiles[stage % len(hardware.profiles)]
    return slowest(hardware)


@lru_cache(maxsize=64)
def slowest_of(profiles: tuple[HardwareProfile, ...]) -> HardwareProfile:
    """Make a profile on which every op and every collective takes as long as on the slowest of
    these profiles. If they are equal, return that profile.

    Times are looked up in each of its `parts`, so measured points are used as well. Each other
    figure is the worst one: the least memory, bandwidth and efficiency, and the largest overhead
    and latency. The profile has the dtypes, kernels and hosts that all of them have.
    """
    parts = tuple(dict.fromkeys(profiles))
    if len(parts) == 1:
        return parts[0]
    hosts = [part.host for part in parts]
    types = {part.device_type for part in parts}
    return HardwareProfile(
        name=f"slowest of {', '.join(part.name for part in parts)}",
        description=f"each op as on the slowest of {', '.join(part.name for part in parts)}",
        device_memory_bytes=min(part.device_memory_bytes for part in parts),
        memory_bandwidth_bytes_per_s=min(part.memory_bandwidth_bytes_per_s for part in parts),
        launch_overhead_s=max(part.launch_overhead_s for part in parts),
        overlap_slowdown=max(part.overlap_slowdown for part in parts),
        kernels=_worst_of_each([part.kernels for part in parts], min),
        matmul_half_flops=max(part.matmul_half_flops for part in parts),
        peak_flops_per_s=_worst_of_each([part.peak_flops_per_s for part in parts], min),
        efficiency={
            kind: _worst_of_each([part.efficiency[kind] for part in parts], min)
            for kind in parts[0].efficiency
        },
        memory_efficiency=_worst_of_each([part.memory_efficiency for part in parts], min),
        links={name: slowest_link(part.links[name] for part in parts) for name in parts[0].links},
        curves={},
        figures=_figures(parts),
        hash=_combined_hash(part.hash for part in parts),
        device_type=types.pop() if len(types) == 1 else "",
        host=None if None in hosts else _least_host([host for host in hosts if host is not None]),
        parts=parts,
    )


def slowest_link(links: Iterable[Link]) -> Link:
    """Make a link whose figures are the worst of these links. It has no measured points, which only
    the `parts` of a profile have."""
    candidates = list(links)
    return Link(
        max(link.latency_s for link in candidates),
        min(link.bandwidth_bytes_per_s for link in candidates),
        min(link.all_to_all_efficiency for link in candidates),
        {},
    )


def _worst_of_each(
    mappings: Sequence[Mapping[str, float]], worst: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    """Return the worst value of each figure that all have."""
    return {
        key: worst(each[key] for each in mappings)
        for key in mappings[0]
        if all(key in each for each in mappings)
    }


def _least_host(hosts: Sequence[Host]) -> Host:
    return Host(
        min(host.memory_bytes for host in hosts),
        min(host.memory_bandwidth_bytes_per_s for host in hosts),
        max(host.latency_s for host in hosts),
        min(host.bandwidth_bytes_per_s for host in hosts),
    )


def _figures(parts: Sequence[HardwareProfile]) -> dict[str, Figure]:
    return {
        f"{part.name}.{path}": figure for part in parts for path, figure in part.figures.items()
    }


def _combined_hash(hashes: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]
