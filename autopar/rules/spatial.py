"""Rules of convolution and pooling, whose spatial dims may be split.

A dim of size H has H' results. Each result reads a window of e elements, ``e = dilation · (kernel −
1) + 1``. Windows start every s elements, the first one p elements before the dim. If ``H = s ·
H'``, as with "same" padding or pooling by a divisor, corresponding parts of the dim and of the
results are on the same rank. A rank then needs from its neighbours

    for its results       p elements before its part, and max(0, e − p − s) after it
    for its gradients     ⌊(e − 1 − p) / s⌋ gradients of results before its part, ⌈p / s⌉ after it

Other spatial dims are not split, and neither are those of transposed convolutions with overlapping
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.layout import Layout
from autopar.core.placements import PARTIAL, REPLICATE, Halo
from autopar.ops.windows import (
    Edges,
    avg_pool_backward_part,
    convolution_backward_part,
    max_pool_backward_part,
    max_pool_part,
    per_dim,
)
from autopar.rules.call import NO_TENSOR, Call, argument, slots
from autopar.rules.notation import WHOLE, AxisOption, Factors, parse
from autopar.rules.site import Local, Site, Start, groups_of, same

aten = torch.ops.aten
FIRST = ((0,),)


@dataclass(frozen=True, slots=True)
class Window:
    """The window of one spatial dim, in elements."""

    extent: int
    stride: int
    padding: int

    @property
    def edges(self) -> Edges:
        """Elements that a part needs from its neighbours (see the module docstring)."""
        after = max(0, self.extent - self.padding - self.stride)
        grad_before = (self.extent - 1 - self.padding) // self.stride
        return Edges(
            grad_before, -(-self.padding // self.stride), self.padding, after, self.padding
        )


Windows = tuple[Window | None, ...]
"""Window per spatial dim; None if the dim must not be split."""


def _shape_of(call: Call, name: str) -> tuple[int, ...]:
    return call.inputs[argument(call, name).index].shape


def _windows(
    extents: Sequence[int],
    strides: Sequence[int],
    paddings: Sequence[int],
    x: Sequence[int],
    out: Sequence[int],
) -> Windows:
    dims = zip(extents, strides, paddings, x, out, strict=True)
    return tuple(
        Window(e, s, p) if size == s * results and results > 1 else None
        for e, s, p, size, results in dims
    )


def convolution_windows(call: Call) -> Windows:
    """Return the windows of a convolution or its backward."""
    backward = call.target is aten.convolution_backward.default
    x, weight = _shape_of(call, "input")[2:], _shape_of(call, "weight")[2:]
    out = (_shape_of(call, "grad_output") if backward else call.outputs[0].shape)[2:]
    num = len(weight)
    stride, padding, dilation = (
        per_dim(argument(call, name), num) for name in ("stride", "padding", "dilation")
    )
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, weight, strict=True)]
    if argument(
        call, "transposed"
    ):  # if windows neither overlap nor leave gaps, each result reads one element
        separable = [
            e == s and p == 0 and size * s == n
            for e, s, p, size, n in zip(extents, stride, padding, x, out, strict=True)
        ]
        return tuple(
            Window(1, 1, 0) if ok and size > 1 else None
            for ok, size in zip(separable, x, strict=True)
        )
    return _windows(extents, stride, padding, x, out)


def pooling_windows(call: Call, num: int) -> Windows:
    """Return the windows of a pooling over the last `num` dims, or of its backward."""
    averages = "avg" in call.target.__name__
    kernel = per_dim(argument(call, "kernel_size"), num)
    stride = per_dim(argument(call, "stride", ()) or kernel, num)
    padding = per_dim(argument(call, "padding", (0,)), num)
    dilation = (1,) * num if averages else per_dim(argument(call, "dilation", (1,)), num)
    extents = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    backward = "backward" in call.target.__name__
    x, out = (
        _shape_of(call, "self")[-num:],
        (call.inputs[0] if backward else call.outputs[0]).shape[-num:],
    )
    if averages and any(padding) and not argument(call, "count_include_pad", True):
        return (None,) * num  # the divisor is smaller at the ends
    if not argument(call, "ceil_mode", False):
        return _windows(extents, stride, padding, x, out)
    # With ceil_mode, the last window may extend beyond the padding. This does not affect a maximum,
    # but the divisor of an average is smaller.
    windows = zip(_windows(extents, stride, padding, x, out), x, strict=True)
    ends = lambda w, size: (  # noqa: E731
        w.extent >= w.padding + w.stride
        and not (averages and (size + 2 * w.padding - w.extent) % w.stride)
    )  # noqa: E731, RUF100
    return tuple(w if w is not None and ends(w, size) else None for w, size in windows)


def _place_halo(dim: int, before: int, after: int, lowest: bool = False) -> Shard:
    return Halo(dim, before, after, lowest) if before or after else Shard(dim)


def place_operand(edges: Edges, dim: int, lowest: bool = False) -> Shard:
    """Return the placement of the operand for a split of the results.

    Args:
        edges: elements that a part needs from its neighbours.
        dim: the dim that is split.
        lowest: whether the ends are padded with the lowest value of the dtype instead of zeros.
    """
    return _place_halo(dim, edges.before, edges.after, lowest)


def seen_back(edges: Edges, dim: int) -> Shard:
    """Return the placement of the results' gradients for a split of the operand's gradient."""
    return _place_halo(dim, edges.grad_before, edges.grad_after)


def over_space(
    call: Call, windows: Windows, place: Callable[[Edges, int], Sequence[Placement]]
) -> tuple[AxisOption, ...]:
    """Return the options that split one spatial dim.

    Args:
        call: the call.
        windows: the window of each spatial dim.
        place: function from the edges of a window and its dim to the placements of all operands and
            results.
    """
    rank, num = len(call.inputs[0].shape), len(windows)
    options = []
    for i, window in enumerate(windows):
        if window is not None:
            placements = tuple(place(window.edges, rank - num + i))
            options.append(
                AxisOption(placements[: len(call.inputs)], placements[len(call.inputs) :])
            )
    return tuple(options)


def _channels(call: Call) -> tuple[str, str, str, str]:
    """Return the letters of the input channels, the two channel dims of the weight, and the output
    channels."""
    groups, transposed = argument(call, "groups"), argument(call, "transposed")
    if groups == 1:
        return ("c", "c", "o", "o") if transposed else ("c", "o", "c", "o")
    depthwise = groups == call.inputs[slots(call).index(argument(call, "input").index)].shape[1]
    return ("g", "g", WHOLE, "g") if depthwise else (WHOLE,) * 4


def convolution(call: Call) -> Factors:
    """Return the factors of a convolution.

    Parallel are the batch, output channels, groups with one channel each, spatial dims, and without
    a bias input channels. With a bias, partial sums over input channels would add it once per rank.
    """
    space = " ".join(WHOLE * (len(call.inputs[0].shape) - 2))
    has_bias = argument(call, "bias") is not None
    x, w0, w1, out = (WHOLE if letter == "c" and has_bias else letter for letter in _channels(call))
    factors = parse(
        f"n {x} {space}, {w0} {w1} {space}, {out} -> n {out} {space}",
        call,
        linear=() if has_bias else ((0,), (1,)),
    )
    others = (REPLICATE,) * (len(call.inputs) - 1)
    return replace(
        factors,
        further=over_space(
            call, convolution_windows(call), lambda e, d: (place_operand(e, d), *others, Shard(d))
        ),
    )


def convolution_backward(call: Call) -> Factors:
    """Return factors as `convolution`; the gradient of the bias does not depend on input channels,
    and the gradients of weight and bias are partial sums over spatial dims."""
    space = " ".join(WHOLE * (len(call.inputs[0].shape) - 2))
    x, w0, w1, out = _channels(call)
    operands = f"n {out} {space}, n {x} {space}, {w0} {w1} {space}"
    factors = parse(f"{operands} -> n {x} {space}, {w0} {w1} {space}, {out} =c", call, linear=())
    wants_x, wants_weight = (call.outputs[i] != NO_TENSOR for i in (0, 1))

    def place(edges: Edges, dim: int) -> Sequence[Placement]:
        """Return the placements of operands and results, with halos only for requested
        gradients."""
        grad = seen_back(edges, dim) if wants_x else Shard(dim)
        operand = place_operand(edges, dim) if wants_weight else Shard(dim)
        results = [Shard(dim), PARTIAL, PARTIAL]
        return (
            grad,
            operand,
            REPLICATE,
            *(
                p if o != NO_TENSOR else REPLICATE
                for p, o in zip(results, call.outputs, strict=True)
            ),
        )

    return replace(factors, further=over_space(call, convolution_windows(call), place))


def _terms(num: int, operands: int, results: int) -> str:
    term = " ".join(("...", *(WHOLE * num)))
    return f"{', '.join([term] * operands)} -> {', '.join([term] * results)}"


def max_pool(num: int) -> Callable[[Call], Factors]:
    """Return the rule of max pooling with indices over the last `num` dims: batch, channels and
    spatial dims are parallel."""

    def rule(call: Call) -> Factors:
        """Return the letters of batch and channels, and the options that split spatial dims."""
        further = over_space(
            call,
            pooling_windows(call, num),
            lambda e, d: (place_operand(e, d, lowest=True), Shard(d), Shard(d)),
        )
        return replace(parse(_terms(num, 1, 2), call), further=further)

    return rule


def max_pool_backward(num: int) -> Callable[[Call], Factors]:
    """Return the rule of the backward of `max_pool`, with operands (gradient, operand of the
    pooling, indices)."""

    def rule(call: Call) -> Factors:
        """Return the letters of batch and channels, and the options that split spatial dims."""
        further = over_space(
            call,
            pooling_windows(call, num),
            lambda e, d: (seen_back(e, d), Shard(d), seen_back(e, d), Shard(d)),
        )
        return replace(parse(_terms(num, 3, 1), call, FIRST), further=further)

    return rule


def avg_pool(num: int) -> Callable[[Call], Factors]:
    """Return the rule of average pooling over the last `num` dims: batch, channels and spatial dims
    are parallel."""

    def rule(call: Call) -> Factors:
        """Return the letters of batch and channels, and the options that split spatial dims."""
        further = over_space(
            call, pooling_windows(call, num), lambda e, d: (place_operand(e, d), Shard(d))
        )
        return replace(parse(_terms(num, 1, 1), call, FIRST), further=further)

    return rule


def avg_pool_backward(num: int) -> Callable[[Call], Factors]:
    """Return the rule of the backward of `avg_pool`, with operands (gradient, operand of the
    pooling)."""

    def rule(call: Call) -> Factors:
        """Return the letters of batch and channels, and the options that split spatial dims."""
        further = over_space(
            call, pooling_windows(call, num), lambda e, d: (seen_back(e, d), Shard(d), Shard(d))
        )
        return replace(parse(_terms(num, 2, 1), call, FIRST), further=further)

    return rule


def nearest(num: int, *, gradient: bool = False) -> Callable[[Call], Factors]:
    """Return the rule of nearest-neighbour resizing: spatial dims are parallel if they grow by an
    integer factor and no argument sets another scale.

    Args:
        num: number of spatial dims.
        gradient: whether the op is the backward.
    """
    names = ("scales",) if num == 1 else ("scales_d", "scales_h", "scales_w")[-num:]

    def rule(call: Call) -> Factors:
        """Return one letter per spatial dim that grows by an integer factor; others are not
        split."""
        small, large = (
            (call.outputs[0], call.inputs[0]) if gradient else (call.inputs[0], call.outputs[0])
        )
        grown = zip(
            small.shape[-num:],
            large.shape[-num:],
            (argument(call, name) for name in names),
            strict=True,
        )
        letters = " ".join(
            f"s{i}" if b % a == 0 and s in (None, b // a) else WHOLE
            for i, (a, b, s) in enumerate(grown)
        )
        return parse(f"... {letters} -> ... {letters}", call, FIRST)

    return rule


# --------------------------------------------------------------------------------------------------
# Local arguments of ops over windows (see `autopar.ops.windows`).


def _is_split(layout: Layout, rank: int, num: int) -> tuple[bool, ...]:
    """Return, for each of the last `num` of `rank` dims, whether it is split."""
    return tuple(bool(layout.splitters(dim)) for dim in range(rank - num, rank))


def _local_padding(padding: Sequence[int], split: Sequence[bool]) -> tuple[int, ...]:
    """Return the padding per dim; 0 for a split dim, whose halo includes the padding."""
    return tuple(0 if s else p for p, s in zip(per_dim(padding, len(split)), split, strict=True))


def _edges(windows: Windows, grad: Layout, operand: Layout, rank: int) -> tuple[Edges | None, ...]:
    """Return the edges of a part per spatial dim; None for a dim that is not split."""
    edges: list[Edges | None] = []
    for dim, window in enumerate(windows, rank - len(windows)):
        if not operand.splitters(dim):
            edges.append(None)
            continue
        assert window is not None, "a split dim has a window"
        around, of_grad = operand.halo(dim), grad.halo(dim)
        edges.append(
            Edges(
                of_grad.before if of_grad else 0,
                of_grad.after if of_grad else 0,
                around.before if around else 0,
                around.after if around else 0,
                window.padding,
            )
        )
    return tuple(edges)


def local_convolution(site: Site) -> Local:
    """Return the local call of a convolution: groups are split with their channels, and the padding
    of a split dim is part of its halo."""
    rank = len(site.call.inputs[0].shape)
    split = _is_split(site.strategy.inputs[0], rank, rank - 2)
    return site.change(
        groups=groups_of(site, 0), padding=_local_padding(argument(site.call, "padding"), split)
    )


def local_convolution_backward(site: Site) -> Local:
    """Return the local call of the backward of a convolution, as `local_convolution`."""
    call, (grad, operand, *_) = site.call, site.strategy.inputs
    rank = len(call.inputs[0].shape)
    split = _is_split(operand, rank, rank - 2)
    sizes = argument(call, "bias_sizes")
    if sizes is not None and call.outputs[2] != NO_TENSOR:
        sizes = site.output_shape(2)
    if not any(split) or argument(call, "transposed"):
        return site.change(groups=groups_of(site, 1), bias_sizes=sizes)
    stride, padding, dilation, mask = (
        argument(call, name) for name in ("stride", "padding", "dilation", "output_mask")
    )
    edges = _edges(convolution_windows(call), grad, operand, rank)
    args = (
        *call.args[:3],
        sizes,
        stride,
        _local_padding(padding, split),
        dilation,
        groups_of(site, 1),
        mask,
        edges,
    )
    return Local(convolution_backward_part, args, {})


def _starts(site: Site, operand: int, num: int) -> tuple[Start | int, ...]:
    """Return, per spatial dim, the index of the first element of a rank's part including its
    halo."""
    shape, layout = site.call.inputs[operand].shape, site.strategy.inputs[operand]
    starts: list[Start | int] = []
    for dim in range(len(shape) - num, len(shape)):
        halo = layout.halo(dim)
        start = site.start(layout, shape[dim], dim)
        starts.append(
            Start(start.dim_size, start.layout, dim, halo.before)
            if halo and isinstance(start, Start)
            else start
        )
    return tuple(starts)


def _max_pool(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        """Return the pooling of a rank's part, with the index of the first element of the part."""
        shape, layout = site.call.inputs[0].shape, site.strategy.inputs[0]
        split = _is_split(layout, len(shape), num)
        if not any(split):
            return same(site)
        defaults = {
            "kernel_size": None,
            "stride": (),
            "padding": (0,),
            "dilation": (1,),
            "ceil_mode": False,
        }
        kernel, stride, padding, dilation, ceil_mode = (
            argument(site.call, name, value) for name, value in defaults.items()
        )
        settings = kernel, stride, _local_padding(padding, split), dilation, ceil_mode
        return Local(
            max_pool_part, (site.call.args[0], *settings, _starts(site, 0, num), shape[-num:]), {}
        )

    return local


