"""The part of a tensor that a device holds in a layout, and the layout that results from a
collective. This is a second, independent implementation of the arithmetic in `autopar.core.layout`.

A dim is split by its axes from the outermost to the innermost, each time into parts of
``ceil(length / devices)``. The first device has the largest part. An axis can be gathered only if
it is the innermost splitter. A new splitter becomes the innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.collective import Collective
from autopar.core.layout import Layout
from autopar.core.placements import Halo, Mirrored

SHARING = ("all_reduce", "reduce_scatter", "all_gather")
"""Collectives that buckets may combine, for elements of the dtypes in `FLOATS`."""
FLOATS = ("float32", "float64", "bfloat16", "float16")


def local_lengths(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of the largest part of a tensor.

    Args:
        shape: shape of the whole tensor.
        layout: its layout; axes split dims in the layout's order.
        mesh_shape: number of devices along each mesh axis.

    Returns:
        One length per dim, including halos.
    """
    lengths = list(shape)
    for axis in layout.order:
        placement = layout.placements[axis]
        if isinstance(placement, Shard):
            lengths[placement.dim] = -(-lengths[placement.dim] // mesh_shape[axis])
    for placement in layout.placements:
        if isinstance(placement, Halo):
            lengths[placement.dim] += placement.before + placement.after
    return tuple(lengths)


def held_bytes(
    shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh_shape: Sequence[int]
) -> int:
    """Return the size of the largest part of a tensor in bytes.

    Args:
        shape: shape of the whole tensor.
        dtype: dtype of its elements.
        layout: its layout; axes split dims in the layout's order.
        mesh_shape: number of devices along each mesh axis.
    """
    size = dtype.itemsize
    for length in local_lengths(shape, layout, mesh_shape):
        size *= length
    return size


@dataclass(frozen=True, slots=True)
class _Start:
    """The placement along its mesh axis that a collective starts from.

    Attributes:
        step: the collective.
        before: placement of the source along the axis.
        wanted: placement of the requested layout along the axis.
        is_innermost: whether the axis is the innermost of those that split dim `step.dim`.
    """

    step: Collective
    before: Placement
    wanted: Placement
    is_innermost: bool

    @property
    def is_part(self) -> bool:
        """Whether the devices hold shards of dim `step.dim` that can be joined."""
        return self.is_innermost and self.before == Shard(self.step.dim)

    @property
    def is_sum(self) -> bool:
        """Whether the devices hold partial results of the reduction."""
        return isinstance(self.before, Partial) and self.before.reduce_op == self.step.reduce_op

    @property
    def is_mirrored(self) -> bool:
        """Whether the devices hold mirrored shards of dim `step.dim`."""
        return self.is_innermost and self.before == Mirrored(self.step.dim)

    @property
    def asks_for_mirrored(self) -> bool:
        """Whether mirrored shards of dim `step.dim` are requested."""
        return self.wanted == Mirrored(self.step.dim)

    @property
    def asks_for_halo(self) -> bool:
        """Whether shards of dim `step.dim` with a halo are requested."""
        return isinstance(self.wanted, Halo) and self.wanted.dim == self.step.dim


_PLACEMENTS: Mapping[str, tuple[Callable[[_Start], bool], Callable[[_Start], Placement]]] = {
    "all_gather": (lambda s: s.is_part, lambda s: Replicate()),
    "all_to_all": (
        lambda s: s.is_part and 0 <= s.step.to_dim != s.step.dim,
        lambda s: Shard(s.step.to_dim),
    ),
    "all_reduce": (lambda s: s.is_sum and s.step.dim == -1, lambda s: Replicate()),
    "reduce_scatter": (lambda s: s.is_sum and s.step.dim >= 0, lambda s: Shard(s.step.dim)),
    "slice": (
        lambda s: s.before == Replicate() and s.step.dim >= 0,
        lambda s: Shard(s.step.dim),
    ),
    "swap": (
        lambda s: s.is_mirrored or (s.is_part and s.asks_for_mirrored),
        lambda s: Shard(s.step.dim) if s.is_mirrored else Mirrored(s.step.dim),
    ),
    "halo": (lambda s: s.is_part and s.asks_for_halo, lambda s: s.wanted),
}
"""Kind of collective → its precondition, and the placement along its axis that it produces."""


def apply_collective(source: Layout, step: Collective, wanted: Layout) -> Layout | None:
    """Return the layout that a collective produces.

    Args:
        source: layout of the tensor before the collective.
        step: the collective; its kind, mesh axis, dims and reduction are read.
        wanted: the requested layout; determines the halo and the direction of a swap.

    Returns:
        The layout; None if the collective cannot start from `source`.
    """
    if step.kind in ("fetch", "store"):
        return _move_between_host_and_device(source, step)
    if source.host or step.axis < 0 or step.kind not in _PLACEMENTS:
        return None
    splitters = [axis for axis in source.order if _splits(source.placements[axis], step.dim)]
    start = _Start(
        step,
        source.placements[step.axis],
        wanted.placements[step.axis],
        splitters[-1:] == [step.axis],
    )
    is_possible, make_placement = _PLACEMENTS[step.kind]
    names_its_dims = (step.to_dim != -1) == (step.kind == "all_to_all")
    names_its_sum = bool(step.reduce_op) == isinstance(start.before, Partial)
    if not (names_its_dims and names_its_sum and is_possible(start)):
        return None
    placements = list(source.placements)
    placements[step.axis] = make_placement(start)
    return Layout(placements, [*(a for a in source.order if a != step.axis), step.axis])


def _splits(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard) and dim >= 0 and placement.dim == dim


def _move_between_host_and_device(source: Layout, step: Collective) -> Layout | None:
    is_bare = (step.axis, step.dim, step.to_dim, step.reduce_op) == (-1, -1, -1, "")
    has_halo = any(isinstance(p, Halo) for p in source.placements)
    is_there = source.host == (step.kind == "fetch")
    if not is_bare or not is_there or source.uncast or source.has_partial or has_halo:
        return None
    return Layout(source.placements, source.order, host=not source.host)


def is_even(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether all devices hold parts of the same shape.

    Args:
        layout: layout of the tensor.
        shape: shape of the whole tensor.
        sizes: number of devices along each mesh axis.
    """
    num = [1] * len(shape)
    for axis, placement in enumerate(layout.placements):
        if hasattr(placement, "dim") and 0 <= placement.dim < len(shape):
            num[placement.dim] *= sizes[axis]
    return not any(length % parts for length, parts in zip(shape, num, strict=True))
