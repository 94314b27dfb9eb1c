"""Collectives: one communication step on one tensor, as priced and as emitted.

The one invariant: the tuple of `Collective`s of a redistribution is the single source of both its
price and the emitted nodes. `bytes` is always the size of the local tensor that ONE rank puts in.

Time of a collective of n ranks, with b the larger of one rank's input and output bytes, α the
latency of a step and β the bandwidth of a device, one direction (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005: for each kind the latency of
its algorithm for short messages and the bandwidth of that for long ones):

    all_gather      ⌈log₂ n⌉ α + (n−1)/n · b/β         recursive doubling; ring
    reduce_scatter  ⌈log₂ n⌉ α + (n−1)/n · b/β         recursive halving; ring
    all_reduce    2 ⌈log₂ n⌉ α + 2 (n−1)/n · b/β       reduce_scatter, then all_gather
                                                       (Rabenseifner)
    all_to_all      ⌈log₂ n⌉ α + (n−1)/n · b/(ε β)     Bruck; pairwise, which reaches a share ε of a
                                                       ring's bandwidth
    swap            α + (b/2)/β                        with one other rank, both ways at once
    halo            α + h/β                            both neighbours at once; h bytes sent to them
                                                       together
    fetch, store    α + b/β                            of the link to the host, which each device
                                                       has for itself

If the profile has measured points of the kind for n ranks, they are interpolated instead. From
points for other numbers of ranks, with m the nearest, t(n, b) = max(formula(n, b), points(m, b ·
w(n)/w(m)) + (s(n) − s(m)) α), with s the number of steps and w the share of b on the wire. In both
cases the local copies are added that `autopar.kernels.collectives` makes if a dim is not leading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, assert_never, get_args

from autopar.core.hardware import Curve, HardwareProfile, Link
from autopar.errors import HardwareError

Kind = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "swap",
    "halo",
    "slice",
    "fetch",
    "store",
]
HOST_KINDS: tuple[Kind, ...] = ("fetch", "store")
"""Copies from and to the host's memory, along no axis."""
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind not in HOST_KINDS)
"""Steps along an axis."""
JOINING: tuple[Kind, ...] = ("all_gather", "all_to_all")
"""Kinds that join the ranks' parts of a dim. The parts may differ in length; the step is then given
the whole length of the dim."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication step along one mesh axis.

    Attributes:
        kind: ``slice`` is the local step Replicate → Shard; it moves nothing between ranks.
            ``fetch`` and ``store`` move a device's part from its host's memory, and there.
        axis: index of the mesh axis; −1 for `HOST_KINDS`, which move along none.
        dim: the tensor dim that is gathered (all_gather), scattered (reduce_scatter, slice),
            extended (halo), or whose halves are exchanged (swap); for all_to_all the dim that is
            sharded before. -1 for all_reduce, fetch and store.
        to_dim: for all_to_all the dim that is sharded afterwards, else -1.
        reduce_op: ``sum``, ``max``, ``min`` or ``product`` for the reducing kinds, else empty.
        dtype: element type as text without ``torch.``, for example ``bfloat16``.
        bytes: bytes of the local input of one rank.
        halo_bytes: for halo the bytes that a rank sends to both its neighbours together, and
            receives from them.
    """

    kind: Kind
    axis: int
    dim: int
    to_dim: int
    reduce_op: str
    dtype: str
    bytes: int
    halo_bytes: int = 0

    def size_in(self, mesh_shape: Sequence[int]) -> int:
        """Return the number of devices that it connects on a mesh; 1 if it moves along no axis."""
        return mesh_shape[self.axis] if self.axis >= 0 else 1

    def output_bytes(self, size: int) -> int:
        """Return the bytes of the local output of one rank, on an axis of `size` devices."""
        match self.kind:
            case "all_gather":
                return self.bytes * size
            case "reduce_scatter" | "slice":
                return self.bytes // size
            case "halo":
                return self.bytes + self.halo_bytes
            case "all_reduce" | "all_to_all" | "swap" | "fetch" | "store":
                return self.bytes
            case _:
                assert_never(self.kind)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as data of JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def collective_time(
    collective: Collective, axis_size: int, link: str, profile: HardwareProfile
) -> float:
    """Return the seconds of a collective alone.

    Args:
        collective: the collective.
        axis_size: devices on its mesh axis.
        link: the link of the axis, ``"intra"`` or ``"inter"``.
        profile: the hardware.

    Raises:
        HardwareError: if the profile has no such link.
    """
    if profile.parts:
        return max(collective_time(collective, axis_size, link, part) for part in profile.parts)
    if collective.kind in HOST_KINDS:
        assert profile.host is not None, (
            "of a host that the profile does not know offload is refused"
        )
        return (
            profile.launch_overhead_s
            + profile.host.latency_s
            + collective.bytes / profile.host.bandwidth_bytes_per_s
        )
    if axis_size == 1:
        return 0.0
    copies_s = (
        _copied_bytes(collective, axis_size)
        * 2
        / (profile.memory_bandwidth_bytes_per_s * profile.memory_efficiency["elementwise"])
    )
    if collective.kind == "slice":
        return profile.launch_overhead_s + copies_s
    if link not in profile.links:
        raise HardwareError(
            f"profile {profile.name!r} has no link {link!r}",
            remedy=f"links are {', '.join(profile.links)}",
        )
    if collective.kind in ("halo", "swap"):
        wire, sent_bytes = (
            profile.links[link],
            collective.halo_bytes if collective.kind == "halo" else collective.bytes / 2,
        )
        return (
            profile.launch_overhead_s
            + wire.latency_s
            + sent_bytes / wire.bandwidth_bytes_per_s
            + copies_s
        )
    size = max(collective.bytes, collective.output_bytes(axis_size))
    return (
        _wire_time(collective.kind, axis_size, size, profile.links[link], profile.launch_overhead_s)
        + copies_s
    )


