"""What named plans force on values between forward and backward: how they may be kept, and what backward runs again.

What may be kept in no layout, backward makes again (`autopar.problem.Value.keepable`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch.distributed.tensor import Shard

from autopar.layout import Layout
from autopar.redistribute import LayoutGraph
from autopar.strategies import ClusterClass, Forced


def may_run_again(cluster: ClusterClass, forced: Forced) -> bool:
    """Whether backward may run forward nodes again that make nothing which another layer reads."""
    if forced.recompute == "full":
        return bool(cluster.first.indices)
    if forced.recompute == "selective":
        return any(member.node in forced.softmax for member in cluster.first.members)
    return forced.recompute is None


def is_never_kept(cluster: ClusterClass, result: int, forced: Forced) -> bool:
    """Whether a result of nodes that may run again has to be made again."""
    return forced.recompute == "full" or (forced.recompute == "selective" and cluster.first.results[result][0] in forced.softmax)


def split_furthest(graph: LayoutGraph, layouts: Iterable[Layout], axes: Iterable[int], mesh_shape: Sequence[int]) -> frozenset[int]:
    """Of the layouts those that are split over the most devices of these axes."""
    axes = tuple(axes)
    parts = {graph.index[at]: math.prod(mesh_shape[axis] for axis in axes if isinstance(at.placements[axis], Shard)) for at in layouts}
    return frozenset(index for index, num in parts.items() if num == max(parts.values()))
