"""Rules applied to a trace: clusters of nodes that share a decision, their classes and strategies,
and the constraints on them."""

from autopar.sharding.clusters import Cluster, ClusterMember, Ref, clusters_of, pattern_of
from autopar.sharding.enumerate import ClusterClass, ClusterStrategy, apart, classes_of
from autopar.sharding.resolve_constraints import (
    Forced,
    Starts,
    frozen_starts,
    group_of,
    layer_of,
    resolve,
    together,
)

__all__ = [
    "Cluster",
    "ClusterClass",
    "ClusterMember",
    "ClusterStrategy",
    "Forced",
    "Ref",
    "Starts",
    "apart",
    "classes_of",
    "clusters_of",
    "frozen_starts",
    "group_of",
    "layer_of",
    "pattern_of",
    "resolve",
    "together",
]
