"""Many tensors into one bucket and back, as steps of emitted graphs around one collective on the bucket.

A bucket is [count, row] (`autopar.kernels.packing`): before a reduce-scatter and after an all-gather it has a row per rank, else one. Dims
that are cut are cut evenly, so no step here asks which rank it is on. Both passes are `pack` and `unpack`, which cast on the way: a
reduction in a wider dtype than its tensors' needs no casts of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.kernels import library
from autopar.kernels.packing import pack_op, unpack_op


def into_bucket(tensors: Sequence[Tensor], dims: Sequence[int], parts: int, count: int, dtype: torch.dtype) -> Tensor:
    """The bucket of tensors that hold `count` of `parts` equal parts along their dims; a scalar is one of length 1."""
    held = [x if x.dim() else x.reshape(1) for x in tensors]
    lengths = [x.shape[dim] * parts // count for x, dim in zip(held, dims, strict=True)]
    bucket: Tensor = pack_op(held, lengths, list(dims), parts, 0, count, dtype, 1.0, False)[0]
    return bucket


def from_bucket(
    bucket: Tensor, sizes: Sequence[Sequence[int]], dims: Sequence[int], parts: int, dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """The tensors of a bucket, new ones: as many of their parts as it has rows.

    Args:
        sizes: shapes of all parts together, without dims for a scalar. dtypes: of the tensors.
    """
    shapes = [tuple(size) or (1,) for size in sizes]
    lengths, num_dims = [n for shape in shapes for n in shape], [len(shape) for shape in shapes]
    # A dtype that a lockstep run has promoted is one that kernels know, too.
    codes = [library.code_of(dtype) for dtype in dtypes]
    found: list[Tensor] = unpack_op(bucket, lengths, num_dims, list(dims), parts, 0, bucket.shape[0], codes, 1.0)
    return [x if len(size) else x.reshape(()) for x, size in zip(found, sizes, strict=True)]
