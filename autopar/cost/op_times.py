"""Seconds of one op on its local tensors, and of one collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from autopar.analysis.work import Work, computes_in, works
from autopar.capture.trace import Trace
from autopar.core.collective import (
    Collective,
    Kind,
    collective_time,
    least_per_byte,
    share_of_bucket,
)
from autopar.core.hardware import FLOP_KINDS, Curve, Hardware, HardwareProfile, Mixed
from autopar.core.layout import Layout, Strategy, local_shape
from autopar.core.mesh import Mesh
from autopar.errors import HardwareError
from autopar.rules import Call, TensorInfo, call_of, num_senders, own_moves
from autopar.sharding import ClusterMember

# --------------------------------------------------------------------------------------------------
# Time of one op on one device.
#
# With f flops, b bytes, P the peak, e the efficiency of large sizes, h `matmul_half_flops`, B the
# memory bandwidth, g the efficiency of the kind and o the launch overhead:
#
#     matmul, attention, attention_backward    max((f + h) / (e P), b / (g B)) + o
#     memory-bound kinds                       b / (g B) + o
#     view                                     0
#
# (f + h) / (e P) is f over the peak at efficiency e · f / (f + h): a matmul of h flops runs at
# half the speed of a large one, because it does not fill the device. A complex product is four
# products of its parts. If the profile has measured points of the kind (and dtype), their curve,
# which includes the overhead, replaces the formula. matmul and attention still take no less than an
# elementwise op over their bytes. The time never decreases as f or b grows. If a profile has
# several parts, the time is the longest of theirs.

_PARTS: Mapping[torch.dtype | str, torch.dtype] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# Curve over flops or None, seconds per flop, added flops, curve over bytes or None, seconds per
# byte, overhead in seconds.
_Rates = tuple[Curve | None, float, float, Curve | None, float, float]


def compute_time(work: Work, dtype: torch.dtype | str, profile: HardwareProfile) -> float:
    """Return the seconds of work on one device.

    Args:
        work: flops, bytes and kind.
        dtype: dtype of the computation; matters for matmul and attention only.
        profile: the hardware.

    Raises:
        HardwareError: if the profile has no peak for matmul or attention in `dtype`.
    """
    if work.kind == "view":
        return 0.0
    if profile.parts:
        return max(compute_time(work, dtype, part) for part in profile.parts)
    if dtype in _PARTS:  # a complex product is four products of its parts
        work, dtype = replace(work, flops=4 * work.flops), _PARTS[dtype]
    flops_curve, s_per_flop, half, bytes_curve, s_per_byte, overhead = _rates(
        profile, work.kind, dtype
    )
    memory = bytes_curve.time_s(work.bytes) if bytes_curve else work.bytes * s_per_byte + overhead
    if work.kind not in FLOP_KINDS:
        return memory
    return max(
        memory,
        (
            flops_curve.time_s(work.flops)
            if flops_curve
            else (work.flops + half) * s_per_flop + overhead
        ),
    )


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
            remedy=(
                f"use one of {known}, or add {name} to peak_flops_per_s and to efficiency in a copy"
                " of the profile and pass its path"
            ),
        )
    s_per_flop = 1 / (profile.peak_flops_per_s[name] * profile.efficiency[kind][name])
    return (profile.curves.get((kind, name)), s_per_flop, profile.matmul_half_flops, *memory)


class CollectivePrices:
    """Seconds of single collectives on a mesh. Prices are cached."""

    def __init__(self, mesh: Mesh, profile: HardwareProfile) -> None:
        self.mesh, self.profile = mesh, profile
        self._known: dict[Collective, float] = {}
        self._per_byte: dict[tuple[Kind, int], float] = {}

    def __call__(self, collective: Collective) -> float:
        if collective not in self._known:
            link = self.mesh.link(collective.axis) if collective.axis >= 0 else ""
            self._known[collective] = collective_time(
                collective, collective.size_in(self.mesh.shape), link, self.profile
            )
        return self._known[collective]

    def share(self, collective: Collective) -> float:
        """Return the seconds of a collective that may share a bucket: its share of the bucket, or
        its time outside of a bucket if that is less."""
        kind, axis = collective.kind, collective.axis
        size, link = self.mesh.shape[axis], self.mesh.link(axis)
        if (kind, axis) not in self._per_byte:
            self._per_byte[kind, axis] = least_per_byte(kind, size, link, self.profile)
        return min(
            self(collective),
            share_of_bucket(collective, size, link, self.profile, self._per_byte[kind, axis]),
        )


@lru_cache(maxsize=2**16)  # equal layers, and strategies of one op, share prices
def local_info(info: TensorInfo, layout: Layout, mesh_shape: Sequence[int]) -> TensorInfo:
    """Return the shape and dtype of the part of a tensor on one rank.

    Args:
        info: global shape and dtype.
        layout: layout of the tensor.
        mesh_shape: devices per mesh axis.
    """
    return TensorInfo(local_shape(info.shape, layout, mesh_shape), info.dtype)


def call_time(
    call: Call, strategy: Strategy, mesh_shape: Sequence[int], profile: HardwareProfile
) -> float:
    """Return the seconds of one op on its local tensors, without its internal collectives.

    Args:
        call: the op with global shapes.
        strategy: the layouts of its operands and results.
        mesh_shape: devices per mesh axis.
        profile: the hardware.
    """
    inputs = [
        local_info(i, layout, mesh_shape)
        for i, layout in zip(call.inputs, strategy.inputs, strict=True)
    ]
    outputs = [
        local_info(o, layout, mesh_shape)
        for o, layout in zip(call.outputs, strategy.outputs, strict=True)
    ]
    dtype = computes_in(inputs)
    senders = num_senders(call, strategy, mesh_shape)
    mirrored = any(layout.special for layout in strategy.outputs)  # results have no halos
    parts = works(
        call.target,
        call.args,
        call.kwargs,
        inputs,
        outputs,
        senders,
        mirrored=mirrored,
        by_kernels=profile.has_row_kernels,
    )
    return sum(n * compute_time(w, dtype, profile) for w, n in parts)


def own_collectives(
    members: Iterable[tuple[ClusterMember, Strategy]], mesh_shape: Sequence[int]
) -> tuple[Collective, ...]:
    """Return the collectives that the members of a cluster issue internally, in order."""
    return tuple(
        c for member, strategy in members for c in own_moves(member.call, strategy, mesh_shape)
    )


# --------------------------------------------------------------------------------------------------
# A lower bound of the compute of a step, from the trace alone: it needs no strategies, layouts or
# solver.
#
# Every op is divided perfectly. With d devices that share a microbatch, and M microbatches, some
# device does at least 1 / (d M) of an op's flops and bytes for each microbatch. `compute_time`
# never decreases with flops or bytes, so its value for this share is a lower bound of the op's
# time, including the launch overhead. The sum over all ops is a lower bound of the time of one
# microbatch through the whole model, regardless of layouts. Communication, recomputation and
# waiting only add to it.

_Kind = tuple[Work, int, torch.dtype]
"""Work on the whole batch, number of sequential repetitions within the op, and its dtype."""


@dataclass(frozen=True)
class TotalWork:
    """The work of a trace on the whole batch.

    Attributes:
        kinds: each kind of work, with the number of ops that have it.
    """

    kinds: tuple[tuple[_Kind, int], ...]

    @staticmethod
    def of(trace: Trace, hardware: Hardware) -> TotalWork:
        """Return the total work of a trace's ops.

        Args:
            trace: the trace of the whole batch.
            hardware: determines whether norms run as row kernels, which move fewer bytes.
        """
        by_kernels = any(profile.has_row_kernels for profile in _profiles(hardware))
        kinds: Counter[_Kind] = Counter()
        for node in trace.graph.nodes:
            if node.op != "call_function":
                continue
            call = call_of(node)
            parts = works(
                call.target,
                call.args,
                call.kwargs,
                call.inputs,
                call.outputs,
                by_kernels=by_kernels,
            )
            dtype = computes_in(call.inputs)
            kinds.update((work, times, dtype) for work, times in parts if work.kind != "view")
        return TotalWork(tuple(kinds.items()))

    def least_s(self, hardware: Hardware, num_devices: int, num_microbatches: int = 1) -> float:
        """Return a lower bound of the seconds of one microbatch through the whole model.

        Args:
            hardware: the hardware of the devices. If they are unequal, each op is priced on the
                fastest.
            num_devices: number of devices that share each op.
            num_microbatches: number of equal parts of the batch.
        """
        profiles, parts = _profiles(hardware), num_devices * num_microbatches
        return sum(
            count * min(_least_op_s(kind, parts, profile) for profile in profiles)
            for kind, count in self.kinds
        )

    def least_staged_s(
        self,
        hardware: Hardware,
        num_devices: int,
        num_stages: int,
        num_microbatches: int,
        num_chunks: int = 1,
    ) -> float:
        """Return a lower bound of the seconds of a pipeline's step, with stages of equal time.

        With P devices along the pipeline and t seconds for a microbatch through all stages, each
        device computes for M · t / P and waits for (P − 1) · t / (P · v), with v stages per device
        (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021,
        section 2.2). For 1F1B and GPipe this is also a bound for unequal stages, since the slowest
        sets the pace.

        Args:
            hardware: as in `least_s`.
            num_devices: number of devices that share a stage.
            num_stages: P, number of devices along the pipeline's axis.
            num_microbatches: M.
            num_chunks: v, number of stages per device.
        """
        least_s = self.least_s(hardware, num_devices, num_microbatches)
        return least_s * (num_microbatches + (num_stages - 1) / num_chunks) / num_stages


def _profiles(hardware: Hardware) -> tuple[HardwareProfile, ...]:
    return tuple(dict.fromkeys(hardware.profiles)) if isinstance(hardware, Mixed) else (hardware,)


def _least_op_s(kind: _Kind, parts: int, profile: HardwareProfile) -> float:
    """Return a lower bound of the seconds of one of `parts` parts of an op.

    An op that works on one block of rows after another can have fewer or smaller repetitions.
    """
    work, times, dtype = kind
    smaller = Work(times * work.flops // parts, times * work.bytes // parts, work.kind)
    at_once_s = compute_time(smaller, dtype, profile)
    if times == 1:
        return at_once_s
    return min(at_once_s, times / parts * compute_time(work, dtype, profile))
