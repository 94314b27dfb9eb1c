"""What the overlapped products (`autopar.kernels.overlapped`) compute, over the list of all ranks' operands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.kernels.equations import in_order, multiply
from autopar.kernels.sums import sum_dtype
from autopar.layout import part_range


def all_gather_matmul_reference(
    equation: str, shards: Sequence[Tensor], others: Sequence[Tensor], which: int, dim: int, biases: Sequence[Tensor | None] = ()
) -> list[tuple[Tensor, Tensor]]:
    """The definition: of every rank, the shards joined in order of the ranks, and the product with its other operand and its bias."""
    whole = torch.cat(list(shards), dim)
    pairs = zip(others, biases or [None] * len(others), strict=True)
    return [(whole, multiply(equation, *in_order(which, whole, other), bias)) for other, bias in pairs]


def matmul_reduce_scatter_reference(
    equation: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    dim: int,
    addends: Sequence[Tensor] | None = None,
    biases: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """The definition: the ranks' products with their biases (and addends, in the products' dtype) added one by one in order of the ranks,
    in fp32 or a wider dtype, cast back, and split along `dim`."""
    parts = [multiply(equation, a, b, bias) for (a, b), bias in zip(pairs, biases or [None] * len(pairs), strict=True)]
    if addends is not None:
        parts = [part + addend for part, addend in zip(parts, addends, strict=True)]
    return [
        _in_order_of_ranks([part.narrow(dim, *part_range(part.shape[dim], (len(parts),), (rank,))) for part in parts])
        for rank in range(len(parts))
    ]


def _in_order_of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the tensors, one after another, in at least fp32; in their dtype."""
    dtype = sum_dtype(parts[0].dtype)
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total.to(parts[0].dtype).contiguous()
