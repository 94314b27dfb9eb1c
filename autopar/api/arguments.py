"""Read the arguments of the public functions into autopar's own types: meshes, batches and
hardware."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.core.hardware import Hardware, HardwareProfile
from autopar.core.mesh import HardwareLike, Mesh, Unshaped, hardware_of, is_unshaped
from autopar.core.private_folder import find_foreign, find_sharing
from autopar.core.units import size
from autopar.errors import AutoparError, MeshError
from autopar.plans import Plan
from autopar.request import RESERVED_SHARE, PlanOptions
from autopar.runtime.device_mesh import mesh_of
from autopar.runtime.launchers import adopt_launch, launched_shape

MeshLike: TypeAlias = Mesh | DeviceMesh | Unshaped | Mapping[str, int]
Launched: TypeAlias = MeshLike | None  # None: all processes that a launcher started
Example: TypeAlias = Mapping[str, Any] | Sequence[Any] | Tensor


def as_mesh(mesh: MeshLike) -> Mesh:
    """Read the mesh argument: a `Mesh`, a torch DeviceMesh, axis sizes by name, (nodes, devices per
    node), or a device count.

    Raises:
        MeshError: if the argument is none of these.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return mesh_of(mesh)
    if is_unshaped(mesh):
        return Mesh(mesh) if isinstance(mesh, int) else Mesh({"node": mesh[0], "gpu": mesh[1]})
    is_batch = any(isinstance(leaf, Tensor) for leaf in tree_leaves(mesh))
    if isinstance(mesh, Mapping) and not is_batch:
        return Mesh(mesh)
    remedy = (
        'pass autopar.Mesh({"node": 4, "gpu": 8}), a torch DeviceMesh, (nodes, devices per node) '
        "as (4, 8), or a device count"
    )
    remedy += "; pass the batch as example_inputs=" if is_batch else ""
    raise MeshError(f"{tree_map_only(Tensor, _in_short, mesh)!r} is not a mesh", remedy=remedy)


def _in_short(x: Tensor) -> str:
    return f"tensor of shape {tuple(x.shape)}"


def launched_processes() -> Unshaped:
    """Return the processes of this job, from which the planner chooses a mesh.

    Returns:
        (nodes, processes per node); the number of processes if nodes have different numbers of
        processes; one process if there is no launcher and no process group.

    Raises:
        MeshError: if the variables of the launcher contradict each other (see `adopt_launch`).
    """
    if dist.is_initialized():
        return launched_shape(dist.get_world_size(), os.environ)
    adopt_launch()
    return launched_shape(int(os.environ.get("WORLD_SIZE", 1)), os.environ)


