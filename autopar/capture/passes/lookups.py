"""Table look-ups as `autopar.ops.embedding`, which can work on a part of the table.

Bags of equal length are look-ups that are summed. ``masked_scatter`` of whole rows, as where a language model takes in an
image's features, looks row n of its source up for the n-th place that the mask picks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, dtype_of, emit, shape_of, sweep, view

_SUM, _MEAN = 0, 1
_INDEX = torch.int64


def replace_bags(graph: fx.Graph) -> None:
    """``_embedding_bag`` of bags of equal length, forward alone, too, as an embedding and a sum or mean, forward and backward."""
    of_bags: dict[fx.Node, fx.Node] = {}
    for node in (*calls(graph, aten._embedding_bag.default), *calls(graph, aten._embedding_bag_forward_only.default)):
        ids = _equal_bags(node)
        if ids is None:
            continue
        weight, users = node.args[0], list(node.users)
        of_bags[node.args[1]] = ids
        pooled = next((user for user in users if user.args[1] == 0), None)
        if pooled is None:
            continue
        with graph.inserting_before(node):
            rows = emit(pooled, ops.embedding, (weight, ids), (*shape_of(ids), shape_of(weight)[1]))
            pool = aten.mean.dim if _argument(node, "mode", _SUM) == _MEAN else aten.sum.dim_IntList
            pooled.replace_all_uses_with(emit(pooled, pool, (rows, [1]), shape_of(pooled)))
    for node in calls(graph, aten._embedding_bag_backward.default):
        if node.args[1] in of_bags and _is_plain(node):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_bag_gradient(node, of_bags[node.args[1]]))
    sweep(graph)


def _equal_bags(node: fx.Node) -> fx.Node | None:
    """The ids [bags, length], made before `node`; None where bags may differ or entries are weighed."""
    offsets, num_ids = node.args[2], shape_of(node.args[1])[0]
    steps = {"arange.start_step": 2, "arange.default": None}
    kind = getattr(offsets.target, "_schema", None) and str(offsets.target).removeprefix("aten.")
    if kind not in steps or not _is_plain(node) or _argument(node, "include_last_offset", False):
        return None
    start, end, step = (0, offsets.args[0], 1) if kind == "arange.default" else (*offsets.args, 1)[:3]
    num_bags = shape_of(offsets)[0]
    if start != 0 or num_bags * step != num_ids or end > num_ids:
        return None
    with node.graph.inserting_before(node):
        return view(node, node.args[1], (num_bags, step))


def _is_plain(node: fx.Node) -> bool:
    weighed = _argument(node, "per_sample_weights", None) is not None or _argument(node, "scale_grad_by_freq", False)
    return not weighed and _argument(node, "mode", _SUM) in (_SUM, _MEAN) and _argument(node, "padding_idx", -1) < 0


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _bag_gradient(node: fx.Node, ids: fx.Node) -> fx.Node:
    grad, num_rows = node.args[0], _argument(node, "num_weights", 0)
    (num_bags, length), width = shape_of(ids), shape_of(grad)[1]
    if _argument(node, "mode", _SUM) == _MEAN:
        grad = emit(node, aten.div.Scalar, (grad, length), shape_of(grad))
    each = emit(node, aten.unsqueeze.default, (grad, 1), (num_bags, 1, width))
    each = emit(node, aten.expand.default, (each, [num_bags, length, width]), (num_bags, length, width))
    return emit(node, ops.embedding_backward, (each, ids, num_rows), (num_rows, width))


def replace_masked_rows(graph: fx.Graph) -> None:
    """``masked_scatter`` whose mask is equal along the last dim, and its backward."""
    places: dict[fx.Node, fx.Node] = {}
    for node in calls(graph, aten.masked_scatter.default):
        whole, mask, source = node.args
        width = shape_of(whole)[-1] if shape_of(whole) else 0
        rows_of = _by_rows(mask, shape_of(whole))
        if rows_of is None or not shape_of(source) or shape_of(source)[-1] != width:
            continue
        with graph.inserting_before(node):
            places[mask] = ids = _places(node, rows_of)
            num_rows = node.args[2].meta["val"].numel() // width
            rows = emit(node, ops.embedding, (view(node, source, (num_rows, width)), ids), shape_of(node))
            node.replace_all_uses_with(emit(node, aten.where.self, (rows_of, rows, whole), shape_of(node)))
    for node in calls(graph, aten.masked_scatter_backward.default):
        grad, mask, sizes = node.args
        if mask in places:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_rows_gradient(node, grad, _by_rows(mask, shape_of(grad)), places[mask], tuple(sizes)))
    sweep(graph)


def _by_rows(mask: fx.Node, shape: tuple[int, ...]) -> fx.Node | None:
    """The mask with a last dim of size 1, where each row of a tensor of that shape is picked whole."""
    if mask.target is aten.expand.default and shape_of(mask) == shape:
        mask = mask.args[0]
    return mask if shape_of(mask) == (*shape[:-1], 1) else None


def _places(node: fx.Node, mask: fx.Node) -> fx.Node:
    """Which row each place takes: how many the mask picked before it."""
    places = shape_of(mask)[:-1]
    flat = view(node, mask, (mask.meta["val"].numel(),))
    count = emit(node, aten.cumsum.default, (flat, 0), shape_of(flat), dtype=_INDEX)
    before = emit(node, aten.sub.Tensor, (count, 1), shape_of(flat), dtype=_INDEX)
    inside = emit(node, aten.clamp.default, (before, 0), shape_of(flat), dtype=_INDEX)
    return view(node, inside, places)


def _rows_gradient(node: fx.Node, grad: fx.Node, mask: fx.Node, ids: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
    others = emit(node, aten.logical_not.default, (mask,), shape_of(mask), dtype=dtype_of(mask))
    picked = emit(node, aten.masked_fill.Scalar, (grad, others, 0), shape_of(grad), dtype=dtype_of(grad))
    width = sizes[-1]
    num_rows = node.meta["val"].numel() // width
    return view(node, emit(node, ops.embedding_backward, (picked, ids, num_rows), (num_rows, width)), sizes)
