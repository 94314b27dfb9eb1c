"""Parameters as DTensors: a storage layout over the dims of `view`, told to torch as placements over the dims of `shape`.

Where a stored dim is seen as several, ``[d, 3 * e]`` as ``[d, 3, e]``, and sharded on an inner one, or where two axes split
one dim out of mesh order, the local data is not one box of the full tensor. torch's word for that is `_StridedShard`,
which cuts a dim into `split_factor` blocks and every block into one piece per rank. Placements act in mesh order, so that
    split_factor(axis) = the local length, when the axis' turn comes, of the view dims before the one it splits
                         × the sizes of those outer splitters of that dim that come later in mesh order.
The data in a local tensor has the same order as in `autopar.run.splitting.split`.

torch (2.11 to 2.13) joins a dim that is split inside a view only where one placement splits it. Where several axes split it, in mesh order
(which is that of a process group's ranks), they are one dim of the DTensor's own mesh: one of ``a``, ``b``, ``c`` is ``a_b``, ``c`` then.
torch 2.11 refuses to join inner parts at all: `full_tensor` raises there; training and checkpoints do not need it.
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
from autopar.kernels import host
from autopar.layout import Layout, local_shape
from autopar.run.device_mesh import around, joined_axes
from autopar.run.given_data import refuse_given_data
from autopar.run.program import ProgramTensor
from autopar.run.splitting import local_part
from autopar.run.unset import blank


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


@dataclass(frozen=True, slots=True)
class Resting:
    """How torch is told where a tensor lies.

    Attributes:
        axes: for each dim of the DTensor's mesh the mesh axes that it stands for, the outermost first.
        placements: one for each of these dims, over the dims of the stored shape.
    """

    axes: tuple[tuple[int, ...], ...]
    placements: tuple[Placement, ...]


def resting(shape: Sequence[int], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> Resting:
    """torch's placements over the dims of `shape`; axes of size 1 replicate.

    Raises:
        LayoutError: where torch has no placements for the layout; see `storable`.
    """
    groups = stored_dims(shape, view)
    sizes, result = list(view), dict[tuple[int, ...], Placement]()
    joined = _joined_axes(groups, view, layout, mesh_shape)
    interleaved = False
    for axis, (placement, num_parts) in enumerate(zip(layout.placements, mesh_shape, strict=True)):
        together = joined.get(axis, (axis,))
        if not isinstance(placement, Shard) or num_parts == 1:
            result[axis,] = placement if not isinstance(placement, Shard) else Replicate()
            continue
        if together in result:
            continue
        dim, splitters, num_parts = placement.dim, layout.splitters(placement.dim), math.prod(mesh_shape[a] for a in together)
        stored = next(index for index, group in enumerate(groups) if dim in group)
        before = math.prod(sizes[d] for d in groups[stored] if d < dim)
        outer = splitters[: splitters.index(axis)] if len(together) == 1 else ()
        later = math.prod(mesh_shape[other] for other in outer if other > axis)
        result[together] = Shard(stored) if before * later == 1 else _StridedShard(stored, split_factor=before * later)
        interleaved |= before > 1
        inner = math.prod(view[d] for d in groups[stored] if d > dim)
        if before * later * inner > 1 and sizes[dim] % (later * num_parts):
            raise LayoutError(f"view dim {dim} of length {sizes[dim]} is not split evenly by layout {layout}")
        sizes[dim] = -(-sizes[dim] // num_parts)
    if interleaved:
        _check_interleaved(tuple(result.values()), layout)
    return Resting(tuple(result), tuple(result.values()))


def _joined_axes(
    groups: Sequence[Sequence[int]], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Mesh axis → the axes that split one inner part of a stored dim, the outermost first; of axes that do so together in mesh order."""
    joined: dict[int, tuple[int, ...]] = {}
    for group in groups:
        split = {d: tuple(a for a in layout.splitters(d) if mesh_shape[a] > 1) for d in group}
        inner = [d for d, axes in split.items() if len(axes) > 1 and math.prod(view[e] for e in group if e < d) > 1]
        joined |= {axis: split[d] for d in inner if split[d] == tuple(sorted(split[d])) for axis in split[d]}
    return joined


def _check_interleaved(result: Sequence[Placement], layout: Layout) -> None:
    """A dim that is split inside a view must be the only such dim, and split by that placement alone."""
    strided = [placement for placement in result if isinstance(placement, _StridedShard)]
    dims = [placement.dim for placement in result if isinstance(placement, Shard | _StridedShard)]
    if len(strided) > 1 or dims.count(strided[0].dim) > 1:
        raise LayoutError(f"a parameter cannot rest in layout {layout}: torch has no placements for {result}")


