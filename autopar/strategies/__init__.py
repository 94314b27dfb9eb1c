"""Rules applied to nodes: clusters that share a decision, folded into classes, with their strategies."""

from autopar.strategies.clusters import Cluster, Member, Ref, clusters_of, pattern_of
from autopar.strategies.expansion import ClusterClass, ClusterStrategy, classes_of
from autopar.strategies.forced import Forced, resolve

__all__ = ["Cluster", "ClusterClass", "ClusterStrategy", "Forced", "Member", "Ref", "classes_of", "clusters_of", "pattern_of", "resolve"]
