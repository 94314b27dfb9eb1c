"""The bound forms of the communication steps, with process groups and coordinates instead of mesh
axes.

They call torch's functional collectives, so `torch.compile` sees only ops. Each step consists of a
*start*, which prepares the sent tensor and issues the collective, and a *finish*, which waits for
the collective and computes the result. Both take all settings of the step. The state between them
is one list, which the finish empties, so that sent tensors are freed as early as possible. For the
same reason, temporaries are passed directly as arguments. `autopar.kernels.collectives` describes
the memory. With an empty group name, a step is fake: it allocates the same memory and communicates
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.core.layout import part_range
from autopar.core.placements import Halo, padding_at
from autopar.errors import LayoutError
from autopar.kernels import host

_functional = torch.ops._c10d_functional
Started = list[Any]
"""The state between start and finish: the received tensor, the sent tensor, and a length or the
operand if the finish needs it. Along an axis of size 1, it is only the operand."""


def part_of(length: int, size: int) -> int:
    """Return the length of all shards of a dim except the last, which may be shorter.

    Raises:
        LayoutError: if the last shard would be empty.
    """
    part = -(-length // size)
    if part * (size - 1) >= length:
        raise LayoutError(
            f"a dim of length {length} cannot be sharded over {size} ranks",
            remedy="choose another layout or mesh",
        )
    return part


def all_gather(x: Tensor, dim: int, size: int, name: str, length: int | None = None) -> Tensor:
    """Concatenate the shards of all ranks along `dim`, in rank order.

    Args:
        x: this rank's shard.
        dim: the dim that is gathered.
        size, name: the number of ranks, and the name of the process group.
        length: the full length of `dim` if it is sharded unevenly.
    """
    return finish_all_gather(start_all_gather(x, dim, size, name, length), dim, size, name, length)


def start_all_gather(
    x: Tensor, dim: int, size: int, name: str, length: int | None = None
) -> Started:
    """Issue an `all_gather`.

    Args:
        x, dim, size, name, length: see `all_gather`.
    """
    if size == 1:
        return [x]
    if length is not None:
        x = _pad_dim(x, dim, part_of(length, size))
    return _start_gather(x.contiguous(), size, name)


def finish_all_gather(
    started: Started, dim: int, size: int, name: str, length: int | None = None
) -> Tensor:
    """Wait for an `all_gather` and return its result.

    Args:
        started: the result of `start_all_gather`.
        dim, size, name, length: see `all_gather`.
    """
    return (
        _only_operand(started)
        if size == 1
        else _cut_dim(_join_parts(_await_received(started, name), dim), dim, length)
    )


def reduce_scatter(
    x: Tensor, dim: int, reduce_op: str, size: int, name: str, coordinate: int
) -> Tensor:
    """Return this rank's shard, along `dim`, of the reduced tensor.

    Args:
        x: this rank's partial result.
        dim: the dim that is sharded.
        reduce_op: ``sum``, ``max``, ``min`` or ``product``.
        size, name: the number of ranks, and the name of the process group.
        coordinate: the index of this rank in the group.
    """
    started = start_reduce_scatter(x, dim, reduce_op, size, name, coordinate)
    return finish_reduce_scatter(started, dim, reduce_op, size, name, coordinate)


def start_reduce_scatter(
    x: Tensor, dim: int, reduce_op: str, size: int, name: str, coordinate: int
) -> Started:
    """Issue a `reduce_scatter`.

    Args:
        x, dim, reduce_op, size, name, coordinate: see `reduce_scatter`.
    """
    if size == 1:
        return [x]
    own_length = part_range(x.shape[dim], [size], [coordinate])[1]
    return [
        *_start_scatter(
            _leading_parts(_whole_parts(x, dim, size), dim, size), reduce_op, size, name
        ),
        own_length,
    ]


def finish_reduce_scatter(
    started: Started, dim: int, reduce_op: str, size: int, name: str, coordinate: int
) -> Tensor:
    """Wait for a `reduce_scatter` and return its result.

    Args:
        started: the result of `start_reduce_scatter`.
        dim, reduce_op, size, name, coordinate: see `reduce_scatter`.
    """
    if size == 1:
        return _only_operand(started)
    own_length = started.pop()
    return _cut_dim(_await_received(started, name).squeeze(0), dim, own_length)


def all_reduce(x: Tensor, reduce_op: str, size: int, name: str) -> Tensor:
    """Return the reduced tensor, in new memory.

    Args:
        x: this rank's partial result.
        reduce_op, size, name: see `reduce_scatter`.
    """
    return finish_all_reduce(start_all_reduce(x, reduce_op, size, name), reduce_op, size, name)


def start_all_reduce(x: Tensor, reduce_op: str, size: int, name: str) -> Started:
    """Issue an `all_reduce`.

    Args:
        x, reduce_op, size, name: see `all_reduce`.
    """
    if size == 1:
        return [x]
    come = (
        _functional.all_reduce(_summable(x.contiguous()), reduce_op, name)
        if name
        else x.new_empty(x.shape)
    )
    # the functional collective reduces a copy in place
    return [come, come if come.dtype == x.dtype else x.new_empty(0)]


def all_reduce_(x: Tensor, reduce_op: str, size: int, name: str) -> Tensor:
    """Reduce a tensor in place. No other tensor may use its memory.

    Args:
        x, reduce_op, size, name: see `all_reduce`.
    """
    return finish_all_reduce(start_all_reduce_(x, reduce_op, size, name), reduce_op, size, name)


def start_all_reduce_(x: Tensor, reduce_op: str, size: int, name: str) -> Started:
    """Issue an `all_reduce_`. A tensor that is not contiguous is copied.

    Args:
        x, reduce_op, size, name: see `all_reduce`.
    """
    if size == 1:
        return [x]
    come = _summable(x.contiguous())
    if name:
        come = _functional.all_reduce_(come, reduce_op, name)
    return [come, come if come.dtype == x.dtype else x.new_empty(0)]


def finish_all_reduce(started: Started, reduce_op: str, size: int, name: str) -> Tensor:
    """Wait for an `all_reduce` and return its result.

    Args:
        started: the result of `start_all_reduce`.
        reduce_op, size, name: see `all_reduce`.
    """
    return _only_operand(started) if size == 1 else _await_received(started, name)


def all_to_all(
    x: Tensor,
    dim: int,
    to_dim: int,
    size: int,
    name: str,
    coordinate: int,
    length: int | None = None,
) -> Tensor:
    """Split a tensor along `to_dim`, send one part to each rank, and concatenate the received parts
    along `dim`.

    Args:
        x: this rank's shard along `dim`.
        dim, to_dim: the dim that is gathered and the dim that is sharded.
        size, name: the number of ranks, and the name of the process group.
        coordinate: the index of this rank in the group.
        length: the full length of `dim` if it is sharded unevenly.
    """
    started = start_all_to_all(x, dim, to_dim, size, name, coordinate, length)
    return finish_all_to_all(started, dim, to_dim, size, name, coordinate, length)


def start_all_to_all(
    x: Tensor,
    dim: int,
    to_dim: int,
    size: int,
    name: str,
    coordinate: int,
    length: int | None = None,
) -> Started:
    """Issue an `all_to_all`.

    Args:
        x, dim, to_dim, size, name, coordinate, length: see `all_to_all`.
    """
    if size == 1 or dim == to_dim:
        return [x]
    own_length = part_range(x.shape[to_dim], [size], [coordinate])[1]
    if length is not None:
        x = _pad_dim(x, dim, part_of(length, size))
    return [
        *_start_exchange(_leading_parts(_whole_parts(x, to_dim, size), to_dim, size), size, name),
        own_length,
    ]


def finish_all_to_all(
    started: Started,
    dim: int,
    to_dim: int,
    size: int,
    name: str,
    coordinate: int,
    length: int | None = None,
) -> Tensor:
    """Wait for an `all_to_all` and return its result.

    Args:
        started: the result of `start_all_to_all`.
        dim, to_dim, size, name, coordinate, length: see `all_to_all`.
    """
    if size == 1 or dim == to_dim:
        return _only_operand(started)
    own_length = started.pop()
    return _cut_dim(
        _cut_dim(_join_parts(_await_received(started, name), dim), dim, length), to_dim, own_length
    )


def halo(
    x: Tensor,
    dim: int,
    before: int,
    after: int,
    lowest: bool,
    size: int,
    name: str,
    coordinate: int,
) -> Tensor:
    """Extend this rank's shard along `dim` by elements of the neighboring shards.

    The first `after` elements are sent to the previous rank, and the last `before` elements to the
    next rank. `autopar.core.placements.padding_at` defines the padding at the ends of the full
    tensor.

    Args:
        x: this rank's shard.
        dim: the dim that is sharded.
        before, after: the number of elements to add on each side.
        lowest: whether to pad with the lowest value of the dtype instead of zero.
        size, name: the number of ranks, and the name of the process group.
        coordinate: the index of this rank in the group.
    """
    started = start_halo(x, dim, before, after, lowest, size, name, coordinate)
    return finish_halo(started, dim, before, after, lowest, size, name, coordinate)


def start_halo(
    x: Tensor,
    dim: int,
    before: int,
    after: int,
    lowest: bool,
    size: int,
    name: str,
    coordinate: int,
) -> Started:
    """Issue a `halo`.

    Args:
        x, dim, before, after, lowest, size, name, coordinate: see `halo`.
    """
    if size == 1:
        return [x]
    has_previous, has_next = coordinate > 0, coordinate < size - 1
    sent = [x.narrow(dim, 0, after)] * has_previous + [
        x.narrow(dim, x.shape[dim] - before, before)
    ] * has_next
    row = x.numel() // x.shape[dim]
    out_splits, in_splits = [0] * size, [0] * size
    if has_previous:
        in_splits[coordinate - 1], out_splits[coordinate - 1] = after * row, before * row
    if has_next:
        in_splits[coordinate + 1], out_splits[coordinate + 1] = before * row, after * row
    return [
        *_start_flat(torch.cat([part.reshape(-1) for part in sent]), out_splits, in_splits, name),
        x,
    ]


def finish_halo(
    started: Started,
    dim: int,
    before: int,
    after: int,
    lowest: bool,
    size: int,
    name: str,
    coordinate: int,
) -> Tensor:
    """Wait for a `halo` and return its result.

    Args:
        started: the result of `start_halo`.
        dim, before, after, lowest, size, name, coordinate: see `halo`.
    """
    x, around = started.pop(), Halo(dim, before, after, lowest)
    if size == 1:
        return torch.cat([padding_at(x, around, before), x, padding_at(x, around, after)], dim=dim)
    has_previous, has_next = coordinate > 0, coordinate < size - 1
    row, shape = x.numel() // x.shape[dim], list(x.shape)
    first, last = _await_received(started, name).split(
        [before * row * has_previous, after * row * has_next]
    )
    from_left = (
        first.view([*shape[:dim], before, *shape[dim + 1 :]])
        if has_previous
        else padding_at(x, around, before)
    )
    right = (
        last.view([*shape[:dim], after, *shape[dim + 1 :]])
        if has_next
        else padding_at(x, around, after)
    )
    return torch.cat([from_left, x, right], dim=dim)


def swap(x: Tensor, dim: int, size: int, name: str, coordinate: int) -> Tensor:
    """Exchange the second half of this rank's shard with the rank at the mirrored coordinate: rank
    i exchanges with rank size − 1 − i.

    Args:
        x: this rank's shard.
        dim: the dim that is sharded.
        size, name: the number of ranks, and the name of the process group.
        coordinate: the index of this rank in the group.
    """
    return finish_swap(start_swap(x, dim, size, name, coordinate), dim, size, name, coordinate)


def start_swap(x: Tensor, dim: int, size: int, name: str, coordinate: int) -> Started:
    """Issue a `swap`.

    Args:
        x, dim, size, name, coordinate: see `swap`.
    """
    if size == 1:
        return [x]
    half = x.shape[dim] // 2
    splits = [0] * size
    splits[size - 1 - coordinate] = x.numel() // 2
    return [*_start_flat(x.narrow(dim, half, half).reshape(-1), splits, splits, name), x]


def finish_swap(started: Started, dim: int, size: int, name: str, coordinate: int) -> Tensor:
    """Wait for a `swap` and return its result.

    Args:
        started: the result of `start_swap`.
        dim, size, name, coordinate: see `swap`.
    """
    if size == 1:
        return _only_operand(started)
    x = started.pop()
    first = x.narrow(dim, 0, x.shape[dim] // 2)
    return torch.cat([first, _await_received(started, name).view(first.shape)], dim=dim)


def shard(x: Tensor, dim: int, size: int, coordinate: int) -> Tensor:
    """Return this rank's shard along `dim` as a contiguous copy.

    Args:
        x: the full tensor.
        dim: the dim that is sharded.
        size, coordinate: the number of ranks, and the index of this rank.
    """
    if size == 1:
        return x
    part_of(x.shape[dim], size)
    return x.narrow(dim, *part_range(x.shape[dim], [size], [coordinate])).clone(
        memory_format=torch.contiguous_format
    )


def exchange_rows(rows: Tensor, leaving: list[int], coming: list[int], name: str) -> Tensor:
    """Send rows to every rank, and receive rows from every rank. The numbers of rows may differ.

    Args:
        rows: the rows to send, ordered by receiving rank.
        leaving: the number of rows for each rank.
        coming: the number of rows from each rank.
        name: the name of the process group.

    Returns:
        The received rows, ordered by sending rank.
    """
    return _await_received(
        [_functional.all_to_all_single(rows.contiguous(), coming, leaving, name), rows], name
    )


def _pad_dim(x: Tensor, dim: int, length: int) -> Tensor:
    """Pad the end of `dim` with zeros up to `length`."""
    missing = length - x.shape[dim]
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


def _whole_parts(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad `dim` with zeros so that all shards have equal length."""
    return _pad_dim(x, dim, part_of(x.shape[dim], size) * size)


