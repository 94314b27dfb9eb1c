"""Tensor parallelism on one axis, with sequence parallelism and selective recomputation.

`by_columns` finds column and row products by trial. At first every product of a whole activation
and a weight is split by columns, and every large enough table by rows. If an op cannot read a split
tensor in its placement (a norm, a sum with the residual stream), or if nothing contracts it, the
responsible products try another dim of their weight, and finally stay whole. Then the walk starts
again. Equal products of repeated layers are decided together. A norm over a split dim reads it
whole; otherwise it fails in backward, where its sums are whole and other operands are split. The
log names products that stay whole.
"""

from __future__ import annotations

import logging
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.capture.trace import Trace
from autopar.constraints import Parallelism
from autopar.core.placements import REPLICATE
from autopar.rules import axis_options
from autopar.sharding.clusters import HEADS, Ref
from autopar.sharding.presets.batch_and_sequence import along_sequence, read_otherwise
from autopar.sharding.propagate import (
    LOSS_SUMS,
    LabelRow,
    Policy,
    SpreadLabels,
    TraceIndex,
    nothing_to_split,
    product_of,
    spread,
)

log = logging.getLogger("autopar")


@dataclass(slots=True)
class _Columns:
    """The state of the trials.

    Attributes:
        dims: pattern of a product → dims of its weight that are left to try; the first is the
            current one.
        tables: tables that are split by rows, with their labels.
        whole: pattern of a product that stays whole → the node that cannot read its split result.
    """

    dims: dict[str, list[int]]
    tables: dict[Ref, Placement]
    whole: dict[str, str] = field(default_factory=dict)


def by_columns(graph: TraceIndex, plan: Parallelism) -> SpreadLabels:
    """Split products by columns and rows (see the module docstring).

    If nothing is left to try, `SpreadLabels.failure` is the node that cannot read its operands.

    Args:
        graph: the trace and its dependencies.
        plan: the named plan.

    Raises:
        ConstraintError: if no chain from one linear to another can be split.
    """
    nodes = [n for n in graph.nodes.values() if product_of(graph, n) is not None]
    tried = _Columns(
        {graph.pattern(n): _column_dims(graph, n) for n in reversed(nodes)}, _tables(graph)
    )
    while True:
        columns = {n.name: Shard(dims[0]) for n in nodes if (dims := tried.dims[graph.pattern(n)])}
        labels = spread(graph, Policy({}, tried.tables, columns))
        failure = labels.failure
        if failure is not None:
            if not _try_next(graph, nodes, tried, failure.sources, failure.node):
                return labels
        else:
            ends = frozenset(
                graph.pattern(n)
                for n in nodes
                if n.name in columns and not _is_consumed_split(graph, n, labels)
            )
            if not _try_next(graph, nodes, tried, ends, ""):
                break
    if not labels.contracted:
        raise nothing_to_split(plan, "no chain of linear layers can be sharded")
    _warn_of_replicated(graph, plan, tried.whole)
    return labels


def _warn_of_replicated(graph: TraceIndex, plan: Parallelism, whole: Mapping[str, str]) -> None:
    """Log the products that stay whole (`_Columns.whole`), and the losses by rows."""
    if whole:
        places = {
            graph.nodes[by].meta["key"]: re.sub(r"\{\d+\}", "*", pattern.partition("/")[0])
            for pattern, by in sorted(whole.items())
        }
        names = ", ".join(f"{module} (for {key})" for key, module in places.items())
        log.warning("%s replicates tensors that an op cannot read as shards: %s", plan, names)
    by_rows = [
        node.meta["key"] for node in graph.nodes.values() if node.target is ops.linear_cross_entropy
    ]
    if by_rows:
        log.warning(
            "%s replicates the weight of a loss by rows (with loss_rows=0 it may be sharded): %s",
            plan,
            ", ".join(by_rows),
        )


def _try_next(
    graph: TraceIndex, nodes: Sequence[fx.Node], tried: _Columns, blamed: frozenset[str], by: str
) -> bool:
    """Let the responsible products try their next dim, or stay whole because of the node `by`.

    A table that is also the weight of such a product stays whole with it.

    Returns:
        False if nothing is left to try.
    """
    changed = False
    for pattern in blamed:
        if tried.dims.get(pattern):
            tried.dims[pattern].pop(0)
            changed = True
        if not tried.dims.get(
            pattern
        ):  # otherwise lookups would split the table, and the gradient of the product would not
            similar = [n for n in nodes if graph.pattern(n) == pattern]
            weights = {product_of(graph, n)[1] for n in similar}  # type: ignore[index]
            changed |= bool(weights & tried.tables.keys())
            tried.tables = {ref: label for ref, label in tried.tables.items() if ref not in weights}
        if by and not tried.dims.get(pattern):
            tried.whole[pattern] = by
    return changed


