"""The communication steps of emitted graphs, as plain functions that refer to mesh axes by index.

When they are called directly, they use the process groups that `use_groups` has set.
`autopar.kernels.bind` replaces axes by constants, so that a bound graph needs no context and
`torch.compile` sees only torch ops. Autograd does not differentiate these steps, since an emitted
backward graph contains its steps explicitly.

`size` is the number of ranks on the axis. A *fake* group has an empty name. Its steps allocate the
same memory as the real ones and communicate nothing, so that a run on fake tensors shows the exact
memory.

Memory in addition to the input `x` and the result `y`, which are contiguous:
    all_gather      none if dim is leading; otherwise a buffer of the size of `y`, while it is
                    copied to `y`
    reduce_scatter  none if dim is leading; otherwise a copy of `x`, until the reduction has ended
    all_to_all      a copy of `x` until it is sent, unless to_dim is leading; a buffer of the size
                    of `y`, unless dim is leading
    swap            the sent elements, unless dim is leading, and the received elements
    halo            the sent and the received elements
    all_reduce, shard   none
    fetch, store    none (`autopar.kernels.host`)
A dim is leading if all dims before it have length 1. If `x` is not contiguous, one more copy is
needed. Along an axis of size 1, every step returns `x`.

Early steps: `start` issues a step and `finish` waits for it. Both take the kind and all settings of
the step. The result of `start` must be passed to exactly one `finish`. Between start and finish,
the sent tensor and the received tensor are alive. The sent tensor is `x` for all_gather, the copy
of `x` that is listed above or else `x` for other steps, and nothing for all_reduce.

Uneven shards: if `size` does not divide the length of a dim, the last shard is shorter
(`autopar.core.layout.part_range`). It is padded for communication, and the result is cut. Each of
these takes a copy. If a step gathers such a dim, `length` is the full length of the dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.core.collective import HOST_KINDS, Kind
from autopar.core.layout import part_range
from autopar.core.mesh import Mesh
from autopar.errors import RuntimeStateError
from autopar.kernels import bound_ops, host


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """This rank's process group along one mesh axis.

    Attributes:
        name: torch's name of the group; empty for a fake group.
        size: the number of ranks in the group.
        coordinate: the index of this rank in the group.
    """

    name: str
    size: int
    coordinate: int


Groups = tuple[AxisGroup, ...]
_current: ContextVar[Groups | None] = ContextVar("autopar_groups", default=None)


@contextmanager
def use_groups(groups: Sequence[AxisGroup]) -> Iterator[None]:
    """A context in which steps in this thread use the given groups, one per mesh axis."""
    token = _current.set(tuple(groups))
    try:
        yield
    finally:
        _current.reset(token)


def fake_groups(mesh: Mesh, coordinate: Sequence[int] | None = None) -> Groups:
    """Return groups without processes for the rank at `coordinate`; by default, the origin."""
    coordinate = coordinate if coordinate is not None else (0,) * len(mesh.shape)
    return tuple(
        AxisGroup("", size, index) for size, index in zip(mesh.shape, coordinate, strict=True)
    )


def all_gather(x: Tensor, dim: int, axis: int, length: int | None = None) -> Tensor:
    """Convert Shard(dim) to Replicate on `axis`: concatenate the shards in order.

    Args:
        x: this rank's shard.
        dim: the dim that is gathered.
        axis: the mesh axis, which must be the innermost axis that shards `dim`.
        length: the full length of `dim` if it is sharded unevenly.
    """
    group = group_of(axis)
    return bound_ops.all_gather(x, dim, group.size, group.name, length)


def reduce_scatter(x: Tensor, dim: int, reduce_op: str, axis: int) -> Tensor:
    """Convert Partial(reduce_op) to Shard(dim) on `axis`: return this rank's shard of the reduced
    tensor.

    Args:
        x: this rank's partial result.
        dim: the dim that is sharded.
        reduce_op: ``sum``, ``max``, ``min`` or ``product``.
        axis: the mesh axis.
    """
    group = group_of(axis)
    return bound_ops.reduce_scatter(x, dim, reduce_op, group.size, group.name, group.coordinate)


def all_reduce(x: Tensor, reduce_op: str, axis: int) -> Tensor:
    """Convert Partial(reduce_op) to Replicate on `axis`: return the reduced tensor in new memory.

    Args:
        x: this rank's partial result.
        reduce_op: see `reduce_scatter`.
        axis: the mesh axis.
    """
    group = group_of(axis)
    return bound_ops.all_reduce(x, reduce_op, group.size, group.name)


def all_to_all(x: Tensor, dim: int, to_dim: int, axis: int, length: int | None = None) -> Tensor:
    """Convert Shard(dim) to Shard(to_dim) on `axis`.

    Args:
        x: this rank's shard.
        dim, to_dim: the dim that is gathered and the dim that is sharded.
        axis: the mesh axis. It must be the innermost axis that shards `dim`, and becomes the
            innermost axis that shards `to_dim`.
        length: the full length of `dim` if it is sharded unevenly.
    """
    group = group_of(axis)
    return bound_ops.all_to_all(x, dim, to_dim, group.size, group.name, group.coordinate, length)


def halo(x: Tensor, dim: int, before: int, after: int, lowest: bool, axis: int) -> Tensor:
    """Convert Shard(dim) to `Halo` on `axis`: add elements of neighboring shards.

    Args:
        x: this rank's shard.
        dim: the dim that is sharded.
        before, after: the number of elements to add on each side.
        lowest: whether the padding at the ends is the lowest value of the dtype instead of zero.
        axis: the mesh axis, which must be the only axis that shards `dim`.
    """
    group = group_of(axis)
    return bound_ops.halo(x, dim, before, after, lowest, group.size, group.name, group.coordinate)


def swap(x: Tensor, dim: int, axis: int) -> Tensor:
    """Convert Shard(dim) to `Mirrored` on `axis`, or back: exchange the second half of the shard
    with the rank at the mirrored coordinate.

    Args:
        x: this rank's shard.
        dim: the dim that is sharded.
        axis: the mesh axis, which must be the only axis that shards `dim`.
    """
    group = group_of(axis)
    return bound_ops.swap(x, dim, group.size, group.name, group.coordinate)


def shard(x: Tensor, dim: int, axis: int) -> Tensor:
    """Convert Replicate to Shard(dim) on `axis`: return this rank's shard as a contiguous copy.

    A view would need no copy, but it would keep all of `x` alive: a sliced gradient or saved value
    would then take `size` times the memory that the plan predicts.

    Args:
        x: the full tensor.
        dim: the dim that is sharded.
        axis: the mesh axis.
    """
    group = group_of(axis)
    return bound_ops.shard(x, dim, group.size, group.coordinate)


def fetch(x: Tensor) -> Tensor:
    """Copy a tensor from host memory to the device. On a CPU, this is a copy within the same
    memory."""
    return host.fetch(x)


def store(x: Tensor) -> Tensor:
    """Copy a tensor from the device to host memory; see `fetch`."""
    return host.store(x)


def start(x: Tensor, kind: str, *settings: Any, length: int | None = None) -> bound_ops.Started:
    """Issue a step.

    Args:
        x: the operand of the step.
        kind: the kind of the step.
        settings: the settings of the step; the last one is the axis.
        length: see `all_gather`.
    """
    if kind in HOST_KINDS:
        return bound_ops.STARTS[kind](x)
    return bound_ops.STARTS[kind](
        x, *bound_settings(kind, settings, length, group_of(settings[-1]))
    )


def finish(
    started: bound_ops.Started, kind: str, *settings: Any, length: int | None = None
) -> Tensor:
    """Wait for a step, and return its result.

    Args:
        started: the result of `start`.
        kind, settings, length: the arguments that were passed to `start`.
    """
    if kind in HOST_KINDS:
        return bound_ops.FINISHES[kind](started)
    return bound_ops.FINISHES[kind](
        started, *bound_settings(kind, settings, length, group_of(settings[-1]))
    )


def bound_settings(
    kind: str, settings: Sequence[Any], length: int | None, group: AxisGroup
) -> tuple[Any, ...]:
    """Return the settings of the bound form of a step, in which a group replaces the axis.

    Args:
        kind: the kind of the step.
        settings: the settings of the step; the last one is the axis.
        length: the full length of the gathered dim if it is sharded unevenly.
        group: this rank's group along the axis.
    """
    known = {"coordinate": group.coordinate, "length": length}
    return (*settings[:-1], group.size, group.name, *(known[name] for name in _FURTHER[kind]))


def local_start(size: int, splitters: tuple[tuple[int, int], ...]) -> int:
    """Return the first global index of this rank's shard of a dim.

    Args:
        size: the full length of the dim.
        splitters: pairs (axis, axis size) of the axes that shard it, outermost first.
    """
    return _own_range(size, splitters)[0]


def local_length(size: int, splitters: tuple[tuple[int, int], ...]) -> int:
    """Return the length of this rank's shard of a dim. For the arguments, see `local_start`."""
    return _own_range(size, splitters)[1]


