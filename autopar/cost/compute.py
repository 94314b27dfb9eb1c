"""Time of one op on one device.

With f flops, b bytes, P the peak, e the efficiency of large sizes, h `matmul_half_flops`, B the memory bandwidth, g the
efficiency of the kind and o the launch overhead:

    matmul, attention, attention_backward   max((f + h) / (e P), b / (g B)) + o
    memory kinds                            b / (g B) + o
    view                                    0

(f + h) / (e P) is f over the peak at efficiency e · f / (f + h): a matmul of h flops runs at half the speed of a large one,
because it does not fill the device. A complex product is four products of its parts. Where the profile has measured points of
the kind (and dtype), their curve, which holds the overhead, replaces the formula; matmul and attention still take no less than
an elementwise op over their bytes. The time falls in neither f nor b. The slowest of several profiles takes the longest of their times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from autopar.analysis.work import Work
from autopar.errors import HardwareError
from autopar.hardware import FLOP_KINDS, Curve, HardwareProfile

_PARTS: Mapping[torch.dtype | str, torch.dtype] = {
    torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64,
}  # fmt: skip
# Curve over flops or None, seconds per flop, flops added, curve over bytes or None, seconds per byte, overhead in seconds.
_Rates = tuple[Curve | None, float, float, Curve | None, float, float]


def compute_time(work: Work, dtype: torch.dtype | str, profile: HardwareProfile) -> float:
    """Seconds that `work` takes; `dtype` is the one it computes in and matters to matmul and attention only.

    Raises:
        HardwareError: where the profile says nothing about matmul or attention in `dtype`.
    """
    if work.kind == "view":
        return 0.0
    if profile.parts:
        return max(compute_time(work, dtype, part) for part in profile.parts)
    if dtype in _PARTS:  # a complex product is four of its parts
        work, dtype = replace(work, flops=4 * work.flops), _PARTS[dtype]
    flops_curve, s_per_flop, half, bytes_curve, s_per_byte, overhead = _rates(profile, work.kind, dtype)
    memory = bytes_curve.time_s(work.bytes) if bytes_curve else work.bytes * s_per_byte + overhead
    if work.kind not in FLOP_KINDS:
        return memory
    return max(memory, flops_curve.time_s(work.flops) if flops_curve else (work.flops + half) * s_per_flop + overhead)


@lru_cache(maxsize=4096)
def _rates(profile: HardwareProfile, kind: str, dtype: torch.dtype | str) -> _Rates:
    memory_kind = "elementwise" if kind in FLOP_KINDS else kind
    s_per_byte = 1 / (profile.memory_bandwidth_bytes_per_s * profile.memory_efficiency[memory_kind])
    memory = (profile.curves.get((memory_kind, "")), s_per_byte, profile.launch_overhead_s)
    if kind not in FLOP_KINDS:
        return (None, 0.0, 0.0, *memory)
    name = str(dtype).removeprefix("torch.")
    if name not in profile.peak_flops_per_s:
        known = ", ".join(profile.peak_flops_per_s)
        raise HardwareError(
            f"profile {profile.name!r} has no peak_flops_per_s for {name}",
            remedy=f"use one of {known}, or add {name} to peak_flops_per_s and to efficiency in a copy of the profile and pass its path",
        )
    s_per_flop = 1 / (profile.peak_flops_per_s[name] * profile.efficiency[kind][name])
    return (profile.curves.get((kind, name)), s_per_flop, profile.matmul_half_flops, *memory)