def _column_dims(graph: TraceIndex, node: fx.Node) -> list[int]:
    """Return the dims of a product's weight that only the weight and the result have, in descending
    order."""
    product = product_of(graph, node)
    assert product is not None
    x, weight = (graph.reads[node.name].index(ref) for ref in product)
    options = axis_options(graph.calls[node.name])
    dims = {
        o.inputs[weight].dim
        for o in options
        if o.inputs[x] == REPLICATE and isinstance(o.inputs[weight], Shard)
    }
    return sorted(dims, reverse=True)


def _tables(graph: TraceIndex) -> dict[Ref, Placement]:
    """Return the tables and weights of experts to split, with their labels.

    Tables with more rows than columns that are looked up by ids of the batch are split by rows,
    unless a loss by rows reads them whole. Weights of experts are split over the features between
    their two linears.
    """
    tables: dict[Ref, Placement] = {}
    unsplit = {
        graph.reads[name][1]
        for name, node in graph.nodes.items()
        if node.target is ops.linear_cross_entropy
    }
    for node in graph.nodes.values():
        if node.target is ops.experts:
            tables |= dict.fromkeys(graph.reads[node.name][3:5], Shard(2))
        if node.target is ops.embedding and node.meta["phase"] == "forward":
            table, ids = graph.reads[node.name][:2]
            rows, columns = graph.calls[node.name].inputs[0].shape
            if (
                graph.is_weight(table[0])
                and ids[0] in graph.on_batch
                and rows > columns
                and table not in unsplit
            ):
                tables[table] = Shard(0)
    return tables


def _is_consumed_split(graph: TraceIndex, node: fx.Node, labels: SpreadLabels) -> bool:
    """Return whether the split result of a product is contracted, or read by a cross entropy with
    more classes than features."""
    if labels.labels.get((node.name, 0)) == REPLICATE:
        return True  # a product by rows, or a whole one
    pattern = graph.pattern(node)
    if pattern in labels.contracted:
        return True
    features, classes = (
        graph.calls[node.name].inputs[0].shape[-1],
        graph.calls[node.name].outputs[0].shape[-1],
    )
    return pattern in labels.scored and classes > features


# --------------------------------------------------------------------------------------------------
# Sequence parallelism on the axes of 1D tensor parallelism: tensors outside of chains of linears
# are split along the sequence.
#
# Two walks over the graph are combined. Tensor parallelism determines the labels inside a chain.
# Context parallelism (`autopar.sharding.presets.batch_and_sequence`) determines those along the
# sequence. A node that tensor parallelism leaves whole takes the row of context parallelism. So the
# first linears of a chain gather the sequence, and the partial sums of its last one are scattered
# over it.
#
# Two kinds of nodes keep the row of tensor parallelism. Nodes that add partial sums which nothing
# else reads keep it, so that these are scattered once. The ops of a cross entropy after logits that
# are split by classes keep it, as they have one number per token.

_KEEPS_SUMS = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default))


def with_sequence(graph: TraceIndex, plan: Parallelism, chains: SpreadLabels) -> SpreadLabels:
    """Split the tensors that tensor parallelism leaves whole along the sequence.

    Nodes that cannot compute on a part of the sequence gather it; the log names them.

    Args:
        graph: the trace and its dependencies.
        plan: the named plan.
        chains: the labels of tensor parallelism.

    Raises:
        ConstraintError: if no input has a sequence.
    """
    along = along_sequence(graph, gathers=True)
    if along is None:
        raise nothing_to_split(
            plan, "no input has a sequence dim (dim 1) to shard", "sequence=True"
        )
    labels = beside_chains(graph, chains, along)
    replicated_parameters = [
        i.path
        for i in graph.trace.inputs
        if len(i.shape) > 1 and not isinstance(along.labels.get((i.node, 0)), Shard)
    ]
    if replicated_parameters:
        log.warning(
            "%s replicates tensors that depend only on inputs with another sequence: %s",
            plan,
            ", ".join(replicated_parameters),
        )
    nodes = [
        node
        for name, node in graph.nodes.items()
        if name in labels.gathering and node.meta["phase"] == "forward"
    ]
    if nodes:
        keys = dict.fromkeys(re.sub(r"\{\d+\}", "*", graph.pattern(node)) for node in nodes)
        log.warning(
            "%s gathers the sequence for ops that cannot compute on a shard of it: %s",
            plan,
            ", ".join(keys),
        )
    return labels


