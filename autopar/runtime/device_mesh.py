"""Conversion between the planner's `Mesh` and torch's DeviceMesh: process groups, coordinates, and
checks that all ranks agree."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from autopar.core.mesh import Mesh
from autopar.errors import MeshError, RuntimeStateError
from autopar.kernels.collectives import AxisGroup, Groups
from autopar.runtime.launchers import adopt_launch
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import of_all, of_all_alike, take_gpu


def device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """Create a DeviceMesh with the same shape and names over all processes.

    If torch.distributed is not initialized, it is initialized from the environment if a launcher
    started this process (see `adopt_launch`), or with a process group of one rank for a mesh of one
    device.

    Args:
        mesh: the planner's mesh.
        device_type: the type of the devices, such as ``"cuda"``.

    Raises:
        MeshError: if the mesh does not have exactly one device per process, or torch.distributed
            cannot be initialized.
    """
    if not dist.is_initialized():
        adopt_launch()
    if device_type == "cuda":
        take_gpu()
    if not dist.is_initialized():
        _initialize(mesh, device_type)
    world = dist.get_world_size()
    if mesh.num_devices != world:
        raise MeshError(
            f"mesh {mesh} has {mesh.num_devices} devices, but there are {world} processes",
            remedy=(
                f"start {mesh.num_devices} processes (autopar run -n {mesh.num_devices} ...), or"
                f" plan for a mesh of {world}"
            ),
        )
    with announced(f"creates process groups for mesh {mesh}"):
        return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)


def mesh_of(devices: DeviceMesh) -> Mesh:
    """Return the planner's mesh for a DeviceMesh. Unnamed dims are named ``axis0``, ``axis1``, …"""
    shape = tuple(devices.shape)
    names = devices.mesh_dim_names or tuple(f"axis{index}" for index in range(len(shape)))
    return Mesh(dict(zip(names, shape, strict=True)))


def check_shape(devices: DeviceMesh, mesh: Mesh) -> None:
    """Check that the devices have the mesh shape that a program was compiled for.

    Raises:
        MeshError: if the shape differs.
    """
    if (here := mesh_of(devices)).shape != mesh.shape:
        raise MeshError(
            f"the program was compiled for mesh {mesh}, but the device mesh is {here}",
            remedy=f"plan for mesh {here}",
        )


def wrap_local(
    local: Tensor,
    devices: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """Wrap a local tensor as a DTensor without a copy.

    No copy is made even if the tensor is on the host and the mesh consists of GPUs;
    `DTensor.from_local` would move the tensor to the GPU. A tensor that requires a gradient is
    still moved.

    Args:
        local: the local tensor.
        devices: the mesh of the DTensor.
        placements: the placement along each mesh axis.
        shape, stride: the shape and stride of the full tensor.
    """
    if local.device.type in (devices.device_type, "meta") or local.requires_grad:
        return DTensor.from_local(
            local,
            devices,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=tuple(stride),
        )
    spec = DTensorSpec(
        devices,
        tuple(placements),
        tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), local.dtype),
    )
    return DTensor(local, spec, requires_grad=False)


def groups_of(devices: DeviceMesh) -> Groups:
    """Return the process group, size and coordinate of this rank along every axis.

    Raises:
        MeshError: if this process is not on the mesh.
    """
    coordinate = devices.get_coordinate()
    if coordinate is None:
        raise MeshError(
            "this process is not on the mesh",
            remedy="use a mesh that covers every process that runs the model",
        )
    sizes = tuple(devices.shape)
    return tuple(
        AxisGroup(devices.get_group(a).group_name, size, coordinate[a])
        for a, size in enumerate(sizes)
    )


def stage_devices(
    devices: DeviceMesh, axis: str
) -> tuple[DeviceMesh, dist.ProcessGroup | None, int]:
    """Return the part of a mesh that runs this rank's stage.

    Args:
        devices: the whole mesh.
        axis: the pipeline axis; ``""`` for one stage on the whole mesh.

    Returns:
        The DeviceMesh of the stage, the group of ranks with the same coordinate in all stages (None
        for one stage), and the index of this rank on the pipeline axis.

    Raises:
        MeshError: if the mesh has no such axis.
    """
    if not axis:
        return devices, None, 0
    names = devices.mesh_dim_names or ()
    if axis not in names:
        raise MeshError(
            f"the device mesh has no dim {axis!r}",
            remedy=f"name its dims as in the plan; its dims are {names or 'not named'}",
        )
    others = tuple(name for name in names if name != axis)
    number = devices.get_local_rank(axis)
    return (devices[others] if others else _alone(devices)), devices.get_group(axis), number


