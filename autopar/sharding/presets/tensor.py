"""Tensor parallelism on one axis: column and row products, found by trying.

At first every product of a whole activation and a weight is split by columns, and every large
enough table by rows; where a split tensor is read by an op that does not read it as it lies (a
norm, a sum with the residual stream), or is read by none, the products that are to blame try
another dim of their weight, then stay whole; and the walk begins again. Equal products of repeated
layers are judged together. A norm over a split dim reads it whole, or shows in backward at the
latest: what it sums there is whole, and meets what is split. What stays whole for an op is logged.
"""

from __future__ import annotations

import logging
import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
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
from autopar.sharding.presets.context import along_sequence, read_otherwise
from autopar.sharding.propagate import (
    LOSS_SUMS,
    Policy,
    Read,
    Row,
    Spread,
    nothing_to_split,
    product_of,
    spread,
)

log = logging.getLogger("autopar")


@dataclass(slots=True)
class _Columns:
    """What is tried.

    Attributes:
        dims: per product pattern the dims of its weight that are left to try, the first of them
            now.
        tables: which are split by rows. whole: products that stay whole → the node that does not
            read what they make in parts.
    """

    dims: dict[str, list[int]]
    tables: dict[Ref, Placement]
    whole: dict[str, str] = field(default_factory=dict)


def by_columns(graph: Read, plan: Parallelism) -> Spread:
    """See the module docstring; `Spread.failure` is the node where nothing is left to try.

    Raises:
        ConstraintError: where no chain from one linear to another can be split.
    """
    nodes = [n for n in graph.nodes.values() if product_of(graph, n) is not None]
    tried = _Columns(
        {graph.pattern(n): _column_dims(graph, n) for n in reversed(nodes)}, _tables(graph)
    )
    while True:
        columns = {n.name: Shard(dims[0]) for n in nodes if (dims := tried.dims[graph.pattern(n)])}
        found = spread(graph, Policy({}, tried.tables, columns))
        failure = found.failure
        if failure is not None:
            if not _try_next(graph, nodes, tried, failure.sources, failure.node):
                return found
        else:
            ends = frozenset(
                graph.pattern(n)
                for n in nodes
                if n.name in columns and not _ends_well(graph, n, found)
            )
            if not _try_next(graph, nodes, tried, ends, ""):
                break
    if not found.contracted:
        raise nothing_to_split(
            plan, "there is no chain from one linear to another that could be split"
        )
    if tried.whole:
        places = {
            graph.nodes[by].meta["key"]: re.sub(r"\{\d+\}", "*", pattern.partition("/")[0])
            for pattern, by in sorted(tried.whole.items())
        }
        whole = ", ".join(f"{module} (for {key})" for key, module in places.items())
        log.warning("%s leaves whole what an op does not read in parts: %s", plan, whole)
    by_rows = [
        node.meta["key"] for node in graph.nodes.values() if node.target is ops.linear_cross_entropy
    ]
    if by_rows:
        log.warning(
            "%s leaves whole the weight of a loss by rows (with loss_rows=0 it may split it): %s",
            plan,
            ", ".join(by_rows),
        )
    return found


def _try_next(
    graph: Read, nodes: Sequence[fx.Node], tried: _Columns, blamed: frozenset[str], by: str
) -> bool:
    """The blamed products take their next dim, if any, or stay whole for the node `by`; a table
    that one of them reads as its weight stays whole with it. False where nothing is left to try."""
    changed = False
    for pattern in blamed:
        if tried.dims.get(pattern):
            tried.dims[pattern].pop(0)
            changed = True
        if not tried.dims.get(
            pattern
        ):  # a table would be split for look-ups and, in its gradient, whole for the product
            weights = {product_of(graph, n)[1] for n in nodes if graph.pattern(n) == pattern}  # type: ignore[index]
            changed |= bool(weights & tried.tables.keys())
            tried.tables = {ref: label for ref, label in tried.tables.items() if ref not in weights}
        if by and not tried.dims.get(pattern):
            tried.whole[pattern] = by
    return changed


def _column_dims(graph: Read, node: fx.Node) -> list[int]:
    """Dims of a product's weight that only the weight and the result have, the last first."""
    product = product_of(graph, node)
    assert product is not None
    x, weight = (graph.reads[node.name].index(ref) for ref in product)
    options = axis_options(graph.calls[node.name])
    dims = {
        o.inputs[weight].dim
        for o in options
        if o.inputs[x] == REPLICATE and isinstance(o.inputs[weight], Shard)
    }  # type: ignore[attr-defined]
    return sorted(dims, reverse=True)


def _tables(graph: Read) -> dict[Ref, Placement]:
    """Tables that are looked up by ids of the batch and have more rows than columns, to be split by
    rows, but for weights of a loss by rows, which reads them whole; experts' weights, to be split
    by what lies between their two linears."""
    found: dict[Ref, Placement] = {}
    whole = {
        graph.reads[name][1]
        for name, node in graph.nodes.items()
        if node.target is ops.linear_cross_entropy
    }
    for node in graph.nodes.values():
        if node.target is ops.experts:
            found |= dict.fromkeys(graph.reads[node.name][3:5], Shard(2))
        if node.target is ops.embedding and node.meta["phase"] == "forward":
            table, ids = graph.reads[node.name][:2]
            rows, columns = graph.calls[node.name].inputs[0].shape
            if (
                graph.is_weight(table[0])
                and ids[0] in graph.on_batch
                and rows > columns
                and table not in whole
            ):
                found[table] = Shard(0)
    return found