def _own_range(size: int, splitters: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    return range_of(size, splitters, [group_of(axis).coordinate for axis, _ in splitters])


PLACES: tuple[Callable[..., int], ...] = (local_start, local_length)  # in the order of `range_of`
# steps along mesh axes
STEPS: tuple[Callable[..., Tensor], ...] = (
    all_gather,
    reduce_scatter,
    all_reduce,
    all_to_all,
    swap,
    halo,
    shard,
)
COPIES: tuple[Callable[..., Tensor], ...] = (fetch, store)  # steps without an axis
PARTS: tuple[Callable[..., Any], ...] = (start, finish)
KIND_OF: Mapping[Any, Kind] = {
    all_gather: "all_gather",
    reduce_scatter: "reduce_scatter",
    all_reduce: "all_reduce",
    all_to_all: "all_to_all",
    halo: "halo",
    swap: "swap",
    shard: "slice",
    fetch: "fetch",
    store: "store",
}


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
    """Return the arguments of a step, or of its start or finish, in order. `length` and the kind
    are left out."""
    if node.target in PARTS:
        x, _, *settings = node.args
        return (x, *settings)
    names = _ARGUMENTS[node.target]
    return (*node.args, *(node.kwargs[name] for name in names[len(node.args) :]))


def group_of(axis: int) -> AxisGroup:
    """Return the group that `use_groups` has set for an axis."""
    return current_groups()[axis]


def current_groups() -> Groups:
    """Return the groups that `use_groups` has set, one per axis.

    Raises:
        RuntimeStateError: if no groups are set.
    """
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
    """Return the first index and the length of a shard of a dim.

    Args:
        size: the full length of the dim.
        splitters: see `local_start`.
        coordinates: the coordinate of the shard on each of these axes.
    """
    return part_range(size, [axis_size for _, axis_size in splitters], coordinates)


_FURTHER: Mapping[str, tuple[str, ...]] = {  # arguments of a bound form after its group
    "all_gather": ("length",),
    "reduce_scatter": ("coordinate",),
    "all_reduce": (),
    "all_to_all": ("coordinate", "length"),
    "swap": ("coordinate",),
    "halo": ("coordinate",),
}


# --------------------------------------------------------------------------------------------------
# Sums of gradients over the microbatches of a step.


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype accumulate: fp32, or the dtype if it is
    wider."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def add_to(total: Tensor, x: Tensor) -> Tensor:
    """Add `x`, which may have any dtype, to `total` in place, in the dtype of `total`. Return
    `total`."""
    return total.add_(x)


def write_to(total: Tensor, x: Tensor) -> Tensor:
    """Overwrite `total` with `x`, as if `x` were added to zeros. Return `total`."""
    return total.copy_(x)


FIRST = {add_to: write_to}
"""Functions of the backward graph, with the functions that replace them for the first
microbatch."""
