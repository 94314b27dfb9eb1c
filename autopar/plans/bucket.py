"""Communications that a plan does together: one collective on one bucket of many small tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.collective import Collective
from autopar.layout import Layout


@dataclass(frozen=True, slots=True)
class Member:
    """One communication of a bucket: the one that makes result `result` of node `node` as `target`, in the bucket's phase."""

    node: str
    result: int
    target: Layout


@dataclass(frozen=True, slots=True)
class Bucket:
    """Communications of one kind, axis, dtype and reduction that are one collective (`autopar.emit.buckets`).

    Attributes:
        phase: of all of them. members: in the order in which they lie in the bucket.
        collective: on the bucket, padding included; along dim 0, or -1 for all_reduce.
        time_s: of it, packing and unpacking included; per microbatch, as of `Communication`. saved_s: against each of them alone.
    """

    phase: str
    members: tuple[Member, ...]
    collective: Collective
    time_s: float
    saved_s: float


def read_bucket(data: Mapping[str, Any]) -> Bucket:
    """From JSON."""
    members = tuple(Member(**{**m, "target": Layout.parse(m["target"])}) for m in data["members"])
    return Bucket(**{**data, "members": members, "collective": Collective(**data["collective"])})
