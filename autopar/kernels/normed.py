"""A kernel that sums partial results of peers, adds a residual and computes an RMS norm, in one
pass.

`reduce_add_rmsnorm` takes the partial results as tensors: those of virtual ranks in one process, or
views of shared memory. `dot_reduce_add_rmsnorm` also computes the product and the reduce-scatter.
The formulas, their dtypes and the order of all sums are at the top of
``autopar_csrc/reduce_add_rmsnorm.cu``. `reference_forward` and `reference_backward` compute the
same in torch; on the CPU, their results are bitwise equal. The last dim is the row; all other dims
are batch dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar import ops
from autopar.core.layout import part_range
from autopar.errors import KernelError
from autopar.kernels import bound_ops, library
from autopar.kernels.chunked import Scatter, Shards, check_chunked, result_shape, scatter, terms_of
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.overlapped import ChunkedDim, prepare_scatter, scattered_gradients
from autopar.kernels.packing import ordered_sum
from autopar.kernels.peers import APART, counts_memory, peers_of, runs_kernels, say_once
from autopar.ops.norms import RmsNorm

BAND = 64  # number of rows whose terms of the weight gradient are summed together
FLOATS = library.FLOATS


def reduce_add_rmsnorm(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``y = residual + Σ parts``, summed in the order of `parts`, ``squares = Σ y²`` of
    each row, and ``normed = y · rstd · weight``.

    Args:
        parts: one tensor per peer, with the shape and dtype of `residual`.
        residual: a floating-point tensor [..., hidden].
        weight: a tensor [hidden] with the dtype of `residual`.
        eps: the ε of rstd.
        rounded: whether y · rstd is rounded to this dtype before it is multiplied by the weight, as
            in some models.

    Returns:
        y [..., hidden]; squares [...] in fp32, or in fp64 for fp64 operands, without a gradient;
        normed [..., hidden].

    Raises:
        KernelError: if shapes or dtypes differ.
    """
    return forward_op(list(parts), residual, weight, eps, rounded)


