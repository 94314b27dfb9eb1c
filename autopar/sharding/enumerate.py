"""Classes of equal clusters, and the strategies that each chooses from.

Terms. A cluster *class* contains all clusters with the same patterns and the same calls. It takes
one decision for all of them. The options of a cluster on one axis are the consistent combinations
of its members' options, without redistribution inside the cluster. Its strategies are the product
of these options over the mesh axes, in every order of the splitters.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.trace import Trace
from autopar.core.layout import Layout, Strategy
from autopar.core.placements import REPLICATE, adds_up, splits
from autopar.errors import ConstraintError
from autopar.rules import AxisOption, TensorInfo, cuts_alike
from autopar.sharding.clusters import (
    Assignment,
    Cluster,
    ClusterMember,
    Ref,
    clusters_of,
    joint_options,
    offered_options,
)
from autopar.sharding.resolve_constraints import Forced, Starts, group_of


@dataclass(frozen=True, slots=True)
class ClusterStrategy:
    """A strategy of a cluster: the layouts of its operands and results, and those of each
    member."""

    outer: Strategy
    members: tuple[Strategy, ...]


@dataclass(frozen=True, slots=True)
class ClusterClass:
    """All clusters that share one decision, and the strategies to choose from."""

    instances: tuple[Cluster, ...]
    strategies: tuple[ClusterStrategy, ...]

    @property
    def first(self) -> Cluster:
        """The first instance, which represents all of them."""
        return self.instances[0]


def classes_of(
    trace: Trace, mesh_shape: Sequence[int], forced: Forced | None = None
) -> tuple[ClusterClass, ...]:
    """Fold the clusters of a trace into classes, and list their strategies.

    Args:
        trace: the trace.
        mesh_shape: devices per mesh axis.
        forced: the constraints; None forces nothing.

    Raises:
        ConstraintError: if no strategy of an op meets its constraints. The error names the op and
            its possible layouts.
    """
    forced = forced or Forced.nothing()
    clusters = clusters_of(trace, forced.named.separate)
    groups: dict[tuple[object, ...], list[Cluster]] = {}
    for cluster in clusters:
        slots = tuple(
            (forced.slots.get(m.node, ()), forced.named.rows.get(m.node, ()))
            for m in cluster.members
        )
        groups.setdefault((*cluster.signature, slots), []).append(cluster)
    partial = _partial_operands(clusters, groups)
    classes = tuple(
        ClusterClass(
            tuple(group),
            _filter_allowed(
                group[0], _expand_presets(group[0], partial[signature], mesh_shape, forced), forced
            ),
        )
        for signature, group in groups.items()
    )
    return split_by_layers(classes, forced.starts)


def split_by_layers(classes: Sequence[ClusterClass], starts: Starts) -> tuple[ClusterClass, ...]:
    """Split classes by groups of layers. Strategies do not change."""
    split_classes: list[ClusterClass] = []
    for cluster_class in classes:
        groups: dict[int, list[Cluster]] = {}
        for cluster in cluster_class.instances:
            groups.setdefault(group_of(cluster.members[0].key, starts), []).append(cluster)
        split_classes += [
            ClusterClass(tuple(groups[group]), cluster_class.strategies) for group in sorted(groups)
        ]
    return tuple(split_classes)


def _expand_presets(
    cluster: Cluster, partial: Sequence[set[Placement]], mesh_shape: Sequence[int], forced: Forced
) -> tuple[ClusterStrategy, ...]:
    """Return the strategies of a cluster that named plans admit."""
    options = _joint_options(cluster, partial)
    replicated = [o for o in options if all(isinstance(p, Replicate) for p in o.values())]
    per_axis = [
        _admit_options(cluster, options, axis, forced) if size > 1 else replicated
        for axis, size in enumerate(mesh_shape)
    ]
    strategies = expand(cluster, per_axis, mesh_shape)
    if not strategies:
        raise _refusal(cluster, mesh_shape, forced)
    return strategies


def _admit_options(
    cluster: Cluster, options: Sequence[Assignment], axis: int, forced: Forced
) -> Sequence[Assignment]:
    """Return the options that agree with the rows of named plans on an axis."""
    rows = [
        (m, row)
        for m in cluster.members
        for a, row in forced.named.rows.get(m.node, ())
        if a == axis
    ]
    return [
        o
        for o in options
        if all(
            row.admits(tuple(o[r] for r in m.reads), tuple(o[r] for r in m.makes))
            for m, row in rows
        )
    ]


def _refusal(cluster: Cluster, mesh_shape: Sequence[int], forced: Forced) -> ConstraintError:
    """Return the error for a cluster without strategies. It names the first tensor that cannot be
    split."""
    for reason in (_too_short, _find_uneven):
        for member in cluster.members:
            rows = dict(forced.named.rows.get(member.node, ()))
            labels = {axis: (*row.inputs, *row.outputs) for axis, row in rows.items()}
            for i, info in enumerate((*member.call.inputs, *member.call.outputs)):
                layout = Layout(
                    [
                        (labels[axis][i] if axis in labels else None) or REPLICATE
                        for axis in range(len(mesh_shape))
                    ]
                )
                dim = reason(layout, info, mesh_shape)
                if dim is not None:
                    parts = layout.num_shards(dim, mesh_shape)
                    plans = ", ".join(
                        dict.fromkeys(forced.named.plans[axis] for axis in layout.splitters(dim))
                    )
                    message = (
                        f"{plans} cannot hold: {member.key} has a tensor of shape {info.shape},"
                        f" whose dim {dim} would be in {parts} parts"
                    )
                    remedy = (
                        f"make its length {info.shape[dim]} a multiple of {parts}, or use fewer or"
                        " smaller axes"
                    )
                    return ConstraintError(message, where=member.call.where, remedy=remedy)
    first = cluster.members[0]
    named = list(dict.fromkeys(filter(None, forced.named.plans)))
    if len(named) == 1:
        message = f"{named[0]} cannot hold: {first.key} has no strategy that satisfies it"
        return ConstraintError(
            message,
            where=first.call.where,
            remedy="remove it for this model, or use other axes for it",
        )
    message = f"the named plans cannot hold: {first.key} has no strategy that satisfies all of them"
    return ConstraintError(message, where=first.call.where, remedy="remove one of them")


def _too_short(layout: Layout, info: TensorInfo, mesh_shape: Sequence[int]) -> int | None:
    """Return the first dim that is too short for the layout; None if there is none."""
    alone = [
        Layout(
            [p if isinstance(p, Shard) and p.dim == dim else REPLICATE for p in layout.placements]
        )
        for dim in range(len(info.shape))
    ]
    return next(
        (dim for dim, split in enumerate(alone) if not split.fits(info.shape, mesh_shape)), None
    )


def _find_uneven(layout: Layout, info: TensorInfo, mesh_shape: Sequence[int]) -> int | None:
    """Return the first dim that is split unevenly; None if there is none. Some ops require
    corresponding parts."""
    return next(
        (dim for dim, size in enumerate(info.shape) if size % layout.num_shards(dim, mesh_shape)),
        None,
    )


def _filter_allowed(
    cluster: Cluster, strategies: tuple[ClusterStrategy, ...], forced: Forced
) -> tuple[ClusterStrategy, ...]:
    for i, member in enumerate(cluster.members):
        for kind, slot, layout in forced.slots.get(member.node, ()):
            matching = tuple(
                s for s in strategies if getattr(s.members[i], f"{kind}s")[slot] == layout
            )
            if not matching:
                possible = sorted(
                    {str(getattr(s.members[i], f"{kind}s")[slot]) for s in strategies}
                )
                raise ConstraintError(
                    f"no strategy has {kind} {slot} of {member.key} as {str(layout)!r}",
                    where=member.call.where,
                    remedy=f"with the other constraints it can be one of: {'; '.join(possible)}",
                )
            strategies = matching
    return strategies


def _joint_options(cluster: Cluster, partial: Sequence[set[Placement]]) -> list[Assignment]:
    """Return every consistent choice of one option per member on one axis, as tensor → placement.

    `partial` lists, for each operand, the partial placements that some producer can give. No others
    are used.
    """
    partial_placements = dict(zip(cluster.operands, partial, strict=True))

    def options_of(member: ClusterMember) -> list[AxisOption]:
        """Return the options of a member whose partial operands can be given."""
        pairs = (
            (o, zip(member.reads, o.inputs, strict=True)) for o in offered_options(member.call)
        )
        return [
            o
            for o, read in pairs
            if not any(
                adds_up(p) and ref in partial_placements and p not in partial_placements[ref]
                for ref, p in read
            )
        ]

    states = joint_options((m.reads, m.makes, options_of(m)) for m in cluster.members)
    unique = {tuple(sorted((r, str(p)) for r, p in state.items())): state for state in states}
    return list(unique.values())


def _partial_operands(
    clusters: Sequence[Cluster], groups: Mapping[tuple[object, ...], Sequence[Cluster]]
) -> dict[tuple[object, ...], list[set[Placement]]]:
    """Return class → for each operand, the partial placements that a producer of any instance can
    give on one axis."""
    signature_of = {id(c): s for s, group in groups.items() for c in group}
    can: dict[Ref, set[Placement]] = {}
    result: dict[tuple[object, ...], list[set[Placement]]] = {
        s: [set() for _ in g[0].operands] for s, g in groups.items()
    }
    cache: dict[tuple[object, ...], list[set[Placement]]] = {}
    for cluster in clusters:
        signature = signature_of[id(cluster)]
        operands = [can.get(r, set()) for r in cluster.operands]
        for total, new in zip(result[signature], operands, strict=True):
            total |= new
        key = (signature, *(frozenset(map(str, o)) for o in operands))
        if key not in cache:
            options = _joint_options(cluster, operands)
            cache[key] = [{o[r] for o in options if adds_up(o[r])} for r in cluster.results]
        can.update(zip(cluster.results, cache[key], strict=True))
    return result


def expand(
    cluster: Cluster, per_axis: Sequence[Sequence[Assignment]], mesh_shape: Sequence[int]
) -> tuple[ClusterStrategy, ...]:
    """List the strategies of a cluster over all mesh axes.

    Args:
        cluster: the cluster.
        per_axis: the options on each axis, as tensor → placement.
        mesh_shape: devices per mesh axis.

    Returns:
        The product of the options, in every order of the splitters. Strategies with layouts that do
        not fit are omitted. Of strategies with equal layouts of operands and results, the first is
        kept.
    """
    shapes = _shapes(cluster)
    strategies_by_layout: dict[Strategy, ClusterStrategy] = {}
    known: dict[tuple[object, ...], Layout | None] = {}  # many strategies share few layouts

    def make_layout(
        ref: Ref, chosen: Sequence[Assignment], order: tuple[int, ...]
    ) -> Layout | None:
        """Return the layout of a tensor.

        Args:
            ref: the tensor.
            chosen: one option per axis.
            order: order of the splitters.

        Returns:
            The layout; None if it does not fit the shape.
        """
        placements = [option[ref] for option in chosen]
        key = (ref, order, *map(id, placements))
        if key not in known:
            layout = Layout(placements, order)
            known[key] = layout if layout.fits(shapes[ref], mesh_shape) else None
        return known[key]

    for chosen in itertools.product(*per_axis):
        for order in _orders(chosen, shapes):
            layouts: dict[Ref, Layout] = {}
            for ref in shapes:
                layout = make_layout(ref, chosen, order)
                if layout is None:
                    break
                layouts[ref] = layout
            else:
                strategy = _strategy(cluster, layouts)
                if all(
                    cuts_alike(m.call, s, mesh_shape)
                    for m, s in zip(cluster.members, strategy.members, strict=True)
                ):
                    strategies_by_layout.setdefault(strategy.outer, strategy)
    return tuple(strategies_by_layout.values())


def _shapes(cluster: Cluster) -> dict[Ref, tuple[int, ...]]:
    shapes: dict[Ref, tuple[int, ...]] = {}
    for member in cluster.members:
        shapes.update(
            (r, info.shape) for r, info in zip(member.reads, member.call.inputs, strict=True)
        )
        shapes.update(
            (r, info.shape) for r, info in zip(member.makes, member.call.outputs, strict=True)
        )
    return shapes


def _orders(
    chosen: Sequence[Assignment], shapes: Mapping[Ref, tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return all orders of the axes if two of them split the same dim of some tensor, else only
    mesh order."""
    natural = tuple(range(len(chosen)))
    for ref in shapes:
        dims = [p.dim for option in chosen if splits(p := option[ref])]
        if len(set(dims)) < len(dims):
            return list(itertools.permutations(natural))
    return [natural]


def _strategy(cluster: Cluster, layouts: Mapping[Ref, Layout]) -> ClusterStrategy:
    members = tuple(
        Strategy(tuple(layouts[r] for r in m.reads), tuple(layouts[r] for r in m.makes))
        for m in cluster.members
    )
    outer = Strategy(
        tuple(layouts[r] for r in cluster.operands), tuple(layouts[r] for r in cluster.results)
    )
    return ClusterStrategy(outer, members)
