"""The layout graph of a tensor: its layouts as nodes, and as *arcs* the single collectives between
them, each on one mesh axis:

    S(d) → R     all_gather      only of the innermost splitter of d (no other may be gathered
                                 without moving other data)
    P    → R     all_reduce
    P    → S(d)  reduce_scatter  the axis becomes the innermost splitter of d
    S(d) → S(e)  all_to_all      only of the innermost splitter of d; the axis becomes the innermost
                                 splitter of e
    R    → S(d)  slice           local; the axis becomes the innermost splitter of d
    S(d) → S(d)~a~b  halo        where the axis alone splits d; nothing leads on from there
    S(d) ↔ S(d)~mirrored  swap   where the axis alone splits d into parts of an even length

or a copy between the devices' memory and their hosts', `store` and `fetch`, where a layout on the
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
        time_s: what it takes by itself. share_s: what it takes at least as a share of a bucket, no
            more than that; None of what may be in none.
    """

    src: int
    dst: int
    collective: Collective
    time_s: float
    share_s: float | None = None

    def seconds(self, *, shares: bool) -> float:
        """By itself, or, where it `shares` a bucket if it may, what it takes of that."""
        return self.time_s if self.share_s is None or not shares else self.share_s


@dataclass(frozen=True, slots=True)
class LayoutGraph:
    """Layouts of one tensor and the single collectives between them.

    Attributes:
        layouts: the nodes. bytes: of a device's memory in each, of what is there for another's sake
            0. arcs: the collectives.
        index: layout → node.
    """

    layouts: tuple[Layout, ...]
    bytes: tuple[int, ...]
    arcs: tuple[Arc, ...]
    index: dict[Layout, int] = field(compare=False, repr=False)

    def outgoing(self) -> list[list[Arc]]:
        """Arcs by their source."""
        result: list[list[Arc]] = [[] for _ in self.layouts]
        for arc in self.arcs:
            result[arc.src].append(arc)
        return result


def local_bytes(
    shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh_shape: Sequence[int]
) -> int:
    """Bytes of the (largest) local tensor."""
    return math.prod(local_shape(shape, layout, mesh_shape)) * dtype.itemsize


def neighbours(
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: Layout,
    mesh_shape: Sequence[int],
    reduce_dtype: torch.dtype | None = None,
    special: tuple[Special, ...] = (),
    allowed: Sequence[Collection[Placement]] | None = None,
    stored: Collection[Layout] = (),
) -> list[tuple[Collective, Layout]]:
    """Every layout that one collective leads to and that fits; reductions run in `reduce_dtype` (by
    default `dtype`).

    Of the many possible halos and mirrored parts, those that are asked for; of the placements on
    each axis, those that are allowed; to the hosts, if it is among those that may be `stored`.
    """
    if layout.uncast:
        return []
    if layout.host:
        return [(host_copy("fetch", shape, dtype, layout, mesh_shape), layout.on_device())]
    found: list[tuple[Collective, Layout]] = []
    sizes: dict[torch.dtype, int] = {}
    for axis, placement in enumerate(layout.placements):
        if mesh_shape[axis] == 1:
            continue
        if splits(placement) and not layout.is_innermost(axis):
            continue
        for target in _axis_targets(placement, len(shape), special):
            if allowed is not None and target not in allowed[axis]:
                continue
            after = layout.with_placement(axis, target)
            if after.fits(shape, mesh_shape):
                moved = (reduce_dtype or dtype) if adds_up(placement) else dtype
                if moved not in sizes:
                    sizes[moved] = local_bytes(shape, moved, layout, mesh_shape)
                size = sizes[moved]
                collective = _collective(
                    axis, placement, target, str(moved).removeprefix("torch."), size
                )
                if collective.kind == "halo":
                    collective = replace(
                        collective, halo_bytes=local_bytes(shape, moved, after, mesh_shape) - size
                    )
                found.append((collective, after))
    if layout in stored:
        found.append((host_copy("store", shape, dtype, layout, mesh_shape), layout.on_host()))
    return found


def host_copy(
    kind: Kind, shape: Sequence[int], dtype: torch.dtype, layout: Layout, mesh_shape: Sequence[int]
) -> Collective:
    """A ``store`` of what lies in a layout, or a ``fetch``."""
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
    to = after.dim if splits(after) else -1  # type: ignore[attr-defined]
    if before == REPLICATE:
        return Collective("slice", axis, to, -1, "", dtype, size)
    if adds_up(before):
        kind: Kind = "all_reduce" if to < 0 else "reduce_scatter"
        return Collective(kind, axis, to, -1, before.reduce_op, dtype, size)  # type: ignore[attr-defined]
    assert isinstance(before, Shard)
    if issubclass(type(after), Mirrored) or issubclass(type(before), Mirrored):
        return Collective("swap", axis, to, -1, "", dtype, size)
    if issubclass(type(after), Halo):
        return Collective("halo", axis, to, -1, "", dtype, size)
    if to < 0:
        return Collective("all_gather", axis, before.dim, -1, "", dtype, size)
    return Collective("all_to_all", axis, before.dim, to, "", dtype, size)


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
    """The layout graph between the layouts `produced` and `wanted`; reductions run in
    `reduce_dtype` (by default `dtype`), or, without `reduces`, not at all. What may be in a bucket
    has its `share` of it (by default none is).

    Its nodes are these and whatever lies between them: on every axis the placements that occur
    there, `Replicate()`, and, where partial sums are produced on an axis, shards of the dims that
    occur on any axis (for hierarchical reductions).
    """
    produced, wanted = list(dict.fromkeys(produced)), list(dict.fromkeys(wanted))
    ends = list(dict.fromkeys([*produced, *wanted]))
    lie = [layout for layout in ends if not layout.uncast]
    dims = sorted({p.dim for layout in lie for p in layout.placements if isinstance(p, Shard)})
    allowed: list[set[Placement]] = []
    for axis in range(len(mesh_shape)):
        here = {layout.placements[axis] for layout in lie} | {REPLICATE}
        here |= {Shard(p.dim) for p in here if isinstance(p, Special)}
        if any(adds_up(p) for p in here):
            here |= {Shard(dim) for dim in dims}
        allowed.append(here)
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
    for layout in queue:  # grows while it is walked
        for collective, after in neighbours(
            shape, dtype, layout, mesh_shape, reduce_dtype, special, allowed, stored
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
    sizes = tuple(
        0 if layout.uncast or layout.host else local_bytes(shape, dtype, layout, mesh_shape)
        for layout in layouts
    )
    return LayoutGraph(tuple(layouts), sizes, tuple(arcs), index)


def may_share(
    c: Collective, shape: Sequence[int], before: Layout, after: Layout, mesh_shape: Sequence[int]
) -> bool:
    """Whether a collective of a tensor can be in a bucket: of a floating tensor of which all
    ranks have equal parts."""
    return (
        c.kind in BUCKETED
        and c.dtype in BUCKET_DTYPES
        and before.divides(shape, mesh_shape)
        and after.divides(shape, mesh_shape)
    )


def all_layouts(shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[Layout, ...]:
    """Every layout without partial sums that fits `shape` (see `Layout.fits`); axes of size 1
    stay replicated."""
    num_axes = len(mesh_shape)
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    options = [
        [REPLICATE, *map(Shard, dims)] if mesh_shape[a] > 1 else [REPLICATE]
        for a in range(num_axes)
    ]
    orders = list(itertools.permutations(range(num_axes)))
    found = (Layout(p, order) for p in itertools.product(*options) for order in orders)
    return tuple(dict.fromkeys(layout for layout in found if layout.fits(shape, mesh_shape)))