def _max_pool_backward(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        """Return the gradient of a rank's part; the indices refer to the full tensor."""
        shape = site.call.inputs[1].shape
        if not any(_is_split(site.strategy.inputs[1], len(shape), num)):
            return same(site)
        indices = argument(site.call, "indices")
        return Local(
            max_pool_backward_part,
            (*site.call.args[:2], indices, _starts(site, 1, num), shape[-num:]),
            {},
        )

    return local


def _avg_pool(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        """Return the pooling of a rank's part, without the padding of split dims, which is part of
        the halo."""
        split = _is_split(site.strategy.inputs[0], len(site.call.inputs[0].shape), num)
        return (
            site.change(padding=_local_padding(argument(site.call, "padding", (0,)), split))
            if any(split)
            else same(site)
        )

    return local


def _avg_pool_backward(num: int) -> Callable[[Site], Local]:
    def local(site: Site) -> Local:
        """Return the gradient of a rank's part, with the edges of the part."""
        call, (grad, operand) = site.call, site.strategy.inputs
        rank = len(call.inputs[1].shape)
        split = _is_split(operand, rank, num)
        if not any(split):
            return same(site)
        names = (
            "kernel_size",
            "stride",
            "padding",
            "ceil_mode",
            "count_include_pad",
            "divisor_override",
        )
        kernel, stride, padding, *others = (argument(call, name) for name in names)
        edges = _edges(pooling_windows(call, num), grad, operand, rank)
        return Local(
            avg_pool_backward_part,
            (*call.args[:2], kernel, stride, _local_padding(padding, split), *others, edges),
            {},
        )

    return local


def _resize_rule(num: int, *, gradient: bool = False) -> Callable[[Site], Local]:
    """Set the sizes of nearest-neighbour resizing."""

    def local(site: Site) -> Local:
        """Return the resizing with the sizes of a rank's part."""
        sizes: dict[str, Any] = {
            "output_size": (site.input_shape(0) if gradient else site.output_shape())[-num:]
        }
        return site.change(**sizes, **({"input_size": site.output_shape()} if gradient else {}))

    return local


LOCALIZERS: Mapping[Callable[..., Any], Callable[[Site], Local]] = {
    aten.convolution.default: local_convolution,
    aten.convolution_backward.default: local_convolution_backward,
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.max_pool3d_with_indices.default: _max_pool(3),
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten.upsample_nearest1d.default: _resize_rule(1),
    aten.upsample_nearest2d.default: _resize_rule(2),
    aten.upsample_nearest3d.default: _resize_rule(3),
    aten.upsample_nearest2d_backward.default: _resize_rule(2, gradient=True),
    aten.upsample_nearest3d_backward.default: _resize_rule(3, gradient=True),
}