def _cut_dim(x: Tensor, dim: int, length: int | None) -> Tensor:
    """Return a copy of the first `length` elements of `dim`. If `length` is None or the length of
    the dim, return `x`."""
    return (
        x
        if length is None or x.shape[dim] == length
        else x.narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)
    )


def _leading_parts(x: Tensor, dim: int, size: int) -> Tensor:
    """Reshape [.., d, ..] to a contiguous tensor [size, .., d / size, ..]. The result is a view if
    `dim` is leading and `x` is contiguous."""
    return x.unflatten(dim, (size, part_of(x.shape[dim], size))).movedim(dim, 0).contiguous()


def _join_parts(parts: Tensor, dim: int) -> Tensor:
    """Reshape [size, .., d, ..] to a contiguous tensor [.., size · d, ..]."""
    # if d is 1, `flatten` alone returns a strided view
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _start_gather(x: Tensor, size: int, name: str) -> Started:
    """Issue an all-gather of [..] to [size, ..]."""
    if not name:
        return [x.new_empty((size, *x.shape)), x]
    return [_functional.all_gather_into_tensor(_sendable(x).unsqueeze(0), size, name), x]


def _start_scatter(x: Tensor, reduce_op: str, size: int, name: str) -> Started:
    """Issue a reduce-scatter of [size, ..] to [1, ..]."""
    if not name:
        return [x.new_empty((1, *x.shape[1:])), x]
    return [_functional.reduce_scatter_tensor(_summable(x), reduce_op, size, name), x]


