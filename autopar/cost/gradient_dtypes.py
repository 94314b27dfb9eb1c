"""Gradients that are added to their sums as backward makes them, though these are wider: the cast
is done where they are read.

Of b bytes in the narrow dtype and w in the wide one a cast takes b + w, and addition of what it
makes 3·w; addition of what is cast takes b + 2·w. So a cast has each of its strategies twice: its
result is made, in a layout from which collectives may lead on, or it is left uncast, in one that
only a parameter whose gradient adds up in that layout reads (`Layout.uncast`). Where every axis has
partial sums nothing leads to the layout but the cast, and the parameter need not read it otherwise.
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
    """How a parameter's gradient may be added without a cast.

    Attributes:
        dtype: of what is cast. layouts: in which it may be made, which are not marked.
    """

    dtype: torch.dtype
    layouts: frozenset[Layout]


def left_uncast(
    classes: Sequence[ClusterClass], trace: Trace
) -> tuple[tuple[ClusterClass, ...], Mapping[str, Uncast]]:
    """The classes with what their casts of gradients may leave uncast, instances apart that may and
    may not; and of which parameters, by name."""
    casts = addable_uncast(trace)
    found: list[ClusterClass] = []
    parameters: dict[str, Uncast] = {}
    for each in classes:
        groups: dict[tuple[int, ...], list[Cluster]] = {}
        for cluster in each.instances:
            groups.setdefault(
                tuple(n for n, member in enumerate(cluster.members) if member.node in casts), []
            ).append(cluster)
        for places, instances in groups.items():
            strategies = each.strategies
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
            found.append(ClusterClass(tuple(instances), strategies))
    return tuple(found), parameters


def _uncast(strategy: ClusterStrategy, place: int, result: int) -> ClusterStrategy:
    """The strategy with one result left uncast: that of one member."""
    outputs, members = list(strategy.outer.outputs), list(strategy.members)
    outputs[result] = outputs[result].left_uncast()
    members[place] = replace(members[place], outputs=(outputs[result],))
    return ClusterStrategy(replace(strategy.outer, outputs=tuple(outputs)), tuple(members))


def is_made_there(layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether no collective leads to a layout: along every axis there are partial sums."""
    return all(
        isinstance(p, Partial)
        for p, size in zip(layout.placements, mesh_shape, strict=True)
        if size > 1
    )


# --------------------------------------------------------------------------------------------------
# Partial sums that are reduced in a wider dtype than their own: while they are widened both
# copies are there.
#
# Gradients of 16-bit parameters are reduced in fp32 (`autopar.core.layout_graph`), as soon as they
# are made. A reduction need not be the first step: what is replicated on another axis may be cut
# there before.

WIDENED = "/widen"
"""Ends the name of a moment at which what a node made is widened, as it ends the key of the node
that does that."""


def widened_bytes(problem: Problem, value: Value) -> list[int]:
    """Bytes of the sums and of their wide copy, at least, per strategy of what makes them; 0
    where it makes none, or they are read so."""
    ops = problem.ops
    uses = {
        use
        for variant in problem.variants
        if problem.values[variant.value] is value
        for use in variant.uses
    }
    wanted = {s.layouts.inputs[use.operand] for use in uses for s in ops[use.op].strategies}
    fewest: dict[int, int] = {}
    found = []
    for strategy in ops[value.op].strategies:
        layout = strategy.layouts.outputs[value.result]
        if layout in wanted or not layout.has_partial:
            found.append(0)
        else:
            made = value.graph.index[layout]
            if made not in fewest:
                fewest[made] = _fewest(value.graph, made)
            found.append(fewest[made])
    return found


def _fewest(graph: LayoutGraph, made: int) -> int:
    """Over the reductions that may come first; 0 where they are in the dtype of the tensor."""
    outgoing, queue, both = graph.arcs_by_source(), [made], []
    for layout in queue:  # grows while it is walked
        for arc in outgoing[layout]:
            if arc.collective.reduce_op:
                narrow, wide = graph.bytes[layout], arc.collective.bytes
                both.append(narrow + wide if wide > narrow else 0)
            elif arc.dst not in queue:
                queue.append(arc.dst)
    return min(both, default=0)
