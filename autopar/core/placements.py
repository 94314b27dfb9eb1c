"""Placements on one mesh axis: torch's, and two special ones, `Halo` and `Mirrored`, which only the
operands and results of ops that require them have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

# --------------------------------------------------------------------------------------------------
# The halo placement: a shard of a dim with some elements of its neighbours on either side.
#
# An op over windows of a dim (convolution, pooling) that is split along this dim needs it. Part
# ``i`` of n holds its own elements, the last `before` elements of part ``i − 1`` and the first
# `after` elements of part ``i + 1``. The ends of the dim are padded with zeros or with the dtype's
# lowest value, as the op would pad them.
#
# Only operands of such ops have this placement. One ``halo`` collective leads there from the plain
# shard.


class Halo(Shard):
    """A shard of `dim` with `before` elements of the part before it and `after` elements of the
    part after it.

    Attributes:
        lowest: whether the ends are padded with the dtype's lowest value (for a maximum) instead of
            zeros.
    """

    before: int
    after: int
    lowest: bool

    def __new__(cls, dim: int, before: int, after: int, lowest: bool = False) -> Halo:
        return super().__new__(cls, dim)

    def __init__(self, dim: int, before: int, after: int, lowest: bool = False) -> None:
        super().__init__(dim)
        self.before, self.after, self.lowest = before, after, lowest

    @property
    def length(self) -> int:
        """Number of elements that a part has more than the plain shard."""
        return self.before + self.after

    def _settings(self) -> tuple[int, int, int, bool]:
        return self.dim, self.before, self.after, self.lowest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Halo) and self._settings() == other._settings()

    def __hash__(self) -> int:
        return hash(self._settings())

    def __str__(self) -> str:
        return f"S({self.dim})~{self.before}~{self.after}" + ("~lowest" if self.lowest else "")

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        return Halo, self._settings()


def padding_at(x: Tensor, halo: Halo, length: int) -> Tensor:
    """Return the padding at one end of the dim.

    Args:
        x: a tensor with the other dims and the dtype.
        halo: the dim and the kind of padding.
        length: elements along the dim.
    """
    shape = (*x.shape[: halo.dim], length, *x.shape[halo.dim + 1 :])
    return x.new_full(shape, lowest_of(x.dtype)) if halo.lowest else x.new_zeros(shape)


def lowest_of(dtype: torch.dtype) -> float | int:
    """Return the lowest value of a dtype, the neutral element of a maximum."""
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def window(whole: Tensor, halo: Halo, start: int, length: int) -> Tensor:
    """Return a part of a tensor with its halo.

    Args:
        whole: the whole tensor.
        halo: the dim and the halo.
        start: first element of the part, without the halo.
        length: elements of the part, without the halo.
    """
    padded = torch.cat(
        [padding_at(whole, halo, halo.before), whole, padding_at(whole, halo, halo.after)],
        dim=halo.dim,
    )
    return padded.narrow(halo.dim, start, length + halo.length)


# --------------------------------------------------------------------------------------------------
# The mirrored placement: two halves of a dim's parts, one from either end, which balances the work
# of causal attention over the ranks.
#
# A dim is split over n ranks into equal parts of an even length. Rank ``i`` holds the first half
# of its own part and the second half of part ``n − 1 − i``. With the halves of all parts numbered
# 0…2n − 1, each of h queries, these are the halves ``2i`` and ``2(n − 1 − i) + 1``. The queries
# of half m see the h·m keys before them, and of their own h one half (the first sees one, the
# last all): h²(m + ½) pairs. So a rank computes
#
# h² (2i + ½) + h² (2(n − 1 − i) + 1 + ½) = h² · 2n
#
# pairs for every i: the n-th part of all (2nh)²/2 pairs. With plain shards the last rank computes
# half of its own square and all pairs before it: (2h)² (n − 1) + (2h)²/2 = h² (4n − 2), nearly
# twice as many, and the other ranks wait for it.
#
# One ``swap`` leads there from the plain shard, and the same one back: rank i exchanges its second
# half with rank ``n − 1 − i``. Only causal attention reads and makes tensors with this placement:
# its queries, its result and their gradients; all other ops have the plain shard. (The context
# parallelism of Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2, gives rank
# i the chunks i and 2n − 1 − i of 2n in the whole model. Here parts stay plain, and one of a
# rank's two halves need not move.)


class Mirrored(Shard):
    """A part of `dim` that consists of the first half of the rank's own part and the second half of
    the part of its mirror image, rank n − 1 − i."""

    def __new__(cls, dim: int) -> Mirrored:
        return super().__new__(cls, dim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mirrored) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash(("mirrored", self.dim))

    def __str__(self) -> str:
        return f"S({self.dim})~mirrored"

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        return Mirrored, (self.dim,)


def second_start(size: int, length: int, start: int) -> int:
    """Return where the second half of a mirrored part begins.

    Args:
        size: length of the dim.
        length: length of the part.
        start: where its first half begins.
    """
    return size - start - length // 2


def swap_parts(parts: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Return the parts along `dim`, by rank, after a swap: plain parts become mirrored, mirrored
    parts plain."""
    halves = [part.tensor_split(2, dim) for part in parts]
    return [torch.cat([first, halves[-1 - i][1]], dim=dim) for i, (first, _) in enumerate(halves)]


# --------------------------------------------------------------------------------------------------
# Predicates of all placements.

Special = Halo | Mirrored
REPLICATE = Replicate()
PARTIAL = Partial("sum")


def splits(placement: Placement) -> TypeGuard[Shard]:
    """Whether a placement is a shard. torch's placements override ``isinstance``, which is slow for
    instances of other classes."""
    return issubclass(type(placement), Shard)


def adds_up(placement: Placement) -> TypeGuard[Partial]:
    """Whether a placement is `Partial`, of a sum or another reduction; as fast as `splits`."""
    return issubclass(type(placement), Partial)