def _start_exchange(x: Tensor, size: int, name: str) -> Started:
    """Issue an all-to-all of [size, ..]: part i is sent to rank i, and part i of the result is
    received from rank i."""
    if not name:
        return [x.new_empty(x.shape), x]
    return [_functional.all_to_all_single(_sendable(x), [1] * size, [1] * size, name), x]


def _start_flat(x: Tensor, out_splits: list[int], in_splits: list[int], name: str) -> Started:
    """Issue an all-to-all of a flat tensor. Elements are ordered by receiving rank in `x`, and by
    sending rank in the result."""
    if not name:
        return [x.new_empty(sum(out_splits)), x]
    return [_functional.all_to_all_single(_sendable(x), out_splits, in_splits, name), x]


_SENDABLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
"""Dtypes that every process group supports. Other dtypes are sent as bytes, in an additional
dim."""


def _sendable(x: Tensor) -> Tensor:
    """View a tensor in a dtype that process groups support."""
    return x if x.dtype in _SENDABLE else x.contiguous().unsqueeze(-1).view(torch.uint8)


def _summable(x: Tensor) -> Tensor:
    """View a complex tensor as a real one, since not every process group can sum complex
    numbers."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _await_received(started: Started, name: str) -> Tensor:
    """Wait for the received tensor of a step, and return it in the dtype of the sent tensor. The
    sent tensor is released."""
    come, sent = started
    started.clear()
    come = _functional.wait_tensor(come) if name else come
    return come if come.dtype == sent.dtype else come.view(sent.dtype).squeeze(-1)


def _only_operand(started: Started) -> Tensor:
    x: Tensor = started.pop()
    return x


IN_PLACE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    all_reduce: all_reduce_,
    start_all_reduce: start_all_reduce_,
}
"""Steps that may compute in the memory of their operand, with their in-place forms."""
STARTS: Mapping[str, Callable[..., Started]] = {
    "all_gather": start_all_gather,
    "reduce_scatter": start_reduce_scatter,
    "all_reduce": start_all_reduce,
    "all_to_all": start_all_to_all,
    "halo": start_halo,
    "swap": start_swap,
    "fetch": host.start_fetch,
    "store": host.start_store,
}
FINISHES: Mapping[str, Callable[..., Tensor]] = {
    "all_gather": finish_all_gather,
    "reduce_scatter": finish_reduce_scatter,
    "all_reduce": finish_all_reduce,
    "all_to_all": finish_all_to_all,
    "halo": finish_halo,
    "swap": finish_swap,
    "fetch": host.finish_fetch,
    "store": host.finish_store,
}
