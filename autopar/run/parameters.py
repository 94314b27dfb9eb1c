"""Parameters as DTensors: a storage layout over the dims of `view`, told to torch as placements over the dims of `shape`.

Where a stored dim is seen as several, ``[d, 3 * e]`` as ``[d, 3, e]``, and sharded on an inner one, or where two axes split
one dim out of mesh order, the local data is not one box of the full tensor. torch's word for that is `_StridedShard`,
which cuts a dim into `split_factor` blocks and every block into one piece per rank. Placements act in mesh order, so that
    split_factor(axis) = the local length, when the axis' turn comes, of the view dims before the one it splits
                         × the sizes of those outer splitters of that dim that come later in mesh order.
The data in a local tensor has the same order as in `autopar.run.splitting.split`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from autopar.errors import LayoutError, RuntimeStateError
from autopar.layout import Layout, local_shape
from autopar.run.program import ProgramTensor
from autopar.run.splitting import local_part


def stored_dims(shape: Sequence[int], view: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each stored dim the view dims it is seen as.

    Raises:
        LayoutError: where `view` does not split the dims of `shape` one by one.
    """
    remaining = list(range(len(view)))
    groups: list[tuple[int, ...]] = []
    for size in shape:
        group: list[int] = []
        while remaining and (not group or math.prod(view[d] for d in group) < size):
            group.append(remaining.pop(0))
        groups.append(tuple(group))
    if groups and remaining and all(view[d] == 1 for d in remaining):
        groups[-1], remaining = (*groups[-1], *remaining), []
    if remaining or any(math.prod(view[d] for d in g) != size for g, size in zip(groups, shape, strict=True)):
        raise LayoutError(f"a tensor of shape {tuple(shape)} cannot be seen as {tuple(view)} dim by dim")
    return tuple(groups)


def placements(shape: Sequence[int], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> tuple[Placement, ...]:
    """One torch placement per mesh axis, over the dims of `shape`; axes of size 1 replicate.

    Raises:
        LayoutError: where torch has no placements for the layout; see `storable`.
    """
    groups = stored_dims(shape, view)
    sizes, result = list(view), []
    interleaved = False
    for axis, (placement, num_parts) in enumerate(zip(layout.placements, mesh_shape, strict=True)):
        if not isinstance(placement, Shard) or num_parts == 1:
            result.append(placement if not isinstance(placement, Shard) else Replicate())
            continue
        dim, splitters = placement.dim, layout.splitters(placement.dim)
        stored = next(index for index, group in enumerate(groups) if dim in group)
        before = math.prod(sizes[d] for d in groups[stored] if d < dim)
        later = math.prod(mesh_shape[other] for other in splitters[: splitters.index(axis)] if other > axis)
        result.append(Shard(stored) if before * later == 1 else _StridedShard(stored, split_factor=before * later))
        interleaved |= before > 1
        inner = math.prod(view[d] for d in groups[stored] if d > dim)
        if before * later * inner > 1 and sizes[dim] % (later * num_parts):
            raise LayoutError(f"view dim {dim} of length {sizes[dim]} is not split evenly by layout {layout}")
        sizes[dim] = -(-sizes[dim] // num_parts)
    if interleaved:
        _check_interleaved(result, layout)
    return tuple(result)


def _check_interleaved(result: Sequence[Placement], layout: Layout) -> None:
    """torch (2.11 to 2.13) joins a dim that is split inside a view wrongly, or not at all, where another placement splits the
    same dim or is strided too; so it must be alone."""
    strided = [placement for placement in result if isinstance(placement, _StridedShard)]
    dims = [placement.dim for placement in result if isinstance(placement, Shard | _StridedShard)]
    if len(strided) > 1 or dims.count(strided[0].dim) > 1:
        raise LayoutError(
            f"a parameter cannot rest in layout {layout}: torch has no placements for {result}",
            remedy="let one axis split the fused dim, and other axes another dim in mesh order",
        )


def storable(shape: Sequence[int], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether a parameter can rest in this layout as a DTensor."""
    try:
        placements(shape, view, layout, mesh_shape)
    except LayoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Storage:
    """How one parameter, buffer or output lies on this rank.

    Attributes:
        graph_shape: local shape over the dims of `view`, as graphs see it.
        stored_shape: local shape over the dims of `shape`, as the DTensor holds it.
    """

    tensor: ProgramTensor
    devices: DeviceMesh
    placements: tuple[Placement, ...]
    graph_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]

    @staticmethod
    def of(tensor: ProgramTensor, devices: DeviceMesh) -> Storage:
        mesh_shape, coordinate = tuple(devices.shape), devices.get_coordinate()
        seen = local_shape(tensor.view, tensor.layout, mesh_shape, coordinate)
        stored = tuple(math.prod(seen[d] for d in group) for group in stored_dims(tensor.shape, tensor.view))
        return Storage(tensor, devices, placements(tensor.shape, tensor.view, tensor.layout, mesh_shape), seen, stored)

    def distribute(self, full: Tensor) -> DTensor:
        """This rank's part of a full tensor, copied to the mesh's device; uninitialised where `full` is on meta."""
        device = torch.device(self.devices.device_type, _device_index(self.devices))
        if full.is_meta:
            return self.wrap(torch.empty(self.stored_shape, dtype=full.dtype, device=device))
        part = local_part(full, self.tensor.layout, tuple(self.devices.shape), self.tensor.view, self.devices.get_coordinate() or ())
        return self.wrap(part.detach().to(device).clone(memory_format=torch.contiguous_format))

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor around a local tensor of either local shape, without a copy."""
        stride = tuple(math.prod(self.tensor.shape[d + 1 :]) for d in range(len(self.tensor.shape)))
        shape, stored = torch.Size(self.tensor.shape), local.reshape(self.stored_shape)
        return DTensor.from_local(stored, self.devices, self.placements, run_check=False, shape=shape, stride=stride)

    def local(self, stored: Tensor) -> Tensor:
        """The local tensor as graphs see it, a view.

        Raises:
            RuntimeStateError: where the tensor was converted to another dtype or moved since the program was made.
        """
        local = stored.to_local() if isinstance(stored, DTensor) else stored
        if local.dtype != self.tensor.dtype or local.device.type != self.devices.device_type:
            raise RuntimeStateError(
                f"{self.tensor.name!r} is {local.dtype} on {local.device.type}, the program was made for {self.tensor.dtype} on "
                f"{self.devices.device_type}",
                remedy="convert the model before autopar.compile, and leave the compiled module as it is",
            )
        return local.view(self.graph_shape)


def _device_index(devices: DeviceMesh) -> int | None:
    if devices.device_type == "cpu":
        return None
    return int(getattr(torch, devices.device_type).current_device())