BUCKETED: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds of collectives that may share a bucket."""
BUCKET_DTYPES: Mapping[str, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes per element of the dtypes that may share a bucket."""
STRIPE = 2048
"""The number of elements that a block of `pack` moves at once, at the least (``kStripe`` in
autopar_csrc/include/sums.h)."""
BUCKET_BYTES = 32 * 2**20
"""The largest size of a bucket on one rank, of its input or its output. Larger buckets would hide
less and save little more."""
# Share of a launch; not measured. It is large enough that a bias is not split and gathered to save
# a few nanoseconds of the optimizer.
_PER_MEMBER = 0.125
_NUM_TOTALS = 16  # sizes of buckets to compare, each half of the previous one


def bucket_time(
    collective: Collective,
    axis_size: int,
    link: str,
    profile: HardwareProfile,
    members: Iterable[int],
) -> float:
    """Return the seconds of one collective on a bucket, with the copies into and out of it.

    Args:
        collective: the collective of the whole bucket.
        axis_size: devices on its mesh axis.
        link: the link of the axis, ``"intra"`` or ``"inter"``.
        profile: the hardware.
        members: per tensor of the bucket the bytes that one rank puts in.

    Raises:
        HardwareError: if the profile has no such link.
    """
    if profile.parts:
        members = tuple(members)
        return max(
            bucket_time(collective, axis_size, link, part, members) for part in profile.parts
        )
    passes_s = sum(
        _passes_s(replace(collective, bytes=size), axis_size, profile) for size in members
    )
    return (
        collective_time(collective, axis_size, link, profile)
        + 2 * profile.launch_overhead_s
        + passes_s
    )


def _passes_s(collective: Collective, axis_size: int, profile: HardwareProfile) -> float:
    """Compute the seconds of `pack`, which reads and writes the input of one tensor, and of
    `unpack`, which reads and writes its output. Each copies one row per rank, and at least a stripe
    per row. The share of a launch is the host's time for one more tensor."""
    least, rows = STRIPE * BUCKET_DTYPES[collective.dtype], {collective.kind: axis_size}
    put_in = max(collective.bytes, least * rows.get("reduce_scatter", 1))
    output_bytes = max(collective.output_bytes(axis_size), least * rows.get("all_gather", 1))
    bytes_per_s = profile.memory_bandwidth_bytes_per_s * profile.memory_efficiency["elementwise"]
    return _PER_MEMBER * profile.launch_overhead_s + 2 * (put_in + output_bytes) / bytes_per_s


def share_of_bucket(
    collective: Collective,
    axis_size: int,
    link: str,
    profile: HardwareProfile,
    per_byte_s: float | None = None,
) -> float:
    """Return the least seconds that a collective takes as a part of any bucket: those of its
    copies, and those of its bytes in a bucket of the best size.

    Args:
        collective: the collective of one tensor.
        axis_size: devices on its mesh axis.
        link: the link of the axis, ``"intra"`` or ``"inter"``.
        profile: the hardware.
        per_byte_s: `least_per_byte`, if it is known already.

    Raises:
        HardwareError: if the profile has no such link.
    """
    if profile.parts:
        return max(share_of_bucket(collective, axis_size, link, part) for part in profile.parts)
    if per_byte_s is None:
        per_byte_s = least_per_byte(collective.kind, axis_size, link, profile)
    return collective.bytes * per_byte_s + _passes_s(collective, axis_size, profile)


