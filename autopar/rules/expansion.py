"""The strategies of a call on a mesh: the product of its options over the mesh axes.

If several axes shard one dim, every order in which they split it is a separate strategy. All
operands and results use the same order, since the axes split the same letter.

A split may be uneven if only one axis splits a dim and only the last part is shorter
(`Layout.fits`). All dims that the axis splits must then have the same size: for example, the parts
of sizes 6 and 3 split in four do not correspond.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.core.layout import Layout, Strategy
from autopar.rules import dispatch
from autopar.rules.call import Call, TensorInfo
from autopar.rules.networks import heads_nest
from autopar.rules.notation import AxisOption

_layout = lru_cache(maxsize=65536)(Layout)
_OF_HEADS = frozenset(
    (ops.attention, ops.attention_backward, ops.flex_attention, ops.flex_attention_backward)
)


def expand(
    call: Call, every: Sequence[AxisOption], mesh_shape: Sequence[int]
) -> tuple[Strategy, ...]:
    """Return all strategies of a call on a mesh: the product of its options over the axes.

    Every operand and result fits its layout (`Layout.fits`), and the parts of different dims
    correspond (`cuts_alike`).

    Args:
        call: the call.
        every: its options on one axis; the first replicates everything.
        mesh_shape: number of devices on each axis of the mesh.
    """
    infos = (*call.inputs, *call.outputs)
    per_axis = [
        [o for o in every if _fits([o], infos, (size,))] if size > 1 else every[:1]
        for size in mesh_shape
    ]
    products: dict[Strategy, None] = {}
    for combination in itertools.product(*per_axis):
        if not _fits(combination, infos, mesh_shape):
            continue
        placements = list(zip(*((*o.inputs, *o.outputs) for o in combination), strict=True))
        for order in _orders(placements, len(mesh_shape)):
            layouts = tuple(_layout(p, order) for p in placements)
            strategy = Strategy(layouts[: len(call.inputs)], layouts[len(call.inputs) :])
            if cuts_alike(call, strategy, mesh_shape):
                products[strategy] = None
    return tuple(products)


def _fits(
    combination: Sequence[AxisOption], infos: Sequence[TensorInfo], mesh_shape: Sequence[int]
) -> bool:
    """Return whether every tensor fits its layout, for any order of the axes."""
    every = zip(*((*option.inputs, *option.outputs) for option in combination), strict=True)
    return all(
        _layout(p).fits(info.shape, mesh_shape) for p, info in zip(every, infos, strict=True)
    )


def cuts_alike(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> bool:
    """Return whether the parts of different dims correspond.

    If an axis splits a dim unevenly, all dims that it splits must have the same size. In attention,
    every rank must have the key and value heads that its query heads read. If tokens are
    dispatched, experts must be split evenly, but tokens may be split unevenly.

    Args:
        call: the call.
        strategy: its strategy.
        mesh_shape: number of devices on each axis of the mesh.
    """
    if call.target in _OF_HEADS and not heads_nest(call, strategy):
        return False
    tensors = list(
        zip((*strategy.inputs, *strategy.outputs), (*call.inputs, *call.outputs), strict=True)
    )
    dispatched = dispatch.dispatch_axes(call, strategy.inputs)
    if dispatched and not dispatch.is_even(call, strategy, dispatched, mesh_shape):
        return False
    if all(layout.divides(info.shape, mesh_shape) for layout, info in tensors):
        return True
    for axis in range(len(mesh_shape)):
        here = dispatch.of_tokens(call, strategy) if axis in dispatched else tensors
        split = [
            (layout, info, p.dim)
            for layout, info in here
            if isinstance(p := layout.placements[axis], Shard)
        ]
        uneven = any(
            info.shape[dim] % layout.num_shards(dim, mesh_shape) for layout, info, dim in split
        )
        if uneven and len({info.shape[dim] for _, info, dim in split}) > 1:
            return False
    return True


def _orders(placements: Sequence[tuple[Placement, ...]], num_axes: int) -> list[tuple[int, ...]]:
    """Return the orders of the axes that give different layouts, the order of the mesh first."""
    if all(_distinct(p) for p in placements):
        return [tuple(range(num_axes))]
    return list(itertools.permutations(range(num_axes)))


def _distinct(placements: tuple[Placement, ...]) -> bool:
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    return len(set(dims)) == len(dims)


def is_expansion(
    call: Call, every: Sequence[AxisOption], strategy: Strategy, mesh_shape: Sequence[int]
) -> bool:
    """Return whether `expand` returns a strategy, without listing all of them.

    Args:
        call: the call.
        every: its options on one axis; the first replicates everything.
        strategy: the strategy.
        mesh_shape: number of devices on each axis of the mesh.
    """
    layouts, num_axes = (*strategy.inputs, *strategy.outputs), len(mesh_shape)
    if (len(strategy.inputs), len(strategy.outputs)) != (len(call.inputs), len(call.outputs)):
        return False
    if any(len(layout.placements) != num_axes for layout in layouts):
        return False
    combination = [
        AxisOption(
            tuple(i.placements[axis] for i in strategy.inputs),
            tuple(o.placements[axis] for o in strategy.outputs),
        )
        for axis in range(num_axes)
    ]
    offered = all(
        o in (every if size > 1 else every[:1])
        for o, size in zip(combination, mesh_shape, strict=True)
    )
    if not offered or not _fits(combination, (*call.inputs, *call.outputs), mesh_shape):
        return False
    if not cuts_alike(call, strategy, mesh_shape):
        return False
    orders = _orders([layout.placements for layout in layouts], num_axes)
    return any(
        all(_layout(layout.placements, order) == layout for layout in layouts) for order in orders
    )
