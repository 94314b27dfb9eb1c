"""The bound forms of the communication steps: process groups and coordinates in place of mesh axes.

They call torch's functional collectives, so `torch.compile` sees operators alone. Helpers take temporaries as arguments, so
that nothing holds them longer than the docstring of `autopar.kernels.collectives` says. An empty group name makes a step fake:
it allocates what the real one does and moves nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.errors import LayoutError
from autopar.halo import Halo, beyond
from autopar.layout import part_range

_functional = torch.ops._c10d_functional


def part_of(length: int, size: int) -> int:
    """The length of all parts but the last, which is not longer, and not empty.

    Raises:
        LayoutError: where it would be empty.
    """
    part = -(-length // size)
    if part * (size - 1) >= length:
        raise LayoutError(f"a dim of length {length} cannot be split over {size} ranks", remedy="choose another layout or mesh")
    return part


def all_gather(x: Tensor, dim: int, size: int, name: str, length: int | None = None) -> Tensor:
    """The parts along `dim`, joined in order of the ranks."""
    if size == 1:
        return x
    if length is not None:
        return _cut(all_gather(_padded(x, dim, part_of(length, size)), dim, size, name), dim, length)
    shape = (*x.shape[:dim], x.shape[dim] * size, *x.shape[dim + 1 :])
    return _gather_leading(x.contiguous(), size, name).movedim(0, dim).reshape(shape)


def reduce_scatter(x: Tensor, dim: int, reduce_op: str, size: int, name: str, coordinate: int) -> Tensor:
    """This rank's part along `dim` of the reduced tensor."""
    if size == 1:
        return x
    length = x.shape[dim]
    part = part_of(length, size)
    if length % size:
        scattered = _scatter_leading(_leading_parts(_padded(x, dim, part * size), dim, size), reduce_op, size, name)
        return _cut(scattered, dim, part_range(length, [size], [coordinate])[1])
    return _scatter_leading(_leading_parts(x, dim, size), reduce_op, size, name)


def all_reduce(x: Tensor, reduce_op: str, size: int, name: str) -> Tensor:
    """The reduced tensor."""
    if size == 1:
        return x
    if not name:
        return x.new_empty(x.shape)
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), reduce_op, name))


def all_to_all(x: Tensor, dim: int, to_dim: int, size: int, name: str, coordinate: int, length: int | None = None) -> Tensor:
    """Split along `to_dim`, joined along `dim`."""
    if size == 1 or dim == to_dim:
        return x
    shape = list(x.shape)
    if length is not None or shape[to_dim] % size:
        joined, split = length or shape[dim] * size, shape[to_dim]
        padded = _padded(_padded(x, dim, part_of(joined, size)), to_dim, part_of(split, size) * size)
        exchanged = all_to_all(padded, dim, to_dim, size, name, coordinate)
        return _cut(_cut(exchanged, dim, joined), to_dim, part_range(split, [size], [coordinate])[1])
    shape[to_dim] = part_of(shape[to_dim], size)
    shape[dim] *= size
    return _exchange_leading(_leading_parts(x, to_dim, size), size, name).movedim(0, dim).reshape(shape)


def halo(x: Tensor, dim: int, before: int, after: int, lowest: bool, size: int, name: str, coordinate: int) -> Tensor:
    """The first `after` elements go to the rank before, the last `before` ones to the rank behind."""
    around, length = Halo(dim, before, after, lowest), x.shape[dim]
    if size == 1:
        return torch.cat([beyond(x, around, before), x, beyond(x, around, after)], dim=dim)
    has_previous, has_next = coordinate > 0, coordinate < size - 1
    sent = [x.narrow(dim, 0, after)] * has_previous + [x.narrow(dim, length - before, before)] * has_next
    row = x.numel() // length
    out_splits, in_splits = [0] * size, [0] * size
    if has_previous:
        in_splits[coordinate - 1], out_splits[coordinate - 1] = after * row, before * row
    if has_next:
        in_splits[coordinate + 1], out_splits[coordinate + 1] = before * row, after * row
    got = _exchange_flat(torch.cat([part.reshape(-1) for part in sent]), out_splits, in_splits, name)
    first, last = got.split([before * row * has_previous, after * row * has_next])
    shape = list(x.shape)
    left = first.view([*shape[:dim], before, *shape[dim + 1 :]]) if has_previous else beyond(x, around, before)
    right = last.view([*shape[:dim], after, *shape[dim + 1 :]]) if has_next else beyond(x, around, after)
    return torch.cat([left, x, right], dim=dim)


def shard(x: Tensor, dim: int, size: int, coordinate: int) -> Tensor:
    """This rank's part along `dim`, a contiguous copy."""
    if size == 1:
        return x
    part_of(x.shape[dim], size)
    return x.narrow(dim, *part_range(x.shape[dim], [size], [coordinate])).clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """Filled up with zeros at the end of `dim`."""
    missing = length - x.shape[dim]
    return torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


def _cut(x: Tensor, dim: int, length: int) -> Tensor:
    """The first `length` of `dim`, in memory of its own."""
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)


def _leading_parts(x: Tensor, dim: int, size: int) -> Tensor:
    """[.., d, ..] → [size, .., d / size, ..], contiguous; a view where `dim` is leading and `x` contiguous."""
    return x.unflatten(dim, (size, part_of(x.shape[dim], size))).movedim(dim, 0).contiguous()


def _gather_leading(x: Tensor, size: int, name: str) -> Tensor:
    """[..] of every rank → [size, ..]."""
    if not name:
        return x.new_empty((size, *x.shape))
    flat = x.view(torch.uint8).view(-1) if x.dtype == torch.bool else x.view(-1)
    gathered = _functional.wait_tensor(_functional.all_gather_into_tensor(flat, size, name))
    return gathered.view(x.dtype).view(size, *x.shape)


def _scatter_leading(x: Tensor, reduce_op: str, size: int, name: str) -> Tensor:
    """[size, ..] → the reduced [..] at this rank's index."""
    if not name:
        return x.new_empty(x.shape[1:])
    return _functional.wait_tensor(_functional.reduce_scatter_tensor(x, reduce_op, size, name)).squeeze(0)


def _exchange_leading(x: Tensor, size: int, name: str) -> Tensor:
    """[size, ..]: part i goes to rank i; the result's part i came from rank i."""
    if not name:
        return x.new_empty(x.shape)
    if x.dtype == torch.bool:
        return _exchange_leading(x.view(torch.uint8), size, name).view(torch.bool)
    return _functional.wait_tensor(_functional.all_to_all_single(x, [1] * size, [1] * size, name))


def _exchange_flat(x: Tensor, out_splits: list[int], in_splits: list[int], name: str) -> Tensor:
    """Elements for every rank, one after another → elements from every rank."""
    if not name:
        return x.new_empty(sum(out_splits))
    if x.dtype == torch.bool:
        return _exchange_flat(x.view(torch.uint8), out_splits, in_splits, name).view(torch.bool)
    return _functional.wait_tensor(_functional.all_to_all_single(x, out_splits, in_splits, name))
