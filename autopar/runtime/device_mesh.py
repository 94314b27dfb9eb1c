"""Between the planner's `Mesh` and torch's DeviceMesh: process groups, coordinates, and
agreement of all ranks."""

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
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import of_all, of_all_alike, take_gpu


def device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """The DeviceMesh of the same shape and names over all processes.

    Where torch.distributed has not been initialised yet: under a launcher (torchrun sets RANK) it
    is initialised from the environment; a mesh of one device gets a process group of its own in
    this process; anything else is an error.

    Raises:
        MeshError: where the mesh does not have exactly one device per process.
    """
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
    with announced(f"makes process groups for mesh {mesh}"):
        return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)


def mesh_of(devices: DeviceMesh) -> Mesh:
    """The planner's view of a DeviceMesh; unnamed dims are called ``axis0``, ``axis1`` …"""
    shape = tuple(devices.shape)
    names = devices.mesh_dim_names or tuple(f"axis{index}" for index in range(len(shape)))
    return Mesh(dict(zip(names, shape, strict=True)))


def check_shape(devices: DeviceMesh, mesh: Mesh) -> None:
    """Raises MeshError where devices are not in the shape that a program was made for."""
    if (here := mesh_of(devices)).shape != mesh.shape:
        raise MeshError(
            f"the program is for mesh {mesh}, not {here}",
            remedy=f"plan for the mesh that is there, {here}",
        )


def around(
    local: Tensor,
    devices: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """The DTensor of this shape around a local tensor, in the same memory, also where that is the
    host's and the mesh is of GPUs (`DTensor.from_local` moves it then, and so does this where it
    has a gradient)."""
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
    """This rank's process group, size and coordinate along every axis.

    Raises:
        MeshError: where this process is not on the mesh.
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
    """The part of a mesh that runs one stage: its DeviceMesh, the ranks at this place in all
    stages, and this stage's number.

    Args:
        axis: the axis along which stages lie; ``""`` for one stage on the whole mesh.

    Raises:
        MeshError: where the mesh has no such axis.
    """
    if not axis:
        return devices, None, 0
    names = devices.mesh_dim_names or ()
    if axis not in names:
        raise MeshError(
            f"the mesh has no axis {axis!r}",
            remedy=f"name its dims as in the plan; they are {names or 'not named'}",
        )
    others = tuple(name for name in names if name != axis)
    number = devices.get_local_rank(axis)
    return (devices[others] if others else _alone(devices)), devices.get_group(axis), number


def joined_axes(devices: DeviceMesh, axes: Sequence[Sequence[int]]) -> DeviceMesh:
    """The same devices as a mesh in which several axes are one dim, the outermost first.

    All ranks of `devices` are to ask for the same meshes in one order; the first time they make
    process groups. Others take no part.

    Args:
        axes: for each dim of the result the axes of `devices` that it stands for, in mesh order;
            each axis once.
    """
    if all(len(joined) == 1 for joined in axes):
        return devices
    # Meshes are equal by their ranks: those of process groups that were destroyed since are others.
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
    told = tuple("_".join(names[axis] for axis in joined) for joined in axes)
    return DeviceMesh.from_group(groups, devices.device_type, mesh=ranks, mesh_dim_names=told)


def _alone(devices: DeviceMesh) -> DeviceMesh:
    """The mesh of this rank alone."""
    groups = [
        dist.new_group([rank]) for rank in range(dist.get_world_size())
    ]  # every rank makes all, in one order
    rank = dist.get_rank()
    return DeviceMesh.from_group(
        groups[rank], devices.device_type, mesh=[rank], mesh_dim_names=("device",)
    )


def agree(fact: str, what: str, devices: DeviceMesh) -> None:
    """Make sure that all ranks of the mesh hold the same `fact`.

    Raises:
        RuntimeStateError: on every rank, naming the ranks that differ from the first.
    """
    if devices.size() == 1:
        return
    facts = of_all_alike(f"tells its {what}", fact)
    ranks = [int(rank) for rank in devices.mesh.flatten()]
    different = [rank for rank in ranks if facts[rank] != facts[ranks[0]]]
    if different:
        raise RuntimeStateError(
            f"ranks {different} have another {what} than rank {ranks[0]}: "
            f"{sorted({facts[r] for r in different})} against {facts[ranks[0]]!r}",
            remedy=(
                "give every rank the same model, batch shapes, mesh and options; or plan once, save"
                " the plan and load it on every rank"
            ),
        )


def first_rank_says(number: int, devices: DeviceMesh) -> int:
    """The `number` of the mesh's first rank, on all of its ranks."""
    if devices.size() == 1:
        return number
    return int(of_all(number)[int(devices.mesh.flatten()[0])])


def join_launched(device_type: str) -> bool:
    """Whether a launcher started this process with others; it knows of them then."""
    if dist.is_initialized():
        return True
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
            " initialised",
            remedy=(
                f"start the script with: autopar run -n {mesh.num_devices} SCRIPT (or torchrun"
                f" --nproc-per-node {mesh.num_devices})"
            ),
        )