def is_shape_of(mesh: Mesh, requested: Unshaped) -> bool:
    """Return whether a mesh has the requested number of devices and of devices per node."""
    if isinstance(requested, int):
        return mesh.num_devices == requested
    return (mesh.num_devices // mesh.devices_per_node, mesh.devices_per_node) == requested


def as_call(example_inputs: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call. A mapping holds keyword arguments, a list or tuple
    positional arguments; a tensor is the only argument.

    Raises:
        AutoparError: if `example_inputs` is none of these.
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, str):
        message = f"example_inputs is a {type(example_inputs).__name__}"
        raise AutoparError(
            message,
            remedy=(
                "pass the batch as forward takes it: a mapping of keyword arguments, a sequence "
                "of positional arguments, or a tensor"
            ),
        )
    return tuple(example_inputs), {}


def check_model(model: nn.Module) -> None:
    """Check that a model is an `nn.Module`.

    Raises:
        AutoparError: if it is not an `nn.Module`.
    """
    if isinstance(model, type):
        raise AutoparError(
            f"{model.__name__} is a class, not a model",
            remedy=f"pass a torch.nn.Module: {model.__name__}(...)",
        )
    if not isinstance(model, nn.Module):
        raise AutoparError(
            f"{type(model).__name__} is not a model", remedy="pass a torch.nn.Module"
        )


def runs_on(model: nn.Module, mesh: MeshLike, batch: object) -> str | None:
    """Return the type of device that a model will run on.

    Args:
        model: the plain model.
        mesh: if it is a torch DeviceMesh, its device type is returned.
        batch: the call's inputs; see `kind_of`.

    Raises:
        AutoparError: if `model` is not an `nn.Module`.
    """
    check_model(model)
    return str(mesh.device_type) if isinstance(mesh, DeviceMesh) else kind_of(model, batch)


def kind_of(model: nn.Module, batch: object) -> str | None:
    """Return the type of device that a model and its batch are on.

    This is the device type of the parameters. If they are on a CPU and the batch is not, it is that
    of the batch: the parameters are sharded from the CPU. It is None if the parameters are on
    several types of devices, or all on meta.
    """
    types = {p.device.type for p in model.parameters()} - {"meta"}
    device_types = {x.device.type for x in tree_leaves(batch) if isinstance(x, Tensor)} - {"meta"}
    if types == {"cpu"} and len(device_types) == 1:
        return device_types.pop()
    return types.pop() if len(types) == 1 else None


# --------------------------------------------------------------------------------------------------
# Hardware: one profile or, for unequal devices, one per index along an axis of the mesh.


def as_hardware(hardware: HardwareLike, mesh: MeshLike) -> Hardware:
    """Read the hardware argument for a mesh; see `autopar.core.mesh.hardware_of`.

    Raises:
        HardwareError: if a profile does not exist, the mesh has no such axis, or the number of
            profiles differs from the size of the axis.
    """
    return hardware_of(hardware, mesh if is_unshaped(mesh) else as_mesh(mesh))


def of_plan(plan: Plan, hardware: HardwareLike | None = None) -> Hardware:
    """Return the hardware for a plan's mesh; by default that of the plan.

    Raises:
        HardwareError: if the profile named in the plan is not found. Pass its path, or a profile.
    """
    return as_hardware(planned_for(plan) if hardware is None else hardware, plan.mesh)


def planned_for(plan: Plan) -> HardwareLike:
    """Return the name of the hardware that a plan was made for."""
    mark = plan.fingerprint
    return {mark.axis: [name for name, _ in mark.profiles]} if mark.axis else mark.profile


# --------------------------------------------------------------------------------------------------
# The default hardware: this machine.

log = logging.getLogger("autopar")
_warned: set[str] = set()


def default_hardware(device_type: str | None = None) -> str:
    """Return ``local`` if this machine was measured for that type of device, otherwise the profile
    of its GPU, otherwise ``cpu-gloo``.

    Without `device_type`, a machine with a GPU counts as that GPU, and any other machine uses its
    measured profile, if any. A ``local`` profile without a device type was installed by hand and is
    always used. If no profile describes the GPU, a log message names the profile used instead.
    """
    required_type = device_type or ("cuda" if torch.cuda.is_available() else None)
    if _is_own(HardwareProfile.local_path()):
        measured = HardwareProfile.load("local").device_type
        if required_type is None or measured in ("", required_type):
            return "local"
    if not torch.cuda.is_available() or device_type == "cpu":
        return "cpu-gloo"
    device_name = torch.cuda.get_device_name()
    profile, is_its_own = HardwareProfile.of_gpu(device_name)
    if not is_its_own:
        template = (
            "no profile for %s; using the times of %s. Run `autopar profile --device cuda` to "
            "measure this machine (about half a minute)"
        )
        _warn_once(template, device_name, profile)
    return profile


def _is_own(path: Path) -> bool:
    """Return whether a profile exists that only this user can have written. Log a warning if
    another user can have written it.
    """
    if not os.path.exists(path):
        return False
    path = path.resolve()
    if reason := find_sharing(path.parent) or find_foreign(path):
        _warn_once(
            "the profile of this machine is not used by default: %s; pass hardware='local' to "
            "use it anyway",
            reason,
        )
    return not reason


def within_this_gpu(options: PlanOptions, profile: HardwareProfile) -> PlanOptions:
    """Return the options with the memory budget limited to that of the GPU of this machine.

    The options are unchanged if a budget was requested, or the GPU has at least the memory of the
    profile.
    """
    if (
        options.memory_bytes is not None
        or profile.device_type == "cpu"
        or not torch.cuda.is_available()
    ):
        return options
    here = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if here >= profile.device_memory_bytes:
        return options
    budget = int(here * (1 - RESERVED_SHARE))
    sizes = (size(num_bytes) for num_bytes in (profile.device_memory_bytes, here, budget))
    _warn_once(
        "%s has %s of memory, this GPU has %s: planning with a budget of %s", profile.name, *sizes
    )
    return replace(options, memory_bytes=budget)


def _warn_once(what: str, *words: str) -> None:
    if (message := what % words) not in _warned:
        _warned.add(message)
        log.warning(message)
