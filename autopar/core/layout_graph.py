"""The layout graph of a tensor: its layouts as nodes, and as *arcs* the single collectives between
them, each on one mesh axis:

    S(d) → R     all_gather      only of the innermost splitter of d (no other may be gathered
                                 without moving other data)
    P    → R     all_reduce
    P    → S(d)  reduce_scatter  the axis becomes the innermost splitter of d
    S(d) → S(e)  all_to_all      only of the innermost splitter of d; the axis becomes the innermost
                                 splitter of e
    R    → S(d)  slice           local; the axis becomes the innermost splitter of d
    S(d) → S(d)~a~b  halo        if no other axis splits d; no arc starts there
    S(d) ↔ S(d)~mirrored  swap   if no other axis splits d, and its parts have an even length

or a copy between the memory of devices and of their hosts, `store` and `fetch`, if a layout on the
host is produced or wanted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.collective import BUCKET_DTYPES, BUCKETED, Collective, Kind
from autopar.core.layout import Layout, local_shape
from autopar.core.placements import REPLICATE, Halo, Mirrored, Special, adds_up, splits

Price = Callable[[Collective], float]


@dataclass(frozen=True, slots=True)
class Arc:
    """One collective from layout `src` to layout `dst` (indices into `LayoutGraph.layouts`).

    Attributes:
        time_s: seconds of the collective by itself.
        share_s: least seconds that it takes as a part of a bucket, at most `time_s`; None if it
            cannot be in a bucket.
    """

    src: int
    dst: int
    collective: Collective
    time_s: float
    share_s: float | None = None

    def seconds(self, *, shares: bool) -> float:
        """Return `share_s` if the arc `shares` a bucket and may be in one, else `time_s`."""
        return self.time_s if self.share_s is None or not shares else self.share_s


@dataclass(frozen=True, slots=True)
class LayoutGraph:
    """Layouts of one tensor and the single collectives between them.

    Attributes:
        layouts: the nodes.
        bytes: bytes of a device's memory per node; 0 for uncast layouts and those on the host.
        arcs: the collectives.
        index: layout → index of its node.
    """

    layouts: tuple[Layout, ...]
    bytes: tuple[int, ...]
    arcs: tuple[Arc, ...]
    index: dict[Layout, int] = field(compare=False, repr=False)

    def arcs_by_source(self) -> list[list[Arc]]:
        """Return, for each node, the arcs that start there."""
        result: list[list[Arc]] = [[] for _ in self.layouts]
        for arc in self.arcs:
            result[arc.src].append(arc)
        return result


def local_bytes(
    shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh_shape: Sequence[int]
) -> int:
    """Return the bytes of the largest local tensor.

    Args:
        shape: shape of the whole tensor.
        dtype: its dtype.
        layout: its layout.
        mesh_shape: devices on each axis of the mesh.
    """
    return math.prod(local_shape(shape, layout, mesh_shape)) * dtype.itemsize


def neighbours(
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: Layout,
    mesh_shape: Sequence[int],
    reduce_dtype: torch.dtype | None = None,
    *,
    special: tuple[Special, ...] = (),
    allowed: Sequence[Collection[Placement]] | None = None,
    stored: Collection[Layout] = (),
) -> list[tuple[Collective, Layout]]:
    """Return every layout that fits and to which one collective leads, with the collective.

    Args:
        shape: shape of the whole tensor.
        dtype: its dtype.
        layout: the layout to start from.
        mesh_shape: devices on each axis of the mesh.
        reduce_dtype: dtype of reductions; by default `dtype`.
        special: the halos and mirrored placements to consider.
        allowed: per axis the placements to consider; None means all.
        stored: layouts that may be copied to the hosts.
    """
    if layout.uncast:
        return []
    if layout.host:
        return [(host_copy("fetch", shape, dtype, layout, mesh_shape), layout.on_device())]
    steps: list[tuple[Collective, Layout]] = []
    num_elements = math.prod(local_shape(shape, layout, mesh_shape))
    for axis in _movable_axes(layout, mesh_shape):
        placement = layout.placements[axis]
        moved = (reduce_dtype or dtype) if adds_up(placement) else dtype
        name, size = str(moved).removeprefix("torch."), num_elements * moved.itemsize
        for target in _axis_targets(placement, len(shape), special):
            if allowed is not None and target not in allowed[axis]:
                continue
            after = layout.with_placement(axis, target)
            if not after.fits(shape, mesh_shape):
                continue
            collective = _collective(axis, placement, target, name, size)
            if collective.kind == "halo":
                halo_bytes = local_bytes(shape, moved, after, mesh_shape) - size
                collective = replace(collective, halo_bytes=halo_bytes)
            steps.append((collective, after))
    if layout in stored:
        steps.append((host_copy("store", shape, dtype, layout, mesh_shape), layout.on_host()))
    return steps


def _movable_axes(layout: Layout, mesh_shape: Sequence[int]) -> list[int]:
    """Axes with several devices whose placement one collective can change (see the module
    docstring)."""
    return [
        axis
        for axis, placement in enumerate(layout.placements)
        if mesh_shape[axis] > 1 and (not splits(placement) or layout.is_innermost(axis))
    ]


def host_copy(
    kind: Kind, shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh_shape: Sequence[int]
) -> Collective:
    """Return the copy of a tensor to the hosts or back.

    Args:
        kind: ``store`` or ``fetch``.
        shape: shape of the whole tensor.
        dtype: its dtype.
        layout: its layout.
        mesh_shape: devices on each axis of the mesh.
    """
    return Collective(
        kind,
        -1,
        -1,
        -1,
        "",
        str(dtype).removeprefix("torch."),
        local_bytes(shape, dtype, layout, mesh_shape),
    )


@lru_cache(maxsize=2**12)
def _axis_targets(
    placement: Placement, rank: int, special: tuple[Special, ...]
) -> tuple[Placement, ...]:
    if isinstance(placement, Special):
        return (Shard(placement.dim),) if isinstance(placement, Mirrored) else ()
    every = (REPLICATE, *map(Shard, range(rank)))
    return (
        *(target for target in every if target != placement),
        *(p for p in special if placement == Shard(p.dim)),
    )


def _collective(
    axis: int, before: Placement, after: Placement, dtype: str, size: int
) -> Collective:
    to = after.dim if splits(after) else -1
    if before == REPLICATE:
        return Collective("slice", axis, to, -1, "", dtype, size)
    if adds_up(before):
        kind: Kind = "all_reduce" if to < 0 else "reduce_scatter"
        return Collective(kind, axis, to, -1, before.reduce_op, dtype, size)
    assert isinstance(before, Shard)
    if issubclass(type(after), Mirrored) or issubclass(type(before), Mirrored):
        return Collective("swap", axis, to, -1, "", dtype, size)
    if issubclass(type(after), Halo):
        return Collective("halo", axis, to, -1, "", dtype, size)
    if after == REPLICATE:
        return Collective("all_gather", axis, before.dim, -1, "", dtype, size)
    if type(before) is Shard and type(after) is Shard:
        return Collective("all_to_all", axis, before.dim, to, "", dtype, size)
    raise AssertionError(f"no collective converts {before} into {after}")


def layout_graph(
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh_shape: Sequence[int],
    produced: Iterable[Layout],
    wanted: Iterable[Layout],
    price: Price,
    reduce_dtype: torch.dtype | None = None,
    *,
    reduces: bool = True,
    share: Price | None = None,
) -> LayoutGraph:
    """Build the layout graph between the layouts `produced` and `wanted`.

    Its nodes are these layouts and the layouts between them. On every axis these have the
    placements that occur there, `Replicate()`, and, if partial sums are produced on the axis,
    shards of the dims that are split on any axis (for hierarchical reductions).

    Args:
        shape: shape of the whole tensor.
        dtype: its dtype.
        mesh_shape: devices on each axis of the mesh.
        produced: layouts in which the tensor is made.
        wanted: layouts in which it is read.
        price: seconds of a collective by itself.
        reduce_dtype: dtype of reductions; by default `dtype`.
        reduces: whether there are arcs that reduce.
        share: seconds of a collective as a part of a bucket; None if there are no buckets.
    """
    produced, wanted = list(dict.fromkeys(produced)), list(dict.fromkeys(wanted))
    ends = list(dict.fromkeys([*produced, *wanted]))
    allowed = _placements_between([e for e in ends if not e.uncast], len(mesh_shape))
    special = tuple(dict.fromkeys(p for layout in wanted for p in layout.special))
    stored = {layout.on_device() for layout in wanted if layout.host}
    index: dict[Layout, int] = {}
    layouts: list[Layout] = []
    arcs: list[Arc] = []
    queue: list[Layout] = []
    for layout in ends:
        index[layout] = len(layouts)
        layouts.append(layout)
        queue.append(layout)
    for layout in queue:  # the loop appends to it
        for collective, after in neighbours(
            shape,
            dtype,
            layout,
            mesh_shape,
            reduce_dtype,
            special=special,
            allowed=allowed,
            stored=stored,
        ):
            if collective.reduce_op and not reduces:
                continue
            if after not in index:
                index[after] = len(layouts)
                layouts.append(after)
                queue.append(after)
            shares = share is not None and may_share(collective, shape, layout, after, mesh_shape)
            share_s = share(collective) if share is not None and shares else None
            arcs.append(Arc(index[layout], index[after], collective, price(collective), share_s))
    sizes = (_device_bytes(shape, dtype, layout, mesh_shape) for layout in layouts)
    return LayoutGraph(tuple(layouts), tuple(sizes), tuple(arcs), index)


def _device_bytes(
    shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh_shape: Sequence[int]
) -> int:
    """Bytes of a device's memory that a tensor takes in a layout (see `LayoutGraph.bytes`)."""
    if layout.uncast or layout.host:
        return 0
    return local_bytes(shape, dtype, layout, mesh_shape)


