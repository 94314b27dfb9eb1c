"""A product whose partial sums are scattered, added to a residual and normed: one op that makes all of it.

    y       = residual + Σ a · b         over all ranks: this rank's part along `dim` of the product's result, whose rows are whole
    squares = Σ y²                       of each row
    normed  = y · rstd · weight          with rstd = 1/√(squares/n + ε)

The product's chunks go to their owners as in `autopar.kernels.overlapped.dot_reduce_scatter`. What adds up the parts that came is
`autopar.kernels.normed`, which adds the residual and norms in the same pass: the sum by itself is neither written nor rounded.
`matmul_reduce_add_rmsnorm_reference` defines the op, over the list of all ranks' operands.

Memory. As of matmul_reduce_scatter in `autopar.kernels.overlapped`, with which it shares what peers write, and a word for each rank. In
a fake group both ways are gone, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar import ops
from autopar.errors import KernelError
from autopar.kernels import bound, library, normed
from autopar.kernels.chunked import Scatter, Shards, scatter
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.equations import check_chunked, result_shape, terms_of
from autopar.kernels.overlapped import Dot, scattering
from autopar.kernels.overlapped_gradients import scattered_gradients
from autopar.kernels.providers import APART, counts_memory, peers_of, runs_kernels, say_once
from autopar.layout import part_range

Made = tuple[Tensor, Tensor, Tensor]
"""y, squares and normed."""


def dot_reduce_add_rmsnorm(
    equation: str,
    operands: tuple[Tensor, Tensor],
    residual: Tensor,
    weight: Tensor,
    dim: int,
    group: AxisGroup,
    num_chunks: int,
    n: int,
    eps: float,
    dtype: torch.dtype,
    rounded: torch.dtype,
    out: torch.dtype,
    dot: Dot,
) -> Made:
    """y, squares and normed of this rank's part, along `dim` of the result, of the sum of all ranks' products.

    Where the kernels do not run, the steps run one after the other, and round each: the product, `bound.reduce_scatter`, the sum with
    the residual, `autopar.ops.square_sum` and `autopar.ops.rms_norm`.

    Args:
        operands, group, num_chunks, dot: as of `autopar.kernels.overlapped.dot_reduce_scatter`.
        residual, weight: as of `autopar.kernels.normed.reduce_add_rmsnorm`.
        n, eps, dtype, rounded, out: as of `autopar.ops.rms_norm`; `norms` says which are taken, and n is a whole row's.

    Raises:
        KernelError: for other settings of the norm. ValueError: as of `dot_reduce_scatter`.
    """
    check_chunked(equation, terms_of(equation)[2][dim], num_chunks)
    if n != residual.shape[-1] or not norms(residual.dtype, weight.dtype, dtype, rounded, out):
        what = f"no kernel norms {n} of {residual.shape[-1]} {residual.dtype}, in {dtype}, to {rounded}, by {weight.dtype}, to {out}"
        raise KernelError(what, remedy="leave the norm apart from the product")
    settings = eps, rounded == residual.dtype
    if group.size > 1 and runs_kernels(group, residual.device):
        place = dim, group.size, group.name, group.coordinate, num_chunks
        return torch.ops.autopar.matmul_reduce_add_rmsnorm(*operands, residual, weight, equation, *place, *settings)
    if group.size > 1 and counts_memory(group):
        _alone(equation, *operands, residual, weight, dim, group, *settings)
    y = residual + bound.reduce_scatter(dot(equation, *operands, None), dim, "sum", group.size, group.name, group.coordinate)
    squares = ops.square_sum(y, dtype)
    return y, squares, ops.rms_norm(y, squares, weight, n, eps, dtype, rounded, out)


def norms(x: torch.dtype, weight: torch.dtype | None, dtype: torch.dtype, rounded: torch.dtype, out: torch.dtype) -> bool:
    """Whether the kernel's norm of what is held in `x` is `autopar.ops.rms_norm` with these dtypes: it has a weight, held in `x` too,
    squares in at least fp32, rounds before the weight to `x` or not at all, and gives `x`."""
    wide = library.wide(x)
    return x in normed.FLOATS and weight == out == x and dtype == wide and rounded in (x, wide)


def matmul_reduce_add_rmsnorm_reference(
    equation: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    residuals: Sequence[Tensor],
    weights: Sequence[Tensor],
    dim: int,
    eps: float,
    rounded: bool,
) -> list[Made]:
    """The definition: of every rank, `normed.reference_forward` of all ranks' products' parts along `dim`, in order of the ranks."""
    products = [torch.einsum(equation, a, b) for a, b in pairs]
    made = []
    for rank, (residual, weight) in enumerate(zip(residuals, weights, strict=True)):
        place = part_range(products[0].shape[dim], (len(pairs),), (rank,))
        parts = [product.narrow(dim, *place) for product in products]
        made.append(normed.reference_forward(parts, residual, weight, eps, rounded))
    return made


@torch.library.custom_op("autopar::matmul_reduce_add_rmsnorm", mutates_args=())
def matmul_reduce_add_rmsnorm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    equation: str,
    dim: int,
    size: int,
    name: str,
    coordinate: int,
    num_chunks: int,
    eps: float,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, squares and normed; `residual` is like this rank's part along `dim` of the product's result."""
    _check(equation, a, b, residual, weight, dim, size, coordinate)
    peers, reason = peers_of(AxisGroup(name, size, coordinate), a.device)
    a, b, residual, weight = (x.contiguous() for x in (a, b, residual, weight))
    if size == 1 or peers is None:
        if size > 1:
            say_once(AxisGroup(name, size, coordinate), APART, reason)
        part = bound.reduce_scatter(torch.einsum(equation, a, b), dim, "sum", size, name, coordinate)
        return normed.forward_op([part], residual, weight, eps, rounded)
    job, shape, made = norming(equation, a, b, residual, weight, dim, size, coordinate, eps, rounded)
    scatter(peers, Shards.of(shape, dim, a.dtype, size, num_chunks), dim, {coordinate: job})
    return made


