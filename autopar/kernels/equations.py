"""Products of two tensors by Einstein's convention, taken in chunks along one letter (see `autopar.kernels.overlapped`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def terms_of(equation: str) -> tuple[str, str, str]:
    """Left operand, right operand, result.

    Raises:
        ValueError: where these are not three.
    """
    terms = tuple(term.strip() for side in equation.split("->") for term in side.split(","))
    if len(terms) != 3:
        raise ValueError(f"not a product of two operands: {equation!r}")
    return terms[0], terms[1], terms[2]


def check_chunked(equation: str, letter: str, num_chunks: int) -> None:
    """Raises:
    ValueError: where the product cannot be taken in so many chunks along the letter.
    """
    left, right, result = terms_of(equation)
    if letter not in result or letter not in left + right:
        raise ValueError(f"{equation!r} cannot be taken in chunks along {letter!r}: it must be in the result and in an operand")
    if num_chunks < 1:
        raise ValueError(f"a shard cannot be cut into {num_chunks} chunks")


@lru_cache(maxsize=4096)
def _as_mm(equation: str) -> tuple[bool, int, bool] | None:
    """An equation as one `mm` of views, for contiguous tensors: whether the right operand comes first, how many dims of the first one
    are rows, and whether the second one is transposed. None where it is no such product."""
    left, right, result = terms_of(equation)
    inner = "".join(letter for letter in left if letter not in result)
    for swapped, first, second in ((False, left, right), (True, right, left)):
        rows, columns = first.removesuffix(inner), second.removeprefix(inner)
        if first == rows + inner and second == inner + columns and result == rows + columns:
            return swapped, len(rows), False
        columns = second.removesuffix(inner)
        if first == rows + inner and second == columns + inner and result == rows + columns:
            return swapped, len(rows), True
    return None


def multiply_into(equation: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a · b``: written by the vendor's matmul itself where that can be, else copied."""
    form = _as_mm(equation)
    if form is None or not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        out.copy_(torch.einsum(equation, a, b))
        return
    swapped, num_rows, transposed = form
    first, second = (b, a) if swapped else (a, b)
    num_inner = first.dim() - num_rows
    rows, inner = first.shape[:num_rows].numel(), first.shape[num_rows:].numel()
    columns = (second.shape[: second.dim() - num_inner] if transposed else second.shape[num_inner:]).numel()
    factor = second.view(columns, inner).t() if transposed else second.view(inner, columns)
    torch.mm(first.view(rows, inner), factor, out=out.view(rows, columns))


def result_shape(equation: str, a: Tensor, b: Tensor) -> list[Any]:
    """The product's shape; lengths may be symbols."""
    left, right, result = terms_of(equation)
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    return [sizes[letter] for letter in result]


def in_order(which: int, mine: T, other: T) -> tuple[T, T]:
    """The operands as the equation names them."""
    return (mine, other) if which == 0 else (other, mine)


def cut(terms: Sequence[str], tensors: Sequence[Tensor], letter: str, begin: int, length: int) -> list[Tensor]:
    """Of each tensor that has the letter these rows; the others as they are."""
    return [x.narrow(term.index(letter), begin, length) if letter in term else x for term, x in zip(terms, tensors, strict=True)]
