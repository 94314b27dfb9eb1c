"""Numbers to try an op on.

A rule holds where it holds on all of `RECIPES` that the op accepts: values of both signs, so that a
sum is no average and no maximum; large ones, beyond any bend of an activation; few among zeros, so
that any is not all; positive ones, and some between zero and one, for logarithms and the like.
Floats are multiples of a power of two, so that sums and products of a few of them are exact.

Integers are valid as indices into any dim of any operand, and sorted in one recipe. Where all
operands are integers they also have both signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.rules.call import Call, TensorInfo, call_on
from autopar.rules.trial import run

RECIPES = ("mixed", "large", "sparse", "positive", "unit")
_SEED = 20110
_RARE = 8  # of as many, one is not zero


def tensors_for(infos: Sequence[TensorInfo], recipe: str, bound: int = 2**31) -> list[torch.Tensor]:
    """Make tensors on the CPU; the same arguments give the same tensors.

    Args:
        infos: their shapes and dtypes.
        recipe: kind of their numbers, one of `RECIPES`.
        bound: limit of integers, exclusive.
    """
    random = torch.Generator().manual_seed(_SEED + RECIPES.index(recipe))
    high = min((size for info in infos for size in info.shape if size > 1), default=2)
    high = min(high, bound)
    signed = recipe in ("mixed", "large", "sparse") and not any(
        i.dtype.is_floating_point or i.dtype.is_complex for i in infos
    )
    return [_tensor(info, recipe, high, signed, random) for info in infos]


def _tensor(
    info: TensorInfo, recipe: str, high: int, signed: bool, random: torch.Generator
) -> torch.Tensor:
    if info.dtype == torch.bool:
        return (
            torch.randint(0, _RARE if recipe == "sparse" else 2, info.shape, generator=random) == 1
        )
    if info.dtype.is_complex:
        return torch.complex(
            _floats(info.shape, recipe, random), _floats(info.shape, recipe, random)
        ).to(info.dtype)
    if info.dtype.is_floating_point:
        return _floats(info.shape, recipe, random).to(info.dtype)
    low = -high if signed and info.dtype.is_signed else 0
    numbers = torch.randint(low, high, info.shape, generator=random)
    return (numbers.sort(-1).values if recipe == "unit" and info.shape else numbers).to(info.dtype)


def _floats(shape: Sequence[int], recipe: str, random: torch.Generator) -> torch.Tensor:
    numbers = torch.randint(-64, 65, tuple(shape), generator=random).double()
    match recipe:
        case "mixed":
            return numbers / 16
        case "large":
            return numbers / 2
        case "sparse":
            return numbers / 16 * (torch.randint(0, _RARE, tuple(shape), generator=random) == 1)
        case "positive":
            return (numbers.abs() + 1) / 16
        case _:
            return (numbers + 65) / 256


# --------------------------------------------------------------------------------------------------
# Small calls that stand for a large one: the same op and settings on dims of other sizes.
#
# Equal sizes stay equal, and dims of size 1, which are broadcast, stay 1. Whether an integer
# argument is a size cannot be seen, so both are tried; what the op makes of the small operands
# must have the structure of what it made of the large ones.

Trial = tuple[Call, list[torch.Tensor]]
_SIZES = (
    8,
    10,
    14,
    16,
    20,
    22,
    26,
    28,
)  # two divides them, and in three parts only the last is shorter
_FEW = (4, 6, 8, 10, 12, 14, 16, 18)  # for tensors of many dims
_LARGEST_RATIO = (
    8  # sizes in such a ratio may be heads and their groups, or a width and its multiple
)
_SMALL, LARGEST = 2**13, 2**16  # elements of all operands


def trials_of(call: Call) -> list[Trial]:
    """Small calls that the op takes, with operands; empty if there is none. The first has the
    most telling sizes."""
    own = num_elements(call.inputs)
    for scaled in scalings(call):
        if found := _trials(scaled, call):
            return found + (_trials(call, call) if own <= _SMALL else [])
    return _trials(call, call) if own <= LARGEST else []


def first_trials(call: Call, recipes: Sequence[str]) -> list[Trial]:
    """As `trials_of`, on the numbers of these recipes alone, and only of calls whose results are
    small."""
    if num_elements(call.outputs) > LARGEST and num_elements(call.inputs) <= LARGEST:
        # sizes are among its arguments: smaller operands would not make its results smaller
        return []
    for scaled in (*scalings(call), *scalings(call, _FEW)):
        if found := _trials(scaled, call, recipes):
            return found
    small = num_elements((*call.inputs, *call.outputs)) <= _SMALL
    return _trials(call, call, recipes) if small else []


def num_elements(infos: Sequence[TensorInfo]) -> int:
    """How many elements tensors have together."""
    return sum(math.prod(info.shape) for info in infos)


def scalings(call: Call, few: Sequence[int] = _SIZES) -> Iterator[Call]:
    """The call with its sizes, in their order, replaced by `few`, or by small ones in the same
    ratios; results as they were."""
    sizes = sorted({size for info in call.inputs for size in info.shape if size > 1})
    for to in (dict(zip(sizes, few, strict=False)), _in_ratio(sizes)):
        infos = tuple(
            TensorInfo(tuple(to.get(s, s) for s in info.shape), info.dtype) for info in call.inputs
        )
        if len(to) == len(sizes) and num_elements(infos) <= LARGEST:
            yield replace(call, inputs=infos)
            yield replace(
                call,
                inputs=infos,
                args=_resize_value(call.args, to),
                kwargs={k: _resize_value(v, to) for k, v in call.kwargs.items()},
            )


def _in_ratio(sizes: Sequence[int]) -> dict[int, int]:
    """As small as can be, with small ratios kept."""
    to: dict[int, int] = {}
    for size in sizes:
        base = max((s for s in to if size % s == 0 and size // s <= _LARGEST_RATIO), default=0)
        fresh = next((s for s in _SIZES if s not in to.values()), 0)
        if base or fresh:
            to[size] = to[base] * (size // base) if base else fresh
    return to


def _resize_value(value: Any, to: Mapping[int, int]) -> Any:
    if isinstance(value, tuple):
        return tuple(_resize_value(v, to) for v in value)
    return to.get(value, value) if type(value) is int else value


def _trials(small: Call, call: Call, recipes: Sequence[str] = RECIPES) -> list[Trial]:
    """The small call on every recipe of numbers that the op takes; in double precision where it
    can be."""
    found = []
    bound = index_bound(small, call)
    for infos in dict.fromkeys((in_double(small.inputs), small.inputs)):
        for recipe in recipes:
            tensors = tensors_for(infos, recipe, bound)
            made = made_on(replace(small, inputs=infos), tensors)
            if made is not None and _same_structure(made, call):
                found.append((made, tensors))
        if found:
            break
    return found


def index_bound(small: Call, call: Call) -> int:
    """What no index may reach: every size that is known, arguments included, of which any may be
    one."""
    sizes = [size for info in call.outputs for size in info.shape]
    return min(
        (n for n in (*sizes, *_integers((small.args, *small.kwargs.values()))) if n > 1), default=2
    )


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, tuple):
        for v in value:
            yield from _integers(v)
    elif type(value) is int:
        yield value


def in_double(infos: Sequence[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Return shapes and dtypes with float64 for every floating dtype."""
    return tuple(replace(i, dtype=torch.float64) if i.dtype.is_floating_point else i for i in infos)


