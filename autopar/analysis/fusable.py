"""Ops that kernels can fuse: passes of norms, sums and norms after products, rows of experts.

The first section counts the bytes that the pieces of a root-mean-square norm (`autopar.ops.norms`,
`autopar.kernels.row_kernels`) read and write, pass by pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import dtype_of, shape_of
from autopar.core.layout import Strategy, local_shape
from autopar.kernels.routed import Routes, shared_regions
from autopar.ops.blocks import wide_dtype
from autopar.rules import Call, own_moves

Kind = Literal["elementwise", "reduction"]
Pass = tuple[int, Kind]  # (bytes read and written, kind of work)


def passes(
    target: Callable[..., Any],
    args: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    by_kernels: bool = False,
) -> Iterator[Pass]:
    """Yield the passes over memory of one call of a piece of a norm.

    Args:
        target: a key of `PIECES`.
        args: arguments as in the graph.
        inputs: local shapes and dtypes of the operands.
        outputs: local shapes and dtypes of the results.
        by_kernels: whether norms run as the kernels of `autopar.kernels.row_kernels`, if these
            support the dtypes.
    """
    num, dtypes, out = math.prod(inputs[0].shape), [info.dtype for info in inputs], outputs[0].dtype
    pieces, kernel = PIECES[target], _KERNELS.get(target) if by_kernels else None
    if kernel is not None:
        parameters = _parameters(target)
        arguments = dict(zip(parameters, args, strict=False))
        operands = [name for name, arg in arguments.items() if parameters[name] and arg is not None]
        long = {
            info.dtype for name, info in zip(operands, inputs, strict=True) if name in kernel.alike
        }
        long |= {out} if target is ops.rms_norm else set()
        is_supported = len(long) == 1 and wide_dtype(arguments["dtype"]) == wide_dtype(*long)
        pieces = kernel.pieces if is_supported else pieces  # ops compute all other cases
    for each_bytes, kind in pieces(args, dtypes, out):
        yield num * each_bytes, kind


def _square_sum(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    yield inputs[0].itemsize, "reduction"


def _norm(args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype) -> Iterator[Pass]:
    x, squares, *weight = (dtype.itemsize for dtype in inputs)
    rounded = args[6].itemsize
    yield x + squares, "elementwise"
    if rounded != squares:
        yield squares + rounded, "elementwise"
    product = max(rounded, *weight) if weight else rounded
    if weight:
        yield rounded + product, "elementwise"
    if product != out.itemsize:
        yield product + out.itemsize, "elementwise"


def _product(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    a, b, wide = inputs[0].itemsize, inputs[1].itemsize, out.itemsize
    if a != wide:
        yield a + wide, "elementwise"
        a = wide
    yield a + b + wide, "elementwise"
    if len(inputs) > 2:  # a factor: a weight, or the scale of rows
        yield 2 * wide, "elementwise"
    yield wide, "reduction"


def _backward(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    grad, x, wide, _, *weight = (dtype.itemsize for dtype in inputs)
    yield grad + wide, "elementwise"
    if weight:
        yield 2 * wide, "elementwise"
    yield 2 * wide + x, "elementwise"
    if out.itemsize != wide:
        yield wide + out.itemsize, "elementwise"


PIECES: Mapping[
    Callable[..., Any],
    Callable[[Sequence[Any], Sequence[torch.dtype], torch.dtype], Iterator[Pass]],
] = {
    ops.square_sum: _square_sum,
    ops.rms_norm: _norm,
    ops.rms_product: _product,
    ops.rms_norm_backward: _backward,
    ops.rms_weight_gradient: _product,
}
"""Piece of a norm → its passes, with bytes per element of x."""


def _norm_passes(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    """Yield the single pass of the norm's kernel."""
    yield inputs[0].itemsize + out.itemsize, "elementwise"


