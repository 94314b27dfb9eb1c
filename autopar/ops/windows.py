"""Convolution and pooling on a part of space: what a rank calls on operands that lie with halos.

In a spatial dim that is split, padding is part of the operand already, as its halo; `padding` is 0
there. Results cover the rank's own elements alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
Sizes = Sequence[int]


class Edges(NamedTuple):
    """Halos of one spatial dim that is split.

    Attributes:
        grad_before, grad_after: elements of the results' gradients that belong to the neighbours.
        before, after: elements of the operand that belong to the neighbours.
        padding: elements that the whole op pads before the dim.
    """

    grad_before: int
    grad_after: int
    before: int
    after: int
    padding: int


def _edges_of(edges: Sequence[Sequence[int] | None]) -> list[Edges | None]:
    """Convert edges from the plain numbers that graphs store."""
    return [None if numbers is None else Edges(*numbers) for numbers in edges]


def own(x: Tensor, before: Sizes, after: Sizes) -> Tensor:
    """Return a tensor without the halos of its last dims.

    Args:
        x: the tensor.
        before, after: per dim the elements of the halo at its beginning and at its end.
    """
    for dim, (first, last) in enumerate(zip(before, after, strict=True), x.dim() - len(before)):
        x = x.narrow(dim, first, x.shape[dim] - first - last)
    return x


def _shape_seen(
    grad: Tensor, x: Tensor, edges: Sequence[Edges | None], extents: Sizes, strides: Sizes
) -> list[int]:
    """Spatial shape of the operand whose results are all of `grad`: in split dims what the halo
    of `grad` sees too."""
    lengths = list(x.shape[x.dim() - len(edges) :])
    for i, edge in enumerate(edges):
        if edge is not None:
            results, length = (
                grad.shape[grad.dim() - len(edges) + i],
                lengths[i] - edge.before - edge.after,
            )
            lengths[i] = max(
                (results - 1) * strides[i] + extents[i],
                edge.grad_before * strides[i] + edge.padding + length,
            )
    return lengths


def _own_gradient(seen: Tensor, x: Tensor, edges: Sequence[Edges | None], strides: Sizes) -> Tensor:
    """Of a gradient over `_shape_seen`, this rank's elements."""
    first = x.dim() - len(edges)
    for i, edge in enumerate(edges):
        if edge is not None:
            length = x.shape[first + i] - edge.before - edge.after
            seen = seen.narrow(first + i, edge.grad_before * strides[i] + edge.padding, length)
    return seen.contiguous()


def convolution_backward_part(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    groups: int,
    output_mask: Sequence[bool],
    edges: Sequence[Sequence[int] | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``convolution_backward`` on a part: the gradient of the part's own elements, and addends of
    the other gradients.

    Args:
        grad: [n, o, ...] and x: [n, c, ...], both with the halos that `edges` says.
        edges: per spatial dim the numbers of `Edges`, None if it is not split.
    """
    num, around = len(edges), _edges_of(edges)
    strides, dilations = _each(stride, num), _each(dilation, num)
    settings = strides, _each(padding, num), dilations, False, [0] * num, groups
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        extents = [d * (k - 1) + 1 for d, k in zip(dilations, weight.shape[2:], strict=True)]
        shape = [*x.shape[:2], *_shape_seen(grad, x, around, extents, strides)]
        like = x.new_empty(1).expand(shape)  # only its shape is read
        seen, _, _ = aten.convolution_backward.default(
            grad, like, weight, None, *settings, [True, False, False]
        )
        grad_x = _own_gradient(seen, x, around, strides)
    if output_mask[1] or output_mask[2]:
        before, after = (
            [getattr(e, name) if e else 0 for e in around] for name in ("grad_before", "grad_after")
        )
        mask = [False, *output_mask[1:]]
        _, grad_weight, grad_bias = aten.convolution_backward.default(
            own(grad, before, after), x, weight, bias_sizes, *settings, mask
        )
    return grad_x, grad_weight, grad_bias


def avg_pool_backward_part(
    grad: Tensor,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    edges: Sequence[Sequence[int] | None],
) -> Tensor:
    """Return the gradient of average pooling for the part's own elements.

    Args:
        grad: gradient of the results, and x: the operand; both with the halos that `edges` says.
        kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override: settings of
            the pooling.
        edges: as for `convolution_backward_part`.
    """
    num, around = len(edges), _edges_of(edges)
    kernels, strides = _each(kernel_size, num), _each(stride or kernel_size, num)
    shape = [*x.shape[: x.dim() - num], *_shape_seen(grad, x, around, kernels, strides)]
    backward = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}[num]
    like = x.new_empty(1).expand(shape)
    seen = backward(
        grad,
        like,
        kernels,
        strides,
        _each(padding, num),
        ceil_mode,
        count_include_pad,
        divisor_override,
    )
    return _own_gradient(seen, x, around, strides)


def max_pool_part(
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    starts: Sizes,
    sizes: Sizes,
) -> tuple[Tensor, Tensor]:
    """Maxima of the part and their indices in the whole space.

    Args:
        starts: per spatial dim, the global index of the first element of `x`, which in a halo
            before the dim is negative.
        sizes: the whole space.
    """
    pool = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}[
        len(sizes)
    ]
    values, indices = pool(x, kernel_size, stride, padding, dilation, ceil_mode)
    places = _unravel(indices, x.shape[x.dim() - len(sizes) :])
    # where all that a window sees is the lowest value the first place counts, which may lie in the
    # halo before the dim
    places = [
        (place + start).clamp_(0, size - 1)
        for place, start, size in zip(places, starts, sizes, strict=True)
    ]
    return values, _ravel(places, sizes)


def max_pool_backward_part(
    grad: Tensor, x: Tensor, indices: Tensor, starts: Sizes, sizes: Sizes
) -> Tensor:
    """The gradient of `max_pool_part` for the part's own elements, which `x` has the shape of.

    Args:
        grad, indices: of all results that see the part.
        starts: per spatial dim, the part's first index.
    """
    num = len(sizes)
    lengths = x.shape[x.dim() - num :]
    places = [place - start for place, start in zip(_unravel(indices, sizes), starts, strict=True)]
    inside = torch.ones_like(indices, dtype=torch.bool)
    for place, length in zip(places, lengths, strict=True):
        inside &= (place >= 0) & (place < length)
    flat = torch.where(inside, _ravel(places, lengths), 0).flatten(-num)
    result = grad.new_zeros((*x.shape[: x.dim() - num], math.prod(lengths)))
    return result.scatter_add_(-1, flat, torch.where(inside, grad, 0).flatten(-num)).view(x.shape)


def _unravel(flat: Tensor, sizes: Sizes) -> list[Tensor]:
    places = []
    for size in reversed(sizes):
        places.append(flat % size)
        flat = flat // size
    return places[::-1]


def _ravel(places: Sequence[Tensor], sizes: Sizes) -> Tensor:
    flat = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        flat = flat * size + place
    return flat


def _each(values: Sizes, num: int) -> list[int]:
    """One value per dim, where one may stand for all."""
    return list(values) * num if len(values) == 1 else list(values)
