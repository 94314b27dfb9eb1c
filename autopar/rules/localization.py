"""Local calls: the call that one rank makes for a strategy.

Most ops have the same arguments for shards as for full tensors. The ops in `LOCALIZERS` have sizes
as arguments, which become local sizes; or positions, which become `Start` tokens; or they need a
different function on a shard, such as a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from autopar import ops
from autopar.core.layout import Strategy
from autopar.ops import random
from autopar.ops.formats import aten_op_of
from autopar.rules import dispatch, flex_attention, spatial
from autopar.rules.call import Call, argument, replace_arguments
from autopar.rules.families import dims_of
from autopar.rules.further import RESIZE_GRADIENTS
from autopar.rules.networks import (
    IN_ITS_OWN,
    LOSS_GRADIENTS,
    LOSSES,
    MEAN,
    NONE,
    SUM,
    mean_loss_part,
    reduced_loss,
)
from autopar.rules.site import Local, Site, groups_of, same

aten = torch.ops.aten


def mean_part(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a rank's term of a mean over split dims: its sum divided by the global number of
    elements. Half-precision values are summed in float32, since sums may exceed their range.

    Args:
        x: the part of the rank.
        dims: the reduced dims.
        keepdim: whether they are kept with size 1.
        count: global number of elements per element of the mean.
        dtype: dtype of the result.

    Returns:
        The term; the sum of the terms of all ranks is the mean.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return torch.sum(x, dim=tuple(dims), keepdim=keepdim, dtype=wide).div_(count).to(dtype)


def _reshape(site: Site) -> Local:
    """Use a reshape to the local shape: the strides of local operands may differ from those of full
    tensors, so that a view may need a copy."""
    return Local(aten.reshape.default, (site.call.args[0], site.output_shape()), {})


def _size(name: str) -> Callable[[Site], Local]:
    """Set the argument `name` to the local shape of the result."""
    return lambda site: site.change(**{name: site.output_shape()})


def _start(operand: int, dim: int, *, sized: bool = False) -> Callable[[Site], Local]:
    """Set ``start`` to the first index of a rank's part of a dim of an operand and, if `sized`,
    ``size`` to the global size of the dim."""

    def local(site: Site) -> Local:
        """Set the arguments if the dim is split."""
        shape, layout = site.call.inputs[operand].shape, site.strategy.inputs[operand]
        at = dim % len(shape)
        if not layout.splitters(at):
            return same(site)
        return site.change(
            start=site.start(layout, shape[at], at), **({"size": shape[at]} if sized else {})
        )

    return local


def _draw_part(site: Site) -> Local:
    """Set the shape of the part, and its window in the full tensor."""
    layout, shape = site.strategy.outputs[0], site.call.outputs[0].shape
    if not any(isinstance(p, Shard) for p in layout.placements):
        return same(site)
    starts = tuple(site.start(layout, size, dim) for dim, size in enumerate(shape))
    return site.change(shape=site.output_shape(), window=(starts, shape))


def _attention(query: int) -> Callable[[Site], Local]:
    """Set the start of a part of the queries for causal attention and, if only query heads are
    split, the key and value heads to read."""

    def local(site: Site) -> Local:
        """Set the arguments that the layout of the queries requires."""
        q, shape = site.strategy.inputs[query], site.call.inputs[query].shape
        changes = site.heads_read(query)
        if argument(site.call, "is_causal", False) and q.splitters(2):
            changes["q_start"] = site.start(q, shape[2], 2)
            changes |= {"mirrored_in": shape[2]} if q.is_mirrored(2) else {}
        return site.change(**changes)

    return local


def _embedding_backward(site: Site) -> Local:
    layout = site.strategy.outputs[0]
    if not layout.splitters(0):
        return same(site)
    return site.change(
        num_rows=site.output_shape()[0], start=site.start(layout, site.call.outputs[0].shape[0], 0)
    )


def _dot(site: Site) -> Local:
    """If there is a bias, set the start indices of the parts of contracted dims: only the first
    part adds the bias."""
    if len(site.call.inputs) == 2:
        return same(site)
    factors, _, result = site.call.args[0].partition("->")
    layout, shape = site.strategy.inputs[0], site.call.inputs[0].shape
    left_operand = factors.partition(",")[0].strip()
    inner = [
        dim
        for dim, letter in enumerate(left_operand)
        if letter not in result and layout.splitters(dim)
    ]
    return (
        site.change(starts=tuple(site.start(layout, shape[dim], dim) for dim in inner))
        if inner
        else same(site)
    )


def _mean(site: Site) -> Local:
    call, shape = site.call, site.call.inputs[0].shape
    reduced = dims_of(argument(call, "dim"), len(shape))
    if not any(
        isinstance(p, Shard) and p.dim in reduced for p in site.strategy.inputs[0].placements
    ):
        return same(site)
    count = math.prod(shape[dim] for dim in reduced)
    keepdim = bool(argument(call, "keepdim", False))
    return Local(
        mean_part, (call.args[0], tuple(sorted(reduced)), keepdim, count, call.outputs[0].dtype), {}
    )


def _mean_loss(operand: int) -> Callable[[Site], Local]:
    """Compute a rank's term of a mean loss over the elements of `operand` and the next operand."""

    def local(site: Site) -> Local:
        """Use `mean_loss_part` if an operand is split."""
        call = site.call
        split = any(
            isinstance(p, Shard) for layout in site.strategy.inputs for p in layout.placements
        )
        name, reduction = call.target.__name__.partition(".")[0], argument(call, "reduction", MEAN)
        if reduction != MEAN or not split:
            plain = same(site)
            return (
                Local(reduced_loss, (name, *plain.args), plain.kwargs)
                if name in IN_ITS_OWN and reduction != NONE
                else plain
            )
        count = math.prod(
            torch.broadcast_shapes(*(info.shape for info in call.inputs[operand : operand + 2]))
        )
        args, kwargs = replace_arguments(call, {"reduction": SUM})
        return Local(mean_loss_part, (name, count, *args), kwargs)

    return local


