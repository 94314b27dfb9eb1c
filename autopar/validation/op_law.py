"""Check whether an op on parts computes the parts that a strategy states: by trials on small
numbers or, for ops that only move elements, by counting.

The check covers one mesh axis at a time. A call is shrunk to small sizes
(`autopar.rules.small_calls`). Its operands are split as the strategy places them on the axis (a
partial sum into random addends), and every rank runs its local call. The results, joined as the
strategy places them, must equal the results of the whole call. The op's row in the table of rules
is not used. The effect of several axes follows from the effect of each, since all tensors are split
in the same order of axes (`autopar.rules.is_strategy`).

A view cannot be shrunk. Its strategies follow from the dims that hold the same elements
(`keeps_parts`). Random draws depend only on the indices of elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.core.layout import Layout, Strategy
from autopar.errors import RuleError
from autopar.ops import random
from autopar.rules import AxisOption, Call
from autopar.rules.call import NO_TENSOR, KeyedCall
from autopar.rules.small_calls import Trial, first_trials
from autopar.rules.trial import check_option
from autopar.validation.samples import SAMPLES

aten = torch.ops.aten
VIEWS = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    )
)
DRAWS = frozenset((random.keep_mask, random.uniform, random.normal, random.randint))
_ZEROS = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}  # uninitialised tensors cannot be compared; zeros of the same shape can
_RECIPES = ("mixed", "positive")


class Verdict(Enum):
    """The verdict on a strategy: proven right by numbers or by counting, proven wrong, or open."""

    PROVEN = "proven"
    WRONG = "wrong"
    OPEN = "open"


def judge(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> tuple[Verdict, str]:
    """Return the verdict on a call's strategy, and the reason if it is wrong.

    Args:
        call: the call on global tensors.
        strategy: layouts of its operands and results.
        mesh_shape: sizes of the mesh axes.
    """
    return _judge(call.keyed, strategy.plain, tuple(mesh_shape))


@lru_cache(maxsize=65536)
def _judge(
    keyed: KeyedCall, strategy: Strategy, mesh_shape: tuple[int, ...]
) -> tuple[Verdict, str]:
    call, verdict = keyed.call, Verdict.PROVEN
    for axis, size in enumerate(mesh_shape):
        option = AxisOption(
            tuple(at.placements[axis] for at in strategy.inputs),
            tuple(at.placements[axis] for at in strategy.outputs),
        )
        if size == 1 or _replicates(option):
            continue
        infos = zip(
            (*call.inputs, *call.outputs), (*strategy.inputs, *strategy.outputs), strict=True
        )
        uneven = any(_is_uneven(info.shape, layout, axis, mesh_shape) for info, layout in infos)
        axis_verdict, why = _on_one_axis(keyed, option, uneven)
        if axis_verdict is Verdict.WRONG:
            return axis_verdict, why
        verdict = axis_verdict if axis_verdict is Verdict.OPEN else verdict
    return verdict, ""


def _replicates(option: AxisOption) -> bool:
    """Return whether every rank runs the whole call."""
    return all(isinstance(p, Replicate) for p in (*option.inputs, *option.outputs))


def _is_uneven(shape: Sequence[int], layout: Layout, axis: int, mesh_shape: Sequence[int]) -> bool:
    placement = layout.placements[axis]
    return isinstance(placement, Shard) and bool(
        shape[placement.dim] % layout.num_shards(placement.dim, mesh_shape)
    )


@lru_cache(maxsize=16384)
def _on_one_axis(keyed: KeyedCall, option: AxisOption, uneven: bool) -> tuple[Verdict, str]:
    call = keyed.call
    if call.target in _ZEROS:
        kwargs = {name: x for name, x in call.kwargs.items() if name != "memory_format"}
        filled = replace(call, target=_ZEROS[call.target], kwargs=kwargs)
        return _on_one_axis(filled.keyed, option, uneven)
    if call.target in VIEWS:
        holds, wrong = keeps_parts(call, option, uneven=uneven), _OTHER_ELEMENTS
    elif call.target in DRAWS:
        holds, wrong = _draws_parts(option), _OTHER_STATE
    else:
        return _on_trials(keyed, option, (2, 3) if uneven else (2,))
    return (Verdict.PROVEN, "") if holds else (Verdict.WRONG, wrong)


_OTHER_ELEMENTS = "its shards do not come from the same elements"
_OTHER_STATE = "every rank needs the same state and draws one shard"


def _draws_parts(option: AxisOption) -> bool:
    """Return whether every rank of a random draw has the same state and draws no partial sum."""
    is_replicated = all(isinstance(p, Replicate) for p in option.inputs)
    return is_replicated and not isinstance(option.outputs[0], Partial)


def _on_trials(keyed: KeyedCall, option: AxisOption, nums: Sequence[int]) -> tuple[Verdict, str]:
    """Check placements by small calls on numbers.

    Args:
        keyed: the call.
        option: the placements on one axis.
        nums: the numbers of ranks to try.
    """
    tried = False
    for small, tensors in _trials(keyed):
        for num in nums:
            if not _can_split(small, option, num):
                continue
            tried = True
            try:
                check_option(small, tensors, option, num)
            except RuleError as error:
                return Verdict.WRONG, error.what
    return (Verdict.PROVEN if tried else Verdict.OPEN), ""


@lru_cache(maxsize=4096)
def _trials(keyed: KeyedCall) -> tuple[Trial, ...]:
    make_samples = SAMPLES.get(keyed.call.target)
    return tuple(
        first_trials(keyed.call, _RECIPES) if make_samples is None else make_samples(keyed.call)
    )


def _can_split(small: Call, option: AxisOption, num: int) -> bool:
    """Return whether each split dim has a part for every rank, and whether all dims are split
    evenly or have the same length."""
    pairs = zip((*small.inputs, *small.outputs), (*option.inputs, *option.outputs), strict=True)
    lengths = {info.shape[p.dim] for info, p in pairs if isinstance(p, Shard) and info != NO_TENSOR}
    even = all(length % num == 0 for length in lengths)
    fits = all(
        Layout((p,)).fits(info.shape, (num,))
        for info, p in zip(
            (*small.inputs, *small.outputs), (*option.inputs, *option.outputs), strict=True
        )
        if info != NO_TENSOR
    )
    return fits and (even or len(lengths) == 1)


def keeps_parts(call: Call, option: AxisOption, *, uneven: bool = False) -> bool:
    """Return whether a view of the parts of its operand gives the parts of its result.

    A view groups dims that hold the same elements. The leading dim of a group determines how its
    elements are split.

    Args:
        call: the view.
        option: the placements on one axis.
        uneven: whether parts differ in length. If so, the two dims must have the same size.
    """
    (before,), (after,) = option.inputs, option.outputs
    if not isinstance(before, Shard) or not isinstance(after, Shard):
        return not isinstance(before, Shard) and before == after
    source, target = call.inputs[0].shape, call.outputs[0].shape
    same_blocks = not uneven or source[before.dim] == target[after.dim]
    return (
        same_blocks
        and type(before) is Shard
        and type(after) is Shard
        and (before.dim, after.dim) in set(leading_dims(source, target))
    )


def leading_dims(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Iterate over pairs (dim before, dim after) that come first in the smallest groups of dims
    with equally many elements in the same order.

    From both dims of a pair on, the shapes have equally many elements.
    """
    behind = [
        {math.prod(shape[dim:]): dim for dim in range(len(shape)) if shape[dim] > 1}
        for shape in (source, target)
    ]
    for num in behind[0].keys() & behind[1].keys():
        yield behind[0][num], behind[1][num]
