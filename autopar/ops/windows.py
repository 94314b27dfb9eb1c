"""Convolution and pooling on a part of the spatial dims: the functions that a rank calls on its
operands with halos.

The halo of a split dim includes the padding, and `padding` of this dim is 0. Results only cover the
elements of the rank's part.
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
    """Halos of one split spatial dim, in elements.

    Attributes:
        grad_before: halo of the results' gradients before the part.
        grad_after: halo of the results' gradients after the part.
        before: halo of the operand before the part.
        after: halo of the operand after the part.
        padding: padding of the full op before the dim.
    """

    grad_before: int
    grad_after: int
    before: int
    after: int
    padding: int


def _edges_of(edges: Sequence[Sequence[int] | None]) -> list[Edges | None]:
    """Convert edges from the tuples of numbers in graphs."""
    return [None if numbers is None else Edges(*numbers) for numbers in edges]


def without_halos(x: Tensor, before: Sizes, after: Sizes) -> Tensor:
    """Return a tensor without the halos of its last dims.

    Args:
        x: the tensor.
        before: number of halo elements at the start of each dim.
        after: number of halo elements at the end of each dim.
    """
    for dim, (first, last) in enumerate(zip(before, after, strict=True), x.dim() - len(before)):
        x = x.narrow(dim, first, x.shape[dim] - first - last)
    return x


def _shape_seen(
    grad: Tensor, x: Tensor, edges: Sequence[Edges | None], extents: Sizes, strides: Sizes
) -> list[int]:
    """Return the spatial shape of the operand from which all elements of `grad` are computed; in
    split dims, it includes the elements that the halo of `grad` depends on."""
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
    """Return the elements of a rank's part from a gradient with shape `_shape_seen`."""
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
    """Compute ``convolution_backward`` of a part.

    Args:
        grad: gradient of the result, ``[n, o, ...]``, with the halos in `edges`.
        x: the operand, ``[n, c, ...]``, with the halos in `edges`.
        weight: the weight.
        bias_sizes: shape of the bias, or None.
        stride: stride per spatial dim.
        padding: padding per spatial dim; 0 for a split dim.
        dilation: dilation per spatial dim.
        groups: number of groups.
        output_mask: which of the three gradients to compute.
        edges: numbers of `Edges` per spatial dim; None if it is not split.

    Returns:
        The gradient of the part's elements, and partial sums of the gradients of weight and bias.
    """
    num, around = len(edges), _edges_of(edges)
    strides, dilations = per_dim(stride, num), per_dim(dilation, num)
    settings = strides, per_dim(padding, num), dilations, False, [0] * num, groups
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        extents = [d * (k - 1) + 1 for d, k in zip(dilations, weight.shape[2:], strict=True)]
        shape = [*x.shape[:2], *_shape_seen(grad, x, around, extents, strides)]
        like = x.new_empty(1).expand(shape)  # only the shape is used
        window_gradient, _, _ = aten.convolution_backward.default(
            grad, like, weight, None, *settings, [True, False, False]
        )
        grad_x = _own_gradient(window_gradient, x, around, strides)
    if output_mask[1] or output_mask[2]:
        before, after = (
            [getattr(e, name) if e else 0 for e in around] for name in ("grad_before", "grad_after")
        )
        mask = [False, *output_mask[1:]]
        _, grad_weight, grad_bias = aten.convolution_backward.default(
            without_halos(grad, before, after), x, weight, bias_sizes, *settings, mask
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
    """Return the gradient of average pooling for the elements of a part.

    Args:
        grad: gradient of the results, with the halos in `edges`.
        x: the operand, with the halos in `edges`.
        kernel_size: setting of the pooling, as are `stride`, `padding`, `ceil_mode`,
            `count_include_pad` and `divisor_override`.
        edges: as for `convolution_backward_part`.
    """
    num, around = len(edges), _edges_of(edges)
    kernels, strides = per_dim(kernel_size, num), per_dim(stride or kernel_size, num)
    shape = [*x.shape[: x.dim() - num], *_shape_seen(grad, x, around, kernels, strides)]
    backward = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}[num]
    like = x.new_empty(1).expand(shape)
    window_gradient = backward(
        grad,
        like,
        kernels,
        strides,
        per_dim(padding, num),
        ceil_mode,
        count_include_pad,
        divisor_override,
    )
    return _own_gradient(window_gradient, x, around, strides)


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
    """Compute max pooling of a part.

    Args:
        x: the operand, with halos.
        kernel_size: setting of the pooling, as are `stride`, `padding`, `dilation` and `ceil_mode`.
        starts: global index of the first element of `x` per spatial dim; negative for a halo before
            the dim.
        sizes: global size of each spatial dim.

    Returns:
        The maxima of the part, and their indices in the full tensor.
    """
    pool = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}[
        len(sizes)
    ]
    values, indices = pool(x, kernel_size, stride, padding, dilation, ceil_mode)
    places = _unravel(indices, x.shape[x.dim() - len(sizes) :])
    # if all values in a window are the lowest value, the first position is returned, which may be
    # in the halo before the dim
    places = [
        (place + start).clamp_(0, size - 1)
        for place, start, size in zip(places, starts, sizes, strict=True)
    ]
    return values, _ravel(places, sizes)


def max_pool_backward_part(
    grad: Tensor, x: Tensor, indices: Tensor, starts: Sizes, sizes: Sizes
) -> Tensor:
    """Return the gradient of `max_pool_part` for the elements of a part.

    Args:
        grad: gradients of all results that depend on the part.
        x: a tensor with the shape of the part.
        indices: indices of these results.
        starts: first index of the part per spatial dim.
        sizes: global size of each spatial dim.
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


def per_dim(values: Sizes, num: int) -> tuple[int, ...]:
    """Return one value per dim; a single value applies to all dims."""
    return tuple(values) * num if len(values) == 1 else tuple(values)
