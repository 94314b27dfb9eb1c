"""What a device holds in a layout, and where a collective leads: the layouts' own arithmetic once
more.

A dim is split by its axes from the outermost to the innermost, each time into parts of
``ceil(length / devices)``; the first device has the largest part. An axis can be gathered only
where it is the innermost splitter, and becomes that where it splits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.collective import Collective
from autopar.halo import Halo
from autopar.layout import Layout
from autopar.mirrored import Mirrored

SHARING = ("all_reduce", "reduce_scatter", "all_gather")
"""Collectives that may be in a bucket, of elements that are"""
FLOATS = ("float32", "float64", "bfloat16", "float16")


def local_lengths(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]
) -> tuple[int, ...]:
    """Shape of the largest part."""
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
    """Bytes of the largest part."""
    size = dtype.itemsize
    for length in local_lengths(shape, layout, mesh_shape):
        size *= length
    return size


def led_to(source: Layout, step: Collective, wanted: Layout) -> Layout | None:
    """The layout that a collective makes of `source`; None where it cannot start there.

    Args:
        wanted: says which halo is meant, where the step is one, and which way a swap goes.
    """
    if step.kind in ("fetch", "store"):
        return _led_to_or_from_host(source, step)
    if source.host or step.axis < 0:
        return None
    before = source.placements[step.axis]
    whole, at = Replicate(), Shard(step.dim) if step.dim >= 0 else None
    innermost = [
        a
        for a in source.order
        if isinstance(p := source.placements[a], Shard) and at is not None and p.dim == at.dim
    ][-1:]
    gathers = before == at and innermost == [step.axis]
    reduces = isinstance(before, Partial) and before.reduce_op == step.reduce_op
    after: Placement | None = None
    match step.kind:
        case "all_gather":
            after = whole if gathers else None
        case "all_to_all":
            moves = gathers and 0 <= step.to_dim != step.dim
            after = Shard(step.to_dim) if moves else None
        case "all_reduce":
            after = whole if reduces and step.dim == -1 else None
        case "reduce_scatter":
            after = at if reduces else None
        case "slice":
            after = at if before == whole else None
        case "swap":
            mirrored = Mirrored(step.dim)
            if gathers and wanted.placements[step.axis] == mirrored:
                after = mirrored
            elif before == mirrored and innermost == [step.axis]:
                after = at
        case "halo":
            asked = wanted.placements[step.axis]
            after = asked if gathers and isinstance(asked, Halo) and asked.dim == step.dim else None
    if (
        after is None
        or (step.to_dim != -1) != (step.kind == "all_to_all")
        or bool(step.reduce_op) != isinstance(before, Partial)
    ):
        return None
    placements = (*source.placements[: step.axis], after, *source.placements[step.axis + 1 :])
    return Layout(placements, [*(a for a in source.order if a != step.axis), step.axis])


def _led_to_or_from_host(source: Layout, step: Collective) -> Layout | None:
    is_bare = (step.axis, step.dim, step.to_dim, step.reduce_op) == (-1, -1, -1, "")
    has_halo = any(isinstance(p, Halo) for p in source.placements)
    is_there = source.host == (step.kind == "fetch")
    if not is_bare or not is_there or source.uncast or source.has_partial or has_halo:
        return None
    return Layout(source.placements, source.order, host=not source.host)


def is_even(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether all devices hold equal parts."""
    num = [1] * len(shape)
    for axis, placement in enumerate(layout.placements):
        if hasattr(placement, "dim") and 0 <= placement.dim < len(shape):
            num[placement.dim] *= sizes[axis]
    return not any(length % parts for length, parts in zip(shape, num, strict=True))
