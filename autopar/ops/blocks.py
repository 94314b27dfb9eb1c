"""Blocks of rows and the dtype of sums, which limit the temporary memory of functions that consist
of plain calls of ATen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_BLOCK, _MOST_BLOCKS = 2**24, 16  # elements of a block, and most blocks
_without_data = ContextVar("without data", default=False)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Return a context in which only shapes, strides and dtypes of results are needed, so that two
    blocks are processed instead of many equal ones."""
    token = _without_data.set(True)
    try:
        yield
    finally:
        _without_data.reset(token)


def block_length(rows: int, width: int) -> int:
    """Return the number of rows of a tensor ``[rows, width]`` to process at a time."""
    return min(rows, max(_BLOCK // max(width, 1), -(-rows // _MOST_BLOCKS), 1))


def row_blocks(x: Tensor) -> list[slice]:
    """Return the blocks of rows of `x` ``[..., n]`` to process; under a compiler, which fuses ops,
    one block with all rows."""
    rows = x.numel() // max(x.shape[-1], 1)
    few = rows if torch.compiler.is_compiling() else block_length(rows, x.shape[-1])
    if few < rows and _without_data.get():
        few = -(-rows // 2)
    return (
        [slice(start, start + few) for start in range(0, rows, few)]
        if rows > few
        else [slice(None)]
    )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which exponentials and sums of `dtype` are computed: float32 for half
    precision, else `dtype`."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# --------------------------------------------------------------------------------------------------
# Tensors whose values are part of the code of a graph.


def constant(
    values: Sequence[bool | int | float | complex],
    size: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Create a tensor with the given values.

    Args:
        values: the values, in row-major order.
        size: shape of the tensor.
        dtype: its dtype.
        device: its device.
    """
    return torch.tensor(values, dtype=dtype, device=device).reshape(tuple(size))
