"""The part of a tensor that lies at a place of the mesh."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.halo import Halo
from autopar.layout.layout import Layout


def part_range(size: int, counts: Sequence[int], coordinates: Sequence[int]) -> tuple[int, int]:
    """Start and length of a part: `size` cut into as many parts as the first count says, the part there cut again, and so on.

    Uneven sizes follow torch's rule (`torch.chunk`): every part has ``ceil(size / n)`` elements until none is left.
    """
    start, length = 0, size
    for count, coordinate in zip(counts, coordinates, strict=True):
        chunk = -(-length // count)
        begin = min(chunk * coordinate, length)
        start, length = start + begin, min(chunk, length - begin)
    return start, length


def local_range(size: int, layout: Layout, dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """Start and length of the part of a dim of `size` that lies at `coordinate` (see `part_range`), without a halo; of a mirrored one the
    start is its first half's."""
    splitters = layout.splitters(dim)
    return part_range(size, [mesh_shape[axis] for axis in splitters], [coordinate[axis] for axis in splitters])


def local_shape(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Shape of the local tensor at `coordinate` (by default at the origin, which has the largest part)."""
    coordinate = coordinate if coordinate is not None else (0,) * len(mesh_shape)
    lengths = list(shape)
    for dim in layout.split:
        lengths[dim] = local_range(shape[dim], layout, dim, mesh_shape, coordinate)[1]
    for special in layout.special:
        lengths[special.dim] += special.length if isinstance(special, Halo) else 0
    return tuple(lengths)
