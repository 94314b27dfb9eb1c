"""Seconds of collectives, buckets and ops on a profile, by the certificate's own formulas.

Only the figures of the profile are shared with the code that prices plans
(`autopar.core.collective`, `autopar.cost`). With n ranks, p bytes of operand on each rank and r =
⌈log₂ n⌉ rounds of latency α, a rank sends

    all_gather      (n−1)·p           in r rounds     (its own part goes to n−1 others)
    reduce_scatter  (n−1)·p/n         in r rounds     (each other rank gets its part)
    all_reduce      2·(n−1)·p/n       in 2·r rounds   (a reduce_scatter, then an all_gather)
    all_to_all      (n−1)·p/n         in r rounds, at the share of bandwidth that these reach
    swap            p/2               in one round
    halo            the halo's bytes  in one round

and launches one kernel. A collective over several axes is several collectives, one per axis, each
over the slowest link between its ranks. Measured points replace the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np
import torch

from autopar.core.collective import Collective, Kind
from autopar.core.hardware import Curve, Hardware, HardwareProfile, Link, profile_of, slowest
from autopar.core.mesh import Mesh
from autopar.cost.priced import Wire
from autopar.errors import HardwareError

_MOST_IN_BUCKET = 32 * 2**20
"""Largest number of bytes of a bucket on one rank, before or after the collective."""
_LEAST_MOVED = 2048
"""Smallest number of elements of each tensor that a pass over a bucket moves."""
_PER_MEMBER = 1 / 8
"""Share of a launch that each tensor of a bucket takes."""
_SIZES_TRIED = 16
_FLOPS = ("matmul", "attention", "attention_backward")
_REAL = {torch.complex32: "float16", torch.complex64: "float32", torch.complex128: "float64"}


@dataclass(frozen=True)
class Rates:
    """Seconds of collectives, buckets and ops on one mesh and profile."""

    mesh: Mesh
    profile: HardwareProfile
    _alone: dict[Collective, float] = field(default_factory=dict)
    _per_byte: dict[tuple[Kind, int], float] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Rates, ...]:
        """The rates of each kind of device, if devices are unequal. All devices wait for the
        slowest."""
        return tuple(Rates(self.mesh, part) for part in self.profile.parts)

    def link_of(self, axis: int) -> str:
        """Return the slowest link between ranks along an axis: within a node, or between nodes."""
        named = dict(self.mesh.links)
        if self.mesh.names[axis] in named:
            return named[self.mesh.names[axis]]
        ranks = np.arange(self.mesh.num_devices).reshape(self.mesh.shape)
        nodes = np.moveaxis(ranks // self.mesh.devices_per_node, axis, -1)
        return "intra" if bool((nodes == nodes[..., :1]).all()) else "inter"

    def alone_s(self, c: Collective) -> float:
        """Return the seconds of a collective outside of buckets."""
        if c not in self._alone:
            many = self.parts
            self._alone[c] = max(r.alone_s(c) for r in many) if many else self._collective_s(c)
        return self._alone[c]

    def _collective_s(self, c: Collective) -> float:
        launch_s = self.profile.launch_overhead_s
        if c.axis < 0:
            host = self.profile.host
            if host is None:
                raise HardwareError(f"profile {self.profile.name!r} has no figures for host memory")
            return launch_s + host.latency_s + c.bytes / host.bandwidth_bytes_per_s
        n = self.mesh.shape[c.axis]
        if n == 1:
            return 0.0
        moved_s = self._memory_s(2 * _bytes_copied(c, n))
        if c.kind == "slice":
            return launch_s + moved_s
        link = self.profile.links[self.link_of(c.axis)]
        if c.kind in ("swap", "halo"):
            sent = c.bytes / 2 if c.kind == "swap" else c.halo_bytes
            return launch_s + link.latency_s + sent / link.bandwidth_bytes_per_s + moved_s
        return self._on_wire_s(c.kind, n, c.bytes, link) + moved_s

    def _on_wire_s(self, kind: Kind, n: int, put_in: float, link: Link) -> float:
        launch_s, curves = self.profile.launch_overhead_s, link.curves.get(kind) or {}
        larger = put_in * n if kind == "all_gather" else put_in
        if n in curves:
            return _interpolate(curves[n], larger)
        if (
            not curves
            and kind in ("all_gather", "reduce_scatter")
            and link.curves.get("all_reduce")
        ):
            return self._on_wire_s("all_reduce", n, larger, link) / 2 + launch_s
        bandwidth = link.bandwidth_bytes_per_s
        if kind == "all_to_all":
            bandwidth *= link.all_to_all_efficiency
        computed_s = (
            launch_s + _rounds(kind, n) * link.latency_s + _bytes_sent(kind, n, put_in) / bandwidth
        )
        if not curves:
            return computed_s
        m = min(curves, key=lambda each: (max(each / n, n / each), each))
        same_share_bytes = larger * _share(kind, n) / _share(kind, m)
        further = (_rounds(kind, n) - _rounds(kind, m)) * link.latency_s
        return max(computed_s, _interpolate(curves[m], same_share_bytes) + further)

    def _memory_s(self, num_bytes: float) -> float:
        """Return the seconds of copying bytes in memory, without a launch."""
        share = self.profile.memory_efficiency["elementwise"]
        return num_bytes / (self.profile.memory_bandwidth_bytes_per_s * share)

    # Buckets.

    def bucket_s(self, c: Collective, members: Sequence[int]) -> float:
        """Return the seconds of one collective on a bucket, including packing and unpacking.

        Args:
            c: the collective of the bucket.
            members: for each member, the bytes of its operand on one rank.
        """
        if self.profile.parts:
            return max(r.bucket_s(c, members) for r in self.parts)
        passes_s = sum(self._passes_s(replace(c, bytes=size)) for size in members)
        return self.alone_s(c) + 2 * self.profile.launch_overhead_s + passes_s

    def _passes_s(self, c: Collective) -> float:
        n, least = self.mesh.shape[c.axis], _LEAST_MOVED * getattr(torch, c.dtype).itemsize
        rows_in = n if c.kind == "reduce_scatter" else 1
        rows_out = n if c.kind == "all_gather" else 1
        packed = max(c.bytes, least * rows_in)
        unpacked = max(c.bytes * rows_out // rows_in, least * rows_out)
        launch_s = _PER_MEMBER * self.profile.launch_overhead_s
        return launch_s + self._memory_s(2 * (packed + unpacked))

    def share_s(self, c: Collective) -> float:
        """Return the seconds of a collective as a part of the bucket that suits it best."""
        if self.profile.parts:
            return max(r.share_s(c) for r in self.parts)
        if (c.kind, c.axis) not in self._per_byte:
            full_bucket = replace(c, dim=0 if c.kind != "all_reduce" else -1, bytes=0)
            self._per_byte[c.kind, c.axis] = min(self._per_byte_s(full_bucket))
        return c.bytes * self._per_byte[c.kind, c.axis] + self._passes_s(c)

    def _per_byte_s(self, whole: Collective) -> Iterable[float]:
        most = self.most_in_bucket(whole)
        for total in {max(most // 2**n, 1) for n in range(_SIZES_TRIED)}:
            launches_s = 2 * self.profile.launch_overhead_s
            yield (self.alone_s(replace(whole, bytes=total)) + launches_s) / total

    def most_in_bucket(self, c: Collective) -> int:
        """Return the largest number of bytes that one rank may put into a bucket. The result of an
        all_gather is larger by the number of ranks."""
        return _MOST_IN_BUCKET // (self.mesh.shape[c.axis] if c.kind == "all_gather" else 1)

    # Ops.

    def op_s(self, kind: str, flops: int, num_bytes: int, dtype: torch.dtype | str) -> float:
        """Return the seconds of one op: the longer of arithmetic and memory access, and its launch.
        A view takes no time.

        Args:
            kind: class of the op, such as "matmul" or "elementwise", for which the profile has an
                efficiency.
            flops: floating-point operations; one in a complex dtype counts as four.
            num_bytes: bytes read and written.
            dtype: dtype in which the op computes.

        Raises:
            HardwareError: if the profile has no peak for the dtype.
        """
        if kind == "view":
            return 0.0
        if self.profile.parts:
            return max(r.op_s(kind, flops, num_bytes, dtype) for r in self.parts)
        p, over_memory = self.profile, kind if kind not in _FLOPS else "elementwise"
        curve = p.curves.get((over_memory, ""))
        bandwidth = p.memory_bandwidth_bytes_per_s * p.memory_efficiency[over_memory]
        moved_s = (
            _interpolate(curve, num_bytes) if curve else p.launch_overhead_s + num_bytes / bandwidth
        )
        if kind not in _FLOPS:
            return moved_s
        is_complex = isinstance(dtype, torch.dtype) and dtype in _REAL
        name = _REAL[dtype] if is_complex else str(dtype).removeprefix("torch.")
        flops = 4 * flops if is_complex else flops
        measured = p.curves.get((kind, name))
        if measured:
            return max(moved_s, _interpolate(measured, flops))
        if name not in p.peak_flops_per_s:
            raise HardwareError(f"profile {p.name!r} has no peak_flops_per_s for {name}")
        reached = p.peak_flops_per_s[name] * p.efficiency[kind][name]
        return max(moved_s, p.launch_overhead_s + (flops + p.matmul_half_flops) / reached)


def wire_between(axis: str, mesh: Mesh, hardware: Hardware, *stages: int) -> Wire:
    """Return the link between stages along an axis: the longest latency and the smallest bandwidth
    of all their devices.

    Args:
        axis: name of the pipeline's axis; for `""` the link takes no time.
        mesh: the mesh of the whole plan.
        hardware: the profile, or one profile per index along an axis.
        stages: indices along `axis`.
    """
    if not axis:
        return Wire()
    name = Rates(mesh, slowest(hardware)).link_of(mesh.names.index(axis))
    links = [profile_of(hardware, axis, stage).links[name] for stage in stages]
    bandwidths = [link.bandwidth_bytes_per_s for link in links]
    return Wire(max(link.latency_s for link in links), min(bandwidths))


def sent_s(wire: Wire, num_bytes: float, num_hops: int = 1) -> float:
    """Return the seconds of sending bytes over several links that work at the same time.

    Args:
        wire: latency and bandwidth of each link.
        num_bytes: bytes that each link transfers.
        num_hops: number of links on the way; each adds its latency.
    """
    return num_hops * wire.latency_s + num_bytes / wire.bandwidth_bytes_per_s


def handed_on_s(axis: str, mesh: Mesh, hardware: Hardware, num_bytes: int) -> float:
    """Return the seconds until every stage along an axis has a result of one of them.

    Args:
        axis: name of the pipeline's axis; for `""` this takes no time.
        mesh: the mesh of the whole plan.
        hardware: the profile, or one profile per index along an axis.
        num_bytes: bytes of the result on a device.
    """
    if not axis or not num_bytes:
        return 0.0
    ranks = mesh.shape[mesh.names.index(axis)]
    return sent_s(wire_between(axis, mesh, hardware, *range(ranks)), num_bytes, ranks - 1)


def _rounds(kind: Kind, n: int) -> int:
    """Return the number of rounds of latency of a collective over n ranks."""
    return (n - 1).bit_length() * (2 if kind == "all_reduce" else 1)


def _bytes_sent(kind: Kind, n: int, put_in: float) -> float:
    """Return the bytes that one rank sends."""
    to_others = (n - 1) * put_in
    match kind:
        case "all_gather":
            return to_others
        case "all_reduce":
            return 2 * to_others / n
        case "reduce_scatter" | "all_to_all":
            return to_others / n
        case "swap" | "halo" | "slice" | "fetch" | "store":
            raise AssertionError(f"the bytes of a {kind} are counted by its caller")
        case _:
            assert_never(kind)


def _share(kind: Kind, n: int) -> float:
    """Return the bytes that one rank sends per byte of its operand or its result, whichever is
    larger."""
    return _bytes_sent(kind, n, 1.0 / n if kind == "all_gather" else 1.0)


def _bytes_copied(c: Collective, n: int) -> int:
    """Return the bytes that a rank copies.

    The parts of ranks are contiguous in a buffer. So the result of an all_gather and the operand of
    a reduce_scatter are copied, unless the dim is the leading one.
    """
    leading: Mapping[str, int] = {
        "all_gather": c.bytes * n * (c.dim > 0),
        "reduce_scatter": c.bytes * (c.dim > 0),
        "all_reduce": 0,
        "all_to_all": c.bytes * (c.dim > 0) + c.bytes * (c.to_dim > 0),
        "slice": c.bytes // n,
        "swap": c.bytes + (c.dim > 0) * (c.bytes // 2),
        "halo": c.bytes + c.halo_bytes,
    }
    return leading[c.kind]


def _interpolate(curve: Curve, size: float) -> float:
    """Interpolate a measured time between points on logarithmic scales. Below the first point,
    return its time; above the last point, scale its time with the size."""
    if size >= curve.sizes[-1]:
        return curve.times[-1] / curve.sizes[-1] * size
    at = math.log(max(size, curve.sizes[0]))
    return float(np.exp(np.interp(at, np.log(curve.sizes), np.log(curve.times))))
