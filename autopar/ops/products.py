"""Products of two tensors on dims that stay apart, and a bias with them.

A linear layer with a bias is one product, as torch's `addmm` is: the bias is added before the
result is rounded, and in no pass of its own. So in 16 bits it gives what the layer gives, and takes
what the layer takes. Where what is summed over is split between ranks, each makes a partial sum,
and the bias belongs to the sum once: the rank that has the first part adds it, the others do not.
To add it after the sum would be a pass more; a layout in which one rank has the bias and others
zeros would have to be made. As it is all have it whole, as they would to add it after, and each
knows where its part begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Dot:
    """An equation as one matrix product of `first` by `second`: permutations to [batch, rows,
    inner] and [batch, inner, columns].

    `swapped` means that the left operand is the second factor, because its own dims come last in
    the result.
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
    left, right, result = (
        term.strip() for side in equation.split("->") for term in side.split(",")
    )
    shared = [letter for letter in result if letter in left and letter in right]
    own = {
        term: [letter for letter in result if letter in term and letter not in shared]
        for term in (left, right)
    }
    inner = [letter for letter in left if letter in right and letter not in result]
    expected = len(shared) + len(inner)
    if len(left) != expected + len(own[left]) or len(right) != expected + len(own[right]):
        raise ValueError(f"not a product of two operands: {equation!r}")
    swapped = (
        bool(own[left])
        and bool(own[right])
        and result.index(own[left][0]) > result.index(own[right][0])
    )
    first, second = (right, left) if swapped else (left, right)
    natural = [*shared, *own[first], *own[second]]
    return _Dot(
        swapped=swapped,
        first=tuple(first.index(letter) for letter in (*shared, *own[first], *inner)),
        second=tuple(second.index(letter) for letter in (*shared, *inner, *own[second])),
        num_batch=len(shared),
        num_rows=len(own[first]),
        num_inner=len(inner),
        result=None
        if "".join(natural) == result
        else tuple(natural.index(letter) for letter in result),
    )


def dot(
    equation: str, a: Tensor, b: Tensor, bias: Tensor | None = None, starts: Sequence[int] = ()
) -> Tensor:
    """Multiply two tensors by Einstein's convention, ``dot("bsk,nk->bsn", x, weight)``. The result
    is contiguous.

    It is computed by one `mm` or `bmm`, with a bias by `addmm` or `baddbmm`. Contiguous operands
    are not copied.

    Args:
        equation: the equation; each letter is in two of the three terms or in all of them.
        a, b: the operands.
        bias: is added; its dims are the last dims of the result.
        starts: if dims that are summed over are split, the first index of this part along each of
            them; the bias is added by the part whose starts are all 0.
    """
    # a compiler traces through the cache's own function: it folds the equation into constants
    plan = _dot_plan.__wrapped__(equation) if torch.compiler.is_compiling() else _dot_plan(equation)
    first, second = (b, a) if plan.swapped else (a, b)
    first, second = first.permute(plan.first), second.permute(plan.second)
    batch, rows = (
        first.shape[: plan.num_batch],
        first.shape[plan.num_batch : plan.num_batch + plan.num_rows],
    )
    inner, columns = (
        first.shape[plan.num_batch + plan.num_rows :],
        second.shape[plan.num_batch + plan.num_inner :],
    )
    several = (batch.numel(),) if batch else ()
    first, second = (
        first.reshape(*several, rows.numel(), inner.numel()),
        second.reshape(*several, inner.numel(), columns.numel()),
    )
    natural = (*batch, *rows, *columns)
    if bias is None or any(starts):
        product = torch.bmm(first, second) if batch else torch.mm(first, second)
    elif (
        plan.result is None and bias.shape == columns and not batch
    ):  # torch fuses one that has a single dim
        product = torch.addmm(bias.reshape(-1), first, second)
    else:
        order = plan.result or range(len(natural))
        spread = bias.expand([natural[dim] for dim in order]).permute(
            [*map(list(order).index, range(len(natural)))]
        )
        spread = spread.reshape(*several, rows.numel(), columns.numel())
        product = (
            torch.baddbmm(spread, first, second) if batch else torch.addmm(spread, first, second)
        )
    product = product.view(natural)
    return product if plan.result is None else product.permute(plan.result).contiguous()


def bias_term(equation: str, num_dims: int) -> str:
    """Return the letters of a bias with `num_dims` dims."""
    result = equation.partition("->")[2].strip()
    return result[len(result) - num_dims :]