def _sum_passes(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    """Yield the single pass of a kernel that multiplies and sums."""
    yield 2 * inputs[0].itemsize, "reduction"


def _gradient_passes(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    """Yield the single pass of the kernel of the norm's gradient."""
    yield 2 * inputs[0].itemsize + out.itemsize, "elementwise"


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel that computes a piece in one pass.

    It requires that the operands named in `alike` have the same dtype, as wide as the dtype in
    which they are squared.
    """

    pieces: Callable[[Sequence[Any], Sequence[torch.dtype], torch.dtype], Iterator[Pass]]
    alike: frozenset[str]


_KERNELS: Mapping[Callable[..., Any], _Kernel] = {
    ops.rms_norm: _Kernel(_norm_passes, frozenset({"x", "weight"})),
    ops.rms_product: _Kernel(_sum_passes, frozenset({"grad", "x", "weight"})),
    ops.rms_norm_backward: _Kernel(_gradient_passes, frozenset({"grad", "x", "weight"})),
    ops.rms_weight_gradient: _Kernel(_sum_passes, frozenset({"grad", "x"})),
}


@cache
def _parameters(target: Callable[..., Any]) -> Mapping[str, bool]:
    """Return the parameters of an op: name → whether it is an operand."""
    return {
        name: "Tensor" in parameter.annotation
        for name, parameter in signature(target).parameters.items()
    }


# --------------------------------------------------------------------------------------------------
# Products whose result is added to a tensor, followed by a norm of the sum. A kernel can compute
# the sum and the norm while it scatters the product.

NORMED = "matmul_reduce_add_rmsnorm"
"""The kernel that scatters the result of a product and normalizes its sum with a residual."""
_ADD = torch.ops.aten.add.Tensor
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Normed(NamedTuple):
    """The ops after a product: its sum with a tensor of its shape, the squared sums of rows, and
    the norm."""

    total: fx.Node
    squares: fx.Node
    norm: fx.Node


def normed_after(product: fx.Node) -> Normed | None:
    """Return the sum and the norm after a forward product.

    The product has no bias, and only the sum reads it. The norm is the first one of the sum that
    `autopar.kernels.normed` can compute: it has a weight, computes in float32 or wider, and rounds
    to the dtype of the sum. If two products are added, the last one has the norm.

    Returns:
        The sum, its squares and its norm; None if there is no such norm.
    """
    total = next(iter(product.users), product)
    if not _is_read_once(product) or len(product.args) > 3 or not _adds(total, product):
        return None
    if any(
        _is_read_once(x) and product < x for x in total.all_input_nodes
    ):  # nodes compare by position
        return None
    for norm in total.users:
        if norm.target is not ops.rms_norm or norm.meta["phase"] != "forward":
            continue
        squares = norm.args[1]
        if norm.args[0] is total and _is_plain(norm, total) and _is_square_of(squares, total):
            return Normed(total, squares, norm)
    return None


def _is_square_of(squares: object, total: fx.Node) -> bool:
    """Return whether a node computes the sums of squares of `total`'s rows."""
    if not isinstance(squares, fx.Node) or squares.target is not ops.square_sum:
        return False
    return squares.args[0] is total


def _is_read_once(product: fx.Node) -> bool:
    return (
        product.target is ops.dot and product.meta["phase"] == "forward" and len(product.users) == 1
    )


def _adds(total: fx.Node, product: fx.Node) -> bool:
    two = (
        total.target is _ADD
        and len(total.args) == 2
        and not total.kwargs
        and total.args[0] is not total.args[1]
    )
    return two and all(
        isinstance(x, fx.Node) and _is_like(x, product) for x in (*total.args, total)
    )


def _is_like(x: fx.Node, other: fx.Node) -> bool:
    return shape_of(x) == shape_of(other) and dtype_of(x) == dtype_of(other)


def _is_plain(norm: fx.Node, total: fx.Node) -> bool:
    _, squares, weight, n, _, dtype, rounded, out = norm.args
    sum_dtype, wide = dtype_of(total), wide_dtype(dtype_of(total))
    places = (
        dtype == wide
        and rounded in (sum_dtype, wide)
        and out == sum_dtype
        and isinstance(squares, fx.Node)
        and squares.args[1] == wide
    )
    there = (
        isinstance(weight, fx.Node) and weight < total and dtype_of(weight) == sum_dtype
    )  # the weight exists when the sum is computed
    return places and there and sum_dtype in _FLOATS and n == shape_of(total)[-1]


# --------------------------------------------------------------------------------------------------
# Sums of two tensors of which one is a product, such as the gradient of a tensor with several
# readers.

_ADDS = torch.ops.aten.add.Tensor


def product_added(node: fx.Node) -> int | None:
    """Return the index of the argument of a sum that is the product to fuse with the addition.

    If a kernel scatters the sum, it computes this product and adds the other argument. It is the
    last one of `products_added`; None if there is none.
    """
    places = products_added(node)
    if len(places) == 2:
        return int(node.args[0] < node.args[1])  # nodes compare by position
    return places[0] if places else None


def products_added(node: fx.Node) -> list[int]:
    """Return the indices of the arguments of a sum that are products which only this sum reads.

    The products have the phase, shape and dtype of the sum. Only backward sums have any: a forward
    sum may be recomputed from a kept product, and a product that is fused with the sum is never
    stored separately.
    """
    if (
        node.target is not _ADDS
        or node.kwargs
        or len(node.args) != 2
        or node.args[0] is node.args[1]
        or node.meta["phase"] != "backward"
    ):
        return []
    return [i for i, x in enumerate(node.args) if isinstance(x, fx.Node) and _only_added(x, node)]


def _only_added(x: fx.Node, total: fx.Node) -> bool:
    alone = (
        x.op == "call_function"
        and x.target is ops.dot
        and len(x.users) == 1
        and x.meta["phase"] == total.meta["phase"]
    )
    return alone and all(
        isinstance(each, fx.Node) and _same_shape_and_dtype(each, total) for each in total.args
    )


def _same_shape_and_dtype(x: fx.Node, other: fx.Node) -> bool:
    return shape_of(x) == shape_of(other) and dtype_of(x) == dtype_of(other)


# --------------------------------------------------------------------------------------------------
# Memory that ranks share for the rows of dispatched experts (`autopar.kernels.routed`).

_OPERANDS = (
    5  # last operands of experts and of their gradient: tokens, picks, gates, up and down weights
)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A region of memory that ranks share along a mesh axis, with its bytes on one rank. Nodes with
    equal regions share one region."""

    axis: int
    name: str
    routes: Routes
    num_bytes: int


def shared_rows(
    call: Call, strategy: Strategy, mesh_shape: Sequence[int]
) -> tuple[SharedRows, ...]:
    """List the regions of a call of experts, or of their gradient.

    Args:
        call: the call, with global shapes.
        strategy: the layouts of its operands and results.
        mesh_shape: devices per mesh axis.

    Returns:
        The regions; empty if the call dispatches no rows.
    """
    moves = own_moves(call, strategy, mesh_shape)
    if not moves:
        return ()
    axis, infos = moves[0].axis, call.inputs[-_OPERANDS:]
    x, ids, _, up, down = (
        local_shape(i.shape, at, mesh_shape)
        for i, at in zip(infos, strategy.inputs[-_OPERANDS:], strict=True)
    )
    sizes = (
        x[1],
        down[1],
        up[0],
        mesh_shape[axis],
        math.prod(ids),
        infos[0].dtype.itemsize,
        infos[2].dtype.itemsize,
    )
    regions_found = shared_regions(*sizes, backward=call.target is ops.experts_backward)
    return tuple(
        SharedRows(axis, name, routes, num_bytes)
        for (name, routes), num_bytes in regions_found.items()
    )
