"""What a tensor of one microbatch is of the batch's: placements on an axis in time, found op by op
by numbers, forward and backward.

With M microbatches, and w the batch's value of a tensor, a microbatch m has, up to a power of M,

    split(d)    the m-th of M parts of w along dim d
    whole       w
    term        a term: the M terms add up to w
    place(d)    positions along dim d, which w counts from the batch's first sample and each
    microbatch from its own

and `power` e says that it has M^e times as much: a mean over a microbatch's samples is a term with
e = 1. No rule of the op says which of these a result is. The op is run on small numbers: on the
batch's, and on those of M microbatches, whose operands are what their labels say and whose settings
are what stands in the graph of one microbatch. A result has a label if, for M = 2 and for M = 3,
the M results are that of the batch's result. It has none where they are not; then it must not reach
an output or a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.layout import Layout, Strategy
from autopar.core.placements import PARTIAL, REPLICATE
from autopar.rules import AxisOption, axis_options, localize
from autopar.rules.call import Call, KeyedCall
from autopar.validation.op_law import DRAWS, VIEWS, leading_dims
from autopar.validation.time_trials import WHOLE, TimePlacement, split_dim, try_on_numbers

aten = torch.ops.aten
_CONSTANTS = frozenset(
    (
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.empty.memory_format,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.scalar_tensor.default,
    )
)


def placements_in_time(
    whole: Call, part: Call, reads: Sequence[TimePlacement], num: int
) -> tuple[TimePlacement, ...]:
    """Return the placements of a node's results in one of `num` microbatches; of kind ``open`` if
    nothing can be said.

    Args:
        whole, part: the calls in the graphs of the batch and of one microbatch. reads: the
            operands' placements.
        num: of microbatches.
    """
    found = _place_results(whole.keyed, part.keyed, tuple(reads), num)
    return found if found else tuple(TimePlacement("open") for _ in whole.outputs)


@lru_cache(maxsize=16384)
def _place_results(
    keyed: KeyedCall, of_part: KeyedCall, reads: tuple[TimePlacement, ...], num: int
) -> tuple[TimePlacement, ...]:
    whole, part = keyed.call, of_part.call
    if whole.target is not part.target or len(whole.outputs) != len(part.outputs):
        return ()
    if whole.target in DRAWS:
        return _drawn(whole, part, reads, num)
    if whole.target in _CONSTANTS:
        return _constant(whole, part, num)
    if whole.key == part.key and all(r == WHOLE for r in reads):
        return tuple(WHOLE for _ in whole.outputs)
    if whole.target is aten.arange.default:
        return _positions(whole, part, num)
    if whole.target in VIEWS:
        return _place_view(whole, part, reads[0], num)
    tried = try_on_numbers(whole, part, reads, num)
    known = bool(tried) and all(found.kind != "open" for found in tried)
    return tried if known else _by_rule(whole, part, reads, num)


def _positions(whole: Call, part: Call, num: int) -> tuple[TimePlacement, ...]:
    """Return the placement of positions, if the batch has `num` times as many as a microbatch."""
    counts = whole.args == (part.args[0] * num,) and dict(whole.kwargs) == dict(part.kwargs)
    return (TimePlacement("place", 0),) if counts else ()


def _by_rule(
    whole: Call, part: Call, reads: Sequence[TimePlacement], num: int
) -> tuple[TimePlacement, ...]:
    """Return the placements that follow from the op's rule on an axis of `num` ranks, if there is
    no small call: microbatches are like ranks.

    A power of one operand is passed on if the rule has the op linear in that operand alone.
    """
    scaled = [number for number, r in enumerate(reads) if r.power]
    if len(scaled) > 1 or any(r.kind == "place" for r in reads):
        return ()
    options = axis_options(whole)
    linear = AxisOption(
        tuple(PARTIAL if n in scaled else REPLICATE for n in range(len(reads))),
        (PARTIAL,) * len(whole.outputs),
    )
    if scaled and linear not in options:
        return ()
    for option in options:
        if all(map(_may_lie, reads, option.inputs)) and _is_called(whole, part, option, num):
            power = reads[scaled[0]].power if scaled else 0
            return tuple(_placement_of(p, power) for p in option.outputs)
    return ()


def _placement_of(placement: Placement, power: int) -> TimePlacement:
    """Return the placement in time of a tensor with a placement on an axis of ranks that stand for
    microbatches."""
    if isinstance(placement, Shard):
        return TimePlacement("split", placement.dim, power)
    return TimePlacement("term" if placement == PARTIAL else "whole", -1, power)


def _may_lie(read: TimePlacement, placement: Placement) -> bool:
    """Return whether a tensor is placed so, on an axis of ranks that stand for microbatches."""
    if read.dim >= 0:
        return placement == Shard(read.dim)
    return placement in {"term": (PARTIAL,), "zero": (PARTIAL, REPLICATE)}.get(
        read.kind, (REPLICATE,)
    )


def _is_called(whole: Call, part: Call, option: AxisOption, num: int) -> bool:
    """Return whether a microbatch makes the call that a rank would make."""
    strategy = Strategy(
        tuple(Layout((p,)) for p in option.inputs), tuple(Layout((p,)) for p in option.outputs)
    )
    local = localize(whole, strategy, (num,))
    return (local.target, tuple(local.args), dict(local.kwargs)) == (
        part.target,
        part.args,
        dict(part.kwargs),
    )


def _drawn(
    whole: Call, part: Call, reads: Sequence[TimePlacement], num: int
) -> tuple[TimePlacement, ...]:
    """Each microbatch draws anew; the batch's numbers are as good as any.

    Numbers that no sample has (of dropout of a weight) count as the batch's, although each
    microbatch draws its own.
    """
    if any(r != WHOLE for r in reads):
        return ()
    if whole.outputs[0].shape == part.outputs[0].shape:
        return (WHOLE,)
    dim = split_dim(whole.outputs[0].shape, part.outputs[0].shape, num)
    return (TimePlacement("split", dim),) if dim >= 0 else ()


def _constant(whole: Call, part: Call, num: int) -> tuple[TimePlacement, ...]:
    """Place a tensor of one value by its shapes, if the value is the same."""
    values = [
        [a for a in call.args if isinstance(a, int | float) and not isinstance(a, bool)]
        for call in (whole, part)
    ]
    if values[0] != values[1]:
        return ()
    dim = split_dim(whole.outputs[0].shape, part.outputs[0].shape, num)
    same = whole.outputs[0].shape == part.outputs[0].shape
    if same or dim >= 0:
        return (
            TimePlacement("zero" if _is_zero(whole) else "split" if dim >= 0 else "whole", dim),
        )
    return ()


def _is_zero(call: Call) -> bool:
    name = call.target.__name__
    filled = (
        next((a for a in reversed(call.args) if type(a) in (int, float)), 1)
        if "full" in name or "scalar" in name
        else 1
    )
    return "zeros" in name or filled == 0


def _place_view(
    whole: Call, part: Call, read: TimePlacement, num: int
) -> tuple[TimePlacement, ...]:
    source, target = whole.inputs[0].shape, whole.outputs[0].shape
    if read.dim < 0:
        return (read,) if target == part.outputs[0].shape else ()
    pairs = dict(leading_dims(source, target))
    dim = pairs.get(read.dim, -1)
    if dim < 0:
        return (TimePlacement("wrong"),)
    return (replace(read, dim=dim),) if split_dim(target, part.outputs[0].shape, num) == dim else ()
