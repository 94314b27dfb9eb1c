"""Products whose result is added to something, and the sum normed: what a kernel can do while it scatters the product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import dtype_of, shape_of
from autopar.ops.blocks import wide_dtype

NORMED = "matmul_reduce_add_rmsnorm"
"""The kernel that scatters what a product makes, and norms its sum with a residual."""
_ADD = torch.ops.aten.add.Tensor
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Normed(NamedTuple):
    """What follows a product: its sum with something like it, the squares of the sum's rows, and the norm of these."""

    total: fx.Node
    squares: fx.Node
    norm: fx.Node


def normed_after(product: fx.Node) -> Normed | None:
    """Of a product of forward, without a bias, that only a sum reads, that sum and the first norm of it; None where there is none that
    `autopar.kernels.normed_scatter` does: with a weight, computed in at least float32 and rounded as the sum is. Of two products of one
    sum the last one has the norm.
    """
    total = next(iter(product.users), product)
    if not _is_read_once(product) or len(product.args) > 3 or not _adds(total, product):
        return None
    if any(_is_read_once(x) and product < x for x in total.all_input_nodes):  # nodes stand in an order
        return None
    for norm in total.users:
        if norm.target is ops.rms_norm and norm.meta["phase"] == "forward" and norm.args[0] is total and _is_plain(norm, total):
            squares = norm.args[1]
            if isinstance(squares, fx.Node) and squares.target is ops.square_sum and squares.args[0] is total:
                return Normed(total, squares, norm)
    return None


def _is_read_once(product: fx.Node) -> bool:
    return product.target is ops.dot and product.meta["phase"] == "forward" and len(product.users) == 1


def _adds(total: fx.Node, product: fx.Node) -> bool:
    two = total.target is _ADD and len(total.args) == 2 and not total.kwargs and total.args[0] is not total.args[1]
    return two and all(isinstance(x, fx.Node) and _is_like(x, product) for x in (*total.args, total))


def _is_like(x: fx.Node, other: fx.Node) -> bool:
    return shape_of(x) == shape_of(other) and dtype_of(x) == dtype_of(other)


def _is_plain(norm: fx.Node, total: fx.Node) -> bool:
    _, squares, weight, n, _, dtype, rounded, out = norm.args
    own, wide = dtype_of(total), wide_dtype(dtype_of(total))
    places = dtype == wide and rounded in (own, wide) and out == own and isinstance(squares, fx.Node) and squares.args[1] == wide
    there = isinstance(weight, fx.Node) and weight < total and dtype_of(weight) == own  # when the sum would be made
    return places and there and own in _FLOATS and n == shape_of(total)[-1]
