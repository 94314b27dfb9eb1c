"""Values and sizes of test operands.

A rule must hold on all `RECIPES` of values that the op accepts: values of both signs, so that a sum
differs from a mean and a maximum; large values, in the linear range of activations; mostly zeros,
so that `any` differs from `all`; positive values; and values between zero and one, for logarithms
and similar functions. Floats are multiples of a power of two, so that sums and products of a few of
them are exact.

Integers are valid indices into every dim of every operand, and sorted in one recipe. If all
operands are integers, they have both signs.
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
_RARE = 8  # in the sparse recipe, one of this many values is nonzero


def tensors_for(infos: Sequence[TensorInfo], recipe: str, bound: int = 2**31) -> list[torch.Tensor]:
    """Create tensors on the CPU; the same arguments give the same tensors.

    Args:
        infos: their shapes and dtypes.
        recipe: kind of their values, one of `RECIPES`.
        bound: exclusive upper bound of integers.
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
# Small calls that represent a large call: the same op and settings with smaller dims.
#
# Equal sizes remain equal, and dims of size 1, which are broadcast, remain 1. It is not known
# whether an integer argument is a size, so both are tried. The results of a small call must have
# the same structure as those of the large call.

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
)  # all are even; of three parts, only the last is shorter
_FEW = (4, 6, 8, 10, 12, 14, 16, 18)  # for tensors with many dims
_LARGEST_RATIO = 8  # sizes with a smaller ratio may be related, such as heads and groups of heads
_SMALL, LARGEST = 2**13, 2**16  # most elements of all operands together


def trials_of(call: Call) -> list[Trial]:
    """Return small calls that the op accepts, with operands; empty if there is none. The sizes of
    the first call are the most distinct."""
    num_values = num_elements(call.inputs)
    for scaled in scalings(call):
        if trials := _trials(scaled, call):
            return trials + (_trials(call, call) if num_values <= _SMALL else [])
    return _trials(call, call) if num_values <= LARGEST else []


def first_trials(call: Call, recipes: Sequence[str]) -> list[Trial]:
    """Return small calls as `trials_of` does, but only with values of the given recipes, and only
    if the results are small."""
    if num_elements(call.outputs) > LARGEST and num_elements(call.inputs) <= LARGEST:
        # sizes are among the arguments: smaller operands would not give smaller results
        return []
    for scaled in (*scalings(call), *scalings(call, _FEW)):
        if trials := _trials(scaled, call, recipes):
            return trials
    small = num_elements((*call.inputs, *call.outputs)) <= _SMALL
    return _trials(call, call, recipes) if small else []


def num_elements(infos: Sequence[TensorInfo]) -> int:
    """Return the total number of elements of tensors."""
    return sum(math.prod(info.shape) for info in infos)


def scalings(call: Call, few: Sequence[int] = _SIZES) -> Iterator[Call]:
    """Yield the call with smaller operands: its sizes, in increasing order, are replaced by `few`,
    or by small sizes with the same ratios. The results are not updated."""
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
    """Return size → smaller size, with small ratios of sizes preserved."""
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
    """Return the small call with values of every recipe that the op accepts; in double precision if
    possible."""
    trials = []
    bound = index_bound(small, call)
    for infos in dict.fromkeys((in_double(small.inputs), small.inputs)):
        for recipe in recipes:
            tensors = tensors_for(infos, recipe, bound)
            trial_call = made_on(replace(small, inputs=infos), tensors)
            if trial_call is not None and _same_structure(trial_call, call):
                trials.append((trial_call, tensors))
        if trials:
            break
    return trials


def index_bound(small: Call, call: Call) -> int:
    """Return the exclusive upper bound of indices: the smallest size of a result, or integer
    argument, which may be a size."""
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
    """Return the call with its results; None if it raises an error, returns values that are not
    finite or not deterministic, or changes its operands."""
    before = [t.clone() for t in tensors]
    try:
        first, second = (
            run(small.target, small.args, small.kwargs, tensors, (), ()) for _ in range(2)
        )
    except Exception:  # an unknown op may raise any error for operands that it does not accept
        return None
    if not all(map(_is_reproducible, first, second)) or not all(map(torch.equal, before, tensors)):
        return None
    return replace(small, outputs=call_on(small.target, (), {}, first)[0].outputs)


def _is_reproducible(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return first is second
    return (
        isinstance(first, torch.Tensor)
        and bool(torch.isfinite(first).all())
        and torch.equal(first, second)
    )


def _same_structure(small: Call, call: Call) -> bool:
    """Return whether two calls have the same number of results and dims, and dims of equal size in
    `call` have equal size in `small`."""
    if len(small.outputs) != len(call.outputs):
        return False
    to: dict[int, int] = {}
    for a, b in zip((*call.inputs, *call.outputs), (*small.inputs, *small.outputs), strict=True):
        if len(a.shape) != len(b.shape) or any(
            to.setdefault(x, y) != y for x, y in zip(a.shape, b.shape, strict=True)
        ):
            return False
    return True
