"""Root-mean-square norms and batch normalization as several functions, whose sums may be partial.

The root-mean-square norm over the last dim, of size n, and its gradients, given the gradient g of
y, are (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation
4)

    rstd = 1/√(Σ x²/n + ε)        y = x · rstd · weight
    c    = Σ (g · weight) · x     d_x = g · weight · rstd − x · rstd³ · c/n
                                  d_weight = Σ_rows g · x · rstd

As elementwise ops, as in most models, the norm and its gradient take twenty passes over memory. A
capture replaces a norm that it matches (`autopar.capture.formulas`) by `normed`, a differentiable
op of torch. In normal form, `normed` is split into several functions, so that rows and the
normalized dim can be sharded.

Rounding. Models compute squares in some dtype (`dtype`). They may round the normalized values
before the weight is applied (`rounded`), and the result (`out`). `rms_norm` rounds at the same
points. Sums and gradients are computed in at least float32 and rounded once.

Shapes: x, gradients and results are ``[..., n]``, or the same part of each row; squares and
products are ``[...]``; the weight is ``[n]``. Each function consists of a few calls of ATen on
blocks of rows; `autopar.analysis.fusable` counts their reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.ops.blocks import row_blocks, wide_dtype


class RmsNorm(NamedTuple):
    """The settings of `rms_norm`, in the order of its arguments.

    Attributes:
        n: number of elements of a full row.
        eps: ε.
        dtype: dtype in which the model computes squares.
        rounded: dtype to which the model rounds before the weight is applied.
        out: dtype of the result.
    """

    n: int
    eps: float
    dtype: torch.dtype
    rounded: torch.dtype
    out: torch.dtype


def square_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Σ x² of each row; for parts of a row, the results are partial sums.

    Args:
        x: the rows, ``[..., n]``.
        dtype: dtype in which the model computes squares.

    Returns:
        The sums, ``[...]``, in at least float32.
    """
    wide = wide_dtype(dtype)
    return torch.linalg.vector_norm(_in(wide, x), dim=-1, dtype=wide).square_()


def rms_norm(
    x: Tensor,
    squares: Tensor,
    weight: Tensor | None,
    n: int,
    eps: float,
    dtype: torch.dtype,
    rounded: torch.dtype,
    out: torch.dtype,
) -> Tensor:
    """Return ``x · rstd · weight``.

    Args:
        x: the rows, ``[..., n]``, or the same part of each row.
        squares: `square_sum` of the full rows, ``[...]``.
        weight: the weight, ``[n]``, or the same part of it; None for ones.
        n: number of elements of a full row.
        eps: ε.
        dtype: dtype in which the model computes squares.
        rounded: dtype to which the model rounds before the weight is applied.
        out: dtype of the result.
    """

    def scale_rows(x: Tensor, scale: Tensor) -> Tensor:
        """Multiply rows ``[r, n]`` by `scale` ``[r, 1]``, then apply the weight."""
        normed = _in(scale.dtype, x).mul(scale).to(rounded)
        return (normed if weight is None else normed * weight).to(out)

    return _by_rows(scale_rows, out, x, _rstd(squares, n, eps))


