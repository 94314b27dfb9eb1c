"""Comparisons of elements with their extreme, as in the backward of a maximum.

Autograd passes the gradient of a maximum to the elements that equal it. In backward, these elements
may be recomputed, or summed in a different order than in forward. Then it is possible that no
element equals the maximum of forward, and the gradient is 0 / 0. The functions of this module
compute the extreme and compare elements with it in one call, from the same operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
MEDIANS = {"median": aten.median.default, "nanmedian": aten.nanmedian.default}


def is_extreme(x: Tensor, dim: list[int], kind: str) -> Tensor:
    """Return which elements of `x` equal its extreme over `dim`.

    Args:
        x: the tensor.
        dim: the reduced dims; all dims if it is empty.
        kind: "max", "min", "median" or "nanmedian"; a median is over all dims.

    Returns:
        A boolean tensor with the shape of `x`.
    """
    if kind in MEDIANS:
        return x == MEDIANS[kind](x)
    extreme = aten.amax.default if kind == "max" else aten.amin.default
    return x == extreme(x, dim, True)


def is_scattered_extreme(
    x: Tensor,
    index: Tensor,
    source: Tensor,
    dim: int,
    kind: str,
    include_self: bool,
    of_source: bool,
) -> Tensor:
    """Return which elements equal the extreme that ``scatter_reduce`` computes from them.

    Args:
        x: the tensor that `source` is reduced into.
        index: indices along `dim`, with the shape of `source`.
        source: the tensor that is reduced, with the rank of `x`.
        dim: the dim of the indices.
        kind: "amax" or "amin".
        include_self: whether the elements of `x` are included in the reduction.
        of_source: whether to compare the elements of `source` instead of those of `x`.

    Returns:
        A boolean tensor with the shape of `source` or of `x`.
    """
    extremes_now = aten.scatter_reduce.two(x, dim, index, source, kind, include_self=include_self)
    return source == extremes_now.gather(dim, index) if of_source else x == extremes_now


def cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float) -> Tensor:
    """Return the gradient of `x` in ``torch.cdist(x, y, p)``; the distances are computed again.

    Args:
        grad: gradient of the distances, ``[..., m, n]``.
        x: points, ``[..., m, d]``.
        y: points, ``[..., n, d]``.
        p: order of the norm.
    """
    grad, x, y = grad.contiguous(), x.contiguous(), y.contiguous()  # required by the kernel
    return aten._cdist_backward.default(grad, x, y, p, aten._cdist_forward.default(x, y, p, None))


def pdist_backward(grad: Tensor, x: Tensor, p: float) -> Tensor:
    """Return the gradient of ``torch.pdist(x, p)``; the distances are computed again.

    Args:
        grad: gradient of the distances, ``[n (n − 1) / 2]``.
        x: points, ``[n, d]``.
        p: order of the norm.
    """
    grad, x = grad.contiguous(), x.contiguous()  # the kernel assumes contiguous operands
    return aten._pdist_backward.default(grad, x, p, aten._pdist_forward.default(x, p))


def segment_reduce_backward(
    grad: Tensor,
    data: Tensor,
    reduce: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    axis: int,
) -> Tensor:
    """Return the gradient of ``torch.segment_reduce``; the results are computed again.

    Args:
        grad: gradient of the results.
        data: the tensor that is reduced.
        reduce: the reduction.
        lengths: lengths of the segments, or None.
        offsets: offsets of the segments, or None.
        axis: the reduced dim.
    """
    how = {"lengths": lengths, "offsets": offsets, "axis": axis}
    reduced = aten.segment_reduce.default(data, reduce, unsafe=True, **how)
    return aten._segment_reduce_backward.default(grad, reduced, data, reduce, **how)
