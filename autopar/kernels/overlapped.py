"""Products that overlap with their communication, chunk by chunk: all_gather + product, and product
+ reduce_scatter.

An equation defines the product of two tensors in einsum notation, ``"bsk,nk->bsn"``: each letter is
in two of the three terms, or in all of them. One letter, that of dim `dim`, is sharded over the
ranks of a group (`autopar.core.layout.part_range`; the last shard may be shorter). It is in the
result, so that the product can be computed in chunks along it:

    all_gather_matmul      gathers operand `which`, of which each rank passes a shard, and returns
                           the gathered operand and the full product on every rank
    matmul_reduce_scatter  sums the products of all ranks, and returns this rank's shard of the sum
                           along `dim` of the result

The reference functions at the end of this file define the ops. The gradient of each op is the other
op. A product may have a bias, as in `autopar.ops.dot`. For partial sums, only one rank passes a
bias.

`all_gather_dot` and `dot_reduce_scatter` run the op, with kernels of `autopar_csrc`, if the ranks
of the group can access each other's memory (`autopar.kernels.peers`). Otherwise they run the
collective and the product one after the other, which is logged once.

Memory in addition to operands and results:
    all_gather_matmul      twice the largest shard, in shared memory
    matmul_reduce_scatter  the full product of this rank, until the end, and twice as much in shared
                           memory
    both                   a copy of one chunk's operand and product, if the sharded dim is not
                           leading or the equation is not a plain matrix product
                           (`autopar.kernels.chunked`)
Shared memory is kept for the next use of the same shapes, so the layers of a model share it. In a
fake group, in which a run on fake tensors counts memory, both variants run, so that the larger one
counts: the kernel without shared memory, and the separate ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.core.layout import part_range
from autopar.kernels import bound_ops
from autopar.kernels.chunked import (
    REDUCIBLE,
    Gather,
    Scatter,
    Shards,
    check_chunked,
    cut_bias,
    cut_rows,
    gather,
    in_order,
    multiply,
    multiply_into,
    result_shape,
    scatter,
    terms_of,
)
from autopar.kernels.collectives import AxisGroup, sum_dtype
from autopar.kernels.peers import APART, counts_memory, peers_of, runs_kernels, say_once
from autopar.ops.products import dot

# --------------------------------------------------------------------------------------------------
# Gradients. The gradient of each op is the other op.


def keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the tensors for the gradient of all_gather_matmul: the other operand and the gathered
    one.

    Args:
        ctx, inputs, output: see `torch.library.register_autograd`.
    """
    _, other, *ctx.settings, bias = inputs
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(other, output[0])


