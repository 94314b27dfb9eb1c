"""Tensor parallelism on one axis: column and row products, found by trying.

At first every product of a whole activation and a weight is split by columns, and every large enough table by rows; where a split tensor
is read by an op that does not read it as it lies (a norm, a sum with the residual stream), or is read by none, the products that are to
blame try another dim of their weight, then stay whole; and the walk begins again. Equal products of repeated layers are judged together. A
norm over a split dim reads it whole, or shows in backward at the latest: what it sums there is whole, and meets what is split. What stays
whole for an op is logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.constraints import Parallelism
from autopar.layout import REPLICATE
from autopar.rules import axis_options
from autopar.strategies.clusters import Ref
from autopar.strategies.labels import Spread, nothing_to_split
from autopar.strategies.reading import Read, product_of
from autopar.strategies.spreading import Policy, spread

log = logging.getLogger("autopar")


@dataclass(slots=True)
class _Columns:
    """What is tried.

    Attributes:
        dims: per product pattern the dims of its weight that are left to try, the first of them now.
        tables: which are split by rows. whole: products that stay whole → the node that does not read what they make in parts.
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
    tried = _Columns({graph.pattern(n): _column_dims(graph, n) for n in reversed(nodes)}, _tables(graph))
    while True:
        columns = {n.name: Shard(dims[0]) for n in nodes if (dims := tried.dims[graph.pattern(n)])}
        found = spread(graph, Policy({}, tried.tables, columns))
        failure = found.failure
        if failure is not None:
            if not _try_next(graph, nodes, tried, failure.sources, failure.node):
                return found
        else:
            ends = frozenset(graph.pattern(n) for n in nodes if n.name in columns and not _ends_well(graph, n, found))
            if not _try_next(graph, nodes, tried, ends, ""):
                break
    if not found.contracted:
        raise nothing_to_split(plan, "there is no chain from one linear to another that could be split")
    if tried.whole:
        places = {
            graph.nodes[by].meta["key"]: re.sub(r"\{\d+\}", "*", pattern.partition("/")[0]) for pattern, by in sorted(tried.whole.items())
        }
        whole = ", ".join(f"{module} (for {key})" for key, module in places.items())
        log.warning("%s leaves whole what an op does not read in parts: %s", plan, whole)
    by_rows = [node.meta["key"] for node in graph.nodes.values() if node.target is ops.linear_cross_entropy]
    if by_rows:
        log.warning("%s leaves whole the weight of a loss by rows (with loss_rows=0 it may split it): %s", plan, ", ".join(by_rows))
    return found


def _try_next(graph: Read, nodes: Sequence[fx.Node], tried: _Columns, blamed: frozenset[str], by: str) -> bool:
    """The blamed products take their next dim, if any, or stay whole for the node `by`; a table that one of them reads as its weight
    stays whole with it. False where nothing is left to try."""
    changed = False
    for pattern in blamed:
        if tried.dims.get(pattern):
            tried.dims[pattern].pop(0)
            changed = True
        if not tried.dims.get(pattern):  # a table would be split for look-ups and, in its gradient, whole for the product
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
    dims = {o.inputs[weight].dim for o in options if o.inputs[x] == REPLICATE and isinstance(o.inputs[weight], Shard)}  # type: ignore[attr-defined]
    return sorted(dims, reverse=True)


def _tables(graph: Read) -> dict[Ref, Placement]:
    """Tables that are looked up by ids of the batch and have more rows than columns, to be split by rows, but for weights of a loss by
    rows, which reads them whole; experts' weights, to be split by what lies between their two linears."""
    found: dict[Ref, Placement] = {}
    whole = {graph.reads[name][1] for name, node in graph.nodes.items() if node.target is ops.linear_cross_entropy}
    for node in graph.nodes.values():
        if node.target is ops.experts:
            found |= dict.fromkeys(graph.reads[node.name][3:5], Shard(2))
        if node.target is ops.embedding and node.meta["phase"] == "forward":
            table, ids = graph.reads[node.name][:2]
            rows, columns = graph.calls[node.name].inputs[0].shape
            if graph.is_weight(table[0]) and ids[0] in graph.on_batch and rows > columns and table not in whole:
                found[table] = Shard(0)
    return found


def _ends_well(graph: Read, node: fx.Node, found: Spread) -> bool:
    """Whether what the product makes in parts is contracted, or scored by a cross entropy and large enough to be worth it."""
    if found.labels.get((node.name, 0)) == REPLICATE:
        return True  # it is a row product here, or whole
    pattern = graph.pattern(node)
    if pattern in found.contracted:
        return True
    features, classes = graph.calls[node.name].inputs[0].shape[-1], graph.calls[node.name].outputs[0].shape[-1]
    return pattern in found.scored and classes > features