def _ends_well(graph: Read, node: fx.Node, found: Spread) -> bool:
    """Whether what the product makes in parts is contracted, or scored by a cross entropy and
    large enough to be worth it."""
    if found.labels.get((node.name, 0)) == REPLICATE:
        return True  # it is a row product here, or whole
    pattern = graph.pattern(node)
    if pattern in found.contracted:
        return True
    features, classes = (
        graph.calls[node.name].inputs[0].shape[-1],
        graph.calls[node.name].outputs[0].shape[-1],
    )
    return pattern in found.scored and classes > features


# --------------------------------------------------------------------------------------------------
# Sequence parallelism on the axes of 1D tensor parallelism: what lies outside of chains of
# linears is split along the sequence.
#
# Two walks over the graph are put together: that of tensor parallelism says what is split inside a
# chain, that of context parallelism (`autopar.sharding.presets.context`) where the sequence is in
# all tensors. A node that tensor parallelism leaves whole takes the second one's row. So a chain's
# first linears gather the sequence, and the partial sums of its last are scattered over it.
#
# Two kinds of nodes stay as tensor parallelism has them: what adds up partial sums that nothing
# else reads, so that they are scattered once, and what a cross entropy makes of logits that are
# split by classes, one number for each token.

_KEEPS_SUMS = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default))


def with_sequence(graph: Read, plan: Parallelism, chains: Spread) -> Spread:
    """What tensor parallelism leaves whole is split along the sequence, but for what cannot compute
    on a part of it, which the log names; a failure is in the spread.

    Raises:
        ConstraintError: where no input has a sequence.
    """
    along = along_sequence(graph, gathers=True)
    if along is None:
        raise nothing_to_split(
            plan, "no input has a sequence to split; its dim 1 would be it", "sequence=True"
        )
    found = beside_chains(graph, chains, along)
    whole = [
        i.path
        for i in graph.trace.inputs
        if len(i.shape) > 1 and not isinstance(along.labels.get((i.node, 0)), Shard)
    ]
    if whole:
        log.warning(
            "%s leaves whole what depends on inputs with another sequence alone: %s",
            plan,
            ", ".join(whole),
        )
    nodes = [
        node
        for name, node in graph.nodes.items()
        if name in found.gathering and node.meta["phase"] == "forward"
    ]
    if nodes:
        keys = dict.fromkeys(re.sub(r"\{\d+\}", "*", graph.pattern(node)) for node in nodes)
        log.warning(
            "%s gathers the sequence for what cannot compute on a part of it: %s",
            plan,
            ", ".join(keys),
        )
    return found


def beside_chains(graph: Read, chains: Spread, along: Spread) -> Spread:
    """`chains` of tensor parallelism with what they leave whole split as in `along`; parameters
    rest as `chains` has them."""
    rows: dict[str, Row] = {}
    sums, of_loss = set[Ref](), set[str]()
    num_reads = Counter(ref for reads in graph.reads.values() for ref in reads)
    for name, row in chains.rows.items():
        node = graph.nodes[name]
        split = any(isinstance(label, Shard) for label in (*row.inputs, *row.outputs))
        adds = node.target in _KEEPS_SUMS and all(
            ref in sums and num_reads[ref] == 1 for ref in graph.reads[name]
        )
        scores = node.target in LOSS_SUMS and split
        if node.target not in HEADS and (
            scores or any(other in of_loss for other, _ in graph.reads[name])
        ):
            of_loss.add(name)
        if adds or (split and _contracts(node, row)):
            sums |= {(name, i) for i in range(len(row.outputs))}
        rows[name] = row if split or adds or name in of_loss else along.rows.get(name, row)
    apart = read_otherwise(graph, rows)
    gathering = {name for name in along.gathering if rows.get(name) == along.rows.get(name)}
    return replace(chains, rows=rows, apart=apart, gathering=gathering, failure=along.failure)


def _contracts(node: fx.Node, row: Row) -> bool:
    """Whether it makes partial sums."""
    return node.target in HEADS and not any(isinstance(label, Shard) for label in row.outputs)


# --------------------------------------------------------------------------------------------------
# What lies around a softmax in attention, which selective recomputation runs again.
#
# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
# section 5: the product of queries and keys, the softmax and its dropout make tensors of [heads,
# s, s], which are large and cheap to make again from queries, keys and values. Where attention is
# one op, it makes none, and it runs again as a whole: its result and its softmax' sums are not
# kept, but what the linear behind it reads is.

_SOFTMAX = frozenset((torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default))


def around_softmax(trace: Trace) -> frozenset[str]:
    """Names of the forward nodes that make scores, what becomes of them up to their product with
    values, and attention as one op."""
    found: set[str] = set()
    for node in trace.graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "forward":
            continue
        if node.target in (ops.attention, ops.flex_attention):
            found |= {
                node.name,
                *(user.name for user in node.users if user.target is operator.getitem),
            }
        elif node.target in _SOFTMAX:
            before, after = _reach(node, backwards=True), _reach(node, backwards=False)
            if any(n.target in HEADS for n in before) and any(n.target in HEADS for n in after):
                found |= {n.name for n in (*before, *(n for n in after if n.target not in HEADS))}
    return frozenset(found)


def _reach(start: fx.Node, *, backwards: bool) -> list[fx.Node]:
    """The node, and forward nodes next to it with as many elements, up to products, these
    included."""
    found, stack = {start: None}, [start]
    while stack:
        node = stack.pop()
        for other in _next(node, backwards):
            if other not in found:
                found[other] = None
                if other.target not in HEADS:
                    stack.append(other)
    return list(found)


def _next(node: fx.Node, backwards: bool) -> Iterable[fx.Node]:
    for other in node.all_input_nodes if backwards else node.users:
        if other.op == "call_function" and other.meta["phase"] == "forward":
            value = other.meta["val"]
            alike = isinstance(value, torch.Tensor) and value.numel() == node.meta["val"].numel()
            if alike or (not backwards and other.target in HEADS):
                yield other