def all_gather_matmul_backward(
    ctx: Any, d_whole: Tensor | None, dy: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Compute dx = reduce_scatter(dy · other + d_whole), d_other = gathered · dy, d_bias = Σ dy.

    Args:
        ctx: the context with the tensors that `keep_gathered` saved.
        d_whole, dy: the gradients of the gathered operand and the product.
    """
    other, gathered = ctx.saved_tensors
    equation, place, dim, _, size, name, coordinate, num_chunks = ctx.settings
    terms = terms_of(equation)
    mine, theirs, result = terms[place], terms[1 - place], terms[2]
    if dy is None:
        dy = gathered.new_zeros(result_shape(equation, *in_order(place, gathered, other)))
    dx = d_other = None
    if ctx.needs_input_grad[0]:
        settings = f"{result},{theirs}->{mine}", dim, size, name, coordinate, num_chunks
        dx = torch.ops.autopar.matmul_reduce_scatter(dy, other, d_whole, *settings)
    if ctx.needs_input_grad[1]:
        d_other = torch.einsum(f"{mine},{result}->{theirs}", gathered, dy)
    return dx, d_other, *(None,) * 8, _bias_gradient(ctx, dy)


def _bias_gradient(ctx: Any, dy: Tensor) -> Tensor | None:
    """Return the sum of a product's gradient over all dims that the bias does not have."""
    return dy.sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[-1] else None


def keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the tensors for the gradient of matmul_reduce_scatter: both operands.

    Args:
        ctx, inputs, output: see `torch.library.register_autograd`.
    """
    a, b, _, *ctx.settings, bias = inputs
    ctx.bias_shape = None if bias is None else bias.shape
    ctx.save_for_backward(a, b)


def matmul_reduce_scatter_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of operands, addend and bias. The gradient of the addend is the
    gathered gradient."""
    d_operands, g = scattered_gradients(dy, ctx.saved_tensors, ctx.settings, ctx.needs_input_grad)
    return *d_operands, g if ctx.needs_input_grad[2] else None, *(None,) * 6, _bias_gradient(ctx, g)


def scattered_gradients(
    dy: Tensor, operands: tuple[Tensor, Tensor], settings: Sequence[Any], needed: Sequence[bool]
) -> tuple[tuple[Tensor | None, Tensor | None], Tensor]:
    """Return the gradients of a scattered product's operands, and the gathered gradient g of the
    product.

    The gradient of the operand that has the sharded letter is computed from chunks of g as they
    arrive.

    Args:
        dy: the gradient of this rank's shard.
        operands: the operands of the product.
        settings: equation, dim, size, name, coordinate and num_chunks of the product.
        needed: whether each operand needs its gradient.
    """
    equation, dim, size, name, coordinate, num_chunks = settings
    terms = terms_of(equation)
    # the operand whose gradient can be computed in chunks
    first = 0 if terms[2][dim] in terms[0] else 1
    mine, theirs, result = terms[first], terms[1 - first], terms[2]
    length = operands[first].shape[mine.index(result[dim])]
    gathered = f"{result},{theirs}->{mine}", 0, dim, length, size, name, coordinate, num_chunks
    g, d_mine = torch.ops.autopar.all_gather_matmul(dy, operands[1 - first], *gathered)
    d_theirs = (
        torch.einsum(f"{mine},{result}->{theirs}", operands[first], g)
        if needed[1 - first]
        else None
    )
    return in_order(first, d_mine, d_theirs), g


class ChunkedDim(NamedTuple):
    """A dim that is sharded over the ranks of a group and sent in chunks. Nodes of graphs may have
    it as an argument.

    Attributes:
        dim: the dim of the gathered operand, or of the scattered result.
        size, name, coordinate: this rank's process group, as in `AxisGroup`.
        num_chunks: the number of chunks of each shard, which are sent and multiplied one by one.
    """

    dim: int
    size: int
    name: str
    coordinate: int
    num_chunks: int

    @staticmethod
    def of(dim: int, group: AxisGroup, num_chunks: int) -> ChunkedDim:
        """Return a dim that is sharded over the ranks of a group.

        Args:
            dim, num_chunks: see `ChunkedDim`.
            group: this rank's process group.
        """
        return ChunkedDim(dim, group.size, group.name, group.coordinate, num_chunks)


def all_gather_dot(
    equation: str,
    operands: tuple[Tensor, Tensor],
    which: int,
    over: ChunkedDim,
    length: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather operand `which` along a dim, and multiply it by the other operand.

    If the kernels do not run, `autopar.ops.dot` computes the product.

    Args:
        equation: the equation of the product.
        operands: the operands. Operand `which` is this rank's shard.
        which: the operand that is gathered.
        over: the dim of this operand that is gathered.
        length: the full length of the dim if it is sharded unevenly.
        bias: the bias of the product, or None.

    Returns:
        The gathered operand and the product.

    Raises:
        ValueError: if the letter of the dim is not in the result, or the number of chunks is less
            than 1.
    """
    dim, group = over.dim, AxisGroup(over.name, over.size, over.coordinate)
    check_chunked(equation, terms_of(equation)[which][dim], over.num_chunks)
    shard, other = operands[which], operands[1 - which]
    if group.size == 1:
        return shard, dot(equation, *operands, bias)
    if not runs_kernels(group, shard.device):
        if counts_memory(group):
            _allocate_gather(equation, operands, which, dim, group, length, bias)
        gathered = bound_ops.all_gather(shard, dim, group.size, group.name, length)
        return gathered, dot(equation, *in_order(which, gathered, other), bias)
    whole_length = shard.shape[dim] * group.size if length is None else length
    settings = (
        equation,
        which,
        dim,
        whole_length,
        group.size,
        group.name,
        group.coordinate,
        over.num_chunks,
    )
    return torch.ops.autopar.all_gather_matmul(shard, other, *settings, bias)


def dot_reduce_scatter(
    equation: str,
    operands: tuple[Tensor, Tensor],
    over: ChunkedDim,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return this rank's shard, along a dim of the result, of the sum of all ranks' products.

    The kernels sum in rank order and in at least fp32. If they do not run, the process group
    computes the sum.

    Args:
        equation, operands: see `all_gather_dot`.
        over: the dim of the result that is scattered.
        addend: a tensor that is added to this rank's product, or None.
        bias: the bias of this rank's product, or None.

    Raises:
        ValueError: see `all_gather_dot`.
    """
    dim, group = over.dim, AxisGroup(over.name, over.size, over.coordinate)
    check_chunked(equation, terms_of(equation)[2][dim], over.num_chunks)
    if group.size > 1 and runs_kernels(group, operands[0].device):
        return torch.ops.autopar.matmul_reduce_scatter(*operands, addend, equation, *over, bias)
    if group.size > 1 and counts_memory(group) and operands[0].dtype in REDUCIBLE:
        _allocate_scatter(equation, operands, addend, dim, group, bias)
    product = dot(equation, *operands, bias)
    if addend is not None:
        product = addend + product
    return (
        product
        if group.size == 1
        else bound_ops.reduce_scatter(product, dim, "sum", group.size, group.name, group.coordinate)
    )


# --- all_gather_matmul
# --------------------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: Tensor,
    other: Tensor,
    equation: str,
    which: int,
    dim: int,
    length: int,
    size: int,
    name: str,
    coordinate: int,
    num_chunks: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gathered operand and the product.

    Args:
        x: this rank's shard of operand `which`.
        other: the other operand.
        equation: the equation of the product.
        which, dim: the operand that is gathered, and its dim.
        length: the full length of `dim`.
        size, name, coordinate: the process group.
        num_chunks: the number of chunks of each shard.
        bias: the bias of the product, or None.
    """
    group = AxisGroup(name, size, coordinate)
    peers, reason = peers_of(group, x.device)
    x, other = x.contiguous(), other.contiguous()
    shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
    if size == 1 or peers is None:
        if size > 1:
            say_once(group, APART, reason)
        gathered = x.clone() if size == 1 else bound_ops.all_gather(x, dim, size, name, length)
        return gathered, multiply(equation, *in_order(which, gathered, other), bias).contiguous()
    job, y = prepare_gather(equation, x, other, which, dim, shape, bias)
    gather(peers, Shards.of(shape, dim, x.dtype, size, num_chunks), {coordinate: job})
    return job.gathered, y


def prepare_gather(
    equation: str,
    shard: Tensor,
    other: Tensor,
    which: int,
    dim: int,
    shape: Sequence[int],
    bias: Tensor | None = None,
) -> tuple[Gather, Tensor]:
    """Prepare the job of a rank in all_gather_matmul.

    Args:
        equation, other, which, dim, bias: see `all_gather_matmul`.
        shard: this rank's shard.
        shape: the shape of the gathered operand.

    Returns:
        The job, and the tensor that it fills with the product.
    """
    gathered = shard.new_empty(shape)
    y = shard.new_empty(result_shape(equation, *in_order(which, gathered, other)))
    terms = terms_of(equation)
    letter = terms[which][dim]

    def consume(begin: int, rows: int) -> None:
        """Multiply these rows."""
        left_rows, right, out = cut_rows(
            terms, (*in_order(which, gathered, other), y), letter, begin, rows
        )
        multiply_into(
            equation, left_rows, right, out, cut_bias(bias, equation, letter, begin, rows)
        )

    return Gather(shard, gathered, consume), y


def _allocate_gather(
    equation: str,
    operands: tuple[Tensor, Tensor],
    which: int,
    dim: int,
    group: AxisGroup,
    length: int | None,
    bias: Tensor | None = None,
) -> None:
    """Allocate the memory of a rank in all_gather_matmul, except for shared memory. Of all chunks,
    the rows of the rank, which are multiplied at once, need the most memory."""
    shard, other = operands[which].contiguous(), operands[1 - which].contiguous()
    length = shard.shape[dim] * group.size if length is None else length
    shape = [*shard.shape[:dim], length, *shard.shape[dim + 1 :]]
    job, _product = prepare_gather(equation, shard, other, which, dim, shape, bias)
    job.consume(*part_range(length, (group.size,), (group.coordinate,)))


# --- matmul_reduce_scatter
# --------------------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::matmul_reduce_scatter", mutates_args=())
def matmul_reduce_scatter(
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
) -> Tensor:
    """Return this rank's shard, along `dim`, of the sum of all ranks' products.

    Args:
        a, b: the factors.
        addend: a tensor that is added to this rank's product, or None.
        equation: the equation of the product.
        dim: the dim of the result that is scattered.
        size, name, coordinate: the process group.
        num_chunks: the number of chunks of each shard.
        bias: the bias of the product, or None.
    """
    group = AxisGroup(name, size, coordinate)
    peers, reason = peers_of(group, a.device)
    if peers is not None and a.dtype not in REDUCIBLE:
        peers, reason = None, f"the kernels do not sum {a.dtype}"
    a, b = a.contiguous(), b.contiguous()
    if size == 1 or peers is None:
        if size > 1:
            say_once(group, APART, reason)
        product = multiply(equation, a, b, bias)
        product = product if addend is None else product + addend
        return (
            product.contiguous()
            if size == 1
            else bound_ops.reduce_scatter(product, dim, "sum", size, name, coordinate)
        )
    job, shape = prepare_scatter(equation, (a, b), addend, dim, group, bias)
    scatter(peers, Shards.of(shape, dim, a.dtype, size, num_chunks), dim, {coordinate: job})
    return job.out


def prepare_scatter(
    equation: str,
    operands: tuple[Tensor, Tensor],
    addend: Tensor | None,
    dim: int,
    group: AxisGroup,
    bias: Tensor | None = None,
) -> tuple[Scatter, list[int]]:
    """Prepare the job of a rank in matmul_reduce_scatter.

    Args:
        equation, addend, dim, bias: see `matmul_reduce_scatter`.
        operands: the factors.
        group: this rank's process group.

    Returns:
        The job, and the shape of the full product.
    """
    a, b = operands
    shape = result_shape(equation, a, b)
    terms = terms_of(equation)
    letter = terms[2][dim]

    def produce(begin: int, rows: int, out: Tensor) -> None:
        """Multiply rows, and add their addend.

        Args:
            begin, rows: the first row and the number of rows.
            out: the tensor that is filled with their partial product.
        """
        left_rows, right = cut_rows(terms[:2], (a, b), letter, begin, rows)
        multiply_into(
            equation, left_rows, right, out, cut_bias(bias, equation, letter, begin, rows)
        )
        if addend is not None:
            out.add_(addend.narrow(dim, begin, rows))

    own_length = part_range(shape[dim], (group.size,), (group.coordinate,))[1]
    return (
        Scatter(
            a.new_empty(shape), a.new_empty([*shape[:dim], own_length, *shape[dim + 1 :]]), produce
        ),
        shape,
    )


def _allocate_scatter(
    equation: str,
    operands: tuple[Tensor, Tensor],
    addend: Tensor | None,
    dim: int,
    group: AxisGroup,
    bias: Tensor | None = None,
) -> None:
    """Allocate the memory of a rank in matmul_reduce_scatter, like `_allocate_gather`. The
    product of the rank's rows is in shared memory."""
    factors = operands[0].contiguous(), operands[1].contiguous()
    job, shape = prepare_scatter(equation, factors, addend, dim, group, bias)
    job.produce(*part_range(shape[dim], (group.size,), (group.coordinate,)), job.out)


# --- fake implementations and gradients
# --------------------------------------------------------------------------------------------------


@all_gather_matmul.register_fake
def _(
    x: Tensor, other: Tensor, equation: str, which: int, dim: int, length: int, *_: Any
) -> tuple[Tensor, Tensor]:
    gathered = x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])
    return gathered, x.new_empty(result_shape(equation, *in_order(which, gathered, other)))


