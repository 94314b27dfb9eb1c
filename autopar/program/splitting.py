"""Conversion between full tensors and local tensors, for all ranks at once and without processes.

`split` and `join` define the order of the data in every local tensor. Parameters on real devices
have the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from autopar.core.layout import Layout, local_range
from autopar.core.mesh import Mesh
from autopar.core.placements import Halo, Mirrored, swap_parts
from autopar.errors import LayoutError, VerificationError

Reduction = Callable[[Tensor, Tensor], Tensor]
REDUCTIONS: dict[str, Reduction] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def local_part(
    full: Tensor,
    layout: Layout,
    mesh_shape: Sequence[int],
    view: Sequence[int],
    coordinate: Sequence[int],
) -> Tensor:
    """Return the shard of `full` at one coordinate of the mesh, as a view if possible.

    Args:
        full: the full tensor.
        layout: the layout over the dims of `view`.
        mesh_shape: the sizes of the mesh axes.
        view: the shape to which `full` is reshaped.
        coordinate: the coordinate of the rank on the mesh.

    Raises:
        LayoutError: if `full` cannot be reshaped to `view`, or the layout has partial sums, halos
            or mirrored shards.
    """
    if math.prod(view) != full.numel():
        raise LayoutError(
            f"a tensor of shape {tuple(full.shape)} cannot be viewed as {tuple(view)}"
        )
    if layout.has_partial or layout.special:
        raise LayoutError(f"a full tensor cannot be sharded as {layout}")
    part = full.reshape(tuple(view))
    for dim, size in enumerate(view):
        start, length = local_range(size, layout, dim, mesh_shape, coordinate)
        part = part.narrow(dim, start, length)
    return part


def split(
    full: Tensor, layout: Layout, mesh: Mesh, view: Sequence[int] | None = None
) -> list[Tensor]:
    """Return one local tensor per rank. Ranks with the same shard share one object.

    Args:
        full: the full tensor.
        layout: the layout over the dims of `view`.
        mesh: the mesh of the ranks.
        view: the shape to which `full` is reshaped; by default its shape.
    """
    view = tuple(full.shape) if view is None else tuple(view)
    parts: dict[tuple[int, ...], Tensor] = {}
    result = []
    for rank in range(mesh.num_devices):
        coordinate = mesh.coordinate(rank)
        place = tuple(
            c if isinstance(p, Shard) else 0
            for c, p in zip(coordinate, layout.placements, strict=True)
        )
        if place not in parts:
            parts[place] = local_part(full, layout, mesh.shape, view, coordinate).contiguous()
        result.append(parts[place])
    return result


def join(
    locals: Sequence[Tensor],
    layout: Layout,
    mesh: Mesh,
    shape: Sequence[int],
    tolerance: float = 0.0,
) -> Tensor:
    """Return the full tensor. Partial sums are reduced, and replicas must be equal.

    Args:
        locals: one local tensor per rank.
        layout: the layout of the tensor.
        mesh: the mesh of the ranks.
        shape: the shape of the result.
        tolerance: the largest difference between replicas, relative to the largest magnitude.

    Raises:
        VerificationError: if replicas differ.
    """
    parts = list(locals)
    for axis in reversed(layout.order):
        placement = layout.placements[axis]
        for group in mesh.groups(axis):
            members = [parts[rank] for rank in group]
            if isinstance(placement, Halo):
                members = [
                    m.narrow(
                        placement.dim, placement.before, m.shape[placement.dim] - placement.length
                    )
                    for m in members
                ]
            elif isinstance(placement, Mirrored):
                members = swap_parts(members, placement.dim)
            if isinstance(placement, Shard):
                merged = torch.cat(members, dim=placement.dim)
            elif isinstance(placement, Partial):
                merged = reduce(members, placement.reduce_op)
            else:
                merged = _check_equal(members, group, mesh.names[axis], tolerance)
            for rank in group:
                parts[rank] = merged
    return parts[0].reshape(tuple(shape))


def reduce(parts: Sequence[Tensor], reduce_op: str) -> Tensor:
    """Reduce the tensors in rank order."""
    result = parts[0]
    for part in parts[1:]:
        result = REDUCTIONS[reduce_op](result, part)
    return result


def _check_equal(
    members: Sequence[Tensor], group: Sequence[int], axis: str, tolerance: float
) -> Tensor:
    first = members[0]
    for rank, other in zip(group[1:], members[1:], strict=True):
        if other is not first and not _equal(first, other, tolerance):
            raise VerificationError(
                f"replicas on mesh axis {axis!r} differ: rank {group[0]} and rank {rank}"
            )
    return first


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    rounds = a.is_floating_point() or a.is_complex()
    if not rounds or tolerance == 0.0 or a.numel() == 0:
        return (
            torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
            if rounds
            else torch.equal(a, b)
        )
    scale = max(a.abs().nan_to_num(0.0, 0.0).max().item(), 1e-30)  # of the finite elements
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)
