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

MeshLike: TypeAlias = Mesh | DeviceMesh | Unshaped | Mapping[str, int]
Launched: TypeAlias = MeshLike | None  # None: all processes that a launcher started
Example: TypeAlias = Mapping[str, Any] | Sequence[Any] | Tensor


def as_mesh(mesh: MeshLike) -> Mesh:
    """Read what users pass as a mesh: a `Mesh`, a torch DeviceMesh, axis sizes by name, (nodes,
    devices per node), or a device count.

    Raises:
        MeshError: where it is none of these.
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
        'pass autopar.Mesh({"node": 4, "gpu": 8}), a torch DeviceMesh, nodes and devices per node'
        " as (4, 8), or a device count"
    )
    remedy += "; the batch is example_inputs=" if is_batch else ""
    raise MeshError(f"{tree_map_only(Tensor, _in_short, mesh)!r} is no mesh", remedy=remedy)


def _in_short(x: Tensor) -> str:
    return f"tensor of shape {tuple(x.shape)}"


def launched_processes() -> Unshaped:
    """Return the processes of this job, whose mesh is still to be shaped.

    Returns:
        (nodes, processes per node) as torchrun sets them; the number of processes if nodes differ;
            one process if there is no launcher and no process group.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return (world // here, here) if world % here == 0 else world


def is_shape_of(mesh: Mesh, asked: Unshaped) -> bool:
    """Return whether a mesh has the requested number of devices, and of devices per node if that is
    given."""
    if isinstance(asked, int):
        return mesh.num_devices == asked
    return (mesh.num_devices // mesh.devices_per_node, mesh.devices_per_node) == asked


def as_call(example_inputs: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call: a mapping is keywords, a list or tuple is positions, a
    tensor is the only argument.

    Raises:
        AutoparError: if `example_inputs` is none of these.
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, str):
        what = f"example_inputs are {type(example_inputs).__name__}"
        raise AutoparError(
            what,
            remedy=(
                "pass the batch as forward takes it: a mapping of keywords, a sequence of"
                " positions, or one tensor"
            ),
        )
    return tuple(example_inputs), {}


def check_model(model: nn.Module) -> None:
    """Check that a model is an `nn.Module`.

    Raises:
        AutoparError: if it is not.
    """
    if isinstance(model, type):
        raise AutoparError(
            f"{model.__name__} is a class and no model",
            remedy=f"pass a torch.nn.Module: {model.__name__}(...)",
        )
    if not isinstance(model, nn.Module):
        raise AutoparError(f"{type(model).__name__} is no model", remedy="pass a torch.nn.Module")


def runs_on(model: nn.Module, mesh: MeshLike, batch: object) -> str | None:
    """Return the kind of device that a model will run on.

    Args:
        model: the plain model.
        mesh: if it is a torch DeviceMesh, its kind of device is returned.
        batch: the call's inputs; see `kind_of`.

    Raises:
        AutoparError: if `model` is no `nn.Module`.
    """
    check_model(model)
    return str(mesh.device_type) if isinstance(mesh, DeviceMesh) else kind_of(model, batch)


def kind_of(model: nn.Module, batch: object) -> str | None:
    """Return the kind of device that a model and its batch are on.

    This is the parameters' kind, unless they are on a CPU, to be split from there, and the batch is
    not. It is None if the parameters are on several kinds, or all are on meta.
    """
    types = {p.device.type for p in model.parameters()} - {"meta"}
    given = {x.device.type for x in tree_leaves(batch) if isinstance(x, Tensor)} - {"meta"}
    if types == {"cpu"} and len(given) == 1:
        return given.pop()
    return types.pop() if len(types) == 1 else None


# --------------------------------------------------------------------------------------------------
# Hardware: one profile or, for unequal devices, one per index along an axis of the mesh.


def as_hardware(hardware: HardwareLike, mesh: MeshLike) -> Hardware:
    """Read what users pass as hardware for a mesh, as `autopar.core.mesh.hardware_of`.

    Raises:
        HardwareError: where a profile is not there, or the mesh has no such axis, or not so many
            devices along it.
    """
    return hardware_of(hardware, mesh if is_unshaped(mesh) else as_mesh(mesh))


def of_plan(plan: Plan, hardware: HardwareLike | None = None) -> Hardware:
    """Hardware for a plan's mesh; by default what the plan was made for.

    Raises:
        HardwareError: where a profile is not here under the name that the plan has: pass its path,
            or a profile.
    """
    return as_hardware(planned_for(plan) if hardware is None else hardware, plan.mesh)


def planned_for(plan: Plan) -> HardwareLike:
    """Return the hardware that a plan was made for, by name."""
    mark = plan.fingerprint
    return {mark.axis: [name for name, _ in mark.profiles]} if mark.axis else mark.profile


# --------------------------------------------------------------------------------------------------
# The default hardware: this machine.

log = logging.getLogger("autopar")
_told: set[str] = set()


def default_hardware(device_type: str | None = None) -> str:
    """``local`` where this machine was measured for that kind of device, else the GPU that is
    there, else ``cpu-gloo``.

    Without `device_type` a machine that has a GPU is that GPU, and any other whatever was measured.
    A ``local`` that does not say what it is of was put there by hand, and is taken. Where no
    profile is of the GPU that is there, the log says whose figures are taken.
    """
    wanted = device_type or ("cuda" if torch.cuda.is_available() else None)
    if _is_own(HardwareProfile.local_path()):
        measured = HardwareProfile.load("local").device_type
        if wanted is None or measured in ("", wanted):
            return "local"
    if not torch.cuda.is_available() or device_type == "cpu":
        return "cpu-gloo"
    device_name = torch.cuda.get_device_name()
    profile, is_its_own = HardwareProfile.of_gpu(device_name)
    if not is_its_own:
        what = (
            "there is no profile of %s: planned with the times of %s; `autopar profile --device"
            " cuda` measures it in half a minute"
        )
        _tell_once(what, device_name, profile)
    return profile


def _is_own(path: Path) -> bool:
    """Return whether a profile exists that nobody but this user can have written. A warning is
    logged if another user can have written it."""
    if not path.exists():
        return False
    path = path.resolve()
    if reason := find_sharing(path.parent) or find_foreign(path):
        _tell_once(
            "the profile of this machine is not taken by default: %s; pass hardware='local' to take"
            " it anyway",
            reason,
        )
    return not reason


def within_this_gpu(options: PlanOptions, profile: HardwareProfile) -> PlanOptions:
    """Return the options with a budget that the GPU of this machine has.

    They are unchanged if a budget was asked for, or the profile has no more memory than the GPU.
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
    _tell_once("%s has %s of memory, this GPU %s: planned within %s", profile.name, *sizes)
    return replace(options, memory_bytes=budget)


def _tell_once(what: str, *words: str) -> None:
    if (said := what % words) not in _told:
        _told.add(said)
        log.warning(said)
