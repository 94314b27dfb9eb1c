"""What users may pass: meshes, batches and hardware, read into autopar's own types."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.devices import Unshaped, is_unshaped
from autopar.errors import AutoparError, MeshError
from autopar.mesh import Mesh
from autopar.run.device_mesh import mesh_of

MeshLike: TypeAlias = Mesh | DeviceMesh | Unshaped | Mapping[str, int]
Launched: TypeAlias = MeshLike | None  # None: all processes that a launcher started
Example: TypeAlias = Mapping[str, Any] | Sequence[Any] | Tensor


def as_mesh(mesh: MeshLike) -> Mesh:
    """Read what users pass as a mesh: a `Mesh`, a torch DeviceMesh, axis sizes by name, (nodes, devices per node), or a device count.

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
    remedy = 'pass autopar.Mesh({"node": 4, "gpu": 8}), a torch DeviceMesh, nodes and devices per node as (4, 8), or a device count'
    remedy += "; the batch is example_inputs=" if is_batch else ""
    raise MeshError(f"{tree_map_only(Tensor, _in_short, mesh)!r} is no mesh", remedy=remedy)


def _in_short(x: Tensor) -> str:
    return f"tensor of shape {tuple(x.shape)}"


def launched() -> Unshaped:
    """The processes of this job, to be shaped: nodes × processes of each, as torchrun says, or their number where nodes differ; one process
    where there is no launcher and no process group."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return (world // here, here) if world % here == 0 else world


def is_shape_of(mesh: Mesh, asked: Unshaped) -> bool:
    """Whether a mesh has as many devices, and nodes of as many, where that was said."""
    if isinstance(asked, int):
        return mesh.num_devices == asked
    return (mesh.num_devices // mesh.devices_per_node, mesh.devices_per_node) == asked


def as_call(example_inputs: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call: a mapping is keywords, a list or tuple is positions, a tensor is the one argument."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, str):
        what = f"example_inputs are {type(example_inputs).__name__}"
        raise AutoparError(what, remedy="pass the batch as forward takes it: a mapping of keywords, a sequence of positions, or one tensor")
    return tuple(example_inputs), {}


def check_model(model: nn.Module) -> None:
    """Raises AutoparError where it is none."""
    if isinstance(model, type):
        raise AutoparError(f"{model.__name__} is a class and no model", remedy=f"pass a torch.nn.Module: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise AutoparError(f"{type(model).__name__} is no model", remedy="pass a torch.nn.Module")


def runs_on(model: nn.Module, mesh: MeshLike, batch: object) -> str | None:
    """Kind of device that a model will run on: the torch mesh's, or as `kind_of` says."""
    check_model(model)
    return str(mesh.device_type) if isinstance(mesh, DeviceMesh) else kind_of(model, batch)


def kind_of(model: nn.Module, batch: object) -> str | None:
    """Kind of device that a model and its batch are on: the parameters' one, unless they wait on a CPU, to be split, for a batch that is
    not; None where no parameter says (weights on meta), or they are on several."""
    types = {p.device.type for p in model.parameters()} - {"meta"}
    given = {x.device.type for x in tree_leaves(batch) if isinstance(x, Tensor)} - {"meta"}
    if types == {"cpu"} and len(given) == 1:
        return given.pop()
    return types.pop() if len(types) == 1 else None
