"""Random numbers by position: each element's number follows from (state, draw, its index in the
whole tensor) alone.

So a draw is the same under every layout, on any number of ranks, and when backward runs it again.
The functions stand in normal-form graphs in place of torch's random ops, whose numbers depend on
how a tensor is cut.

A graph that draws has one more buffer, `STATE`: a 64-bit counter that every step raises by one;
`draw` numbers the draws of a step. The bits of an element are two finalizers of a counter. The
outer dims, as one index, go through splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom
Number Generators", OOPSLA 2014) to two 32-bit keys; the inner dims, as one 32-bit index, are mixed
with these by a 32-bit finalizer of multiplications and shifts (the constants are lowbias32 of
Wellons, "Prospecting for Hash Functions", 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

STATE = "autopar_random_state"
_GOLDEN = 0x9E3779B97F4A7C15
LARGEST_RANGE = 2**31  # of `randint`
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # more would round up to the range's end
LEAST_EXPONENTIAL = (
    2.0**-25
)  # half a step of `uniform`: 0 is drawn by no exponential distribution, though by `uniform`
GAMMA_TRIES = 12  # all are refused less often than once in 10¹⁵
_INNER = 2**31  # inner dims together have at most as many elements
# What one element costs in eager mode: passes over 32-bit numbers, each of which reads and writes
# four bytes.
NUM_PASSES = 25
_ATEN = torch.ops.aten
WITHOUT_GENERATOR: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        _ATEN.rand.generator: _ATEN.rand.default,
        _ATEN.randn.generator: _ATEN.randn.default,
        _ATEN.randint.generator: _ATEN.randint.default,
        _ATEN.randint.low_generator: _ATEN.randint.low,
        _ATEN.randperm.generator: _ATEN.randperm.default,
    }
)
"""torch's ops of a generator → what they are where it is None."""


def initial_state(seed: int) -> Tensor:
    """The state before the first step: a scalar of int64. Different seeds begin far apart."""
    return _mix64(
        torch.tensor(_to_signed(seed + _GOLDEN, 64), dtype=torch.int64)
    )  # 0 would stay 0, and so would the first bits