def norming(
    equation: str, a: Tensor, b: Tensor, residual: Tensor, weight: Tensor, dim: int, size: int, rank: int, eps: float, rounded: bool
) -> tuple[Scatter, list[int], Made]:
    """A rank's part in matmul_reduce_add_rmsnorm, the shape of its whole product, and what it fills. All tensors are contiguous."""
    job, shape = scattering(equation, a, b, None, dim, size, rank)
    made = normed.with_room(job.out)
    return replace(job, add_up=lambda parts: normed.forward_into(made, parts, residual, weight, eps, rounded)), shape, made


def _alone(
    equation: str, a: Tensor, b: Tensor, residual: Tensor, weight: Tensor, dim: int, group: AxisGroup, eps: float, rounded: bool
) -> None:
    """Allocate what a rank does in matmul_reduce_add_rmsnorm beside what it shares: of all chunks its own rows need the most."""
    held = a.contiguous(), b.contiguous(), residual.contiguous(), weight.contiguous()
    job, shape, _made = norming(equation, *held, dim, group.size, group.coordinate, eps, rounded)
    job.produce(*part_range(shape[dim], (group.size,), (group.coordinate,)), job.out)
    _table = a.new_empty(group.size, dtype=torch.int64)  # of the parts' addresses


def _check(equation: str, a: Tensor, b: Tensor, residual: Tensor, weight: Tensor, dim: int, size: int, coordinate: int) -> None:
    """Raises KernelError where rows are not whole, or the residual is not like the rank's part of the product."""
    part = result_shape(equation, a, b)
    if not 0 <= dim < len(part) - 1:
        raise KernelError(f"{equation!r}, cut along dim {dim}, has no whole rows", remedy="scatter along a dim before the last")
    part[dim] = part_range(part[dim], (size,), (coordinate,))[1]
    if list(residual.shape) != part or not a.dtype == b.dtype == residual.dtype:
        what = f"a residual {tuple(residual.shape)} {residual.dtype} beside a part {tuple(part)} of a product of {a.dtype} and {b.dtype}"
        raise KernelError(what, remedy="give a residual like the rank's part of the product")
    normed.check_normed([], residual, weight)


@matmul_reduce_add_rmsnorm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    equation: str,
    dim: int,
    size: int,
    name: str,
    coordinate: int,
    num_chunks: int,
    eps: float,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return normed.with_room(residual.new_empty(residual.shape))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    a, b, _, weight, *ctx.settings, ctx.eps, _ = inputs
    y, squares, _ = output
    ctx.save_for_backward(a, b, weight, y, squares)
    ctx.mark_non_differentiable(squares)


def _differentiate(ctx: Any, grad_y: Tensor, _: Tensor, grad_normed: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of y is that of the residual and of every rank's part of the product."""
    a, b, weight, y, squares = ctx.saved_tensors
    grad, grad_weight = normed.backward_op(grad_y, grad_normed, y, squares, weight, ctx.eps)
    d_operands, _ = scattered_gradients(grad, (a, b), ctx.settings, ctx.needs_input_grad)
    return *d_operands, grad, grad_weight, *(None,) * 8


matmul_reduce_add_rmsnorm.register_autograd(_differentiate, setup_context=_remember)