def _placements_between(ends: Sequence[Layout], num_axes: int) -> list[set[Placement]]:
    """Per mesh axis the placements of layouts between `ends` (see `layout_graph`)."""
    dims = sorted({p.dim for layout in ends for p in layout.placements if isinstance(p, Shard)})
    allowed: list[set[Placement]] = []
    for axis in range(num_axes):
        here = {layout.placements[axis] for layout in ends} | {REPLICATE}
        here |= {Shard(p.dim) for p in here if isinstance(p, Special)}
        if any(adds_up(p) for p in here):
            here |= {Shard(dim) for dim in dims}
        allowed.append(here)
    return allowed


def may_share(
    c: Collective, shape: Sequence[int], before: Layout, after: Layout, mesh_shape: Sequence[int]
) -> bool:
    """Whether a collective can be in a bucket: its tensor is floating, and all ranks have parts of
    equal size.

    Args:
        c: the collective.
        shape: shape of the whole tensor.
        before: its layout before the collective.
        after: its layout after it.
        mesh_shape: devices on each axis of the mesh.
    """
    return (
        c.kind in BUCKETED
        and c.dtype in BUCKET_DTYPES
        and before.divides(shape, mesh_shape)
        and after.divides(shape, mesh_shape)
    )


def all_layouts(shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[Layout, ...]:
    """Return every layout without partial sums that fits `shape` (see `Layout.fits`); axes of size
    1 stay replicated."""
    num_axes = len(mesh_shape)
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    options = [
        [REPLICATE, *map(Shard, dims)] if mesh_shape[a] > 1 else [REPLICATE]
        for a in range(num_axes)
    ]
    orders = list(itertools.permutations(range(num_axes)))
    layouts = (Layout(p, order) for p in itertools.product(*options) for order in orders)
    return tuple(dict.fromkeys(layout for layout in layouts if layout.fits(shape, mesh_shape)))