def keep_mask(
    state: Tensor,
    shape: Sequence[int],
    p: float,
    draw: int,
    starts: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Boolean mask of `shape`, each element False with probability `p` (to within 2⁻³²).

    Args:
        state: scalar int64. draw: the draw's number within the step.
        starts, sizes: where the mask is a part: the index of its first element in the whole, and
            the whole's shape.
    """
    threshold = round(p * 2**32) - 2**31
    if threshold >= 2**31:
        return torch.zeros(tuple(shape), dtype=torch.bool, device=state.device)
    return _bits(state, shape, draw, starts, sizes) >= threshold


def uniform(
    state: Tensor,
    shape: Sequence[int],
    low: float,
    high: float,
    dtype: torch.dtype,
    draw: int,
    starts: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Numbers from [`low`, `high`), in steps of 2⁻²⁴ of the range, wider where `dtype` has fewer
    digits; arguments as in `keep_mask`.

    Of [0, 1) the end is never drawn; of another range it may be, by rounding.
    """
    unit = _unit(_bits(state, shape, draw, starts, sizes), _DIGITS.get(dtype, 24))
    return unit.mul_(high - low).add_(low).to(dtype)


def normal(
    state: Tensor,
    shape: Sequence[int],
    mean: float,
    std: float,
    dtype: torch.dtype,
    draw: int,
    starts: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Normal numbers (Box and Muller, "A Note on the Generation of Random Normal Deviates",
    1958); arguments as in `keep_mask`."""
    radius = (
        _unit(_bits(state, shape, draw, starts, sizes)).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    )
    angle = _unit(_bits(state, shape, draw, starts, sizes, stream=1)).mul_(2 * math.pi).cos_()
    return radius.mul_(angle).mul_(std).add_(mean).to(dtype)


def randint(
    state: Tensor,
    shape: Sequence[int],
    low: int,
    high: int,
    dtype: torch.dtype,
    draw: int,
    starts: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Integers from `low` to `high` − 1, at most `LARGEST_RANGE` of them, each with its probability
    to within 2⁻³².

    Arguments as in `keep_mask`.
    """
    bits = _bits(state, shape, draw, starts, sizes).to(torch.int64).add_(2**31)
    return bits.mul_(high - low).bitwise_right_shift_(32).add_(low).to(dtype)


def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``x · mask · scale``: dropout's forward and, of its gradient, backward."""
    return (x * mask).mul_(scale)


def gamma(alpha: Tensor, normals: Tensor, uniforms: Tensor, last: Tensor) -> Tensor:
    """Gamma numbers of shape parameter `alpha` and rate 1 (Marsaglia and Tsang, "A Simple Method
    for Generating Gamma Variables", 2000).

    The first of `GAMMA_TRIES` tries that is accepted is taken; each is with probability 0.95 and
    more.

    Args:
        alpha: [...], above 0. normals, uniforms: [..., `GAMMA_TRIES`], normal, and from [0, 1).
            last: [...], from [0, 1), of which numbers below 1 for `alpha` are made.
    """
    d = (torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3).unsqueeze(-1)
    cubed = (1 + normals * (9 * d).rsqrt()) ** 3
    known = cubed.clamp_min(torch.finfo(alpha.dtype).tiny)
    fits = (cubed > 0) & ((-uniforms).log1p() < 0.5 * normals**2 + d * (1 - known + known.log()))
    tries = torch.arange(GAMMA_TRIES, device=alpha.device)
    first = torch.where(fits, tries, GAMMA_TRIES - 1).amin(-1, keepdim=True)
    made = (d * known.gather(-1, first)).squeeze(-1)
    made = torch.where(alpha < 1, made * (-last).log1p().div(alpha).exp(), made)
    return made.clamp_min(torch.finfo(alpha.dtype).tiny)


def _bits(
    state: Tensor,
    shape: Sequence[int],
    draw: int,
    starts: Sequence[int] | None,
    sizes: Sequence[int] | None,
    stream: int = 0,
) -> Tensor:
    """32 random bits per element, as int32."""
    starts, sizes = starts or [0] * len(shape), sizes or shape
    split = len(sizes)  # dims from here on are the inner ones
    while split and math.prod(sizes[split - 1 :]) <= _INNER:
        split -= 1
    key = _mix64(state + _to_signed((2 * draw + stream) * _GOLDEN, 64))
    outer = _index(shape, starts, sizes, range(split), torch.int64, state.device)
    rows = _mix64(outer.mul_(_to_signed(_GOLDEN, 64)).add_(key))
    first, second = rows.to(torch.int32), (rows >> 32).to(torch.int32)
    inner = _index(shape, starts, sizes, range(split, len(sizes)), torch.int32, state.device)
    return _mix32(_mix32(inner.bitwise_xor(first)).add_(second))


def _index(
    shape: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    dims: range,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The index of every element among `dims` of the whole; the other dims have length 1."""
    index = torch.zeros((1,) * len(shape), dtype=dtype, device=device)
    for dim in dims:
        stride = math.prod(sizes[dim + 1 : dims.stop])
        places = torch.arange(
            starts[dim], starts[dim] + shape[dim], dtype=dtype, device=device
        ).mul_(stride)
        index = index + places.view((-1,) + (1,) * (len(shape) - 1 - dim))
    return index


def _mix64(z: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shift_right(z, shift, 64)) * _to_signed(factor, 64)
    return z ^ _shift_right(z, 31, 64)


def _mix32(z: Tensor) -> Tensor:
    """In place."""
    z.bitwise_xor_(_shift_right(z, 16, 32)).mul_(_to_signed(0x7FEB352D, 32))
    z.bitwise_xor_(_shift_right(z, 15, 32)).mul_(_to_signed(0x846CA68B, 32))
    return z.bitwise_xor_(_shift_right(z, 16, 32))


def _shift_right(z: Tensor, shift: int, width: int) -> Tensor:
    """Shifted right without the sign."""
    return (z >> shift).bitwise_and_(2 ** (width - shift) - 1)


def _to_signed(value: int, width: int) -> int:
    """The two's complement of `value`'s lowest bits."""
    return (value + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)


def _unit(bits: Tensor, digits: int = 24) -> Tensor:
    """[0, 1) in steps of 2^−digits, as float32."""
    return _shift_right(bits, 32 - digits, 32).to(torch.float32).mul_(2.0**-digits)
