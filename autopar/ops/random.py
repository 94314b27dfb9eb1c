"""Random numbers by position: the number of an element only depends on the state, the number of the
draw, and the index of the element in the full tensor.

Therefore a draw is equal for every layout and number of ranks, and also if backward recomputes it.
In normal-form graphs, these functions replace the random ops of torch, whose numbers depend on how
a tensor is split.

A graph with random ops has an additional buffer, `STATE`: a 64-bit counter that every step
increments; `draw` numbers the draws of a step. The bits of an element are computed by two hash
functions of counters. splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014) maps the flat index over the outer dims to two 32-bit keys. A 32-bit hash
of multiplications and shifts combines these keys with the flat 32-bit index over the inner dims
(the constants are lowbias32 of Wellons, "Prospecting for Hash Functions", 2018).
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
_DIGITS = {torch.float16: 11, torch.bfloat16: 8}  # more bits would round up to the upper end
LEAST_EXPONENTIAL = (
    2.0**-25
)  # half a step of `uniform`, which may draw 0; exponential numbers are never 0
GAMMA_TRIES = 12  # the probability that all are rejected is below 10⁻¹⁵
_INNER = 2**31  # most elements of the inner dims together
# Cost per element in eager mode: passes over 32-bit numbers, each of which reads and writes four
# bytes.
NUM_PASSES = 25
Window = tuple[Sequence[int], Sequence[int]]
"""The position of a part in the full tensor: the index of its first element per dim, and the shape
of the full tensor."""
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
"""Random op of torch with a generator → the same op without one."""


def initial_state(seed: int) -> Tensor:
    """Return the state before the first step, an int64 scalar; the states of different seeds are
    far apart."""
    return _mix64(
        torch.tensor(_to_signed(seed + _GOLDEN, 64), dtype=torch.int64)
    )  # without the constant, seed 0 would give the state 0


def keep_mask(
    state: Tensor,
    shape: Sequence[int],
    p: float,
    draw: int,
    window: Window | None = None,
) -> Tensor:
    """Draw a boolean mask whose elements are False with probability `p` (within 2⁻³²).

    Args:
        state: the random state, an int64 scalar.
        shape: shape of the mask, or of the part.
        p: the probability.
        draw: number of the draw in the step.
        window: position of the part in the full tensor; None for the full tensor.
    """
    threshold = round(p * 2**32) - 2**31
    if threshold >= 2**31:
        return torch.zeros(tuple(shape), dtype=torch.bool, device=state.device)
    return _bits(state, shape, draw, window) >= threshold


def uniform(
    state: Tensor,
    shape: Sequence[int],
    low: float,
    high: float,
    dtype: torch.dtype,
    draw: int,
    window: Window | None = None,
) -> Tensor:
    """Draw uniform numbers from [`low`, `high`), in steps of 2⁻²⁴ of the range, or larger steps if
    `dtype` has fewer digits. For the range [0, 1), the upper end is never drawn; for other ranges,
    it may be the result of rounding.

    Args:
        state: as for `keep_mask`.
        shape: as for `keep_mask`.
        low: lower end of the range.
        high: upper end of the range.
        dtype: dtype of the result.
        draw: as for `keep_mask`.
        window: as for `keep_mask`.
    """
    unit = _unit(_bits(state, shape, draw, window), _DIGITS.get(dtype, 24))
    return unit.mul_(high - low).add_(low).to(dtype)


def normal(
    state: Tensor,
    shape: Sequence[int],
    mean: float,
    std: float,
    dtype: torch.dtype,
    draw: int,
    window: Window | None = None,
) -> Tensor:
    """Draw normal numbers (Box and Muller, "A Note on the Generation of Random Normal Deviates",
    1958).

    Args:
        state: as for `keep_mask`.
        shape: as for `keep_mask`.
        mean: the mean.
        std: the standard deviation.
        dtype: dtype of the result.
        draw: as for `keep_mask`.
        window: as for `keep_mask`.
    """
    radius = _unit(_bits(state, shape, draw, window)).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    angle = _unit(_bits(state, shape, draw, window, stream=1)).mul_(2 * math.pi).cos_()
    return radius.mul_(angle).mul_(std).add_(mean).to(dtype)


def randint(
    state: Tensor,
    shape: Sequence[int],
    low: int,
    high: int,
    dtype: torch.dtype,
    draw: int,
    window: Window | None = None,
) -> Tensor:
    """Draw integers from [`low`, `high`) with equal probabilities (within 2⁻³²).

    Args:
        state: as for `keep_mask`.
        shape: as for `keep_mask`.
        low: lower end of the range.
        high: upper end of the range, which has at most `LARGEST_RANGE` integers.
        dtype: dtype of the result.
        draw: as for `keep_mask`.
        window: as for `keep_mask`.
    """
    bits = _bits(state, shape, draw, window).to(torch.int64).add_(2**31)
    return bits.mul_(high - low).bitwise_right_shift_(32).add_(low).to(dtype)


def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return ``x · mask · scale``, the result of a dropout or its gradient.

    Args:
        x: the operand, or the gradient of the result.
        mask: which elements are kept, with the shape of `x`.
        scale: 1 / (1 − dropout probability).
    """
    return (x * mask).mul_(scale)


