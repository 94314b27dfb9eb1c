"""Grids of tensor parallelism (`autopar.constraints.parallel`): placements on each side of a grid.

The sides that split samples, and the depth, are data parallelism. On the other sides activations
are *at rest* in a placement that splits a dim. The result of a product by columns is split over its
features. A result whose partial sums are scattered is split over its samples (`SAMPLES`) or, on the
second side of ``2d``, over its features. A product with a weight is by *columns* (it reads the
whole activation, and the weight split over dims of the result) or by *rows* (both are split over
the contracted dim, and the results are partial sums). On the second side of ``2d`` all products are
by columns. On the sides of ``3d`` a product is by rows if features are split, and by columns if
samples are. So the split dim alternates from one product to the next, and differs between the two
sides.

All other nodes read their operands at rest. A node that cannot (a norm over split features) reads
them split over another dim (tokens), and its result has their placement at rest. The log names such
nodes. If a node can do neither, the plan is refused.
"""

from __future__ import annotations

import logging
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.constraints import Parallelism
from autopar.core.placements import PARTIAL, REPLICATE
from autopar.rules import AxisOption, axis_options
from autopar.sharding.clusters import HEADS, Ref
from autopar.sharding.propagate import (
    Policy,
    Propagation,
    SpreadLabels,
    TraceIndex,
    nothing_to_split,
    product_of,
)

log = logging.getLogger("autopar")
Side = Literal[
    "columns", "inner", "outer"
]  # second side of 2d; side of 3d that splits features of the residual stream; other side of 3d
SIDES: Mapping[str, tuple[Side | None, ...]] = {
    "2d": (None, "columns"),
    "2.5d": (None, "columns", None),
    "3d": (None, "inner", "outer"),
}
"""Kind of grid → the side of each of its axes; None is data parallelism."""
SAMPLES = Shard(0)


def walk_sides(graph: TraceIndex, plan: Parallelism) -> dict[Side, SpreadLabels]:
    """Return the placements on the sides of a plan's grid that are not data parallelism.

    If a node cannot read its operands, `SpreadLabels.failure` names it.

    Args:
        graph: the trace and its dependencies.
        plan: the named plan.

    Raises:
        ConstraintError: if the model has no product with a weight.
    """
    if not any(product_of(graph, node) for node in graph.nodes.values()):
        raise nothing_to_split(plan, "the model has no linear layer to shard")
    walks = {side: _Side(graph, side) for side in SIDES[plan.kind or ""] if side is not None}
    labels = {side: walk.run() for side, walk in walks.items()}
    aside = dict.fromkeys(name for walk in walks.values() for name in walk.aside)
    if aside and not any(spread.failure for spread in labels.values()):
        keys = dict.fromkeys(
            re.sub(r"(?<=\.)\d+(?=[./])", "*", graph.nodes[name].meta["key"]) for name in aside
        )
        log.warning(
            "%s shards another dim for ops that cannot read the sharded one: %s",
            plan,
            ", ".join(keys),
        )
    return labels