def _group_norm(operand: int) -> Callable[[Site], Local]:
    """Set the local sizes; groups are split together with their channels."""

    def local(site: Site) -> Local:
        """Set the sizes from the local shape of `operand`."""
        batch, channels = site.input_shape(operand)[:2]
        return site.change(N=batch, C=channels, group=groups_of(site, operand, "group"))

    return local


LOCALIZERS: Mapping[Callable[..., Any], Callable[[Site], Local]] = {
    **{op: _reshape for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)},
    **{op: _reshape for op in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)},
    **{
        op: _size("size")
        for op in (aten.expand.default, aten.new_zeros.default, aten.new_ones.default)
    },
    **{op: _size("size") for op in (aten.new_full.default, aten.new_empty.default)},
    **{
        op: _size("input_sizes")
        for op in (aten.slice_backward.default, aten.select_backward.default)
    },
    **{
        op: _size("input_sizes")
        for op in (aten.unfold_backward.default, aten.diagonal_backward.default)
    },
    **{op: _size("input_size") for op in RESIZE_GRADIENTS},
    **{op: _mean for op in (aten.mean.dim, aten.mean.default)},
    ops.dot: _dot,
    ops.attention: _attention(0),
    ops.attention_backward: _attention(1),
    ops.embedding: _start(0, 0, sized=True),
    ops.pick: _start(0, -1, sized=True),
    **dict.fromkeys(dispatch.TOKENS, dispatch.local),
    ops.cross_entropy_backward: _start(0, -1),
    ops.embedding_backward: _embedding_backward,
    **{op: _draw_part for op in (random.keep_mask, random.uniform, random.normal, random.randint)},
    **{op: _mean_loss(0) for op in LOSSES},
    **{op: _mean_loss(1) for op in LOSS_GRADIENTS},
    aten.native_group_norm.default: _group_norm(0),
    aten.native_group_norm_backward.default: _group_norm(1),
    **spatial.LOCALIZERS,
    **flex_attention.LOCALIZERS,
}


def localize(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> Local:
    """Return the call that a rank makes on its shards.

    Sizes are those of the shard. `Start` tokens represent its first index, `Length` tokens
    represent sizes that differ between ranks.

    Args:
        call: the full call.
        strategy: its strategy.
        mesh_shape: number of devices on each axis of the mesh.
    """
    site = Site(call, strategy, mesh_shape)
    return LOCALIZERS.get(aten_op_of(call.target), same)(site)
