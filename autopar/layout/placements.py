"""Placements on one mesh axis: torch's, and those in which tensors lie only for the ops that ask for them."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.halo import Halo
from autopar.mirrored import Mirrored

Special = Halo | Mirrored
REPLICATE = Replicate()
PARTIAL = Partial("sum")


def splits(placement: Placement) -> bool:
    """Whether it is a shard. torch's placements have an ``isinstance`` of their own, which takes long where they are not."""
    return issubclass(type(placement), Shard)


def adds_up(placement: Placement) -> bool:
    """Whether it is a partial sum, or another reduction's part; as quickly as `splits`."""
    return issubclass(type(placement), Partial)