class _Side(Propagation):
    """The walk over one side.

    Attributes:
        labels: labels of tensors at rest. The rows have the labels in which they are produced.
        pending: tensors that are produced as partial sums.
        aside: node → operands that it reads split over another dim than at rest.
    """

    def __init__(self, graph: TraceIndex, side: Side) -> None:
        super().__init__(graph, Policy({}, slices=True))
        self.side, self.pending, self.aside = side, set[Ref](), dict[str, list[Ref]]()
        self.multiplied: dict[Ref, list[Ref]] = {}  # weight → activations of its forward products
        for node in graph.nodes.values():
            if (product := product_of(graph, node)) is not None:
                self.multiplied.setdefault(product[1], []).append(product[0])
        self.num_reads = Counter(ref for reads in graph.reads.values() for ref in reads)
        for node in _find_tied(graph):
            label = _row_label(graph, node) if side == "inner" else _column_label(graph, node)
            if label is not None:
                self.demand(product_of(graph, node)[1], label)  # type: ignore[index]

    def run(self) -> SpreadLabels:
        """Walk, and add the nodes that read an operand in another placement than that in which it
        is produced."""
        labels = super().run()
        for name, row in labels.rows.items():
            pairs = [
                (label, self._produced_label(ref))
                for ref, label in zip(self.graph.reads[name], row.inputs, strict=True)
            ]
            if any(
                label is not None and produced not in (None, label) for label, produced in pairs
            ):
                labels.separate.add(name)
        return labels

    def _produced_label(self, ref: Ref) -> Placement | None:
        """Return the label in which a node produces a tensor; None without a row."""
        return self.result.rows[ref[0]].outputs[ref[1]] if ref[0] in self.result.rows else None

    def _choose(self, node: fx.Node) -> AxisOption | None:
        """Return the option that reads the fewest operands in another placement than at rest."""
        options = [o for o in self._options(node) if self._is_possible(node, o)]
        for selection in (
            self._by_table,
            self._by_start,
            self._by_product,
            self._by_gradient,
            self._by_weight,
        ):
            candidates = selection(node, options)
            if candidates:
                return min(candidates, key=lambda o: self._cost(node, o))
        best = min(options, key=lambda o: self._cost(node, o), default=None)
        if best is None or not self._moved_operands(node, best):
            return best
        if not any(isinstance(p, Shard | Partial) for p in best.outputs):
            return None
        self.aside[node.name] = self._moved_operands(node, best)
        return best

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        self._place_operands(node, option)
        self._settle(node.name, option)
        reads = self.graph.reads[node.name]
        moved = self.aside.get(reads[0][0] if node.target is operator.getitem else node.name, [])
        for i, placement in enumerate(option.outputs):
            ref = node.name, i
            if isinstance(placement, Partial):
                self.pending.add(ref)
                self.labels[ref] = self._like_activation(node) or self._sum_label(node, option, i)
            elif (
                isinstance(placement, Shard) and (label := self._like_activation(node)) is not None
            ):
                self.labels[ref] = label
            elif len(option.outputs) == 1:
                shape = self.graph.calls[node.name].outputs[i].shape
                self.labels[ref] = next(
                    (self.labels[r] for r in moved if self.graph.shape_of(r) == shape), placement
                )

    def _is_possible(self, node: fx.Node, option: AxisOption) -> bool:
        """Return whether an option reads partial sums only where that is useful.

        Such a node only adds or moves them, and nothing else reads these sums.
        """
        reads, call = self.graph.reads[node.name], self.graph.calls[node.name]
        if node.target is operator.getitem:
            is_pending = reads[0] in self.pending
            return isinstance(option.inputs[0], Partial) == is_pending and (
                is_pending or option.inputs[0] == self._produced_label(reads[0])
            )
        if not any(isinstance(p, Partial) for p in option.inputs):
            return True
        sizes = {(i.dtype, math.prod(i.shape)) for i in (*call.inputs, *call.outputs)}
        pairs = zip(reads, option.inputs, strict=True)
        return len(sizes) == 1 and all(
            p == PARTIAL and ref in self.pending and self.num_reads[ref] == 1 for ref, p in pairs
        )

    def _moved_operands(self, node: fx.Node, option: AxisOption) -> list[Ref]:
        """Return the activations that an option reads in another placement than at rest, by a
        collective."""
        pairs = zip(self.graph.reads[node.name], option.inputs, strict=True)
        return [
            ref
            for ref, placement in pairs
            if self._is_activation(ref[0])
            and isinstance(self._state(ref), Shard)
            and placement not in (self._state(ref), PARTIAL)
        ]

    def _cost(self, node: fx.Node, option: AxisOption) -> tuple[int, ...]:
        """Return the cost of an option. The numbers count, in order: moved operands, gathered
        weights, sliced whole operands, and reduced partial sums. Of equal options, the later dim is
        preferred."""
        gathers = slices = 0
        for ref, placement in zip(self.graph.reads[node.name], option.inputs, strict=True):
            label = self._state(ref)
            if self._is_activation(ref[0]):
                slices += not isinstance(label, Shard) and isinstance(placement, Shard)
            else:
                gathers += isinstance(label, Shard) and placement != label
        moved, summed = (
            len(self._moved_operands(node, option)),
            sum(not isinstance(p, Partial) for p in option.inputs),
        )
        dims = [p.dim for p in option.outputs if isinstance(p, Shard)]
        return moved, gathers, slices, summed, bool(dims) != bool(moved), -max(dims, default=0)

    def _sum_label(self, node: fx.Node, option: AxisOption, result: int) -> Placement:
        """Return the label of partial sums at rest.

        The sums of a product are scattered, others are whole, and a sum of several has their label.
        """
        for i, (ref, placement) in enumerate(
            zip(self.graph.reads[node.name], option.inputs, strict=True)
        ):
            if isinstance(placement, Partial):
                read = (
                    o.outputs[result]
                    for o in self._options(node)
                    if o.inputs[i] == self.labels[ref]
                )
                return next((label for label in read if not isinstance(label, Partial)), REPLICATE)
        shape = self.graph.calls[node.name].outputs[result].shape
        target = Shard(len(shape) - 1) if self.side == "columns" else SAMPLES
        is_product = (
            node.target in (ops.dot, ops.embedding) and node.name not in self.graph.gradient_of
        )
        return target if is_product and shape[target.dim] > 1 else REPLICATE

    def _like_activation(self, node: fx.Node) -> Placement | None:
        """Return the label of the activation of which a node computes the gradient; None for other
        nodes.

        The activation is the operand of the last forward product with the same weight.
        """
        if node.target is not ops.dot or node.meta["phase"] != "backward":
            return None
        for ref in self.graph.reads[node.name]:
            for x in reversed(self.multiplied.get(ref, ())):
                if self.graph.shape_of(x) == self.graph.shape_of((node.name, 0)):
                    return self._state(x)
        return None

    def _by_product(self, node: fx.Node, options: Sequence[AxisOption]) -> list[AxisOption]:
        """Return the options of a forward product with a weight: by rows or by columns."""
        product = product_of(self.graph, node)
        if product is None:
            return []
        x, weight = (self.graph.reads[node.name].index(ref) for ref in product)
        label = self.labels.get(product[1])
        if isinstance(label, Shard):
            return [o for o in options if o.inputs[weight] == label]
        state = self._state(product[0])
        rows = [
            o
            for o in options
            if o.inputs[x] == state != REPLICATE and isinstance(o.outputs[0], Partial)
        ]
        if rows and self.side != "columns" and isinstance(rows[0].inputs[weight], Shard):
            return rows
        return [
            o
            for o in options
            if o.inputs[x] == REPLICATE and o.inputs[weight] == _column_label(self.graph, node)
        ]

    def _by_table(self, node: fx.Node, options: Sequence[AxisOption]) -> list[AxisOption]:
        """Return the options of a forward lookup by ids of the batch: by the label of its table if
        that is split, else by samples or by features."""
        table = (
            self.graph.reads[node.name][0]
            if node.target is ops.embedding and node.meta["phase"] == "forward"
            else ("", 0)
        )
        if not self.graph.is_weight(table[0]):
            return []
        label = self.labels.get(table)
        if isinstance(label, Shard):
            return [o for o in options if o.inputs[0] == label]
        rows_label = (
            SAMPLES
            if self.side == "outer"
            else Shard(len(self.graph.calls[node.name].outputs[0].shape) - 1)
        )
        return [o for o in options if o.outputs[0] == rows_label]

    def _by_gradient(self, node: fx.Node, options: Sequence[AxisOption]) -> list[AxisOption]:
        """Return the options of a product that computes the gradient of a weight: by the label of
        the weight."""
        label = self.labels.get((self.graph.gradient_of.get(node.name, ""), 0))
        if node.target not in HEADS or not isinstance(label, Shard):
            return []
        return [o for o in options if o.outputs[0] == label]

    def _by_weight(self, node: fx.Node, options: Sequence[AxisOption]) -> list[AxisOption]:
        """Return the options of a backward product that reads a weight with its label."""
        for i, ref in enumerate(self.graph.reads[node.name]):
            label = self.labels.get(ref)
            if node.target is ops.dot and self._is_weight(ref[0]) and isinstance(label, Shard):
                return [o for o in options if o.inputs[i] == label]
        return []

    def _by_start(self, node: fx.Node, options: Sequence[AxisOption]) -> list[AxisOption]:
        """Return the options of the first op of activations, which reads inputs and weights: by
        samples or by features."""
        reads = self.graph.reads[node.name]
        if any(self._is_activation(name) for name, _ in reads) or not any(
            self._is_weight(name) for name, _ in reads
        ):
            return []
        inputs = [i for i, (name, _) in enumerate(reads) if name in self.graph.on_batch]
        if self.side == "outer":
            return [o for o in options if o.outputs[0] == SAMPLES]
        return [
            o
            for o in options
            if isinstance(o.outputs[0], Shard) and all(o.inputs[i] == REPLICATE for i in inputs)
        ]

    def _split_at_producer(
        self, ref: Ref, label: Placement, reader: str
    ) -> dict[str, AxisOption] | None:
        """Return the same as in `Propagation`. Partial sums and results of getitem do not
        change."""
        node = self.graph.nodes.get(ref[0])
        fixed = node is None or ref in self.pending or node.target is operator.getitem
        return None if fixed else super()._split_at_producer(ref, label, reader)

    def _find_blamed_sources(self, node: fx.Node) -> frozenset[str]:
        return frozenset()


