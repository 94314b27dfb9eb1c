"""Look-ups by position: rows of a table by the places of tokens, and of each sample one of its rows.

ATen's ``index`` makes the dims that it indexes whole, and its gradient, an ``index_put`` into zeros, is no sum of parts. A table looked up
by an arange is an `autopar.ops.embedding`, whose gradient is one. What ``x[arange(n), picks]`` picks of n samples is a ``gather`` along dim
1, in which samples stay apart, as they do in its gradient, a ``scatter_add``.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, cast, dtype_of, emit, shape_of, sweep, view

_ZEROS = frozenset((aten.new_zeros.default, aten.zeros.default))
_ARRANGES = frozenset(
    (
        aten.unsqueeze.default, aten.squeeze.dim, aten.view.default, aten.expand.default, aten.repeat.default, aten.clone.default,
        aten.permute.default, aten.transpose.int, aten._to_copy.default, aten.slice.Tensor,
    )
)  # fmt: skip


def replace_positions(graph: fx.Graph) -> None:
    """Look-ups in tables by aranges, and of one row of each sample, forward and backward."""
    for node in calls(graph, aten.index.Tensor):
        with graph.inserting_before(node):
            made = _looked_up(node) or _picked(node)
        if made is not None:
            node.replace_all_uses_with(made)
    for node in calls(graph, aten.index_put.default):
        if tuple(node.args[3:]) != (True,):
            continue
        with graph.inserting_before(node):
            made = _table_gradient(node) or _picks_gradient(node)
        if made is not None:
            node.replace_all_uses_with(made)
    sweep(graph)


def _looked_up(node: fx.Node) -> fx.Node | None:
    table, ids = node.args[0], _ids_of(node)
    return None if ids is None else emit(node, ops.embedding, (table, ids), shape_of(node))


def _table_gradient(node: fx.Node) -> fx.Node | None:
    zeros, ids, grad = node.args[0], _ids_of(node), node.args[2]
    if ids is None or zeros.target not in _ZEROS or shape_of(grad) != (*shape_of(ids), shape_of(node)[1]):
        return None
    return emit(node, ops.embedding_backward, (grad, ids, shape_of(node)[0]), shape_of(node))


def _ids_of(node: fx.Node) -> fx.Node | None:
    """The places that are looked up in a table [v, d], none of them negative, which counts from the end; None where it is not that."""
    indices = node.args[1]
    if len(shape_of(node.args[0])) != 2 or len(indices) != 1 or not dtype_of(node).is_floating_point:
        return None
    return indices[0] if _is_arange(indices[0]) else None


def _is_arange(node: fx.Node) -> bool:
    """Whether all its elements are those of an arange from 0 or above."""
    while node.target in _ARRANGES and not dtype_of(node).is_floating_point:
        node = node.args[0]
    match str(node.target), node.args:
        case "aten.arange.default", _:
            return not dtype_of(node).is_floating_point
        case "aten.arange.start" | "aten.arange.start_step", (start, *_):
            return not dtype_of(node).is_floating_point and start >= 0 and (node.args[2:] or (1,))[0] > 0
    return False


def _picked(node: fx.Node) -> fx.Node | None:
    picks = _picks_of(node)
    if picks is None:
        return None
    rows = emit(node, aten.gather.default, (node.args[0], 1, picks), shape_of(picks))
    return view(node, rows, shape_of(node))


def _picks_gradient(node: fx.Node) -> fx.Node | None:
    whole, grad, picks = node.args[0], node.args[2], _picks_of(node)
    if picks is None or shape_of(grad) != (shape_of(node)[0], *shape_of(node)[2:]):
        return None
    return emit(node, aten.scatter_add.default, (whole, 1, picks, view(node, grad, shape_of(picks))), shape_of(node))


def _picks_of(node: fx.Node) -> fx.Node | None:
    """Which row each sample of ``node.args[0]`` [n, s, ...] has picked, [n, 1, ...]; None where it is not that."""
    indices = node.args[1]
    if len(indices) != 2 or None in indices:
        return None
    (num, length, *rest), (samples, picks) = shape_of(node.args[0]), indices
    plain = samples.target is aten.arange.default and samples.args == (num,) and shape_of(picks) == (num,)
    if not plain or not dtype_of(picks).is_signed or dtype_of(picks).is_floating_point:
        return None
    each = view(node, _from_start(node, cast(node, picks, torch.int64), length), (num, 1, *(1 for _ in rest)))
    return emit(node, aten.expand.default, (each, [num, 1, *rest]), (num, 1, *rest), dtype=torch.int64) if rest else each


def _from_start(node: fx.Node, picks: fx.Node, length: int) -> fx.Node:
    """Those below zero, which count from the end, counted from the start."""
    if picks.target is aten.argmax.default:
        return picks
    below = emit(node, aten.lt.Scalar, (picks, 0), shape_of(picks), dtype=torch.bool)
    again = emit(node, aten.add.Tensor, (picks, length), shape_of(picks), dtype=torch.int64)
    return emit(node, aten.where.self, (below, again, picks), shape_of(picks), dtype=torch.int64)
