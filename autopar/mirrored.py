"""The mirrored placement: two halves of a dim's parts, one from either end, such that causal attention's work is the same for all ranks.

A dim is split over n ranks into equal parts of an even length. Rank ``i`` holds the first half of its own part and the second half of part
``n − 1 − i``. With the halves of all parts numbered 0…2n − 1, each of h queries, these are the halves ``2i`` and ``2(n − 1 − i) + 1``. The
queries of half m see the h·m keys before them, and of their own h one half (the first sees one, the last all): h²(m + ½) pairs. So a rank
computes

    h² (2i + ½) + h² (2(n − 1 − i) + 1 + ½) = h² · 2n

pairs, whichever it is: the n-th part of the whole, of (2nh)²/2. Split plainly, the last rank computes half of its square, and all before
it: (2h)² (n − 1) + (2h)²/2 = h² (4n − 2), nearly twice as much, and the others wait for it.

One ``swap`` leads there from the plain shard, and the same one back: each rank sends its second half to rank ``n − 1 − i`` and has that
one's. So lie causal attention's queries, what is made of them and its gradient, for attention alone; whatever else reads or makes them has
the plain shard. (Of 2n chunks, the context parallelism of Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2, gives rank
i chunks i and 2n − 1 − i all through the model. Here parts stay plain, and one of a rank's two halves need not move.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard


class Mirrored(Shard):
    """A part of `dim` that is the first half of the rank's own part and the second half of its mirror image's."""

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
    """Where the second half of a mirrored part of a dim of `size` begins: that of a part of `length` whose first half begins at `start`."""
    return size - start - length // 2


def swapped(parts: Sequence[Tensor], dim: int) -> list[Tensor]:
    """The parts along `dim`, by rank, after a swap: plain ones mirrored, mirrored ones plain."""
    halves = [part.tensor_split(2, dim) for part in parts]
    return [torch.cat([first, halves[-1 - i][1]], dim=dim) for i, (first, _) in enumerate(halves)]