def _column_label(graph: TraceIndex, node: fx.Node) -> Placement | None:
    """Return the last dim of a product's weight that only the weight and the result have."""
    dims = [p.dim for x, p, _ in _splits_of_weight(graph, node) if x == REPLICATE]
    return Shard(max(dims)) if dims else None


def _row_label(graph: TraceIndex, node: fx.Node) -> Placement | None:
    """Return the first dim of a product's weight that is contracted."""
    return next(
        (
            p
            for x, p, result in _splits_of_weight(graph, node)
            if isinstance(x, Shard) and isinstance(result, Partial)
        ),
        None,
    )


def _splits_of_weight(graph: TraceIndex, node: fx.Node) -> list[tuple[Placement, Shard, Placement]]:
    """Return the placements of activation, weight and result for each way to split a product's
    weight."""
    product = product_of(graph, node)
    assert product is not None
    x, weight = (graph.reads[node.name].index(ref) for ref in product)
    options = axis_options(graph.calls[node.name])
    return [
        (o.inputs[x], p, o.outputs[0]) for o in options if isinstance(p := o.inputs[weight], Shard)
    ]


def _find_tied(graph: TraceIndex) -> Iterable[fx.Node]:
    """Return the products whose weight is also the table of a lookup."""
    tables = {graph.reads[n.name][0] for n in graph.nodes.values() if n.target is ops.embedding}
    return [
        n
        for n in graph.nodes.values()
        if (product := product_of(graph, n)) is not None and product[1] in tables
    ]
