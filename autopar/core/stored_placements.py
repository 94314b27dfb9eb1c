"""The placements of torch for a storage layout: a layout over the dims of `view`, as placements
over the dims of `shape`.

Where a stored dim is seen as several, ``[d, 3 * e]`` as ``[d, 3, e]``, and sharded on an inner one,
or where two axes split one dim out of mesh order, the local data is not one box of the full tensor.
torch's word for that is `_StridedShard`, which cuts a dim into `split_factor` blocks and every
block into one piece per rank. Placements act in mesh order, so that
    split_factor(axis) = the local length, when the axis' turn comes, of the view dims before the
    one it splits
                         × the sizes of those outer splitters of that dim that come later in mesh
                         order.
The data in a local tensor has the same order as in `autopar.program.splitting.split`.

torch (2.11 to 2.13) joins a dim that is split inside a view only where one placement splits it.
Where several axes split it, in mesh order (which is that of a process group's ranks), they are one
dim of the DTensor's own mesh: one of ``a``, ``b``, ``c`` is ``a_b``, ``c`` then. torch 2.11 refuses
to join inner parts at all: `full_tensor` raises there; training and checkpoints do not need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from autopar.core.layout import Layout
from autopar.errors import LayoutError


def stored_dims(shape: Sequence[int], view: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return, for each stored dim, the view dims that it is split into.

    Args:
        shape: the stored shape.
        view: the shape as which it is viewed.

    Raises:
        LayoutError: if `view` does not split the dims of `shape` one by one.
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
    if remaining or any(
        math.prod(view[d] for d in g) != size for g, size in zip(groups, shape, strict=True)
    ):
        raise LayoutError(
            f"a tensor of shape {tuple(shape)} cannot be viewed as {tuple(view)} dim by dim"
        )
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class StoredPlacements:
    """The arguments of a DTensor: its mesh dims and placements.

    Attributes:
        axes: for each dim of the DTensor's mesh the mesh axes that it stands for, the outermost
            first.
        placements: one for each of these dims, over the dims of the stored shape.
    """

    axes: tuple[tuple[int, ...], ...]
    placements: tuple[Placement, ...]


def stored_placements(
    shape: Sequence[int], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]
) -> StoredPlacements:
    """Return torch's placements over the dims of `shape`; axes of size 1 replicate.

    Args:
        shape: the stored shape.
        view: the shape over which `layout` is.
        layout: the layout of the tensor viewed as `view`.
        mesh_shape: devices on each axis of the mesh.

    Raises:
        LayoutError: if torch has no placements for the layout; see `storable`.
    """
    groups = stored_dims(shape, view)
    sizes, result = list(view), dict[tuple[int, ...], Placement]()
    joined = _joined_axes(groups, view, layout, mesh_shape)
    is_interleaved = False
    for axis, (placement, num_parts) in enumerate(zip(layout.placements, mesh_shape, strict=True)):
        together = joined.get(axis, (axis,))
        if not isinstance(placement, Shard) or num_parts == 1:
            result[axis,] = placement if not isinstance(placement, Shard) else Replicate()
            continue
        if together in result:
            continue
        dim, num_parts = placement.dim, math.prod(mesh_shape[a] for a in together)
        stored, dims_before, dims_after = _position_in_stored(groups, dim)
        before = math.prod(sizes[d] for d in dims_before)
        after = math.prod(view[d] for d in dims_after)
        later = 1 if len(together) > 1 else _num_later_parts(layout, axis, dim, mesh_shape)
        result[together] = (
            Shard(stored)
            if before * later == 1
            else _StridedShard(stored, split_factor=before * later)
        )
        is_interleaved |= before > 1
        if before * later * after > 1 and sizes[dim] % (later * num_parts):
            raise LayoutError(
                f"view dim {dim} of length {sizes[dim]} is not split evenly by layout {layout}"
            )
        sizes[dim] = -(-sizes[dim] // num_parts)
    if is_interleaved:
        _check_interleaved(tuple(result.values()), layout)
    return StoredPlacements(tuple(result), tuple(result.values()))


def _position_in_stored(
    groups: Sequence[Sequence[int]], dim: int
) -> tuple[int, list[int], list[int]]:
    """Return the stored dim that a view dim belongs to, and the view dims of it before and after
    that one."""
    stored = next(index for index, group in enumerate(groups) if dim in group)
    group = groups[stored]
    return stored, [d for d in group if d < dim], [d for d in group if d > dim]


def _num_later_parts(layout: Layout, axis: int, dim: int, mesh_shape: Sequence[int]) -> int:
    """Return the number of parts into which those outer splitters of `dim` cut it that come after
    `axis` in mesh order."""
    splitters = layout.splitters(dim)
    outer = splitters[: splitters.index(axis)]
    return math.prod(mesh_shape[other] for other in outer if other > axis)


def _joined_axes(
    groups: Sequence[Sequence[int]], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Mesh axis → all axes that split the same inner part of a stored dim, the outermost first, if
    that is mesh order."""
    joined: dict[int, tuple[int, ...]] = {}
    for group in groups:
        split = {d: tuple(a for a in layout.splitters(d) if mesh_shape[a] > 1) for d in group}
        inner = [
            d
            for d, axes in split.items()
            if len(axes) > 1 and math.prod(view[e] for e in group if e < d) > 1
        ]
        joined |= {
            axis: split[d]
            for d in inner
            if split[d] == tuple(sorted(split[d]))
            for axis in split[d]
        }
    return joined


def _check_interleaved(result: Sequence[Placement], layout: Layout) -> None:
    """A dim that is split inside a view must be the only such dim, and split by that placement
    alone."""
    strided = [placement for placement in result if isinstance(placement, _StridedShard)]
    dims = [placement.dim for placement in result if isinstance(placement, Shard | _StridedShard)]
    if len(strided) > 1 or dims.count(strided[0].dim) > 1:
        raise LayoutError(
            f"a parameter cannot be stored in layout {layout}: torch has no placements for {result}"
        )


def storable(
    shape: Sequence[int], view: Sequence[int], layout: Layout, mesh_shape: Sequence[int]
) -> bool:
    """Return whether a parameter can be stored in a layout as a DTensor.

    Args:
        shape, view, layout, mesh_shape: as in `stored_placements`.
    """
    try:
        stored_placements(shape, view, layout, mesh_shape)
    except LayoutError:
        return False
    return True
