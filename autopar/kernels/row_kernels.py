"""Kernels for norms and softmaxes of rows on a GPU, which make one pass over memory. In graphs that
are bound for a GPU, they replace ops of `autopar.ops`.

The ops consist of several ATen calls, each of which reads and writes all of its operands. The
kernels read and write each element once, and allocate only their result. Their results equal those
of the ops, except for the order of sums and of a product's factors, and the rounding of an
exponential. The ops run instead if there are no kernels or if tensors are not contiguous, which is
logged once. They also run for other dtypes (the cost model includes this), for tensors without
data, and under a compiler, which fuses the ops.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar import ops
from autopar.kernels import library
from autopar.kernels.normed import BAND
from autopar.ops.blocks import wide_dtype
from autopar.ops.vocabulary import cross_entropy_backward_, linear_cross_entropy_by

_LOG = logging.getLogger(__name__)
_WITH_DATA = (Tensor, torch.nn.Parameter)  # fake tensors have other types


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """Run the kernel that replaces `autopar.ops.sum_exp`."""
    if not _supports(x):
        return ops.sum_exp(x, m)
    s = x.new_empty(x.shape[:-1], dtype=library.wide(x.dtype))
    most = _wide(m, x)
    _launch("ap_sum_exp", x, most, s)
    return s


def cross_entropy_backward(
    x: Tensor, m: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int = 0
) -> Tensor:
    """Run the kernel that replaces `autopar.ops.cross_entropy_backward`.

    Args:
        x, m, s, index, scale, start: see `autopar.ops.cross_entropy_backward`.
    """
    if not _supports(x):
        return ops.cross_entropy_backward(x, m, s, index, scale, start)
    return _cross_entropy_backward(x, m, s, index, scale, start, torch.empty_like(x))


def cross_entropy_backward_in_place(
    x: Tensor, m: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int = 0
) -> Tensor:
    """Run `cross_entropy_backward`, and write the result into the logits.

    Args:
        x, m, s, index, scale, start: see `autopar.ops.cross_entropy_backward`.
    """
    if not _supports(x):
        return cross_entropy_backward_(x, m, s, index, scale, start)
    return _cross_entropy_backward(x, m, s, index, scale, start, x)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, index: Tensor, ignored: int, rows: int, gradients: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel that replaces `autopar.ops.linear_cross_entropy`.

    Args:
        x, weight, index, ignored, rows, gradients: see `autopar.ops.linear_cross_entropy`.
    """
    if not _supports(x, weight):
        return ops.linear_cross_entropy(x, weight, index, ignored, rows, gradients)
    return linear_cross_entropy_by(_row_losses, x, weight, index, ignored, rows, gradients)


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
    """Run the kernel that replaces `autopar.ops.rms_norm`.

    Args:
        x, squares, weight, n, eps, dtype, rounded, out: see `autopar.ops.rms_norm`.
    """
    wide = library.wide(x.dtype)
    if (
        not _supports(x, weight)
        or squares.dtype != wide
        or out != x.dtype
        or rounded not in (x.dtype, wide)
    ):
        return ops.rms_norm(x, squares, weight, n, eps, dtype, rounded, out)
    y, sums = torch.empty_like(x), squares.contiguous()
    _launch("ap_row_norm", x, sums, weight, y, last=(n, eps, int(rounded != wide)))
    return y


