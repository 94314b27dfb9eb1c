"""Which elements are extremes: comparisons that backward makes with a value that forward computed.

Autograd gives the gradient of a maximum to the elements that equal it. Backward may read these
elements after recomputation, or summed in another order than in forward. Then none of them may
equal forward's maximum, and the gradient is 0 / 0. The ops of this module compute the extreme and
compare with it in one call, from the same operand.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
MEDIANS = {"median": aten.median.default, "nanmedian": aten.nanmedian.default}


def is_extreme(x: Tensor, dim: list[int], kind: str) -> Tensor:
    """Return which elements of `x` equal its extreme over `dim`.

    Args:
        dim: all dims if it is empty.
        kind: "max", "min", "median" or "nanmedian"; medians are those of all dims.

    Returns:
        Booleans in the shape of `x`.
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
    """Return which elements equal the extreme that ``scatter_reduce`` reduced them into.

    Args:
        x: the tensor that is reduced into.
        index, source: of one shape, with as many dims.
        kind: "amax" or "amin".
        of_source: whether elements of `source` are requested, else those of `x`.

    Returns:
        Booleans in the shape of `source`, or of `x`.
    """
    found = aten.scatter_reduce.two(x, dim, index, source, kind, include_self=include_self)
    return source == found.gather(dim, index) if of_source else x == found


def cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float) -> Tensor:
    """Return the gradient of `x` in ``torch.cdist(x, y, p)``, recomputing the distances.

    Args:
        grad: [..., m, n].
        x: [..., m, d].
        y: [..., n, d].
    """
    grad, x, y = grad.contiguous(), x.contiguous(), y.contiguous()  # the kernel takes no others
    return aten._cdist_backward.default(grad, x, y, p, aten._cdist_forward.default(x, y, p, None))


def pdist_backward(grad: Tensor, x: Tensor, p: float) -> Tensor:
    """Return the gradient of ``torch.pdist(x, p)``, whose distances are computed again.

    Args:
        grad: gradient of the distances [n (n − 1) / 2].
        x: points [n, d].
        p: order of the norm.
    """
    grad, x = grad.contiguous(), x.contiguous()  # the kernel reads others as if they were
    return aten._pdist_backward.default(grad, x, p, aten._pdist_forward.default(x, p))


def segment_reduce_backward(
    grad: Tensor,
    data: Tensor,
    reduce: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    axis: int,
) -> Tensor:
    """Return the gradient of ``torch.segment_reduce``, whose results are computed again.

    Args:
        grad: gradient of the results.
        data, reduce, lengths, offsets, axis: the arguments of ``torch.segment_reduce``.
    """
    how = {"lengths": lengths, "offsets": offsets, "axis": axis}
    found = aten.segment_reduce.default(data, reduce, unsafe=True, **how)
    return aten._segment_reduce_backward.default(grad, found, data, reduce, **how)
