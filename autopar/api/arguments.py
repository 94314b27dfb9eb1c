"""What users may pass: meshes, batches and hardware, read into autopar's own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.run.device_mesh import mesh_of

MeshLike: TypeAlias = Mesh | DeviceMesh | int | Mapping[str, int]
Example: TypeAlias = Mapping[str, Any] | Sequence[Any] | Tensor


def as_mesh(mesh: MeshLike) -> Mesh:
    """Read what users pass as a mesh: a `Mesh`, a torch DeviceMesh, axis sizes by name, or a device count.

    Raises:
        MeshError: where it is none of these.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return mesh_of(mesh)
    if isinstance(mesh, int | Mapping) and not isinstance(mesh, bool):
        return Mesh(mesh)
    raise MeshError(f"{mesh!r} is no mesh", remedy='pass autopar.Mesh({"node": 4, "gpu": 8}), a torch DeviceMesh or a device count')


def is_count(mesh: MeshLike) -> TypeGuard[int]:
    """Whether a mesh is a device count, whose shape is the planner's choice."""
    return isinstance(mesh, int) and not isinstance(mesh, bool)


def as_call(example_inputs: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call: a mapping is keywords, a list or tuple is positions, a tensor is the one argument."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    return tuple(example_inputs), {}


def runs_on(model: nn.Module, mesh: MeshLike) -> str | None:
    """Kind of device that a model will run on: the torch mesh's, or its parameters'; None where neither says (weights on meta)."""
    if isinstance(mesh, DeviceMesh):
        return str(mesh.device_type)
    types = {p.device.type for p in model.parameters()} - {"meta"}
    return types.pop() if len(types) == 1 else None


def default_hardware(device_type: str | None = None) -> str:
    """``local`` where this machine was measured for that kind of device, else the GPU that is there, else ``cpu-gloo``.

    Without `device_type` a machine that has a GPU is that GPU, and any other whatever was measured. A ``local`` that does not say what
    it is of was put there by hand, and is taken.
    """
    wanted = device_type or ("cuda" if torch.cuda.is_available() else None)
    if HardwareProfile.local_path().exists():
        measured = HardwareProfile.load("local").device_type
        if wanted is None or measured in ("", wanted):
            return "local"
    if torch.cuda.is_available() and device_type != "cpu":
        return HardwareProfile.of_gpu(torch.cuda.get_device_name())
    return "cpu-gloo"
