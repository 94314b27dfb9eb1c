"""Sequence parallelism on the axes of 1D tensor parallelism: what lies outside of chains of linears is split along the sequence.

Two walks over the graph are put together: that of tensor parallelism says what is split inside a chain, that of context parallelism
(`autopar.strategies.context`) where the sequence is in all tensors. A node that tensor parallelism leaves whole takes the second one's row.
So a chain's first linears gather the sequence, and the partial sums of its last are scattered over it.

Two kinds of nodes stay as tensor parallelism has them: what adds up partial sums that nothing else reads, so that they are scattered
once, and what a cross entropy makes of logits that are split by classes, one number for each token.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import replace

import torch
from torch import fx
from torch.distributed.tensor import Shard

from autopar.constraints import Parallelism
from autopar.strategies.clusters import HEADS, Ref
from autopar.strategies.context import along_sequence, read_otherwise
from autopar.strategies.labels import Row, Spread, nothing_to_split
from autopar.strategies.reading import Read
from autopar.strategies.spreading import LOSS_SUMS

log = logging.getLogger("autopar")
_KEEPS_SUMS = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default))


def with_sequence(graph: Read, plan: Parallelism, chains: Spread) -> Spread:
    """What tensor parallelism leaves whole is split along the sequence, but for what cannot compute on a part of it, which the log names; a
    failure is in the spread.

    Raises:
        ConstraintError: where no input has a sequence.
    """
    along = along_sequence(graph, gathers=True)
    if along is None:
        raise nothing_to_split(plan, "no input has a sequence to split; its dim 1 would be it", "sequence=True")
    found = beside_chains(graph, chains, along)
    whole = [i.path for i in graph.trace.inputs if len(i.shape) > 1 and not isinstance(along.labels.get((i.node, 0)), Shard)]
    if whole:
        log.warning("%s leaves whole what depends on inputs with another sequence alone: %s", plan, ", ".join(whole))
    nodes = [node for name, node in graph.nodes.items() if name in found.gathering and node.meta["phase"] == "forward"]
    if nodes:
        keys = dict.fromkeys(re.sub(r"\{\d+\}", "*", graph.pattern(node)) for node in nodes)
        log.warning("%s gathers the sequence for what cannot compute on a part of it: %s", plan, ", ".join(keys))
    return found


def beside_chains(graph: Read, chains: Spread, along: Spread) -> Spread:
    """`chains` of tensor parallelism with what they leave whole split as in `along`; parameters rest as `chains` has them."""
    rows: dict[str, Row] = {}
    sums, of_loss = set[Ref](), set[str]()
    num_reads = Counter(ref for reads in graph.reads.values() for ref in reads)
    for name, row in chains.rows.items():
        node = graph.nodes[name]
        split = any(isinstance(label, Shard) for label in (*row.inputs, *row.outputs))
        adds = node.target in _KEEPS_SUMS and all(ref in sums and num_reads[ref] == 1 for ref in graph.reads[name])
        scores = node.target in LOSS_SUMS and split
        if node.target not in HEADS and (scores or any(other in of_loss for other, _ in graph.reads[name])):
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
