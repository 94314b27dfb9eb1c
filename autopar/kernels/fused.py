"""Products that do the collective at their border as well, one of them a norm besides: steps of emitted graphs that plans ask for by name.

As the steps of `autopar.kernels.collectives` they name mesh axes by index, and `bind` puts process groups in their place. What they give is
that of the collective, of the product and of the norm, one after the other, but for how often it is rounded. So they run where ranks do not
reach each other's memory (`autopar.kernels.overlapped` and `autopar.kernels.normed_scatter`, which say what memory both ways take). Whether
they do is known only at run time: a plan counts what the kernels share with their peers and keep, and of what lives meanwhile the larger of
both ways, so that one after the other takes no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar import ops
from autopar.collective import Kind
from autopar.kernels import collectives
from autopar.kernels.normed_scatter import dot_reduce_add_rmsnorm
from autopar.kernels.overlapped import all_gather_dot, dot_reduce_scatter


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    equation: str,
    operand: int,
    dim: int,
    axis: int,
    num_chunks: int,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """A factor of a product, gathered, and the product.

    Args:
        a, b: its factors; `operand` (0 or 1) says which of them is split along `dim` on the axis.
        num_chunks: in which each rank's part goes.
        bias, starts: of the product.

    Returns:
        The whole factor, and ``ops.dot(equation, …)`` of it.
    """
    group = collectives.group_of(axis)
    return gather_bound(a, b, equation, operand, dim, group.size, group.name, group.coordinate, num_chunks, bias, starts)


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    equation: str,
    dim: int,
    axis: int,
    num_chunks: int,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> Tensor:
    """This rank's part along `dim` of a product's result, to which each rank's `addend` is added, summed over the ranks of the axis.

    Args:
        bias, starts: of the product, as of ``ops.dot``.
    """
    group = collectives.group_of(axis)
    return scatter_bound(a, b, addend, equation, dim, group.size, group.name, group.coordinate, num_chunks, bias, starts)


def matmul_reduce_add_rmsnorm(
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor,
    equation: str,
    dim: int,
    axis: int,
    num_chunks: int,
    n: int,
    eps: float,
    dtype: torch.dtype,
    rounded: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`matmul_reduce_scatter`, what `residual` is with it, ``ops.square_sum(…, dtype)`` of that, and ``ops.rms_norm`` of both.

    Args:
        n, eps, dtype, rounded, out: of the norm; `autopar.kernels.normed_scatter.norms` says which dtypes there are.
    """
    group = collectives.group_of(axis)
    settings = equation, dim, group.size, group.name, group.coordinate, num_chunks, n, eps, dtype, rounded, out
    return norm_bound(a, b, residual, weight, *settings)


def gather_bound(
    a: Tensor,
    b: Tensor,
    equation: str,
    operand: int,
    dim: int,
    size: int,
    name: str,
    coordinate: int,
    num_chunks: int,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """As `all_gather_matmul`, in a process group."""
    group = collectives.AxisGroup(name, size, coordinate)
    return all_gather_dot(equation, (a, b), operand, dim, group, num_chunks, ops.dot, bias=None if any(starts) else bias)


def scatter_bound(
    a: Tensor,
    b: Tensor,
    addend: Tensor | None,
    equation: str,
    dim: int,
    size: int,
    name: str,
    coordinate: int,
    num_chunks: int,
    bias: Tensor | None = None,
    starts: Sequence[int] = (),
) -> Tensor:
    """As `matmul_reduce_scatter`, in a process group."""
    group = collectives.AxisGroup(name, size, coordinate)
    return dot_reduce_scatter(equation, (a, b), dim, group, num_chunks, ops.dot, addend, None if any(starts) else bias)


def norm_bound(
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
    n: int,
    eps: float,
    dtype: torch.dtype,
    rounded: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `matmul_reduce_add_rmsnorm`, in a process group."""
    group, norm = collectives.AxisGroup(name, size, coordinate), (n, eps, dtype, rounded, out)
    return dot_reduce_add_rmsnorm(equation, (a, b), residual, weight, dim, group, num_chunks, *norm, ops.dot)


KERNELS: Mapping[Callable[..., Any], Kind] = {
    all_gather_matmul: "all_gather",
    matmul_reduce_scatter: "reduce_scatter",
    matmul_reduce_add_rmsnorm: "reduce_scatter",
}
"""What a plan's kernels are emitted as, and the collective that each does."""

BOUND: Mapping[Callable[..., Any], tuple[Callable[..., Any], int]] = {
    all_gather_matmul: (gather_bound, 5),
    matmul_reduce_scatter: (scatter_bound, 5),
    matmul_reduce_add_rmsnorm: (norm_bound, 6),
}
"""Each in a process group, and which of its own arguments is the axis."""
