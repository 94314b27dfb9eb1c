"""What users may pass: meshes, batches and hardware, read into autopar's own types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
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


def default_hardware(device_type: str | None = None) -> str:
    """``local`` where this machine was measured, else the GPU that is there, else ``cpu-gloo``."""
    if HardwareProfile.local_path().exists():
        return "local"
    if torch.cuda.is_available() and device_type != "cpu":
        name = torch.cuda.get_device_name().lower()
        known = {"h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-sxm-80gb"}
        return next((profile for chip, profile in known.items() if chip in name), "h100-sxm")
    return "cpu-gloo"
