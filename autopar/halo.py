"""The halo placement: a shard of a dim with some elements of its neighbours on either side.

An op over windows of a dim (convolution, pooling) that is split along this dim needs it: part ``i`` of n holds its own
elements, the last `before` of part ``i − 1`` and the first `after` of part ``i + 1``. Beyond the ends of the dim stand
zeros, or the dtype's lowest value, as the op would pad it.

Only operands lie so, for the op that asks for it: one ``halo`` collective leads there from the plain shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard


class Halo(Shard):
    """A shard of `dim` with `before` elements of the part before it and `after` of the one behind it.

    Attributes:
        lowest: what lies beyond the ends: the dtype's lowest value (for a maximum) instead of zeros.
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
    padded = torch.cat([beyond(whole, halo, halo.before), whole, beyond(whole, halo, halo.after)], dim=halo.dim)
    return padded.narrow(halo.dim, start, length + halo.length)
