"""The communication steps of emitted graphs, as plain functions that name mesh axes by index.

Executed directly they look up the process groups that `use_groups` has made current;
`autopar.kernels.bind` puts constants in their place, so that a bound graph needs no context and
`torch.compile` sees only torch operators. No autograd runs through them: an emitted backward graph
holds its own steps.

Terms. `size` is the number of ranks on the axis, `part` the length of one rank's share. A *fake*
group has an empty name: its steps allocate what the real ones do and move nothing, so that a run on
fake tensors shows the exact memory.

Memory, with `x` the input and `y` the result (both contiguous): besides them live
    all_gather      dim leading: nothing; else one buffer as large as `y`, while it is copied to `y`
    reduce_scatter  dim leading: nothing; else one copy of `x`, until the reduction has ended
    all_to_all      to_dim not leading: one copy of `x` until it is sent; dim not leading: one
                    buffer as large as `y`
    swap            what is sent, where dim is not leading, and what is received
    halo            what is sent and what is received
    all_reduce, shard   nothing
    fetch, store    nothing (`autopar.kernels.host`)
A dim is leading where all dims before it have length 1. `x` that is not contiguous costs one more
copy. Along an axis of size 1 every step returns `x` itself.

Early steps. `start` issues a step and `finish` waits for it; both take its kind and all of its
settings, and what `start` returns goes to one `finish` and nowhere else. From start to finish live
what is sent (for all_gather `x`, else the copy of it that is named above, or `x` where there is
none; nothing for all_reduce) and what comes.

Uneven parts. A dim whose length `size` does not divide has a shorter last part
(`autopar.core.layout.part_range`). It is padded for the way and cut back after it; each costs a
copy. Where a step joins such a dim, `length` says how long it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.collective import HOST_KINDS
from autopar.core.layout import part_range
from autopar.core.mesh import Mesh
from autopar.errors import RuntimeStateError
from autopar.kernels import bound_ops, host


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """This rank's process group along one mesh axis.

    Attributes:
        name: torch's name of the group, empty for a fake group. size: the number of its ranks.
        coordinate: this rank's place in it.
    """

    name: str
    size: int
    coordinate: int


Groups = tuple[AxisGroup, ...]
_current: ContextVar[Groups | None] = ContextVar("autopar_groups", default=None)


@contextmanager
def use_groups(groups: Sequence[AxisGroup]) -> Iterator[None]:
    """Make `groups`, one per mesh axis, the groups of the steps that run inside, in this thread."""
    token = _current.set(tuple(groups))
    try:
        yield
    finally:
        _current.reset(token)


def fake_groups(mesh: Mesh, coordinate: Sequence[int] | None = None) -> Groups:
    """Return groups without processes, as seen from `coordinate`, by default the origin."""
    coordinate = coordinate if coordinate is not None else (0,) * len(mesh.shape)
    return tuple(
        AxisGroup("", size, index) for size, index in zip(mesh.shape, coordinate, strict=True)
    )


def all_gather(x: Tensor, dim: int, axis: int, length: int | None = None) -> Tensor:
    """Shard(dim) → Replicate on `axis`: the parts joined in order.

    Args:
        x: this rank's part. dim: the dim that is joined. axis: the mesh axis, which must be the
            innermost splitter of `dim`.
        length: the whole length of `dim`, if its parts differ in length.
    """
    group = group_of(axis)
    return bound_ops.all_gather(x, dim, group.size, group.name, length)


def reduce_scatter(x: Tensor, dim: int, reduce_op: str, axis: int) -> Tensor:
    """Partial(reduce_op) → Shard(dim) on `axis`: this rank's part of the reduced tensor.

    Args:
        x: this rank's partial result. dim: the dim that is split. reduce_op: ``sum``, ``max``,
            ``min`` or ``product``.
        axis: the mesh axis.
    """
    group = group_of(axis)
    return bound_ops.reduce_scatter(x, dim, reduce_op, group.size, group.name, group.coordinate)


def all_reduce(x: Tensor, reduce_op: str, axis: int) -> Tensor:
    """Partial(reduce_op) → Replicate on `axis`; a new tensor.

    Args:
        x: this rank's partial result. reduce_op: see `reduce_scatter`. axis: the mesh axis.
    """
    group = group_of(axis)
    return bound_ops.all_reduce(x, reduce_op, group.size, group.name)


def all_to_all(x: Tensor, dim: int, to_dim: int, axis: int, length: int | None = None) -> Tensor:
    """Shard(dim) → Shard(to_dim) on `axis`.

    Args:
        x: this rank's part. dim, to_dim: the dim that is joined and the dim that is split.
        axis: the mesh axis, which must be the innermost splitter of `dim` and becomes that of
            `to_dim`.
        length: the whole length of `dim`, if its parts differ in length.
    """
    group = group_of(axis)
    return bound_ops.all_to_all(x, dim, to_dim, group.size, group.name, group.coordinate, length)


def halo(x: Tensor, dim: int, before: int, after: int, lowest: bool, axis: int) -> Tensor:
    """Shard(dim) → `Halo` on `axis`: the part with its neighbours' elements.

    Args:
        x: this rank's part. dim: the dim that is split. before, after: the elements to add on each
            side.
        lowest: whether the padding beyond the ends is the dtype's lowest value instead of zeros.
        axis: the mesh axis, the only one that splits `dim`.
    """
    group = group_of(axis)
    return bound_ops.halo(x, dim, before, after, lowest, group.size, group.name, group.coordinate)


def swap(x: Tensor, dim: int, axis: int) -> Tensor:
    """Shard(dim) → `Mirrored`, or back, on `axis`: the second half comes from the rank at the
    mirrored place.

    Args:
        x: this rank's part. dim: the dim that is split. axis: the mesh axis, the only one that
            splits `dim`.
    """
    group = group_of(axis)
    return bound_ops.swap(x, dim, group.size, group.name, group.coordinate)


def shard(x: Tensor, dim: int, axis: int) -> Tensor:
    """Replicate → Shard(dim) on `axis`: this rank's part, always a contiguous copy.

    A view would be free, but it would hold all of `x` alive: a gradient or a kept value that was
    sliced would then cost `size` times what the plan says.

    Args:
        x: the whole tensor. dim: the dim that is split. axis: the mesh axis.
    """
    group = group_of(axis)
    return bound_ops.shard(x, dim, group.size, group.coordinate)


def fetch(x: Tensor) -> Tensor:
    """Copy from the host's memory. On a CPU that is the same memory; a graph that is bound for a
    GPU copies to it."""
    return host.fetch(x)


def store(x: Tensor) -> Tensor:
    """Copy to the host's memory, see `fetch`."""
    return host.store(x)