def rms_product(grad: Tensor, x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return Σ (grad · weight) · x of each row; for parts of a row, the results are partial sums.

    Args:
        grad: gradient of the result of `rms_norm`, ``[..., n]``.
        x: the rows, ``[..., n]``.
        weight: the weight, ``[n]``; None for ones.
        dtype: dtype in which the model computes squares.

    Returns:
        The sums, ``[...]``, in at least float32.
    """
    gradients, rows, wide, parts = _flat(grad), _flat(x), wide_dtype(dtype), []
    for here in row_blocks(x):
        products = _product(gradients[here], rows[here], wide)
        parts.append((products if weight is None else products.mul_(weight)).sum(-1))
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).view(x.shape[:-1])


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    squares: Tensor,
    product: Tensor,
    weight: Tensor | None,
    n: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of `x` of `rms_norm`.

    Args:
        grad: gradient of the result, ``[..., n]``, or the same part of each row.
        x: as for `rms_norm`.
        squares: as for `rms_norm`.
        product: `rms_product` of the full rows, ``[...]``.
        weight: as for `rms_norm`.
        n: as for `rms_norm`.
        eps: as for `rms_norm`.
        dtype: as for `rms_norm`.
    """
    scale = _rstd(squares, n, eps)

    def differentiate_rows(grad: Tensor, x: Tensor, scale: Tensor, slope: Tensor) -> Tensor:
        """Return grad · weight · scale + x · slope of rows ``[r, n]``, with scale and slope ``[r,
        1]``."""
        total = _in(scale.dtype, grad).mul(scale)
        total = total if weight is None else total.mul_(weight)
        return total.addcmul_(_in(scale.dtype, x), slope).to(x.dtype)

    slope = scale.pow(3).mul_(product).div_(-n)
    return _by_rows(differentiate_rows, x.dtype, grad, x, scale, slope)


def rms_weight_gradient(
    grad: Tensor, x: Tensor, squares: Tensor, n: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return the gradient ``[n]`` of the weight of `rms_norm`, in at least float32; for a part of
    the rows, the result is a partial sum.

    Args:
        grad: gradient of the result, ``[..., n]``.
        x: as for `rms_norm`.
        squares: as for `rms_norm`.
        n: as for `rms_norm`.
        eps: as for `rms_norm`.
        dtype: as for `rms_norm`.
    """
    gradients, rows, scale = _flat(grad), _flat(x), _rstd(squares, n, eps).reshape(-1, 1)
    parts = [
        _product(gradients[here], rows[here], scale.dtype).mul_(scale[here]).sum(0)
        for here in row_blocks(x)
    ]
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total


def _by_rows(
    function: Callable[..., Tensor], dtype: torch.dtype, x: Tensor, *others: Tensor
) -> Tensor:
    """Apply a function to blocks of rows.

    Args:
        function: the function of `x` and `others`.
        dtype: dtype of the result.
        x: the rows, ``[..., n]``.
        others: tensors with the shape of `x`, or with one element per row, ``[...]``.
    """
    blocks = row_blocks(x)
    operands = [x, *(each if each.dim() == x.dim() else each.unsqueeze(-1) for each in others)]
    if len(blocks) == 1:
        return function(*operands).contiguous()  # as the fake result of `normed`
    result, flat = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format),
        [_flat(each) for each in operands],
    )
    rows = _flat(result)
    for here in blocks:
        rows[here] = function(*(each[here] for each in flat))
    return result


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _rstd(squares: Tensor, n: int, eps: float) -> Tensor:
    return squares.div(n).add_(eps).rsqrt_()


def _in(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return `x` if an op of `x` and a tensor of `dtype` computes in `dtype`, else `x` cast to
    `dtype`."""
    return x if torch.promote_types(x.dtype, dtype) == dtype else x.to(dtype)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a · b as a new tensor, computed in `dtype`."""
    return a * b.to(dtype) if a.dtype == dtype else a.to(dtype).mul_(b)


@torch.library.custom_op("autopar::rms_norm", mutates_args=())
def _norm_whole(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    rounded: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of full rows, and their `square_sum`."""
    squares = square_sum(x, dtype)
    return rms_norm(x, squares, weight, x.shape[-1], eps, dtype, rounded, out), squares


@torch.library.custom_op("autopar::rms_norm_backward", mutates_args=())
def _normed_backward(
    grad: Tensor, x: Tensor, squares: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight; without a weight, the second is empty."""
    product, n = rms_product(grad, x, weight, dtype), x.shape[-1]
    d_x = rms_norm_backward(grad, x, squares, product, weight, n, eps, dtype)
    if weight is None:
        return d_x, x.new_empty(0)
    return d_x, rms_weight_gradient(grad, x, squares, n, eps, dtype).to(weight.dtype)


@_norm_whole.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    rounded: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=out), x.new_empty(x.shape[:-1], dtype=wide_dtype(dtype))


@_normed_backward.register_fake
def _(
    grad: Tensor, x: Tensor, squares: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), (
        x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, ctx.dtype, *_ = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    x, squares, weight = ctx.saved_tensors
    d_x, d_weight = normed_backward(grad, x, squares, weight, ctx.eps, ctx.dtype)
    return d_x, None if weight is None else d_weight, None, None, None, None


_norm_whole.register_autograd(_differentiate, setup_context=_save_for_backward)
normed = torch.ops.autopar.rms_norm.default
normed_backward = torch.ops.autopar.rms_norm_backward.default


# --------------------------------------------------------------------------------------------------
# Batch normalization as several functions, whose sums over batch and spatial dims may be partial.
#
# `x` is [n, c, ...]; statistics have one element per channel, [c]. Sums use at least float32. The
# formulas are from Ioffe and Szegedy, "Batch Normalization", 2015, section 3.

_HALF = (torch.float16, torch.bfloat16)


def channel_sum(x: Tensor) -> Tensor:
    """Return Σ x over all dims except dim 1 (the channels)."""
    return x.sum(_others(x), dtype=torch.float32 if x.dtype in _HALF else None)


def squared_deviation(x: Tensor, mean: Tensor) -> Tensor:
    """Return Σ (x − mean)² over all dims except dim 1 (the channels)."""
    return _minus(x, mean).square_().sum(_others(x))


def scaled_product(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return Σ grad · (x − mean) · rstd over all dims except dim 1 (the channels), the gradient of
    the weight.

    Args:
        grad: gradient of the result of `normalize`, ``[n, c, ...]``.
        x: the operand, ``[n, c, ...]``.
        mean: means, ``[c]``.
        rstd: reciprocal standard deviations, ``[c]``.
    """
    return _minus(x, mean).mul_(grad).sum(_others(x)).mul_(rstd)


def normalize(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return ``(x − mean) · rstd · weight + bias`` in the dtype of `x`.

    Args:
        x: the operand, ``[n, c, ...]``.
        mean: means, ``[c]``.
        rstd: reciprocal standard deviations, ``[c]``.
        weight: the weight, ``[c]``, or None.
        bias: the bias, ``[c]``, or None.
    """
    scale = rstd if weight is None else rstd * weight
    result = _minus(x, mean).mul_(_view_channels(scale, x))
    return (result if bias is None else result.add_(_view_channels(bias, x))).to(x.dtype)


def normalize_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_sum: Tensor,
    product: Tensor,
    count: int,
) -> Tensor:
    """Return the gradient of `x` of `normalize`, if mean and rstd are computed from `x`.

    Args:
        grad: gradient of the result, ``[n, c, ...]``.
        x: the operand, ``[n, c, ...]``.
        mean: means, ``[c]``.
        rstd: reciprocal standard deviations, ``[c]``.
        weight: the weight, ``[c]``, or None.
        grad_sum: `channel_sum` of `grad`, ``[c]``.
        product: `scaled_product` of `grad`, ``[c]``.
        count: number of elements per channel in the full batch.
    """
    normalized = _minus(x, mean).mul_(_view_channels(rstd * product / -count, x))
    centered = normalized.add_(grad).sub_(_view_channels(grad_sum / count, x))
    return centered.mul_(_view_channels(rstd if weight is None else rstd * weight, x)).to(x.dtype)


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _view_channels(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view((-1,) + (1,) * (x.dim() - 2))


def _minus(x: Tensor, mean: Tensor) -> Tensor:
    """Return x − mean as a new tensor, in at least float32."""
    return x - _view_channels(mean.float() if x.dtype in _HALF else mean, x)