def least_per_byte(kind: Kind, axis_size: int, link: str, profile: HardwareProfile) -> float:
    """Return the least seconds per byte that one rank puts into a bucket, without copies, over all
    sizes of buckets.

    Args:
        kind: kind of the collective.
        axis_size: devices on its mesh axis.
        link: the link of the axis, ``"intra"`` or ``"inter"``.
        profile: the hardware.

    Raises:
        HardwareError: if the profile has no such link.
    """
    collective = Collective(kind, 0, -1 if kind == "all_reduce" else 0, -1, "", "", 0)
    most = most_put_in(kind, axis_size)
    totals = (max(most >> n, 1) for n in range(_NUM_TOTALS))
    launches_s = 2 * profile.launch_overhead_s
    return min(
        (collective_time(replace(collective, bytes=total), axis_size, link, profile) + launches_s)
        / total
        for total in totals
    )


def most_put_in(kind: Kind, axis_size: int) -> int:
    """Return the most bytes that one rank may put into a bucket."""
    return BUCKET_BYTES // axis_size if kind == "all_gather" else BUCKET_BYTES


def faster(link: Link, share: float) -> Link:
    """Return the link with a bandwidth that is larger by `share`: (1 + share) · n bytes take the
    time that n bytes took. Its latency stays."""
    curves: Mapping[str, Mapping[int, Curve]] = {
        kind: {
            num: Curve(tuple(size * (1 + share) for size in c.sizes), c.times)
            for num, c in by_num.items()
        }
        for kind, by_num in link.curves.items()
    }
    return replace(
        link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * (1 + share), curves=curves
    )


def with_faster(profile: HardwareProfile, link: str, share: float) -> HardwareProfile:
    """Return the profile with a larger bandwidth of one link; all its `parts` change alike.

    Args:
        profile: the hardware.
        link: name of the link, ``"intra"`` or ``"inter"``.
        share: by how much the bandwidth grows, as in `faster`.
    """
    parts = tuple(with_faster(part, link, share) for part in profile.parts)
    return replace(
        profile, links={**profile.links, link: faster(profile.links[link], share)}, parts=parts
    )


def _copied_bytes(collective: Collective, axis_size: int) -> int:
    """Compute the bytes copied locally. Ranks' parts are contiguous in the buffer of a collective,
    so a dim that is not leading needs a copy. A slice is always copied. The halves of a swap are
    copied when they are joined, and the sent half is copied if the dim is not leading."""
    match collective.kind:
        case "all_gather":
            return collective.bytes * axis_size if collective.dim > 0 else 0
        case "reduce_scatter":
            return collective.bytes if collective.dim > 0 else 0
        case "all_to_all":
            return collective.bytes * ((collective.dim > 0) + (collective.to_dim > 0))
        case "swap":
            return collective.bytes + (collective.bytes // 2 if collective.dim > 0 else 0)
        case "slice" | "halo":
            return collective.output_bytes(axis_size)
        case "all_reduce" | "fetch" | "store":
            return 0
        case _:
            assert_never(collective.kind)


def _num_rounds(kind: Kind) -> int:
    """Count how often the data pass all ranks: an all_reduce is a reduce_scatter and an all_gather.

    Raises:
        AssertionError: if the kind does not involve all ranks of the axis.
    """
    match kind:
        case "all_reduce":
            return 2
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return 1
        case "swap" | "halo" | "slice" | "fetch" | "store":
            raise AssertionError(f"a {kind} is not a step of all ranks")
        case _:
            assert_never(kind)


def _steps(kind: Kind, n: int) -> int:
    return math.ceil(math.log2(n)) * _num_rounds(kind)


def _share(kind: Kind, n: int) -> float:
    """Compute the bytes that one device sends, per byte of the larger of its input and output."""
    return (n - 1) / n * _num_rounds(kind)


def _wire_time(kind: Kind, n: int, size: float, link: Link, launch_s: float) -> float:
    curves = link.curves.get(kind)
    if curves and n in curves:
        return curves[n].time_s(size)
    if not curves and kind in ("all_gather", "reduce_scatter") and link.curves.get("all_reduce"):
        # a ring all_reduce is a reduce_scatter and an all_gather; as two collectives, each has a
        # launch of its own
        return _wire_time("all_reduce", n, size, link, launch_s) / 2 + launch_s
    bandwidth = link.bandwidth_bytes_per_s * (
        link.all_to_all_efficiency if kind == "all_to_all" else 1.0
    )
    formula = launch_s + _steps(kind, n) * link.latency_s + _share(kind, n) * size / bandwidth
    if not curves:
        return formula
    nearest = min(curves, key=lambda m: (abs(math.log(m / n)), m))
    scaled = curves[nearest].time_s(size * _share(kind, n) / _share(kind, nearest))
    return max(formula, scaled + (_steps(kind, n) - _steps(kind, nearest)) * link.latency_s)
