"""Table look-ups as `autopar.ops.embedding`, which can work on a part of the table."""

from __future__ import annotations

from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, emit, shape_of, sweep


def replace_embeddings(graph: fx.Graph) -> None:
    """``embedding`` and its dense backward; gradients scaled by frequency, which need all ids, stay as they are."""
    for node in calls(graph, aten.embedding.default):
        with graph.inserting_before(node):
            node.replace_all_uses_with(emit(node, ops.embedding, node.args[:2], shape_of(node)))
    for node in calls(graph, aten.embedding_dense_backward.default):
        grad, ids, num_rows, padding_idx, by_frequency = node.args
        if by_frequency:
            continue
        with graph.inserting_before(node):
            args = (grad, ids, num_rows, None, padding_idx)
            node.replace_all_uses_with(emit(node, ops.embedding_backward, args, shape_of(node)))
    sweep(graph)
