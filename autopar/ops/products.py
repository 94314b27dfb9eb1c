"""Products of two tensors without flattened dims, with an optional bias.

A linear layer with a bias is one op, like torch's `addmm`: the bias is added before the result is
rounded, without an additional pass over memory. Thus its results in 16 bits and its time equal
those of the layer. If a contracted dim is split between ranks, each rank computes a partial sum,
and the bias must be added once: the rank with the first part adds it. To add the bias after the
reduction would need an additional pass. A layout with the bias on one rank and zeros on the others
would need to be computed. Instead, every rank has the full bias and the start index of its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Dot:
    """An equation as one matrix product of two factors.

    Attributes:
        swapped: whether the left operand is the second factor, because its own dims are the last
            ones of the result.
        first: permutation of the first factor to ``[batch, rows, inner]``; None for the identity.
        second: permutation of the second factor to ``[batch, inner, columns]``; None for the
            identity.
        num_batch: number of batch dims.
        num_rows: number of dims of the rows.
        num_inner: number of contracted dims.
        result: permutation to the dims of the result; None for the identity.
    """

    swapped: bool
    first: tuple[int, ...] | None
    second: tuple[int, ...] | None
    num_batch: int
    num_rows: int
    num_inner: int
    result: tuple[int, ...] | None


@lru_cache(maxsize=4096)
def _dot_plan(equation: str) -> _Dot:
    left_letters, right, result = (
        term.strip() for side in equation.split("->") for term in side.split(",")
    )
    shared = [letter for letter in result if letter in left_letters and letter in right]
    own_letters = {
        term: [letter for letter in result if letter in term and letter not in shared]
        for term in (left_letters, right)
    }
    inner = [letter for letter in left_letters if letter in right and letter not in result]
    expected = len(shared) + len(inner)
    if len(left_letters) != expected + len(own_letters[left_letters]) or len(
        right
    ) != expected + len(own_letters[right]):
        raise ValueError(f"not a product of two operands: {equation!r}")
    swapped = (
        bool(own_letters[left_letters])
        and bool(own_letters[right])
        and result.index(own_letters[left_letters][0]) > result.index(own_letters[right][0])
    )
    first, second = (right, left_letters) if swapped else (left_letters, right)
    natural = [*shared, *own_letters[first], *own_letters[second]]
    return _Dot(
        swapped=swapped,
        first=_order((*shared, *own_letters[first], *inner), first),
        second=_order((*shared, *inner, *own_letters[second]), second),
        num_batch=len(shared),
        num_rows=len(own_letters[first]),
        num_inner=len(inner),
        result=_order(result, natural),
    )


def _order(wanted: Sequence[str], letters: Sequence[str]) -> tuple[int, ...] | None:
    """Return the permutation of `letters` to `wanted`; None for the identity."""
    places = tuple(letters.index(letter) for letter in wanted)
    return None if places == tuple(range(len(places))) else places


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a product.

    Attributes:
        plan: the product.
        first: shape of the first factor as a matrix, ``[batch, rows, inner]``; without the batch if
            there is none.
        second: shape of the second factor as a matrix, ``[batch, inner, columns]``, likewise.
        natural: sizes of the dims of the result in the order batch, rows, columns.
        columns: the last of these sizes.
    """

    plan: _Dot
    first: tuple[int, ...]
    second: tuple[int, ...]
    natural: tuple[int, ...]
    columns: tuple[int, ...]


@lru_cache(maxsize=4096)
def _sizes_of(equation: str, a: Sequence[int], b: Sequence[int]) -> _Sizes:
    """Return the sizes of the product of two operands with the given shapes."""
    plan_of = _dot_plan.__wrapped__ if torch.compiler.is_compiling() else _dot_plan
    plan = plan_of(equation)
    first, second = (b, a) if plan.swapped else (a, b)
    first = first if plan.first is None else [first[dim] for dim in plan.first]
    second = second if plan.second is None else [second[dim] for dim in plan.second]
    inner_at = plan.num_batch + plan.num_rows
    batch, rows, inner = first[: plan.num_batch], first[plan.num_batch : inner_at], first[inner_at:]
    columns = second[plan.num_batch + plan.num_inner :]
    several = (math.prod(batch),) if plan.num_batch else ()
    return _Sizes(
        plan,
        (*several, math.prod(rows), math.prod(inner)),
        (*several, math.prod(inner), math.prod(columns)),
        (*batch, *rows, *columns),
        tuple(columns),
    )


def dot(
    equation: str, a: Tensor, b: Tensor, bias: Tensor | None = None, starts: Sequence[int] = ()
) -> Tensor:
    """Multiply two tensors by Einstein's convention: ``dot("bsk,nk->bsn", x, weight)``.

    The product is one `mm` or `bmm`, or one `addmm` or `baddbmm` with a bias. Contiguous operands
    are not copied.

    Args:
        equation: the equation; each letter is in two or all of the three terms.
        a: the first operand.
        b: the second operand.
        bias: added to the product; its dims are the last dims of the result.
        starts: if contracted dims are split, the first index of this part along each of them; the
            bias is only added if all of them are 0.

    Returns:
        The product, contiguous.
    """
    # a compiler traces the functions behind the caches and folds the equation into constants
    sizes_of = _sizes_of.__wrapped__ if torch.compiler.is_compiling() else _sizes_of
    sizes = sizes_of(equation, a.shape, b.shape)
    plan, batch = sizes.plan, sizes.plan.num_batch
    first, second = (b, a) if plan.swapped else (a, b)
    first = (first if plan.first is None else first.permute(plan.first)).reshape(sizes.first)
    second = (second if plan.second is None else second.permute(plan.second)).reshape(sizes.second)
    if bias is None or any(starts):
        product = torch.bmm(first, second) if batch else torch.mm(first, second)
    else:
        addend = _bias_as_matrix(bias, sizes)
        add_product = torch.baddbmm if batch else torch.addmm
        product = add_product(addend, first, second)
    product = product.view(sizes.natural)
    return product if plan.result is None else product.permute(plan.result).contiguous()


def _bias_as_matrix(bias: Tensor, sizes: _Sizes) -> Tensor:
    """Return a bias as the addend of a product of two matrices. A bias with the dims of the columns
    has one dim, as torch fuses its addition."""
    plan, natural = sizes.plan, sizes.natural
    if plan.result is None and bias.shape == sizes.columns and not plan.num_batch:
        return bias.reshape(-1)
    order = plan.result or range(len(natural))
    spread = bias.expand([natural[dim] for dim in order]).permute(
        [*map(list(order).index, range(len(natural)))]
    )
    return spread.reshape(*sizes.first[:-1], sizes.second[-1])


def bias_term(equation: str, num_dims: int) -> str:
    """Return the letters of a bias with `num_dims` dims: the last letters of the result."""
    result = equation.partition("->")[2].strip()
    return result[len(result) - num_dims :]