def beside_chains(graph: TraceIndex, chains: SpreadLabels, along: SpreadLabels) -> SpreadLabels:
    """Combine the labels of tensor parallelism with those along the sequence.

    Args:
        graph: the trace and its dependencies.
        chains: the labels of tensor parallelism, which also determine the storage of parameters.
        along: the labels along the sequence, used for nodes that `chains` leaves whole.
    """
    unchanged = _nodes_adding_sums(graph, chains.rows) | _nodes_of_losses(graph, chains.rows)
    rows = {
        name: row if row.is_split or name in unchanged else along.rows.get(name, row)
        for name, row in chains.rows.items()
    }
    other_reads = read_otherwise(graph, rows)
    gathering = {name for name in along.gathering if rows.get(name) == along.rows.get(name)}
    return replace(
        chains, rows=rows, separate=other_reads, gathering=gathering, failure=along.failure
    )


def _nodes_adding_sums(graph: TraceIndex, rows: Mapping[str, LabelRow]) -> set[str]:
    """Return the nodes that only add or cast partial sums which nothing else reads."""
    num_reads = Counter(ref for reads in graph.reads.values() for ref in reads)
    adding, sums = set[str](), set[Ref]()
    for name, row in rows.items():
        node = graph.nodes[name]
        if node.target in _KEEPS_SUMS and all(
            ref in sums and num_reads[ref] == 1 for ref in graph.reads[name]
        ):
            adding.add(name)
        if name in adding or (row.is_split and _contracts(node, row)):
            sums |= {(name, i) for i in range(len(row.outputs))}
    return adding


def _nodes_of_losses(graph: TraceIndex, rows: Mapping[str, LabelRow]) -> set[str]:
    """Return the ops of a cross entropy after logits that are split by classes."""
    nodes = set[str]()
    for name, row in rows.items():
        target = graph.nodes[name].target
        scores = target in LOSS_SUMS and row.is_split
        if target not in HEADS and (scores or any(n in nodes for n, _ in graph.reads[name])):
            nodes.add(name)
    return nodes


def _contracts(node: fx.Node, row: LabelRow) -> bool:
    """Return whether a node contracts a split dim, so that its results are partial sums."""
    return node.target in HEADS and not any(isinstance(label, Shard) for label in row.outputs)


# --------------------------------------------------------------------------------------------------
# The ops around the softmax of attention, which selective recomputation recomputes.
#
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section
# 5: the product of queries and keys, the softmax and its dropout have results of shape [heads, s,
# s]. These are large, and cheap to recompute from queries, keys and values. If attention is one op,
# it has no such results and is recomputed as a whole: its result and the sums of its softmax are
# not kept, but the operand of the next linear is.

_SOFTMAX = frozenset((torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default))


def around_softmax(trace: Trace) -> frozenset[str]:
    """Return the names of the forward nodes from the scores of attention up to their product with
    the values, and of attention as one op."""
    names: set[str] = set()
    for node in trace.graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "forward":
            continue
        if node.target in (ops.attention, ops.flex_attention):
            names |= {
                node.name,
                *(user.name for user in node.users if user.target is operator.getitem),
            }
        elif node.target in _SOFTMAX:
            before, after = _reach(node, backwards=True), _reach(node, backwards=False)
            if any(n.target in HEADS for n in before) and any(n.target in HEADS for n in after):
                names |= {n.name for n in (*before, *(n for n in after if n.target not in HEADS))}
    return frozenset(names)


def _reach(start: fx.Node, *, backwards: bool) -> list[fx.Node]:
    """Return the node and its forward neighbours with as many elements, up to and including
    products."""
    nodes, stack = {start: None}, [start]
    while stack:
        node = stack.pop()
        for other in _next(node, backwards):
            if other not in nodes:
                nodes[other] = None
                if other.target not in HEADS:
                    stack.append(other)
    return list(nodes)


def _next(node: fx.Node, backwards: bool) -> Iterable[fx.Node]:
    for other in node.all_input_nodes if backwards else node.users:
        if other.op == "call_function" and other.meta["phase"] == "forward":
            value = other.meta["val"]
            same_size = (
                isinstance(value, torch.Tensor) and value.numel() == node.meta["val"].numel()
            )
            if same_size or (not backwards and other.target in HEADS):
                yield other