def start(x: Tensor, kind: str, *settings: Any, length: int | None = None) -> bound_ops.Started:
    """Issue the step `kind` with its settings, the axis last."""
    if kind in HOST_KINDS:
        return bound_ops.STARTS[kind](x)
    return bound_ops.STARTS[kind](
        x, *bound_settings(kind, settings, length, group_of(settings[-1]))
    )


def finish(
    started: bound_ops.Started, kind: str, *settings: Any, length: int | None = None
) -> Tensor:
    """Wait for a step that was started with the same settings and return its result."""
    if kind in HOST_KINDS:
        return bound_ops.FINISHES[kind](started)
    return bound_ops.FINISHES[kind](
        started, *bound_settings(kind, settings, length, group_of(settings[-1]))
    )


def bound_settings(
    kind: str, settings: Sequence[Any], length: int | None, group: AxisGroup
) -> tuple[Any, ...]:
    """Return the settings of a step's bound form: the axis is replaced by its group.

    Args:
        kind: the step. settings: its settings, the axis last. length: the length of the joined dim,
            if its parts differ. group: this rank's group along the axis.
    """
    known = {"coordinate": group.coordinate, "length": length}
    return (*settings[:-1], group.size, group.name, *(known[name] for name in _FURTHER[kind]))


def local_start(size: int, splitters: tuple[tuple[int, int], ...]) -> int:
    """Return the first global index of this rank's part of a dim.

    Args:
        size: the dim's length. splitters: (axis, axis size) of the axes that split it, outermost
            first.
    """
    return _own_range(size, splitters)[0]


