"""Kernels of emitted graphs for lists of ranks: products and the collectives at their borders, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar import ops
from autopar.collective import Kind
from autopar.kernels.fused import KERNELS, matmul_reduce_add_rmsnorm

ByRank = list[Any]
Moved = Callable[[Kind, ByRank, Sequence[Any]], ByRank]
"""What a collective, by its settings, makes of tensors by rank."""


def run_kernel(
    node: fx.Node, operands: Sequence[ByRank | None], biases: ByRank, moved: Moved, in_dtype: Callable[[Any], Any]
) -> ByRank:
    """What a kernel's node makes, by rank; product and collective give what they would alone.

    Args:
        operands: of the node, by rank, as far as they are tensors, in order. biases: of each rank's product, None where it has none.
        in_dtype: a dtype that is asked for → the one to compute in.
    """
    a, b, *others = operands
    assert a is not None and b is not None, "the factors of a product"
    if node.target is matmul_reduce_add_rmsnorm:
        equation, dim, axis, _, n, eps, *dtypes = node.args[4:]
        parts = moved("reduce_scatter", _products(str(equation), a, b, biases), (dim, "sum", axis))
        return _normed(parts, others, n, eps, in_dtype(dtypes))
    *settings, axis, _ = node.args[2:]
    if KERNELS[node.target] == "all_gather":  # type: ignore[index]
        equation, operand, dim = settings
        factors = [a, b]
        factors[operand] = whole = moved("all_gather", factors[operand], (dim, axis))  # type: ignore[index, call-overload]
        return list(zip(whole, _products(str(equation), factors[0], factors[1], biases), strict=True))
    _, equation, dim = settings
    products = _products(str(equation), a, b, biases)
    if others and others[0] is not None:
        products = [x + product for x, product in zip(others[0], products, strict=True)]
    return moved("reduce_scatter", products, (dim, "sum", axis))


def _normed(parts: ByRank, others: Sequence[ByRank | None], n: Any, eps: Any, dtypes: Sequence[torch.dtype]) -> ByRank:
    """The sums with the residuals, their squares and norms."""
    residuals, weights = others
    assert residuals is not None and weights is not None, "a norm has both"
    (squared_in, *rounded), results = dtypes, []
    for residual, part, weight in zip(residuals, parts, weights, strict=True):
        total = residual + part
        squares = ops.square_sum(total, squared_in)
        results.append((total, squares, ops.rms_norm(total, squares, weight, n, eps, squared_in, *rounded)))
    return results


def _products(equation: str, a: ByRank, b: ByRank, biases: ByRank) -> ByRank:
    """Ranks with the very same factors, and bias, share theirs."""
    found: dict[tuple[int, ...], Any] = {}
    each = list(zip(a, b, biases, strict=True))
    for operands in each:
        if tuple(map(id, operands)) not in found:
            found[tuple(map(id, operands))] = ops.dot(equation, *operands)
    return [found[tuple(map(id, operands))] for operands in each]
