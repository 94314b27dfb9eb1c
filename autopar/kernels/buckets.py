"""Where the parts of some tensors lie in a bucket (`autopar.kernels.packing`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from autopar.errors import KernelError
from autopar.layout import part_range

ALIGN = 8  # elements: a segment begins at 16 bytes in any dtype
LIMIT = 2**31 - 64  # elements of a segment
CHUNK = 16384  # elements of a segment whose squares are summed together
_REMEMBERED = 1024  # layouts


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where the parts of some tensors lie in a bucket.

    Attributes:
        sizes: the whole tensors' shapes, each with at least one dim. dims: the dim of each that is cut.
        parts: the number of ranks that they are cut for, by the rule of `autopar.layout.part_range`.
    """

    sizes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    parts: int

    def segments(self) -> tuple[int, ...]:
        """Elements of each tensor's segment, padding included: the same in every row."""
        return _computed(_segments, self)

    @property
    def row(self) -> int:
        """Elements of a row."""
        return sum(self.segments())

    def lengths(self) -> tuple[int, ...]:
        """The length, in the whole tensors, of the dims that are cut."""
        return tuple(size[dim] for size, dim in zip(self.sizes, self.dims, strict=True))

    def local_sizes(self, first: int, count: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of tensors that hold the parts of `count` ranks from `first` on."""
        return _computed(_local_sizes, self, first, count)


# Remembered: a training step packs by the same few layouts again and again, and the host should be ahead of the device.
@lru_cache(maxsize=_REMEMBERED)
def _segments(layout: BucketLayout) -> tuple[int, ...]:
    cut = zip(layout.sizes, layout.dims, strict=True)
    largest = (math.prod(with_length(size, dim, -(-size[dim] // layout.parts))) for size, dim in cut)
    return tuple(-(-num // ALIGN) * ALIGN for num in largest)


@lru_cache(maxsize=_REMEMBERED)
def _local_sizes(layout: BucketLayout, first: int, count: int) -> tuple[tuple[int, ...], ...]:
    lengths = (sum(part_range(n, [layout.parts], [rank])[1] for rank in range(first, first + count)) for n in layout.lengths())
    return tuple(with_length(size, dim, n) for size, dim, n in zip(layout.sizes, layout.dims, lengths, strict=True))


def _computed(remembered: Any, layout: BucketLayout, *settings: int) -> Any:
    """What a remembered function gives; for lengths that are symbols, as while a compiler traces, it is computed anew."""
    is_known = all(type(length) is int for size in layout.sizes for length in size)
    return (remembered if is_known else remembered.__wrapped__)(layout, *settings)


def with_length(size: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """The shape with this length of this dim."""
    return (*size[:dim], length, *size[dim + 1 :])


@lru_cache(maxsize=_REMEMBERED)
def places(layout: BucketLayout) -> tuple[tuple[tuple[int, int, int, int, int], ...], int]:
    """Of each tensor outer, whole and inner length, where its segment begins, and its first chunk; and the number of chunks."""
    segments = layout.segments()
    if max(*segments, *layout.lengths()) >= LIMIT:
        raise KernelError(f"a tensor has {max(segments)} elements of a rank, kernels count to {LIMIT - 1}", remedy="pack it in several")
    chunks = [-(-segment // CHUNK) for segment in segments]
    begins = zip(accumulate(segments, initial=0), accumulate(chunks, initial=0), strict=True)
    shapes = zip(layout.sizes, layout.dims, begins, strict=False)  # there is one more begin: the end
    found = ((math.prod(size[:dim]), size[dim], math.prod(size[dim + 1 :]), *begin) for size, dim, begin in shapes)
    return tuple(found), sum(chunks)