def reference_forward(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `reduce_add_rmsnorm` in torch.

    Args:
        parts, residual, weight, eps, rounded: see `reduce_add_rmsnorm`.
    """
    wide = library.wide(residual.dtype)
    total = torch.zeros_like(residual, dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    y = (residual.to(wide) + total).to(residual.dtype)
    values = y.to(wide)
    squares = ordered_sum(values * values)
    scaled = values * _rstd(squares, y.shape[-1], eps)
    if rounded:
        scaled = scaled.to(y.dtype).to(wide)
    return y, squares, (scaled * weight.to(wide)).to(y.dtype)


def reference_backward(
    grad_y: Tensor, grad_normed: Tensor, y: Tensor, squares: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the residual and of the weight in torch. The gradient of each part
    equals that of the residual. Rounding is ignored.

    Args:
        grad_y, grad_normed: the gradients of y and normed.
        y, squares: results of forward.
        weight, eps: see `reduce_add_rmsnorm`.
    """
    wide = library.wide(y.dtype)
    hidden = y.shape[-1]
    n, values, scale = grad_normed.to(wide), y.to(wide), _rstd(squares, hidden, eps)
    u = n * weight.to(wide)
    mean = (ordered_sum(u * values) / hidden).unsqueeze(-1)
    grad = grad_y.to(wide) + (u * scale - values * (scale * scale * scale * mean))
    shares = (n * values * scale).reshape(-1, hidden)
    bands = -(-shares.shape[0] // BAND)
    filled = torch.nn.functional.pad(shares, (0, 0, 0, bands * BAND - shares.shape[0])).view(
        bands, BAND, hidden
    )
    in_bands = _one_by_one(filled.transpose(0, 1))
    return grad.to(y.dtype), _one_by_one(in_bands).to(y.dtype)


def _rstd(squares: Tensor, hidden: int, eps: float) -> Tensor:
    """Return rstd [..., 1] for squares [...]."""
    # on the CPU, rsqrt consists of two exactly rounded steps, unlike torch.sqrt
    return torch.rsqrt(squares / hidden + eps).unsqueeze(-1)


def _one_by_one(x: Tensor) -> Tensor:
    """Return the sum over the first dim. The terms are added to zero one after another."""
    total = torch.zeros_like(x[0]) if x.shape[0] else x.new_zeros(x.shape[1:])
    for row in x:
        total = total + row
    return total


@torch.library.custom_op("autopar::reduce_add_rmsnorm", mutates_args=())
def _forward(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    check_normed([*parts, residual], residual, weight)
    if not parts:
        raise KernelError("no peer has a partial sum to add", remedy="pass at least one part")
    if not library.has(residual.device):
        return reference_forward(parts, residual, weight, eps, rounded)
    y = with_room(residual.new_empty(residual.shape))
    norm = AddNorm(residual, weight, eps, rounded).contiguous()
    forward_into(y, [part.contiguous() for part in parts], norm)
    return y


def with_room(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and uninitialized tensors for squares and normed."""
    return y, y.new_empty(y.shape[:-1], dtype=library.wide(y.dtype)), y.new_empty(y.shape)


@dataclass(frozen=True, slots=True)
class AddNorm:
    """A residual to which a sum of parts is added, and the settings of the RMS norm of the result.

    Attributes:
        residual: the residual [..., hidden].
        weight: the weight [hidden] of the norm, with the dtype of the residual.
        eps: the ε of rstd.
        rounded: whether y · rstd is rounded to the residual's dtype before it is multiplied by the
            weight.
    """

    residual: Tensor
    weight: Tensor
    eps: float
    rounded: bool

    def contiguous(self) -> AddNorm:
        """Return a copy with contiguous tensors."""
        return replace(self, residual=self.residual.contiguous(), weight=self.weight.contiguous())


def forward_into(
    made: tuple[Tensor, Tensor, Tensor], parts: Sequence[Tensor], norm: AddNorm
) -> None:
    """Run the kernel, which fills y, squares and normed. All tensors must be contiguous.

    On a GPU, the addresses of the parts are in a tensor whose memory the current stream reuses only
    after the kernel.

    Args:
        made: y, squares and normed.
        parts: see `reduce_add_rmsnorm`.
        norm: the residual and the norm.
    """
    y, squares, normed = made
    table = library.table((part.data_ptr() for part in parts), y.device)
    addresses = (x.data_ptr() for x in (norm.residual, norm.weight, y, normed, squares))
    settings = library.code_of(y.dtype), squares.numel(), y.shape[-1], norm.eps, int(norm.rounded)
    library.launch(
        "ap_reduce_add_rmsnorm_forward",
        y.device,
        table.data_ptr(),
        len(parts),
        *addresses,
        *settings,
    )


@torch.library.custom_op("autopar::reduce_add_rmsnorm_backward", mutates_args=())
def _backward(
    grad_y: Tensor, grad_normed: Tensor, y: Tensor, squares: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    check_normed([grad_y, grad_normed], y, weight)
    if not library.has(y.device):
        return reference_backward(grad_y, grad_normed, y, squares, weight, eps)
    operands = [x.contiguous() for x in (grad_y, grad_normed, y, squares, weight)]
    grad, grad_weight = torch.empty_like(operands[2]), torch.empty_like(operands[4])
    bands = squares.new_empty(-(-squares.numel() // BAND), y.shape[-1])
    addresses = (x.data_ptr() for x in (*operands, grad, grad_weight, bands))
    settings = library.code_of(y.dtype), squares.numel(), y.shape[-1], eps
    library.launch("ap_reduce_add_rmsnorm_backward", y.device, *addresses, *settings)
    return grad, grad_weight


def check_normed(like: Sequence[Tensor], x: Tensor, weight: Tensor) -> None:
    """Check the operands of a norm.

    Args:
        like: tensors that must have the shape, dtype and device of `x`.
        x: a tensor [..., hidden].
        weight: the weight [hidden].

    Raises:
        KernelError: if shapes, dtypes or devices differ.
    """
    if (
        x.dtype not in FLOATS
        or x.dim() == 0
        or x.shape[-1] == 0
        or tuple(weight.shape) != tuple(x.shape[-1:])
    ):
        message = f"a norm of {tuple(x.shape)} {x.dtype} with a weight of {tuple(weight.shape)}"
        raise KernelError(
            message, remedy=("pass floating-point tensors [..., hidden] and a weight [hidden]")
        )
    for other in (*like, weight):
        if other is not weight and other.shape != x.shape:
            raise KernelError(
                f"a part has shape {tuple(other.shape)}, but the residual has shape"
                f" {tuple(x.shape)}",
                remedy="pass parts with the shape of the residual",
            )
        if other.dtype != x.dtype or other.device != x.device:
            message = f"{other.dtype} on {other.device} with {x.dtype} on {x.device}"
            raise KernelError(message, remedy="pass all tensors in one dtype on one device")


@_forward.register_fake
def _(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, rounded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return with_room(residual.new_empty(residual.shape))


@_backward.register_fake
def _(
    grad_y: Tensor, grad_normed: Tensor, y: Tensor, squares: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weight.new_empty(weight.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    parts, _, weight, ctx.eps, _ = inputs
    y, squares, _ = output
    ctx.num_parts = len(parts)
    ctx.save_for_backward(y, squares, weight)
    ctx.mark_non_differentiable(squares)


def _differentiate(ctx: Any, grad_y: Tensor, _: Tensor, grad_normed: Tensor) -> tuple[Any, ...]:
    grad, grad_weight = backward_op(grad_y, grad_normed, *ctx.saved_tensors, ctx.eps)
    return [grad] * ctx.num_parts, grad, grad_weight, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)
forward_op = torch.ops.autopar.reduce_add_rmsnorm.default
backward_op = torch.ops.autopar.reduce_add_rmsnorm_backward.default


# --------------------------------------------------------------------------------------------------
# A product whose partial sums are scattered, added to a residual and normalized, as one op.
#
#     y       = residual + Σ a · b over all ranks: this rank's shard along `dim` of the product,
#               whose rows are not sharded
#     squares = Σ y² of each row
#     normed  = y · rstd · weight, with rstd = 1/√(squares/n + ε)
#
# The chunks of the product are sent as in `autopar.kernels.overlapped.dot_reduce_scatter`. The
# kernel that sums the received parts also adds the residual and normalizes, so the sum is neither
# written nor rounded separately. `matmul_reduce_add_rmsnorm_reference` defines the op, given the
# operands of all ranks.
#
# Memory: that of matmul_reduce_scatter (`autopar.kernels.overlapped`), including the same shared
# memory, and one word per rank. As there, a fake group runs both variants.

Made = tuple[Tensor, Tensor, Tensor]
"""y, squares and normed."""


def dot_reduce_add_rmsnorm(
    equation: str,
    operands: tuple[Tensor, Tensor],
    residual: Tensor,
    weight: Tensor,
    over: ChunkedDim,
    norm: RmsNorm,
) -> Made:
    """Return y, squares and normed for this rank's shard of the sum of all ranks' products.

    If the kernels do not run, separate ops run, each of which rounds its result: `autopar.ops.dot`,
    `bound_ops.reduce_scatter`, the sum with the residual, `autopar.ops.square_sum` and
    `autopar.ops.rms_norm`.

    Args:
        equation, operands, over: see `autopar.kernels.overlapped.dot_reduce_scatter`.
        residual, weight: see `reduce_add_rmsnorm`.
        norm: the settings of the norm, over full rows; `norms` defines the supported dtypes.

    Raises:
        KernelError: if the settings of the norm are not supported.
        ValueError: see `dot_reduce_scatter`.
    """
    dim, group = over.dim, AxisGroup(over.name, over.size, over.coordinate)
    n, eps, dtype, rounded, out = norm
    check_chunked(equation, terms_of(equation)[2][dim], over.num_chunks)
    if n != residual.shape[-1] or not norms(residual.dtype, weight.dtype, dtype, rounded, out):
        message = (
            f"no kernel computes this norm: n={n} of {residual.shape[-1]} elements, residual"
            f" {residual.dtype}, computed in {dtype}, rounded to {rounded}, weight {weight.dtype},"
            f" result {out}"
        )
        raise KernelError(message, remedy="compute the norm separately from the product")
    is_rounded = rounded == residual.dtype
    if group.size > 1 and runs_kernels(group, residual.device):
        return torch.ops.autopar.matmul_reduce_add_rmsnorm(
            *operands, residual, weight, equation, *over, eps, is_rounded
        )
    if group.size > 1 and counts_memory(group):
        _allocate_normed(equation, operands, AddNorm(residual, weight, eps, is_rounded), dim, group)
    y = residual + bound_ops.reduce_scatter(
        ops.dot(equation, *operands), dim, "sum", group.size, group.name, group.coordinate
    )
    squares = ops.square_sum(y, dtype)
    return y, squares, ops.rms_norm(y, squares, weight, *norm)


def norms(
    x: torch.dtype,
    weight: torch.dtype | None,
    dtype: torch.dtype,
    rounded: torch.dtype,
    out: torch.dtype,
) -> bool:
    """Return whether the kernel computes `autopar.ops.rms_norm` with these dtypes.

    It requires a weight with the dtype of `x` and squares in at least fp32. Before the weight, it
    rounds to the dtype of `x` or not at all. The result has the dtype of `x`.

    Args:
        x, weight: the dtypes of the operands; None for no weight.
        dtype, rounded, out: see `autopar.ops.rms_norm`.
    """
    wide = library.wide(x)
    return x in FLOATS and weight == out == x and dtype == wide and rounded in (x, wide)


def matmul_reduce_add_rmsnorm_reference(
    equation: str,
    pairs: Sequence[tuple[Tensor, Tensor]],
    residuals: Sequence[Tensor],
    weights: Sequence[Tensor],
    dim: int,
    eps: float,
    rounded: bool,
) -> list[Made]:
    """Compute the op for all ranks, given the operands of all ranks. This defines the op.

    Args:
        equation: the equation of the product.
        pairs, residuals, weights: the operands of each rank.
        dim, eps, rounded: see `matmul_reduce_add_rmsnorm`.

    Returns:
        For each rank, the result of `reference_forward` for its shards of all ranks' products.
    """
    products = [torch.einsum(equation, a, b) for a, b in pairs]
    results = []
    for rank, (residual, weight) in enumerate(zip(residuals, weights, strict=True)):
        place = part_range(products[0].shape[dim], (len(pairs),), (rank,))
        parts = [product.narrow(dim, *place) for product in products]
        results.append(reference_forward(parts, residual, weight, eps, rounded))
    return results


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
    """Return y, squares and normed of this rank.

    Args:
        a, b, equation, dim, size, name, coordinate, num_chunks: see
            `autopar.kernels.overlapped.matmul_reduce_scatter`.
        residual: a tensor with the shape of this rank's shard, along `dim`, of the result.
        weight, eps, rounded: see `reduce_add_rmsnorm`.
    """
    group, norm = AxisGroup(name, size, coordinate), AddNorm(residual, weight, eps, rounded)
    _check(equation, a, b, norm, dim, group)
    peers, reason = peers_of(group, a.device)
    a, b, norm = a.contiguous(), b.contiguous(), norm.contiguous()
    if size == 1 or peers is None:
        if size > 1:
            say_once(group, APART, reason)
        part = bound_ops.reduce_scatter(
            torch.einsum(equation, a, b), dim, "sum", size, name, coordinate
        )
        return forward_op([part], norm.residual, norm.weight, eps, rounded)
    job, shape, results = prepare_norm(equation, (a, b), norm, dim, group)
    scatter(peers, Shards.of(shape, dim, a.dtype, size, num_chunks), dim, {coordinate: job})
    return results


def prepare_norm(
    equation: str, operands: tuple[Tensor, Tensor], norm: AddNorm, dim: int, group: AxisGroup
) -> tuple[Scatter, list[int], Made]:
    """Prepare the job of a rank in matmul_reduce_add_rmsnorm. All tensors must be contiguous.

    Args:
        equation, dim: see `matmul_reduce_add_rmsnorm`.
        operands: the factors.
        norm: the residual and the norm of the rank.
        group: this rank's process group.

    Returns:
        The job, the shape of the full product, and the tensors that the job fills.
    """
    job, shape = prepare_scatter(equation, operands, None, dim, group)
    results = with_room(job.out)
    return replace(job, add_up=lambda parts: forward_into(results, parts, norm)), shape, results


def _allocate_normed(
    equation: str, operands: tuple[Tensor, Tensor], norm: AddNorm, dim: int, group: AxisGroup
) -> None:
    """Allocate the memory of a rank in matmul_reduce_add_rmsnorm, except for shared memory. Of all
    chunks, the rows of the rank need the most memory."""
    a, b = operands[0].contiguous(), operands[1].contiguous()
    job, shape, _made = prepare_norm(equation, (a, b), norm.contiguous(), dim, group)
    job.produce(*part_range(shape[dim], (group.size,), (group.coordinate,)), job.out)
    _table = a.new_empty(group.size, dtype=torch.int64)  # the addresses of the parts


def _check(equation: str, a: Tensor, b: Tensor, norm: AddNorm, dim: int, group: AxisGroup) -> None:
    """Raise KernelError if rows are sharded, or the shape or dtype of the residual differs from the
    rank's shard of the product."""
    part, residual = result_shape(equation, a, b), norm.residual
    if not 0 <= dim < len(part) - 1:
        raise KernelError(
            f"{equation!r}, split along dim {dim}, has no full rows",
            remedy="scatter along a dim before the last",
        )
    part[dim] = part_range(part[dim], (group.size,), (group.coordinate,))[1]
    if list(residual.shape) != part or not a.dtype == b.dtype == residual.dtype:
        message = (
            f"a residual {tuple(residual.shape)} {residual.dtype} does not match a shard"
            f" {tuple(part)} of a product of {a.dtype} and {b.dtype}"
        )
        raise KernelError(
            message,
            remedy="pass a residual with the shape and dtype of the rank's shard of the product",
        )
    check_normed([], residual, norm.weight)


@matmul_reduce_add_rmsnorm.register_fake
def _(a: Tensor, b: Tensor, residual: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return with_room(residual.new_empty(residual.shape))


def _remember_scatter(ctx: Any, inputs: tuple[Any, ...], output: Made) -> None:
    a, b, _, weight, *ctx.settings, ctx.eps, _ = inputs
    y, squares, _ = output
    ctx.save_for_backward(a, b, weight, y, squares)
    ctx.mark_non_differentiable(squares)


def _differentiate_scatter(
    ctx: Any, grad_y: Tensor, _: Tensor, grad_normed: Tensor
) -> tuple[Tensor | None, ...]:
    """Compute the gradients. That of y is the gradient of the residual and of the product's
    shard."""
    a, b, weight, y, squares = ctx.saved_tensors
    grad, grad_weight = backward_op(grad_y, grad_normed, y, squares, weight, ctx.eps)
    d_operands, _ = scattered_gradients(grad, (a, b), ctx.settings, ctx.needs_input_grad)
    return *d_operands, grad, grad_weight, *(None,) * 8


matmul_reduce_add_rmsnorm.register_autograd(_differentiate_scatter, setup_context=_remember_scatter)
