"""Rules applied to a trace: clusters of nodes that share a decision, their classes and strategies,
and the constraints on them."""

from autopar.sharding.clusters import Cluster, ClusterMember, Ref, clusters_of, pattern_of
from autopar.sharding.enumerate import ClusterClass, ClusterStrategy, classes_of, split_by_layers
from autopar.sharding.propagate import LabelRow
from autopar.sharding.resolve_constraints import (
    Forced,
    Starts,
    combine_groupings,
    frozen_starts,
    group_of,
    layer_of,
    resolve,
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
    "classes_of",
    "clusters_of",
    "combine_groupings",
    "frozen_starts",
    "group_of",
    "layer_of",
    "pattern_of",
    "resolve",
    "resolve_named",
    "split_by_layers",
]
