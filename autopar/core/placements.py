"""The halo placement: a shard of a dim with some elements of its neighbours on either side.

An op over windows of a dim (convolution, pooling) that is split along this dim needs it: part ``i``
of n holds its own elements, the last `before` of part ``i − 1`` and the first `after` of part ``i +
1``. Beyond the ends of the dim stand zeros, or the dtype's lowest value, as the op would pad it.

Only operands lie so, for the op that asks for it: one ``halo`` collective leads there from the
plain shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class Halo(Shard):
    """A shard of `dim` with `before` elements of the part before it and `after` of the one behind
    it.

    Attributes:
        lowest: what lies beyond the ends: the dtype's lowest value (for a maximum) instead of
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
        """How many elements a part has more than the plain shard."""
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


def beyond(x: Tensor, halo: Halo, length: int) -> Tensor:
    """What stands beyond the ends of the dim for `length` elements."""
    shape = (*x.shape[: halo.dim], length, *x.shape[halo.dim + 1 :])
    return x.new_full(shape, lowest_of(x.dtype)) if halo.lowest else x.new_zeros(shape)


def lowest_of(dtype: torch.dtype) -> float | int:
    """The value that no maximum is below."""
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def window(whole: Tensor, halo: Halo, start: int, length: int) -> Tensor:
    """The part of the whole tensor that begins at `start` and has `length` elements of its own."""
    padded = torch.cat(
        [beyond(whole, halo, halo.before), whole, beyond(whole, halo, halo.after)], dim=halo.dim
    )
    return padded.narrow(halo.dim, start, length + halo.length)


# --------------------------------------------------------------------------------------------------
# The mirrored placement: two halves of a dim's parts, one from either end, such that causal
# attention's work is the same for all ranks.
#
# A dim is split over n ranks into equal parts of an even length. Rank ``i`` holds the first half
# of its own part and the second half of part ``n − 1 − i``. With the halves of all parts numbered
# 0…2n − 1, each of h queries, these are the halves ``2i`` and ``2(n − 1 − i) + 1``. The queries
# of half m see the h·m keys before them, and of their own h one half (the first sees one, the
# last all): h²(m + ½) pairs. So a rank computes
#
# h² (2i + ½) + h² (2(n − 1 − i) + 1 + ½) = h² · 2n
#
# pairs, whichever it is: the n-th part of the whole, of (2nh)²/2. Split plainly, the last rank
# computes half of its square, and all before it: (2h)² (n − 1) + (2h)²/2 = h² (4n − 2), nearly
# twice as much, and the others wait for it.
#
# One ``swap`` leads there from the plain shard, and the same one back: each rank sends its second
# half to rank ``n − 1 − i`` and has that one's. So lie causal attention's queries, what is made
# of them and its gradient, for attention alone; whatever else reads or makes them has the plain
# shard. (Of 2n chunks, the context parallelism of Grattafiori et al., "The Llama 3 Herd of
# Models", 2024, section 3.3.2, gives rank i chunks i and 2n − 1 − i all through the model. Here
# parts stay plain, and one of a rank's two halves need not move.)


class Mirrored(Shard):
    """A part of `dim` that is the first half of the rank's own part and the second half of its
    mirror image's."""

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
    """Where the second half of a mirrored part of a dim of `size` begins: that of a part of
    `length` whose first half begins at `start`."""
    return size - start - length // 2


def swap_parts(parts: Sequence[Tensor], dim: int) -> list[Tensor]:
    """The parts along `dim`, by rank, after a swap: plain ones mirrored, mirrored ones plain."""
    halves = [part.tensor_split(2, dim) for part in parts]
    return [torch.cat([first, halves[-1 - i][1]], dim=dim) for i, (first, _) in enumerate(halves)]


# --------------------------------------------------------------------------------------------------
# Placements on one mesh axis: torch's, and those in which tensors lie only for the ops that ask
# for them.

Special = Halo | Mirrored
REPLICATE = Replicate()
PARTIAL = Partial("sum")


def splits(placement: Placement) -> bool:
    """Whether it is a shard. torch's placements have an ``isinstance`` of their own, which takes
    long where they are not."""
    return issubclass(type(placement), Shard)


def adds_up(placement: Placement) -> bool:
    """Whether it is a partial sum, or another reduction's part; as quickly as `splits`."""
    return issubclass(type(placement), Partial)
