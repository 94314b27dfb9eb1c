"""From one mesh axis to all of them: the product of a call's axis options.

Where several axes shard one dim, every order in which they can split it is a strategy of its own,
and all operands and results take the same order, since the axes split one and the same factor.

Splits may be uneven where one axis alone splits a dim, and only the last part is shorter
(`Layout.fits`). Then all dims that the axis splits must have one size: of sizes 6 and 3 in four,
the parts would not belong together.
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

    Every operand and result fits its layout (`Layout.fits`), and splits of different dims match
    (`cuts_alike`).

    Args:
        call: the call.
        every: its options on one axis; the first replicates everything.
        mesh_shape: devices on each axis of the mesh.
    """
    infos = (*call.inputs, *call.outputs)
    per_axis = [
        [o for o in every if _fits([o], infos, (size,))] if size > 1 else every[:1]
        for size in mesh_shape
    ]
    found: dict[Strategy, None] = {}
    for combination in itertools.product(*per_axis):
        if not _fits(combination, infos, mesh_shape):
            continue
        placements = list(zip(*((*o.inputs, *o.outputs) for o in combination), strict=True))
        for order in _orders(placements, len(mesh_shape)):
            layouts = tuple(_layout(p, order) for p in placements)
            strategy = Strategy(layouts[: len(call.inputs)], layouts[len(call.inputs) :])
            if cuts_alike(call, strategy, mesh_shape):
                found[strategy] = None
    return tuple(found)


def _fits(
    combination: Sequence[AxisOption], infos: Sequence[TensorInfo], mesh_shape: Sequence[int]
) -> bool:
    """Whether every tensor fits its layout, for any order of the axes."""
    every = zip(*((*option.inputs, *option.outputs) for option in combination), strict=True)
    return all(
        _layout(p).fits(info.shape, mesh_shape) for p, info in zip(every, infos, strict=True)
    )


def cuts_alike(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> bool:
    """Whether the parts of different dims match: all dims that an axis splits have one size if it
    splits one of them unevenly, and attention has the heads that its queries read. If tokens are
    dispatched, experts are split evenly, while tokens need not be.

    Args:
        call: the call.
        strategy: its strategy.
        mesh_shape: devices on each axis of the mesh.
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
    """Orders of the axes that make a difference; mesh order first."""
    if all(_distinct(p) for p in placements):
        return [tuple(range(num_axes))]
    return list(itertools.permutations(range(num_axes)))


def _distinct(placements: tuple[Placement, ...]) -> bool:
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    return len(set(dims)) == len(dims)


def is_expansion(
    call: Call, every: Sequence[AxisOption], strategy: Strategy, mesh_shape: Sequence[int]
) -> bool:
    """Whether `expand` returns a strategy, without listing all of them.

    Args:
        call: the call.
        every: its options on one axis; the first replicates everything.
        strategy: the strategy.
        mesh_shape: devices on each axis of the mesh.
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
