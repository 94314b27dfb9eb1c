"""Products of two tensors by Einstein's convention, taken in chunks along one letter (see `autopar.kernels.overlapped`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.ops.products import bias_term, dot

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


def multiply(equation: str, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """``a · b``, with a bias as `autopar.ops.dot` adds it."""
    return torch.einsum(equation, a, b) if bias is None else dot(equation, a, b, bias)


def multiply_into(equation: str, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """``out = a · b``, with a bias: written by the vendor's matmul itself where that can be, else copied."""
    form = _as_mm(equation)
    if form is None or not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        out.copy_(multiply(equation, a, b, bias))
        return
    swapped, num_rows, transposed = form
    first, second = (b, a) if swapped else (a, b)
    num_inner = first.dim() - num_rows
    rows, inner = first.shape[:num_rows].numel(), first.shape[num_rows:].numel()
    own = second.shape[: second.dim() - num_inner] if transposed else second.shape[num_inner:]
    columns = own.numel()
    factor = second.view(columns, inner).t() if transposed else second.view(inner, columns)
    if bias is None:
        torch.mm(first.view(rows, inner), factor, out=out.view(rows, columns))
    elif bias.shape == own:
        torch.addmm(bias.reshape(columns), first.view(rows, inner), factor, out=out.view(rows, columns))
    else:
        out.copy_(dot(equation, a, b, bias))


def result_shape(equation: str, a: Tensor, b: Tensor) -> list[Any]:
    """The product's shape; lengths may be symbols."""
    left, right, result = terms_of(equation)
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    return [sizes[letter] for letter in result]


def in_order(which: int, mine: T, other: T) -> tuple[T, T]:
    """The operands as the equation names them."""
    return (mine, other) if which == 0 else (other, mine)


def cut_bias(bias: Tensor | None, equation: str, letter: str, begin: int, length: int) -> Tensor | None:
    """Of a bias what `cut` leaves of a result."""
    return None if bias is None else cut([bias_term(equation, bias.dim())], [bias], letter, begin, length)[0]


def cut(terms: Sequence[str], tensors: Sequence[Tensor], letter: str, begin: int, length: int) -> list[Tensor]:
    """Of each tensor that has the letter these rows; the others as they are."""
    return [x.narrow(term.index(letter), begin, length) if letter in term else x for term, x in zip(terms, tensors, strict=True)]
