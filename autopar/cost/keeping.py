"""What may be kept between forward and backward, and what backward may run again: what layers end
with, and what named plans force.

What may be kept in no layout, backward makes again (`autopar.core.problem.Value.keepable`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

from torch.distributed.tensor import Shard

from autopar.analysis.work import is_view
from autopar.core.layout import Layout
from autopar.core.layout_graph import LayoutGraph
from autopar.sharding import Cluster, ClusterClass, Forced, Ref


def borders_of(classes: Sequence[ClusterClass], leaving: Iterable[Ref]) -> set[Ref]:
    """Tensors that another layer, or another stage, reads in forward, itself or through views. What
    makes them does not run again: a chain of recomputed layers would be run, and held, all at once
    when backward first asks for its end, and nothing would be saved. Views of them may be made
    again: they take no time, and kept beside what they are views of, the memory of both would be
    counted twice.

    Args:
        leaving: what another stage reads.
    """
    forward = [cluster for c in classes for cluster in c.instances if c.first.phase == "forward"]
    layers = {ref: cluster.indices for cluster in forward for ref in cluster.results}
    viewed = {
        ref: cluster.operands for cluster in forward if _is_view(cluster) for ref in cluster.results
    }
    waiting = [
        ref
        for cluster in forward
        for ref in cluster.operands
        if layers.get(ref, cluster.indices) != cluster.indices
    ]
    waiting += leaving
    found: set[Ref] = set()
    while waiting:
        ref = waiting.pop()
        found |= set() if ref in viewed else {ref}
        waiting += viewed.get(ref, ())
    return found


def _is_view(cluster: Cluster) -> bool:
    """Whether a cluster makes nothing but views; what picks a result is one where the op that
    makes it is."""
    return (
        all(is_view(member.call.target) for member in cluster.members)
        and cluster.members[0].call.target is not operator.getitem
    )


def may_run_again(cluster: ClusterClass, forced: Forced) -> bool:
    """Whether backward may run forward nodes again that make nothing which another layer reads."""
    if forced.recompute == "full":
        return bool(cluster.first.indices)
    if forced.recompute == "selective":
        return any(member.node in forced.softmax for member in cluster.first.members)
    return forced.recompute is None


def is_never_kept(cluster: ClusterClass, result: int, forced: Forced) -> bool:
    """Whether a result of nodes that may run again has to be made again."""
    return forced.recompute == "full" or (
        forced.recompute == "selective" and cluster.first.results[result][0] in forced.softmax
    )


def split_furthest(
    graph: LayoutGraph, layouts: Iterable[Layout], axes: Iterable[int], mesh_shape: Sequence[int]
) -> frozenset[int]:
    """Of the layouts those that are split over the most devices of these axes."""
    axes = tuple(axes)
    parts = {
        graph.index[at]: math.prod(
            mesh_shape[axis] for axis in axes if isinstance(at.placements[axis], Shard)
        )
        for at in layouts
    }
    return frozenset(index for index, num in parts.items() if num == max(parts.values()))
