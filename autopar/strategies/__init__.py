"""Rules applied to nodes: clusters that share a decision, folded into classes, with their strategies."""

from autopar.strategies.clusters import Cluster, Member, Ref, clusters_of, pattern_of
from autopar.strategies.expansion import ClusterClass, ClusterStrategy, apart, classes_of
from autopar.strategies.forced import Forced, resolve
from autopar.strategies.groups import Starts, frozen_starts, group_of, layer_of, together

__all__ = [
    "Cluster", "ClusterClass", "ClusterStrategy", "Forced", "Member", "Ref", "Starts", "apart", "classes_of", "clusters_of",
    "frozen_starts", "group_of", "layer_of", "pattern_of", "resolve", "together",
]  # fmt: skip
