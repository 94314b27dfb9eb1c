"""Offload to host memory: the budget of a host, and the time to store activations there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.constraints import Offloaded
from autopar.core.collective import Collective
from autopar.core.hardware import HardwareProfile
from autopar.core.layout_graph import LayoutGraph, host_copy
from autopar.errors import HardwareError
from autopar.rules import TensorInfo
from autopar.sharding import Forced

# Usable share of the host memory per device. The rest is left to the processes, their batches, and
# page-locked buffers.
_SHARE = 0.8


def host_budget(forced: Forced, profile: HardwareProfile) -> int:
    """Return the bytes of host memory that each device may use; 0 if nothing is offloaded.

    Args:
        forced: the constraints.
        profile: the hardware.

    Raises:
        HardwareError: if tensors are offloaded and the profile does not describe a host.
    """
    stored = [name for name, layout in forced.storage.items() if layout.host]
    if forced.offload is None and not stored:
        return 0
    if profile.host is None:
        message = (
            f"profile {profile.name!r} has no figures for host memory, but"
            f" {forced.offload or stored[0]} requires host storage"
        )
        raise HardwareError(
            message,
            remedy=(
                'add the field "host" to a copy of the profile and pass its path, or plan without'
                " offload"
            ),
        )
    asked = forced.offload.host_bytes if forced.offload is not None else None
    return asked or int(profile.host.memory_bytes * _SHARE)


def offload_seconds(
    info: TensorInfo,
    graph: LayoutGraph,
    keepable: frozenset[int] | None,
    mesh_shape: Sequence[int],
    price: Callable[[Collective], float],
) -> tuple[float, ...]:
    """Return the seconds to store a tensor on the hosts, for each layout of its graph.

    Args:
        info: global shape and dtype of the tensor.
        graph: its layout graph.
        keepable: indices of the layouts in which it may be kept; None allows all.
        mesh_shape: devices per mesh axis.
        price: function that returns the seconds of a collective.

    Returns:
        Seconds per layout. Infinite for partial sums, parts with halos, layouts marked as uncast or
        on the host, and layouts in which the tensor may not be kept.
    """
    seconds = []
    for n, layout in enumerate(graph.layouts):
        may = (keepable is None or n in keepable) and not (
            layout.has_partial or layout.has_halo or layout.uncast or layout.host
        )
        seconds.append(
            price(host_copy("store", info.shape, info.dtype, layout, mesh_shape))
            if may
            else math.inf
        )
    return tuple(seconds)


def shared_by(forced: Forced, profile: HardwareProfile, num_stages: int) -> Forced:
    """Divide the host memory of a device evenly among its stages.

    Args:
        forced: the constraints on all stages.
        profile: the hardware.
        num_stages: number of stages per device.

    Returns:
        The constraints on each stage.
    """
    total_bytes = host_budget(forced, profile)
    if not total_bytes or num_stages == 1:
        return forced
    asked = forced.offload or Offloaded(
        parameters=False, activations=False, host_bytes=None
    )  # only storage layouts place tensors on the host
    return replace(forced, offload=replace(asked, host_bytes=max(total_bytes // num_stages, 1)))