def gamma(alpha: Tensor, normals: Tensor, uniforms: Tensor, last: Tensor) -> Tensor:
    """Compute gamma numbers with rate 1 (Marsaglia and Tsang, "A Simple Method for Generating Gamma
    Variables", 2000). The result is the first accepted one of `GAMMA_TRIES` tries; each is accepted
    with a probability of at least 0.95.

    Args:
        alpha: shape parameters above 0, ``[...]``.
        normals: normal numbers, ``[..., GAMMA_TRIES]``.
        uniforms: uniform numbers from [0, 1), ``[..., GAMMA_TRIES]``.
        last: uniform numbers from [0, 1), ``[...]``, for `alpha` below 1.
    """
    d = (torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3).unsqueeze(-1)
    cubed = (1 + normals * (9 * d).rsqrt()) ** 3
    known = cubed.clamp_min(torch.finfo(alpha.dtype).tiny)
    fits = (cubed > 0) & ((-uniforms).log1p() < 0.5 * normals**2 + d * (1 - known + known.log()))
    tries = torch.arange(GAMMA_TRIES, device=alpha.device)
    first = torch.where(fits, tries, GAMMA_TRIES - 1).amin(-1, keepdim=True)
    numbers = (d * known.gather(-1, first)).squeeze(-1)
    numbers = torch.where(alpha < 1, numbers * (-last).log1p().div(alpha).exp(), numbers)
    return numbers.clamp_min(torch.finfo(alpha.dtype).tiny)


def _bits(
    state: Tensor, shape: Sequence[int], draw: int, window: Window | None, stream: int = 0
) -> Tensor:
    """Return 32 random bits per element, as int32."""
    starts, sizes = window or ([0] * len(shape), shape)
    split = len(sizes)  # first inner dim
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
    """Return the flat index of every element over `dims` of the full tensor; the other dims have
    size 1."""
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
    """Apply the 32-bit hash in place."""
    z.bitwise_xor_(_shift_right(z, 16, 32)).mul_(_to_signed(0x7FEB352D, 32))
    z.bitwise_xor_(_shift_right(z, 15, 32)).mul_(_to_signed(0x846CA68B, 32))
    return z.bitwise_xor_(_shift_right(z, 16, 32))


def _shift_right(z: Tensor, shift: int, width: int) -> Tensor:
    """Return `z` shifted right as an unsigned number of `width` bits."""
    return (z >> shift).bitwise_and_(2 ** (width - shift) - 1)


def _to_signed(value: int, width: int) -> int:
    """Return the lowest `width` bits of `value` as a two's complement number."""
    return (value + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)


def _unit(bits: Tensor, digits: int = 24) -> Tensor:
    """Convert bits to float32 numbers from [0, 1) in steps of 2^−digits."""
    return _shift_right(bits, 32 - digits, 32).to(torch.float32).mul_(2.0**-digits)
