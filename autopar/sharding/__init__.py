"""Rules applied to a trace: clusters of nodes that share a decision, their classes and strategies,
and the constraints on them."""

from autopar.sharding.clusters import Cluster, ClusterMember, Ref, clusters_of, pattern_of
from autopar.sharding.enumerate import ClusterClass, ClusterStrategy, apart, classes_of
from autopar.sharding.propagate import LabelRow
from autopar.sharding.resolve_constraints import (
    Forced,
    Starts,
    frozen_starts,
    group_of,
    layer_of,
    resolve,
    together,
)
from autopar.sharding.resolve_presets import Named, Walks, resolve_named

__all__ = [
    "Cluster",
    "ClusterClass",
    "ClusterMember",
    "ClusterStrategy",
    "Forced",
    "LabelRow",
    "Named",
    "Ref",
    "Starts",
    "Walks",
    "apart",
    "classes_of",
    "clusters_of",
    "frozen_starts",
    "group_of",
    "layer_of",
    "pattern_of",
    "resolve",
    "resolve_named",
    "together",
]
