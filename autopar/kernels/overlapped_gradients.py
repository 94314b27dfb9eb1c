"""The gradients of the overlapped products (`autopar.kernels.overlapped`): each op's is the other op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels.equations import in_order, result_shape, terms_of


def keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What all_gather_matmul's gradient needs: the other operand and the gathered one."""
    _, other, *ctx.settings, bias = inputs
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(other, output[0])


def all_gather_matmul_backward(ctx: Any, d_whole: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """dx = reduce_scatter(dy · other + d_whole), d_other = gathered · dy, d_bias = Σ dy."""
    other, whole = ctx.saved_tensors
    equation, which, dim, _, size, name, coordinate, num_chunks = ctx.settings
    terms = terms_of(equation)
    mine, theirs, result = terms[which], terms[1 - which], terms[2]
    if dy is None:
        dy = whole.new_zeros(result_shape(equation, *in_order(which, whole, other)))
    dx = d_other = None
    if ctx.needs_input_grad[0]:
        settings = f"{result},{theirs}->{mine}", dim, size, name, coordinate, num_chunks
        dx = torch.ops.autopar.matmul_reduce_scatter(dy, other, d_whole, *settings)
    if ctx.needs_input_grad[1]:
        d_other = torch.einsum(f"{mine},{result}->{theirs}", whole, dy)
    return dx, d_other, *(None,) * 8, _bias_gradient(ctx, dy)


def _bias_gradient(ctx: Any, dy: Tensor) -> Tensor | None:
    """The sum of a product's gradient over all dims that a bias lacks."""
    return dy.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[-1] else None


def keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What matmul_reduce_scatter's gradient needs: both operands."""
    a, b, _, *ctx.settings, bias = inputs
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(a, b)


def matmul_reduce_scatter_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """d_addend = the gathered gradient, of which d_bias is the sum."""
    d_operands, g = scattered_gradients(dy, ctx.saved_tensors, ctx.settings, ctx.needs_input_grad)
    return *d_operands, g if ctx.needs_input_grad[2] else None, *(None,) * 6, _bias_gradient(ctx, g)


def scattered_gradients(
    dy: Tensor, operands: tuple[Tensor, Tensor], settings: Sequence[Any], needed: Sequence[bool]
) -> tuple[tuple[Tensor | None, Tensor | None], Tensor]:
    """Gradients of a scattered product's operands, where they are needed, and the gathered gradient g of the product.

    Of the operand that has the sharded letter it is g · the other one, as g comes.

    Args:
        dy: of this rank's part. settings: equation, dim, size, name, coordinate and num_chunks of the product. needed: of both operands.
    """
    equation, dim, size, name, coordinate, num_chunks = settings
    terms = terms_of(equation)
    first = 0 if terms[2][dim] in terms[0] else 1  # the operand whose gradient can be taken in chunks
    mine, theirs, result = terms[first], terms[1 - first], terms[2]
    length = operands[first].shape[mine.index(result[dim])]
    gathered = f"{result},{theirs}->{mine}", 0, dim, length, size, name, coordinate, num_chunks
    g, d_mine = torch.ops.autopar.all_gather_matmul(dy, operands[1 - first], *gathered)
    d_theirs = torch.einsum(f"{mine},{result}->{theirs}", operands[first], g) if needed[1 - first] else None
    return in_order(first, d_mine, d_theirs), g
