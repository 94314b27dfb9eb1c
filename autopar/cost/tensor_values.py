"""The tensors of a problem: the ops that compute and read them, how equal tensors fold into values
and variants, and which values may be kept.

The borders of layers and named plans determine which values may be kept for backward, and which ops
backward may recompute. A value that may not be kept in any layout is recomputed
(`autopar.core.problem.Value.keepable`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Shard

from autopar.analysis.gradients import only_widened
from autopar.analysis.work import is_view
from autopar.capture.trace import Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.layout_graph import LayoutGraph, all_layouts, layout_graph
from autopar.core.mesh import Mesh
from autopar.core.problem import Op, Phase, Use, Value, Variant
from autopar.cost.gradient_dtypes import Uncast
from autopar.cost.offload import offload_seconds
from autopar.cost.op_times import CollectivePrices
from autopar.cost.priced import Crossing, Source
from autopar.cost.zero_stages import StepMoves
from autopar.rules import TensorInfo
from autopar.sharding import Cluster, ClusterClass, Forced, Ref


@dataclass(frozen=True, slots=True)
class PriceSetting:
    """The arguments of `autopar.cost.price.price`, and values that follow from them.

    Attributes:
        trace, mesh, profile, optimizer, forced, crossing, exposed, all_ways: as in `price`.
        moves: the collectives at the beginning and the end of a step.
        accumulates: whether gradients are added to sums.
        uncast: parameter → the ways to add its gradient without a cast.
    """

    trace: Trace
    mesh: Mesh
    profile: HardwareProfile
    optimizer: str
    forced: Forced
    crossing: Crossing
    moves: StepMoves
    accumulates: bool
    exposed: Collection[str]
    uncast: Mapping[str, Uncast]
    all_ways: bool


@dataclass
class OpTables:
    """The ops of a problem while it is built, and the tensors that they compute and read.

    Attributes:
        ops: the ops, in order.
        sources: source of each op.
        producers: tensor → (op, result).
        readers: tensor → its uses.
        infos: tensor → its shape and dtype.
    """

    ops: list[Op] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    producers: dict[Ref, tuple[int, int]] = field(default_factory=dict)
    readers: dict[Ref, list[Use]] = field(default_factory=dict)
    infos: dict[Ref, TensorInfo] = field(default_factory=dict)

    def add(self, op: Op, source: Source) -> int:
        """Add an op and its source, and return the op's index."""
        self.ops.append(op)
        self.sources.append(source)
        return len(self.ops) - 1

    def add_reader(
        self, ref: Ref, op: int, operand: int, phase: Phase, *, again: bool = True
    ) -> None:
        """Record that an op reads a tensor.

        Args:
            ref: the tensor.
            op: index of the op.
            operand: position of the tensor among its operands.
            phase: the phase in which the op runs.
            again: whether its recomputation reads the tensor, too.
        """
        self.readers.setdefault(ref, []).append(Use(op, operand, phase, again))

    def uses(self, ref: Ref) -> tuple[Use, ...]:
        """Return the readers of a tensor, one per op, operand and phase.

        If several instances of an op differ, the one whose recomputation reads the tensor counts.
        """
        readers = sorted(
            self.readers.get(ref, ()), key=lambda u: (u.op, u.operand, u.phase, u.read_again)
        )
        return tuple({(u.op, u.operand, u.phase): u for u in readers}.values())


