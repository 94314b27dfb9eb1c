"""Root-mean-square norms in pieces (`autopar.ops.rms`), so that sums over what is normed can be sums over ranks."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, dtype_of, emit, shape_of, sweep
from autopar.ops.blocks import wide_dtype


def split_rms_norms(graph: fx.Graph) -> None:
    """Forward and backward of every norm."""
    for node in calls(graph, ops.normed):
        with graph.inserting_before(node):
            _forward(node, *node.args)
    for node in calls(graph, ops.normed_backward):
        with graph.inserting_before(node):
            _backward(node, *node.args)
    sweep(graph)


def _forward(node: fx.Node, x: fx.Node, weight: fx.Node | None, eps: float, *dtypes: torch.dtype) -> None:
    dtype, _, out = dtypes
    squares = _per_row(node, x, ops.square_sum, (x, dtype), dtype)
    result = emit(node, ops.rms_norm, (x, squares, weight, shape_of(x)[-1], eps, *dtypes), shape_of(x), dtype=out)
    _replace(node, result, squares)


def _backward(
    node: fx.Node, grad: fx.Node, x: fx.Node, squares: fx.Node, weight: fx.Node | None, eps: float, dtype: torch.dtype
) -> None:
    n = shape_of(x)[-1]
    product = _per_row(node, x, ops.rms_product, (grad, x, weight, dtype), dtype)
    d_x = emit(node, ops.rms_norm_backward, (grad, x, squares, product, weight, n, eps, dtype), shape_of(x), dtype=dtype_of(x))
    d_weight = None if weight is None else _weight_gradient(node, grad, x, squares, weight, eps, dtype)
    _replace(node, d_x, d_weight)


def _weight_gradient(
    node: fx.Node, grad: fx.Node, x: fx.Node, squares: fx.Node, weight: fx.Node, eps: float, dtype: torch.dtype
) -> fx.Node:
    wide, shape = wide_dtype(dtype), shape_of(weight)
    made = emit(node, ops.rms_weight_gradient, (grad, x, squares, *shape, eps, dtype), shape, dtype=wide)
    if wide == dtype_of(weight):
        return made
    return emit(node, aten._to_copy.default, (made,), shape, dtype=dtype_of(weight), kwargs={"dtype": dtype_of(weight)})


def _per_row(node: fx.Node, x: fx.Node, target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
    """A piece with one element for each row of x."""
    return emit(node, target, args, shape_of(x)[:-1], dtype=wide_dtype(dtype))


def _replace(node: fx.Node, *results: fx.Node | None) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem, "an operator with two results"
        result = results[user.args[1]]  # type: ignore[index]
        if result is not None:
            user.replace_all_uses_with(result)
