"""Numbers to try an op on.

A rule holds where it holds on all of `RECIPES` that the op accepts: values of both signs, so that a sum is no average and no
maximum; large ones, beyond any bend of an activation; few among zeros, so that any is not all; positive ones, and some between
zero and one, for logarithms and the like. Floats are multiples of a power of two, so that sums and products of a few of them are exact.

Integers are valid as indices into any dim of any operand, and sorted in one recipe. Where all operands are integers they also
have both signs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.rules.call import TensorInfo

RECIPES = ("mixed", "large", "sparse", "positive", "unit")
_SEED = 20110
_RARE = 8  # of as many, one is not zero


def tensors_for(infos: Sequence[TensorInfo], recipe: str, bound: int = 2**31) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes on the CPU; the same ones each time. Integers are below `bound`."""
    random = torch.Generator().manual_seed(_SEED + RECIPES.index(recipe))
    high = min((size for info in infos for size in info.shape if size > 1), default=2)
    high = min(high, bound)
    signed = recipe in ("mixed", "large", "sparse") and not any(i.dtype.is_floating_point or i.dtype.is_complex for i in infos)
    return [_tensor(info, recipe, high, signed, random) for info in infos]


def _tensor(info: TensorInfo, recipe: str, high: int, signed: bool, random: torch.Generator) -> torch.Tensor:
    if info.dtype == torch.bool:
        return torch.randint(0, _RARE if recipe == "sparse" else 2, info.shape, generator=random) == 1
    if info.dtype.is_complex:
        return torch.complex(_floats(info.shape, recipe, random), _floats(info.shape, recipe, random)).to(info.dtype)
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