def joined_axes(devices: DeviceMesh, axes: Sequence[Sequence[int]]) -> DeviceMesh:
    """Return a mesh over the same devices in which each dim joins several axes, outermost first.

    All ranks of `devices` must call this function for the same meshes in the same order, since the
    first call for a mesh creates process groups. Ranks outside `devices` do not call it.

    Args:
        devices: the mesh.
        axes: for each dim of the result, the axes of `devices` that it joins, in mesh order. Each
            axis occurs once.
    """
    if all(len(joined) == 1 for joined in axes):
        return devices
    # Meshes compare equal by their ranks, even if their process groups have been destroyed.
    key = devices, tuple(map(tuple, axes))
    world, mesh = _joined.get(key, (None, None))
    if mesh is None or world is not dist.group.WORLD:
        mesh = _join_axes(devices, axes)
        _joined[key] = dist.group.WORLD, mesh
    return mesh


_joined: dict[
    tuple[DeviceMesh, tuple[tuple[int, ...], ...]], tuple[dist.ProcessGroup | None, DeviceMesh]
] = {}


def _join_axes(devices: DeviceMesh, axes: Sequence[Sequence[int]]) -> DeviceMesh:
    shape = [math.prod(devices.size(axis) for axis in joined) for joined in axes]
    ranks = devices.mesh.permute([axis for joined in axes for axis in joined]).reshape(shape)
    place = [int(n) for n in (ranks == dist.get_rank()).nonzero()[0]]
    groups = []
    for dim, joined in enumerate(axes):
        along = ranks[(*place[:dim], slice(None), *place[dim + 1 :])].tolist()
        alone = len(joined) == 1
        groups.append(
            devices.get_group(joined[0])
            if alone
            else dist.new_group(along, use_local_synchronization=True)
        )
    names = devices.mesh_dim_names or tuple(f"axis{axis}" for axis in range(len(devices.shape)))
    dim_names = tuple("_".join(names[axis] for axis in joined) for joined in axes)
    return DeviceMesh.from_group(groups, devices.device_type, mesh=ranks, mesh_dim_names=dim_names)


def _alone(devices: DeviceMesh) -> DeviceMesh:
    """Return a mesh that contains only this rank."""
    # every rank creates the groups of all ranks in the same order
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    return DeviceMesh.from_group(
        groups[rank], devices.device_type, mesh=[rank], mesh_dim_names=("device",)
    )


def agree(fact: str, what: str, devices: DeviceMesh) -> None:
    """Check that all ranks of a mesh have the same value; every rank must call this.

    Args:
        fact: the value of this rank.
        what: the name of the value, for error messages.
        devices: the mesh.

    Raises:
        RuntimeStateError: on every rank, with the ranks that differ from the first rank.
    """
    if devices.size() == 1:
        return
    facts = of_all_alike(f"tells its {what}", fact)
    ranks = [int(rank) for rank in devices.mesh.flatten()]
    different = [rank for rank in ranks if facts[rank] != facts[ranks[0]]]
    if different:
        raise RuntimeStateError(
            f"ranks {different} have a different {what} from rank {ranks[0]}: "
            f"{sorted({facts[r] for r in different})} against {facts[ranks[0]]!r}",
            remedy=(
                "give every rank the same model, batch shapes, mesh and options; or plan once, save"
                " the plan and load it on every rank"
            ),
        )


def first_rank_says(number: int, devices: DeviceMesh) -> int:
    """Return the number that the first rank of the mesh passes; every rank must call this."""
    if devices.size() == 1:
        return number
    return int(of_all(number)[int(devices.mesh.flatten()[0])])


def join_launched(device_type: str) -> bool:
    """Initialize torch.distributed if a launcher started this process.

    Returns:
        Whether torch.distributed is initialized.

    Raises:
        MeshError: if the variables of the launcher contradict each other (see `adopt_launch`).
    """
    if dist.is_initialized():
        return True
    adopt_launch()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    dist.init_process_group(_backend(device_type))
    return True


def _backend(device_type: str) -> str | None:
    return "gloo" if device_type == "cpu" else None


def _initialize(mesh: Mesh, device_type: str) -> None:
    if join_launched(device_type):
        return
    if mesh.num_devices == 1:
        dist.init_process_group(_backend(device_type), store=dist.HashStore(), rank=0, world_size=1)
    else:
        raise MeshError(
            f"mesh {mesh} needs {mesh.num_devices} processes, but torch.distributed is not"
            " initialized",
            remedy=(
                f"start the script with: autopar run -n {mesh.num_devices} SCRIPT (or torchrun"
                f" --nproc-per-node {mesh.num_devices})"
            ),
        )
