"""Products of two tensors on dims that stay apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Dot:
    """An equation as one matrix product of `first` by `second`: permutations to [batch, rows, inner] and [batch, inner, columns].

    `swapped` says that the left operand is the second factor, as where its own dims come last in the result.
    """

    swapped: bool
    first: tuple[int, ...]
    second: tuple[int, ...]
    num_batch: int
    num_rows: int
    num_inner: int
    result: tuple[int, ...] | None


@lru_cache(maxsize=4096)
def _dot_plan(equation: str) -> _Dot:
    left, right, result = (term.strip() for side in equation.split("->") for term in side.split(","))
    shared = [letter for letter in result if letter in left and letter in right]
    own = {term: [letter for letter in result if letter in term and letter not in shared] for term in (left, right)}
    inner = [letter for letter in left if letter in right and letter not in result]
    expected = len(shared) + len(inner)
    if len(left) != expected + len(own[left]) or len(right) != expected + len(own[right]):
        raise ValueError(f"not a product of two operands: {equation!r}")
    swapped = bool(own[left]) and bool(own[right]) and result.index(own[left][0]) > result.index(own[right][0])
    first, second = (right, left) if swapped else (left, right)
    natural = [*shared, *own[first], *own[second]]
    return _Dot(
        swapped=swapped,
        first=tuple(first.index(letter) for letter in (*shared, *own[first], *inner)),
        second=tuple(second.index(letter) for letter in (*shared, *inner, *own[second])),
        num_batch=len(shared),
        num_rows=len(own[first]),
        num_inner=len(inner),
        result=None if "".join(natural) == result else tuple(natural.index(letter) for letter in result),
    )


def dot(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """Product of two tensors by Einstein's convention, ``dot("bsk,nk->bsn", x, weight)``; contiguous in the output's order.

    Each letter is in two of the three terms or in all of them. One `mm` or `bmm`; contiguous operands are not copied.
    """
    # a compiler traces through the cache's own function: it folds the equation into constants
    plan = _dot_plan.__wrapped__(equation) if torch.compiler.is_compiling() else _dot_plan(equation)
    first, second = (b, a) if plan.swapped else (a, b)
    first, second = first.permute(plan.first), second.permute(plan.second)
    batch, rows = first.shape[: plan.num_batch], first.shape[plan.num_batch : plan.num_batch + plan.num_rows]
    inner, columns = first.shape[plan.num_batch + plan.num_rows :], second.shape[plan.num_batch + plan.num_inner :]
    shapes = (rows.numel(), inner.numel()), (inner.numel(), columns.numel())
    if batch:
        product = torch.bmm(first.reshape(batch.numel(), *shapes[0]), second.reshape(batch.numel(), *shapes[1]))
    else:
        product = torch.mm(first.reshape(shapes[0]), second.reshape(shapes[1]))
    product = product.view((*batch, *rows, *columns))
    return product if plan.result is None else product.permute(plan.result).contiguous()
