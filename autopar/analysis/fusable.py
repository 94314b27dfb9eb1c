"""What the pieces of a root-mean-square norm (`autopar.ops.norms`; `autopar.kernels.rows`) read
and write, pass by pass, as they stand."""

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
Pass = tuple[int, Kind]  # bytes, and what is done


def passes(
    target: Callable[..., Any],
    args: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    by_kernels: bool = False,
) -> Iterator[Pass]:
    """The passes of one call; arguments as of `autopar.analysis.work.works`."""
    num, dtypes, out = math.prod(inputs[0].shape), [info.dtype for info in inputs], outputs[0].dtype
    pieces, kernel = PIECES[target], _KERNELS.get(target) if by_kernels else None
    if kernel is not None:
        parameters = _parameters(target)
        given = dict(zip(parameters, args, strict=False))
        operands = [name for name, arg in given.items() if parameters[name] and arg is not None]
        long = {
            info.dtype for name, info in zip(operands, inputs, strict=True) if name in kernel.alike
        }
        long |= {out} if target is ops.rms_norm else set()
        taken = len(long) == 1 and wide_dtype(given["dtype"]) == wide_dtype(*long)
        pieces = kernel.pieces if taken else pieces  # others are left to the ops
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
    if len(inputs) > 2:  # by a weight, or by what rows are scaled with
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
"""Bytes for each element of x."""


def passes_of_norm(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    yield inputs[0].itemsize + out.itemsize, "elementwise"


def passes_of_sum(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    yield 2 * inputs[0].itemsize, "reduction"


def passes_of_gradient(
    args: Sequence[Any], inputs: Sequence[torch.dtype], out: torch.dtype
) -> Iterator[Pass]:
    yield 2 * inputs[0].itemsize + out.itemsize, "elementwise"


@dataclass(frozen=True, slots=True)
class _Kernel:
    """What a kernel does in one pass, where the operands named `alike` are in one dtype, as wide
    as that which is squared in."""

    pieces: Callable[[Sequence[Any], Sequence[torch.dtype], torch.dtype], Iterator[Pass]]
    alike: frozenset[str]


_KERNELS: Mapping[Callable[..., Any], _Kernel] = {
    ops.rms_norm: _Kernel(passes_of_norm, frozenset({"x", "weight"})),
    ops.rms_product: _Kernel(passes_of_sum, frozenset({"grad", "x", "weight"})),
    ops.rms_norm_backward: _Kernel(passes_of_gradient, frozenset({"grad", "x", "weight"})),
    ops.rms_weight_gradient: _Kernel(passes_of_sum, frozenset({"grad", "x"})),
}


@cache
def _parameters(target: Callable[..., Any]) -> Mapping[str, bool]:
    """An op's parameters by name, and whether each is an operand."""
    return {
        name: "Tensor" in parameter.annotation
        for name, parameter in signature(target).parameters.items()
    }


# --------------------------------------------------------------------------------------------------
# Products whose result is added to something, and the sum normed: what a kernel can do while it
# scatters the product.

NORMED = "matmul_reduce_add_rmsnorm"
"""The kernel that scatters what a product makes, and norms its sum with a residual."""
_ADD = torch.ops.aten.add.Tensor
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Normed(NamedTuple):
    """What follows a product: its sum with something like it, the squares of the sum's rows, and
    the norm of these."""

    total: fx.Node
    squares: fx.Node
    norm: fx.Node


def normed_after(product: fx.Node) -> Normed | None:
    """Of a product of forward, without a bias, that only a sum reads, that sum and the first norm
    of it; None where there is none that `autopar.kernels.normed` does: with a weight, computed in
    at least float32 and rounded as the sum is. Of two products of one sum the last one has the
    norm.
    """
    total = next(iter(product.users), product)
    if not _is_read_once(product) or len(product.args) > 3 or not _adds(total, product):
        return None
    if any(
        _is_read_once(x) and product < x for x in total.all_input_nodes
    ):  # nodes stand in an order
        return None
    for norm in total.users:
        if (
            norm.target is ops.rms_norm
            and norm.meta["phase"] == "forward"
            and norm.args[0] is total
            and _is_plain(norm, total)
        ):
            squares = norm.args[1]
            if (
                isinstance(squares, fx.Node)
                and squares.target is ops.square_sum
                and squares.args[0] is total
            ):
                return Normed(total, squares, norm)
    return None


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
    own, wide = dtype_of(total), wide_dtype(dtype_of(total))
    places = (
        dtype == wide
        and rounded in (own, wide)
        and out == own
        and isinstance(squares, fx.Node)
        and squares.args[1] == wide
    )
    there = (
        isinstance(weight, fx.Node) and weight < total and dtype_of(weight) == own
    )  # when the sum would be made
    return places and there and own in _FLOATS and n == shape_of(total)[-1]


# --------------------------------------------------------------------------------------------------
# Sums of two tensors of which one is a product: as a gradient of what several products read is.

_ADDS = torch.ops.aten.add.Tensor


def product_added(node: fx.Node) -> int | None:
    """The place among a sum's arguments of the product that is taken where the sum is made, and
    added to the other there, if a kernel scatters the sum: of `products_added` the one that comes
    last, None where there is none."""
    places = products_added(node)
    if len(places) == 2:
        return int(node.args[0] < node.args[1])  # type: ignore[operator]  # nodes stand in an order
    return places[0] if places else None


def products_added(node: fx.Node) -> list[int]:
    """The places among a sum's arguments of products of the sum's phase, shape and dtype that
    nothing else reads.

    Of backward's sums: forward's may run again, from the product as it was kept, and a product that
    is taken with the sum never lies alone.
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
    return alone and all(isinstance(each, fx.Node) and _like(each, total) for each in total.args)


def _like(x: fx.Node, other: fx.Node) -> bool:
    return shape_of(x) == shape_of(other) and dtype_of(x) == dtype_of(other)


# --------------------------------------------------------------------------------------------------
# What ranks share for the rows of dispatched experts, where these go between peers
# (`autopar.kernels.routed`).

_OPERANDS = (
    5  # tokens, picks, gates, up's and down's weights: the last of experts and of their gradient
)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """A region along a mesh axis, of so many bytes on a rank: all nodes that use an equal one
    have it together."""

    axis: int
    name: str
    routes: Routes
    num_bytes: int


def shared_rows(
    call: Call, strategy: Strategy, mesh_shape: Sequence[int]
) -> tuple[SharedRows, ...]:
    """The regions of a call of experts, or of their gradient; none where it dispatches nothing."""
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
    found = shared_regions(*sizes, backward=call.target is ops.experts_backward)
    return tuple(
        SharedRows(axis, name, routes, num_bytes) for (name, routes), num_bytes in found.items()
    )
