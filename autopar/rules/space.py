"""Local arguments of ops over space: see `autopar.rules.windows` and `autopar.ops.windows`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.layout import Layout
from autopar.ops.windows import Edges, avg_pool_backward_part, convolution_backward_part, max_pool_backward_part, max_pool_part
from autopar.rules.call import NO_TENSOR, argument
from autopar.rules.site import Local, Site, Start, groups_of, same
from autopar.rules.windows import Windows, convolution_windows, each, pooling_windows

aten = torch.ops.aten


def _is_split(layout: Layout, rank: int, num: int) -> tuple[bool, ...]:
    """Which of the last `num` of `rank` dims are split."""
    return tuple(bool(layout.splitters(dim)) for dim in range(rank - num, rank))


def _padding(padding: Sequence[int], split: Sequence[bool]) -> tuple[int, ...]:
    """0 where the dim is split: there the halo has it already."""
    return tuple(0 if s else p for p, s in zip(each(padding, len(split)), split, strict=True))


def _edges(windows: Windows, grad: Layout, operand: Layout, rank: int) -> tuple[Edges | None, ...]:
    """Per spatial dim what lies around a part's own elements, None where the dim is not split."""
    found: list[Edges | None] = []
    for dim, window in enumerate(windows, rank - len(windows)):
        if not operand.splitters(dim):
            found.append(None)
            continue
        assert window is not None, "only dims that may be split are"
        around, of_grad = operand.halo(dim), grad.halo(dim)
        found.append(
            Edges(
                of_grad.before if of_grad else 0,
                of_grad.after if of_grad else 0,
                around.before if around else 0,
                around.after if around else 0,
                window.padding,
            )
        )
    return tuple(found)


def convolution(site: Site) -> Local:
    """Groups are split with their channels; padding of a split dim has become its halo."""
    rank = len(site.call.inputs[0].shape)
    split = _is_split(site.strategy.inputs[0], rank, rank - 2)
    return site.change(groups=groups_of(site, 0), padding=_padding(argument(site.call, "padding"), split))


def convolution_backward(site: Site) -> Local:
    """As `convolution`."""
    call, (grad, operand, *_) = site.call, site.strategy.inputs
    rank = len(call.inputs[0].shape)
    split = _is_split(operand, rank, rank - 2)
    sizes = argument(call, "bias_sizes")
    if sizes is not None and call.outputs[2] != NO_TENSOR:
        sizes = site.output_shape(2)
    if not any(split) or argument(call, "transposed"):
        return site.change(groups=groups_of(site, 1), bias_sizes=sizes)
    stride, padding, dilation, mask = (argument(call, name) for name in ("stride", "padding", "dilation", "output_mask"))
    edges = _edges(convolution_windows(call), grad, operand, rank)
    args = (*call.args[:3], sizes, stride, _padding(padding, split), dilation, groups_of(site, 1), mask, edges)
    return Local(convolution_backward_part, args, {})


def _starts(site: Site, operand: int, num: int) -> tuple[Start | int, ...]:
    """Per spatial dim the index of the rank's first element, of its halo where it has one."""
    shape, layout = site.call.inputs[operand].shape, site.strategy.inputs[operand]
    found: list[Start | int] = []
    for dim in range(len(shape) - num, len(shape)):
        halo = layout.halo(dim)
        start = site.start(layout, shape[dim], dim)
        found.append(Start(start.dim_size, start.layout, dim, halo.before) if halo and isinstance(start, Start) else start)
    return tuple(found)


def _max_pool(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        shape, layout = site.call.inputs[0].shape, site.strategy.inputs[0]
        split = _is_split(layout, len(shape), num)
        if not any(split):
            return same(site)
        defaults = {"kernel_size": None, "stride": (), "padding": (0,), "dilation": (1,), "ceil_mode": False}
        kernel, stride, padding, dilation, ceil_mode = (argument(site.call, name, value) for name, value in defaults.items())
        settings = kernel, stride, _padding(padding, split), dilation, ceil_mode
        return Local(max_pool_part, (site.call.args[0], *settings, _starts(site, 0, num), shape[-num:]), {})

    return local


def _max_pool_backward(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        shape = site.call.inputs[1].shape
        if not any(_is_split(site.strategy.inputs[1], len(shape), num)):
            return same(site)
        indices = argument(site.call, "indices")
        return Local(max_pool_backward_part, (*site.call.args[:2], indices, _starts(site, 1, num), shape[-num:]), {})

    return local


def _avg_pool(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        split = _is_split(site.strategy.inputs[0], len(site.call.inputs[0].shape), num)
        return site.change(padding=_padding(argument(site.call, "padding", (0,)), split)) if any(split) else same(site)

    return local


def _avg_pool_backward(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        call, (grad, operand) = site.call, site.strategy.inputs
        rank = len(call.inputs[1].shape)
        split = _is_split(operand, rank, num)
        if not any(split):
            return same(site)
        names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        kernel, stride, padding, *others = (argument(call, name) for name in names)
        edges = _edges(pooling_windows(call, num), grad, operand, rank)
        return Local(avg_pool_backward_part, (*call.args[:2], kernel, stride, _padding(padding, split), *others, edges), {})

    return local


def _resized(num: int, *, gradient: bool = False) -> Callable[[Site], Local]:
    """Nearest-neighbour resizing: sizes are arguments."""

    def local(site: Site) -> Local:
        sizes: dict[str, Any] = {"output_size": (site.input_shape(0) if gradient else site.output_shape())[-num:]}
        return site.change(**sizes, **({"input_size": site.output_shape()} if gradient else {}))

    return local


LOCALIZERS: Mapping[Callable[..., Any], Callable[[Site], Local]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.max_pool3d_with_indices.default: _max_pool(3),
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten.upsample_nearest1d.default: _resized(1),
    aten.upsample_nearest2d.default: _resized(2),
    aten.upsample_nearest3d.default: _resized(3),
    aten.upsample_nearest2d_backward.default: _resized(2, gradient=True),
    aten.upsample_nearest3d_backward.default: _resized(3, gradient=True),
}
