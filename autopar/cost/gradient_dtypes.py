"""Dtypes of gradients: additions that need no cast, and reductions in a wider dtype.

A gradient may be added to a wider sum without a cast: the addition casts as it reads. With b bytes
in the narrow dtype and w in the wide one, a cast moves b + w bytes, and the addition of its result
3·w. The addition of the narrow gradient moves b + 2·w. So each strategy of a cast is offered twice.
In the first, the cast is computed, in a layout from which collectives may start. In the second, its
operand stays uncast, in a layout that only a parameter reads whose gradient is summed in that
layout (`Layout.uncast`). If every axis has partial sums, only the cast itself leads to the layout,
and the parameter need not read it in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial

from autopar.analysis.gradients import addable_uncast
from autopar.capture.trace import Trace
from autopar.core.layout import Layout
from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Problem, Value
from autopar.sharding import Cluster, ClusterClass, ClusterStrategy


@dataclass(frozen=True, slots=True)
class Uncast:
    """The ways to add a parameter's gradient without a cast.

    Attributes:
        dtype: dtype of the gradient before the cast.
        layouts: layouts in which it may be computed, without the mark `Layout.uncast`.
    """

    dtype: torch.dtype
    layouts: frozenset[Layout]


def left_uncast(
    classes: Sequence[ClusterClass], trace: Trace
) -> tuple[tuple[ClusterClass, ...], Mapping[str, Uncast]]:
    """Add to casts of gradients the strategies that leave their operand uncast.

    Args:
        classes: the classes of clusters of the trace.
        trace: the trace.

    Returns:
        The classes, in which instances with and without such casts are separate; and parameter name
        → the ways to add its gradient without a cast.
    """
    casts = addable_uncast(trace)
    with_uncast: list[ClusterClass] = []
    parameters: dict[str, Uncast] = {}
    for cluster_class in classes:
        groups: dict[tuple[int, ...], list[Cluster]] = {}
        for cluster in cluster_class.instances:
            groups.setdefault(
                tuple(n for n, member in enumerate(cluster.members) if member.node in casts), []
            ).append(cluster)
        for places, instances in groups.items():
            strategies = cluster_class.strategies
            if len(places) == 1:
                cast = instances[0].members[places[0]]
                result = instances[0].results.index((cast.node, 0))
                uncast = Uncast(
                    cast.call.inputs[0].dtype,
                    frozenset(s.outer.outputs[result] for s in strategies),
                )
                parameters |= {
                    casts[cluster.members[places[0]].node]: uncast for cluster in instances
                }
                strategies = (*strategies, *(_uncast(s, places[0], result) for s in strategies))
            with_uncast.append(ClusterClass(tuple(instances), strategies))
    return tuple(with_uncast), parameters


def _uncast(strategy: ClusterStrategy, place: int, result: int) -> ClusterStrategy:
    """Return the strategy with one result of one member left uncast."""
    outputs, members = list(strategy.outer.outputs), list(strategy.members)
    outputs[result] = outputs[result].left_uncast()
    members[place] = replace(members[place], outputs=(outputs[result],))
    return ClusterStrategy(replace(strategy.outer, outputs=tuple(outputs)), tuple(members))


def is_all_partial(layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Return whether no collective leads to a layout, because every axis has partial sums."""
    return all(
        isinstance(p, Partial)
        for p, size in zip(layout.placements, mesh_shape, strict=True)
        if size > 1
    )


# --------------------------------------------------------------------------------------------------
# Partial sums that are reduced in a wider dtype. Both copies exist during the cast.
#
# Gradients of 16-bit parameters are reduced in fp32 (`autopar.core.layout_graph`) as soon as they
# are computed. A tensor that is replicated on another axis may be sliced there before the
# reduction.

WIDENED = "/widen"
"""Suffix of the name of a moment at which the result of a node is widened, and of the key of the
node that widens it."""


def widened_bytes(problem: Problem, value: Value) -> list[int]:
    """Return a lower bound on the bytes of partial sums together with their wide copy.

    Args:
        problem: the problem.
        value: the value.

    Returns:
        Bytes per strategy of the op that computes the value; 0 if the strategy has no partial sums,
        or if a reader reads them without a reduction.
    """
    ops = problem.ops
    uses = {
        use
        for variant in problem.variants
        if problem.values[variant.value] is value
        for use in variant.uses
    }
    read_layouts = {s.layouts.inputs[use.operand] for use in uses for s in ops[use.op].strategies}
    fewest: dict[int, int] = {}
    widened = []
    for strategy in ops[value.op].strategies:
        layout = strategy.layouts.outputs[value.result]
        if layout in read_layouts or not layout.has_partial:
            widened.append(0)
        else:
            made_layout = value.graph.index[layout]
            if made_layout not in fewest:
                fewest[made_layout] = _fewest(value.graph, made_layout)
            widened.append(fewest[made_layout])
    return widened


def _fewest(graph: LayoutGraph, made: int) -> int:
    """Return the fewest bytes over the reductions that may come first; 0 if one of them needs no
    wider dtype."""
    outgoing, queue, both = graph.arcs_by_source(), [made], []
    for layout in queue:  # grows during the loop
        for arc in outgoing[layout]:
            if arc.collective.reduce_op:
                narrow, wide = graph.bytes[layout], arc.collective.bytes
                both.append(narrow + wide if wide > narrow else 0)
            elif arc.dst not in queue:
                queue.append(arc.dst)
    return min(both, default=0)