def made_on(small: Call, tensors: list[torch.Tensor]) -> Call | None:
    """The call with its results, where it gives numbers, the same ones each time, and leaves its
    operands alone."""
    before = [t.clone() for t in tensors]
    try:
        first, second = (
            run(small.target, small.args, small.kwargs, tensors, (), ()) for _ in range(2)
        )
    except Exception:  # an op that is not known may raise anything: it does not take these operands
        return None
    if not all(map(_is_one_answer, first, second)) or not all(map(torch.equal, before, tensors)):
        return None
    return replace(small, outputs=call_on(small.target, (), {}, first)[0].outputs)


def _is_one_answer(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    return (
        isinstance(first, torch.Tensor)
        and bool(torch.isfinite(first).all())
        and torch.equal(first, second)
    )


def _same_structure(small: Call, call: Call) -> bool:
    """Whether sizes correspond: as many results of as many dims, and dims that were equal still
    are."""
    if len(small.outputs) != len(call.outputs):
        return False
    to: dict[int, int] = {}
    for a, b in zip((*call.inputs, *call.outputs), (*small.inputs, *small.outputs), strict=True):
        if len(a.shape) != len(b.shape) or any(
            to.setdefault(x, y) != y for x, y in zip(a.shape, b.shape, strict=True)
        ):
            return False
    return True