def rms_product(grad: Tensor, x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Run the kernel that replaces `autopar.ops.rms_product`.

    Args:
        grad, x, weight, dtype: see `autopar.ops.rms_product`.
    """
    if not _supports(x, grad, weight) or wide_dtype(dtype) != library.wide(x.dtype):
        return ops.rms_product(grad, x, weight, dtype)
    product = x.new_empty(x.shape[:-1], dtype=library.wide(x.dtype))
    _launch("ap_row_product", grad, x, weight, product)
    return product


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
    """Run the kernel that replaces `autopar.ops.rms_norm_backward`.

    Args:
        grad, x, squares, product, weight, n, eps, dtype: see `autopar.ops.rms_norm_backward`.
    """
    if not _supports(x, grad, weight) or not squares.dtype == product.dtype == library.wide(
        x.dtype
    ):
        return ops.rms_norm_backward(grad, x, squares, product, weight, n, eps, dtype)
    dx, sums, products = torch.empty_like(x), squares.contiguous(), product.contiguous()
    _launch("ap_row_norm_backward", grad, x, sums, products, weight, dx, last=(n, eps))
    return dx


def rms_weight_gradient(
    grad: Tensor, x: Tensor, squares: Tensor, n: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Run the kernel that replaces `autopar.ops.rms_weight_gradient`.

    Args:
        grad, x, squares, n, eps, dtype: see `autopar.ops.rms_weight_gradient`.
    """
    num_bands = -(-squares.numel() // BAND)
    if not _supports(x, grad) or squares.dtype != library.wide(x.dtype) or num_bands > 65535:
        return ops.rms_weight_gradient(grad, x, squares, n, eps, dtype)
    dw, bands, sums = (
        squares.new_empty(x.shape[-1]),
        squares.new_empty(num_bands, x.shape[-1]),
        squares.contiguous(),
    )
    _launch("ap_row_weight_gradient", grad, x, sums, dw, bands, last=(n, eps))
    return dw


ON_GPU: Mapping[Callable[..., Any], Callable[..., Any]] = {
    ops.sum_exp: sum_exp,
    ops.cross_entropy_backward: cross_entropy_backward,
    cross_entropy_backward_: cross_entropy_backward_in_place,
    ops.linear_cross_entropy: linear_cross_entropy,
    ops.rms_norm: rms_norm,
    ops.rms_product: rms_product,
    ops.rms_norm_backward: rms_norm_backward,
    ops.rms_weight_gradient: rms_weight_gradient,
}
"""The function that replaces each op in a graph that is bound for a GPU."""


def _cross_entropy_backward(
    x: Tensor, m: Tensor, s: Tensor, index: Tensor, scale: Tensor, start: int, grad: Tensor
) -> Tensor:
    rows = [_wide(m, x), _wide(s, x), index.to(torch.int64).contiguous(), _wide(scale, x)]
    _launch("ap_cross_entropy_backward", x, *rows, grad, last=(start,))
    return grad


def _row_losses(logits: Tensor, index: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return the losses [n] of logits [n, v], and the gradient of the sum of those losses that are
    not ignored. The gradient overwrites the logits."""
    m, picked = logits.amax(-1), ops.pick(logits, index, ignored)
    s = sum_exp(logits, m)
    gradient = cross_entropy_backward_in_place(logits, m, s, index, (index != ignored).to(s.dtype))
    return s.log().add_(m).sub_(picked), gradient


def _supports(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether a kernel supports these tensors: contiguous tensors with data, of one dtype,
    on one device."""
    if torch.compiler.is_compiling() or not _has_kernel(x):
        return False
    tensors = [each for each in (x, *others) if each is not None]
    if not all(_is_like(each, x) for each in tensors):
        return False
    strided = next((each for each in tensors if not each.is_contiguous()), None)
    if strided is not None:
        _say_once(
            f"a norm or a loss of {tuple(x.shape)} needs several passes over memory: it reads a"
            f" tensor with strides {strided.stride()}"
        )
    return strided is None


def _is_like(each: Tensor, x: Tensor) -> bool:
    """Return whether a tensor has data, and the dtype and device of `x`."""
    return each.dtype == x.dtype and each.device == x.device and type(each) in _WITH_DATA


def _has_kernel(x: Tensor) -> bool:
    """Return whether there is a kernel for the dtype, size and device of a tensor."""
    if x.dtype not in library.FLOATS or x.dim() == 0 or not x.numel():
        return False
    is_short = x.shape[-1] < 2**31 and _num_rows(x) < 2**31
    return is_short and library.on_device(_kind(x)) and library.has(x.device)


@cache
def _say_once(what: str) -> None:
    _LOG.warning(what)


def _kind(x: Tensor) -> str:
    return "cuda" if x.is_cuda else "host"


def _num_rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _wide(row: Tensor, x: Tensor) -> Tensor:
    """Convert a tensor with one number per row of `x` to the dtype and layout that kernels read."""
    return row.to(library.wide(x.dtype)).contiguous()


def _launch(kernel: str, *tensors: Tensor | None, last: tuple[object, ...] = ()) -> None:
    """Launch a kernel on the rows of the first of `tensors`. The caller must keep the tensors alive
    until the kernel is enqueued."""
    x = tensors[0]
    assert x is not None
    addresses = [0 if each is None else each.data_ptr() for each in tensors]
    library.launch(
        kernel, x.device, *addresses, library.code_of(x.dtype), _num_rows(x), x.shape[-1], *last
    )