@matmul_reduce_scatter.register_fake
def _(
    a: Tensor, b: Tensor, addend: Tensor | None, equation: str, dim: int, *settings: Any
) -> Tensor:
    size, _name, coordinate, *_ = settings
    shape = result_shape(equation, a, b)
    shape[dim] = part_range(shape[dim], (size,), (coordinate,))[1]
    return a.new_empty(shape)


all_gather_matmul.register_autograd(all_gather_matmul_backward, setup_context=keep_gathered)
matmul_reduce_scatter.register_autograd(matmul_reduce_scatter_backward, setup_context=keep_operands)


# --------------------------------------------------------------------------------------------------
# The definitions of the ops, given the operands of all ranks.


def all_gather_matmul_reference(
    equation: str,
    shards: Sequence[Tensor],
    others: Sequence[Tensor],
    which: int,
    dim: int,
    biases: Sequence[Tensor | None] = (),
) -> list[tuple[Tensor, Tensor]]:
    """Compute all_gather_matmul for all ranks, given the operands of all ranks.

    Args:
        equation: the equation of the product.
        shards, others, biases: the operands and bias of each rank.
        which, dim: the operand that is gathered, and its dim.

    Returns:
        The gathered operand and the product of each rank.
    """
    gathered = torch.cat(list(shards), dim)
    pairs = zip(others, biases or [None] * len(others), strict=True)
    return [
        (gathered, multiply(equation, *in_order(which, gathered, other), bias))
        for other, bias in pairs
    ]


def matmul_reduce_scatter_reference(
    equation: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    dim: int,
    addends: Sequence[Tensor] | None = None,
    biases: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Compute matmul_reduce_scatter for all ranks, given the operands of all ranks.

    The products are summed one by one in rank order, in at least fp32, and cast back.

    Args:
        equation: the equation of the product.
        pairs, biases: the operands and bias of each rank.
        dim: the dim of the result that is scattered.
        addends: the addend of each rank, in the dtype of the products.

    Returns:
        The shard of the sum, along `dim`, of each rank.
    """
    parts = [
        multiply(equation, a, b, bias)
        for (a, b), bias in zip(pairs, biases or [None] * len(pairs), strict=True)
    ]
    if addends is not None:
        parts = [part + addend for part, addend in zip(parts, addends, strict=True)]
    return [
        _in_order_of_ranks(
            [
                part.narrow(dim, *part_range(part.shape[dim], (len(parts),), (rank,)))
                for part in parts
            ]
        )
        for rank in range(len(parts))
    ]


def _in_order_of_ranks(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the tensors in their dtype, computed one by one in at least fp32."""
    dtype = sum_dtype(parts[0].dtype)
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total.to(parts[0].dtype).contiguous()