class TensorValues:
    """Folds the tensors of a problem into values and variants."""

    def __init__(self, setting: PriceSetting, tables: OpTables) -> None:
        self.setting, self.tables = setting, tables
        self.price = CollectivePrices(setting.mesh, setting.profile)
        # Gradients that are cast before they are reduced.
        self._only_cast = only_widened(setting.trace)
        # By the arguments of `layout_graph`.
        self._graphs: dict[tuple[object, ...], LayoutGraph] = {}

    def all(self) -> tuple[list[Value], list[Variant], list[tuple[Ref, ...]]]:
        """Fold tensors into values by the ops that compute them, and into variants by the ops that
        read them."""
        groups: dict[tuple[int, int], dict[tuple[Use, ...], list[Ref]]] = {}
        for ref, producer in self.tables.producers.items():
            uses = self.tables.uses(ref)
            if uses:
                groups.setdefault(producer, {}).setdefault(uses, []).append(ref)
        values: list[Value] = []
        variants: list[Variant] = []
        refs: list[tuple[Ref, ...]] = []
        for (op, result), by_uses in groups.items():
            refs_here = [ref for members in by_uses.values() for ref in members]
            ref = next((r for r in refs_here if r[0] in self.setting.exposed), refs_here[0])
            graph = self._layout_graph(op, result, ref, {u for uses in by_uses for u in uses})
            copied = self.tables.sources[op].copies
            resident = (
                self.tables.sources[op].kind not in ("compute", "output")
                and not self.tables.sources[op].crosses
                and not copied
            )
            key = f"{self.tables.ops[op].key}#{result}"
            phase: Phase = (
                "backward" if self.tables.ops[op].kind == "output" else self.tables.ops[op].phase
            )
            readers = [use for uses in by_uses for use in uses if use.phase == "forward"]
            keepable, info = self._keepable(op, result, graph, readers), self.tables.infos[ref]
            dtype, away_s = (
                str(info.dtype).removeprefix("torch."),
                self._away(op, phase, info, graph, keepable),
            )
            values.append(
                Value(key, op, result, phase, graph, resident, keepable, copied, dtype, away_s)
            )
            for uses, members in by_uses.items():
                variants.append(Variant(len(values) - 1, len(members), uses))
                refs.append(tuple(members))
        return values, variants, refs

    def _keepable(
        self, op: int, result: int, graph: LayoutGraph, uses: Sequence[Use]
    ) -> frozenset[int] | None:
        """Return the indices of the layouts in which a value may be kept; None allows all.

        Empty if constraints force recomputation. On a grid, these are the layouts split over the
        most devices, of those in which forward computes or reads the value.
        """
        cluster, named = self.tables.sources[op].cluster, self.setting.forced.named
        if (
            cluster is not None
            and self.tables.ops[op].recomputable
            and is_never_kept(cluster, result, self.setting.forced)
        ):
            return frozenset()
        free = cluster is not None and cluster.first.results[result][0] not in named.rows
        if (
            not named.grid
            or free
            or self.tables.sources[op].kind in ("input", "buffer")
            or self.tables.ops[op].phase == "backward"
        ):
            return None
        layouts = [s.layouts.outputs[result] for s in self.tables.ops[op].strategies]
        layouts += [
            s.layouts.inputs[u.operand] for u in uses for s in self.tables.ops[u.op].strategies
        ]
        return split_furthest(graph, layouts, named.grid, self.setting.mesh.shape)

    def _away(
        self,
        op: int,
        phase: Phase,
        info: TensorInfo,
        graph: LayoutGraph,
        keepable: frozenset[int] | None,
    ) -> tuple[float, ...]:
        """Return `Value.away_s` of a value that forward computes or that arrives from another
        stage. Empty without offload of activations."""
        offload, source = self.setting.forced.offload, self.tables.sources[op]
        if (
            offload is None
            or not offload.activations
            or phase == "backward"
            or not (source.kind == "compute" or source.crosses)
        ):
            return ()
        return offload_seconds(
            info, graph, keepable, self.setting.mesh.shape, self.setting.moves.price
        )

    def _layout_graph(self, op: int, result: int, ref: Ref, uses: set[Use]) -> LayoutGraph:
        info = self.tables.infos[ref]
        produced = [s.layouts.outputs[result] for s in self.tables.ops[op].strategies]
        ordered = sorted(uses, key=lambda u: (u.op, u.operand))
        read_layouts = [
            s.layouts.inputs[u.operand] for u in ordered for s in self.tables.ops[u.op].strategies
        ]
        read_layouts += (
            all_layouts(info.shape, self.setting.mesh.shape)
            if ref[0] in self.setting.exposed
            else ()
        )
        gradient = any(self.tables.ops[u.op].kind == "parameter" for u in uses)
        wide = (
            torch.float32
            if gradient and info.dtype.is_floating_point and info.dtype.itemsize < 4
            else None
        )
        reduces = (
            ref[0] not in self._only_cast or ref[0] in self.setting.exposed
        )  # partial sums do not cross between stages
        key = (
            tuple(info.shape),
            info.dtype,
            wide,
            reduces,
            tuple(dict.fromkeys(produced)),
            tuple(dict.fromkeys(read_layouts)),
        )
        if key not in self._graphs:
            self._graphs[key] = layout_graph(
                info.shape,
                info.dtype,
                self.setting.mesh.shape,
                produced,
                read_layouts,
                self.price,
                wide,
                reduces=reduces,
                share=self.price.share,
            )
        return self._graphs[key]


# --------------------------------------------------------------------------------------------------
# Values that may be kept, and ops that backward may recompute.


def borders_of(classes: Sequence[ClusterClass], leaving: Iterable[Ref]) -> set[Ref]:
    """Return the tensors that another layer or stage reads in forward, directly or through views.

    The ops that compute them are not recomputed. Otherwise backward would run a whole chain of
    recomputed layers, and hold all their results, when it first needs the end of the chain. Views
    of them may be recomputed: this takes no time, and if both a tensor and its view were kept,
    their memory would count twice.

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
    borders: set[Ref] = set()
    while waiting:
        ref = waiting.pop()
        borders |= set() if ref in viewed else {ref}
        waiting += viewed.get(ref, ())
    return borders


def _is_view(cluster: Cluster) -> bool:
    """Return whether a cluster consists of views. A cluster of getitems alone does not count."""
    return (
        all(is_view(member.call.target) for member in cluster.members)
        and cluster.members[0].call.target is not operator.getitem
    )


def may_run_again(cluster: ClusterClass, forced: Forced) -> bool:
    """Return whether constraints let backward recompute a forward cluster.

    Clusters that compute borders of layers (`borders_of`) are excluded elsewhere.
    """
    if forced.recompute == "full":
        return bool(cluster.first.indices)
    if forced.recompute == "selective":
        return any(member.node in forced.softmax for member in cluster.first.members)
    return forced.recompute is None


def is_never_kept(cluster: ClusterClass, result: int, forced: Forced) -> bool:
    """Return whether a result of a recomputable cluster must be recomputed.

    Args:
        cluster: a class of clusters that backward may recompute.
        result: index of the result.
        forced: the constraints.
    """
    return forced.recompute == "full" or (
        forced.recompute == "selective" and cluster.first.results[result][0] in forced.softmax
    )


def split_furthest(
    graph: LayoutGraph, layouts: Iterable[Layout], axes: Iterable[int], mesh_shape: Sequence[int]
) -> frozenset[int]:
    """Return the layouts that are split over the most devices of some mesh axes.

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
