"""Which values may be kept for backward, and which ops backward may run again.

Both follow from the borders of layers and from named plans. A value that may be kept in no layout
is recomputed (`autopar.core.problem.Value.keepable`).
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
    """Find the tensors that another layer or stage reads in forward, directly or through views.

    The ops that make them are not recomputed. Otherwise backward would run a whole chain of
    recomputed layers, and hold all their results, when it first needs the end of the chain. Views
    of them may be recomputed: that takes no time, and if both a tensor and its view were kept,
    their memory would be counted twice.

    Args:
        classes: the classes of clusters of the trace.
        leaving: tensors that another stage reads.
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
    """Whether a cluster makes only views. A cluster of getitems alone does not count."""
    return (
        all(is_view(member.call.target) for member in cluster.members)
        and cluster.members[0].call.target is not operator.getitem
    )


def may_run_again(cluster: ClusterClass, forced: Forced) -> bool:
    """Whether constraints let backward run a cluster of forward again.

    Clusters that make borders of layers (`borders_of`) are excluded elsewhere.
    """
    if forced.recompute == "full":
        return bool(cluster.first.indices)
    if forced.recompute == "selective":
        return any(member.node in forced.softmax for member in cluster.first.members)
    return forced.recompute is None


def is_never_kept(cluster: ClusterClass, result: int, forced: Forced) -> bool:
    """Whether a result of a recomputable cluster must be recomputed.

    Args:
        cluster: a class of clusters that backward may run again.
        result: index of the result.
        forced: the constraints.
    """
    return forced.recompute == "full" or (
        forced.recompute == "selective" and cluster.first.results[result][0] in forced.softmax
    )


def split_furthest(
    graph: LayoutGraph, layouts: Iterable[Layout], axes: Iterable[int], mesh_shape: Sequence[int]
) -> frozenset[int]:
    """Select the layouts that are split over the most devices of some mesh axes.

    Args:
        graph: the layout graph of the tensor.
        layouts: layouts of the graph to select from.
        axes: the mesh axes that count.
        mesh_shape: devices per mesh axis.

    Returns:
        Indices of the selected layouts in the graph.
    """
    axes = tuple(axes)
    parts = {
        graph.index[at]: math.prod(
            mesh_shape[axis] for axis in axes if isinstance(at.placements[axis], Shard)
        )
        for at in layouts
    }
    return frozenset(index for index, num in parts.items() if num == max(parts.values()))