def local_length(size: int, splitters: tuple[tuple[int, int], ...]) -> int:
    """Return the length of this rank's part of a dim. For the arguments see `local_start`."""
    return _own_range(size, splitters)[1]


def _own_range(size: int, splitters: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return range_of(size, splitters, [group_of(axis).coordinate for axis, _ in splitters])


PLACES: tuple[Callable[..., int], ...] = (local_start, local_length)  # in the order of `range_of`
STEPS: tuple[Callable[..., Tensor], ...] = (
    all_gather,
    reduce_scatter,
    all_reduce,
    all_to_all,
    swap,
    halo,
    shard,
)  # along axes
COPIES: tuple[Callable[..., Tensor], ...] = (fetch, store)  # along none
PARTS: tuple[Callable[..., Any], ...] = (start, finish)


_ARGUMENTS = {
    all_gather: ("x", "dim", "axis"),
    reduce_scatter: ("x", "dim", "reduce_op", "axis"),
    all_reduce: ("x", "reduce_op", "axis"),
    all_to_all: ("x", "dim", "to_dim", "axis"),
    swap: ("x", "dim", "axis"),
    halo: ("x", "dim", "before", "after", "lowest", "axis"),
    shard: ("x", "dim", "axis"),
    fetch: ("x",),
    store: ("x",),
}


def positional(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a step, or of its start or finish, in order, without `length` and the
    kind."""
    if node.target in PARTS:
        x, _, *settings = node.args
        return (x, *settings)
    names = _ARGUMENTS[node.target]
    return (*node.args, *(node.kwargs[name] for name in names[len(node.args) :]))


def group_of(axis: int) -> AxisGroup:
    """Return this rank's current group along an axis."""
    return current_groups()[axis]


def current_groups() -> Groups:
    """Return this rank's current groups, one per axis."""
    groups = _current.get()
    if groups is None:
        raise RuntimeStateError(
            "a communication step ran without process groups",
            remedy=(
                "run the graph inside use_groups(...), bind it with bind(graph, groups), or use the"
                " lockstep interpreter"
            ),
        )
    return groups


def range_of(
    size: int, splitters: Sequence[tuple[int, int]], coordinates: Sequence[int]
) -> tuple[int, int]:
    """Return first index and length of a part of a dim.

    Args:
        size: the dim's length. splitters: see `local_start`. coordinates: the part's place on each
            of these axes.
    """
    return part_range(size, [axis_size for _, axis_size in splitters], coordinates)


_FURTHER: Mapping[str, tuple[str, ...]] = {  # what a bound form takes after its group
    "all_gather": ("length",),
    "reduce_scatter": ("coordinate",),
    "all_reduce": (),
    "all_to_all": ("coordinate", "length"),
    "swap": ("coordinate",),
    "halo": ("coordinate",),
}


# --------------------------------------------------------------------------------------------------
# Sums of gradients that are held through a step.


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of this dtype add up: fp32, or the dtype itself if it is
    wider."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def add_to(total: Tensor, x: Tensor) -> Tensor:
    """Add `x`, of any dtype, to `total` in place, in the dtype of `total`; return `total`."""
    return total.add_(x)


def write_to(total: Tensor, x: Tensor) -> Tensor:
    """Write into `total` what `add_to` makes of zeros, whatever it holds; return `total`."""
    return total.copy_(x)


FIRST = {add_to: write_to}
"""What stands in the backward graph, and what runs in its place on the first microbatch."""
