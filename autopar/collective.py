"""Collectives: one communication step on one tensor, as priced and as emitted.

The one invariant: the tuple of `Collective`s of a redistribution is the single source of both its price and the
emitted nodes. `bytes` is always the size of the local tensor that ONE rank puts in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice"]
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "slice")


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication step along one mesh axis.

    Attributes:
        kind: ``slice`` is the local step Replicate → Shard; it moves nothing between ranks.
        axis: index of the mesh axis.
        dim: the tensor dim gathered (all_gather), scattered (reduce_scatter, slice), or, for all_to_all, the dim that
            is sharded before. -1 for all_reduce.
        to_dim: for all_to_all the dim that is sharded afterwards, else -1.
        reduce_op: ``sum``, ``max``, ``min`` or ``product`` for the reducing kinds, else empty.
        dtype: element type as text without ``torch.``, for example ``bfloat16``.
        bytes: bytes of the local input of one rank.
    """

    kind: Kind
    axis: int
    dim: int
    to_dim: int
    reduce_op: str
    dtype: str
    bytes: int

    def output_bytes(self, size: int) -> int:
        """Bytes of the local output of one rank, on an axis of `size` devices."""
        if self.kind == "all_gather":
            return self.bytes * size
        if self.kind in ("reduce_scatter", "slice"):
            return self.bytes // size
        return self.bytes

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