def storable(shape: Sequence[int], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether a parameter can rest in this layout as a DTensor."""
    try:
        resting(shape, view, layout, mesh_shape)
    except LayoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Storage:
    """How one parameter, buffer or output lies on this rank.

    Attributes:
        devices: the program's mesh. seen: the mesh that its DTensor names, `devices` or one in which some axes are one dim.
        graph_shape: local shape over the dims of `view`, as graphs see it.
        stored_shape: local shape over the dims of `shape`, as the DTensor holds it.
    """

    tensor: ProgramTensor
    devices: DeviceMesh
    seen: DeviceMesh
    placements: tuple[Placement, ...]
    graph_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]

    @staticmethod
    def of(tensor: ProgramTensor, devices: DeviceMesh) -> Storage:
        mesh_shape, coordinate = tuple(devices.shape), devices.get_coordinate()
        local = local_shape(tensor.view, tensor.layout, mesh_shape, coordinate)
        stored = tuple(math.prod(local[d] for d in group) for group in stored_dims(tensor.shape, tensor.view))
        at = resting(tensor.shape, tensor.view, tensor.layout, mesh_shape)
        return Storage(tensor, devices, joined_axes(devices, at.axes), at.placements, local, stored)

    def distribute(self, full: Tensor) -> DTensor:
        """This rank's part of a full tensor, copied to where it rests; blank (`autopar.run.unset`) where `full` is on meta."""
        if self.tensor.layout.host:
            return self.wrap(self._on_host(full))
        device = torch.device(self.devices.device_type, _device_index(self.devices))
        if full.is_meta:
            return self.wrap(blank(torch.empty(self.stored_shape, dtype=full.dtype, device=device)))
        part = local_part(full, self.tensor.layout, tuple(self.devices.shape), self.tensor.view, self.devices.get_coordinate() or ())
        return self.wrap(part.detach().to(device).clone(memory_format=torch.contiguous_format))

    def _on_host(self, full: Tensor) -> Tensor:
        """This rank's part in the host's memory, page-locked where a GPU fetches it."""
        local = host.empty(self.stored_shape, full.dtype, pinned=self.devices.device_type == "cuda")
        if full.is_meta:
            blank(local)
        else:
            part = local_part(full, self.tensor.layout, tuple(self.devices.shape), self.tensor.view, self.devices.get_coordinate() or ())
            local.copy_(part.detach().reshape(self.stored_shape))
        return local

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor around a local tensor of either local shape, without a copy."""
        stride = tuple(math.prod(self.tensor.shape[d + 1 :]) for d in range(len(self.tensor.shape)))
        return around(local.reshape(self.stored_shape), self.seen, self.placements, self.tensor.shape, stride)

    def local(self, stored: Tensor) -> Tensor:
        """The local tensor as graphs see it, a view.

        Raises:
            RuntimeStateError: where the tensor was converted to another dtype or moved since the program was made, was given data, or is
                another one, which does not rest as this says.
        """
        refuse_given_data(self.tensor.name, stored)
        local = stored.to_local() if isinstance(stored, DTensor) else stored
        expected = "cpu" if self.tensor.layout.host else self.devices.device_type
        if local.dtype != self.tensor.dtype or local.device.type != expected:
            raise RuntimeStateError(
                f"{self.tensor.name!r} is {local.dtype} on {local.device.type}, the program was made for {self.tensor.dtype} on {expected}",
                remedy="convert the model before autopar.compile, and leave the compiled module as it is",
            )
        if local.shape != self.stored_shape or not self._is_of(stored):
            raise self._of_another_form(stored)
        return local.view(self.graph_shape)

    def _is_of(self, stored: Tensor) -> bool:
        """Whether the local tensor is this rank's part of it; a plain tensor is whole."""
        if stored.shape != self.tensor.shape:
            return False
        if not isinstance(stored, DTensor) or stored.placements == self.placements:
            return True
        both = zip(self.placements, stored.placements, strict=False)
        return all(size == 1 or mine == its for size, (mine, its) in zip(self.seen.shape, both, strict=False))

    def _of_another_form(self, stored: Tensor) -> RuntimeStateError:
        name, kind = self.tensor.name, f"a DTensor {stored.placements}" if isinstance(stored, DTensor) else "a plain tensor"
        wanted = "that is whole on each rank" if self.tensor.layout.is_replicated else f"that is a DTensor {self.placements}"
        return RuntimeStateError(
            f"{kind} of shape {tuple(stored.shape)} stands for {name!r}, which the program takes as one of {self.tensor.shape} {wanted}",
            remedy=f"compute it of what pm.get_parameter({name!r}) is; or torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, "
            "p.placements) of that p; or give pm itself the values: pm.load_state_dict",
        )


def _device_index(devices: DeviceMesh) -> int | None:
    if devices.device_type == "cpu":
        return None
    return int(getattr(torch, devices.device_type).current_device())
