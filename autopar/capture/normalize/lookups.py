"""Replace table lookups with `autopar.ops.embedding`, which supports a sharded table.

Embedding bags of equal length are lookups followed by a sum or mean. Lookups by position are
lookups by an arange. ``masked_scatter`` of whole rows, with which a multimodal language model
inserts image features, is a lookup of row n of its source for the n-th position that the mask
selects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, cast, dtype_of, emit, shape_of, sweep, view

_SUM, _MEAN = 0, 1
_INDEX = torch.int64


def replace_bags(graph: fx.Graph) -> None:
    """Replace ``_embedding_bag`` with bags of equal length, and its backward, with an embedding and
    a sum or mean."""
    of_bags: dict[fx.Node, fx.Node] = {}
    for node in (
        *calls(graph, aten._embedding_bag.default),
        *calls(graph, aten._embedding_bag_forward_only.default),
    ):
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
    """Insert and return the ids as ``[bags, length]``; return None if bags may differ in length or
    entries are weighted."""
    offsets, num_ids = node.args[2], shape_of(node.args[1])[0]
    steps = {"arange.start_step": 2, "arange.default": None}
    kind = getattr(offsets.target, "_schema", None) and str(offsets.target).removeprefix("aten.")
    if kind not in steps or not _is_plain(node) or _argument(node, "include_last_offset", False):
        return None
    start, end, step = (
        (0, offsets.args[0], 1) if kind == "arange.default" else (*offsets.args, 1)[:3]
    )
    num_bags = shape_of(offsets)[0]
    if start != 0 or num_bags * step != num_ids or end > num_ids:
        return None
    with node.graph.inserting_before(node):
        return view(node, node.args[1], (num_bags, step))


def _is_plain(node: fx.Node) -> bool:
    weighed = _argument(node, "per_sample_weights", None) is not None or _argument(
        node, "scale_grad_by_freq", False
    )
    return (
        not weighed
        and _argument(node, "mode", _SUM) in (_SUM, _MEAN)
        and _argument(node, "padding_idx", -1) < 0
    )


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    names = [argument.name for argument in node.target._schema.arguments]
    position = names.index(name)
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _bag_gradient(node: fx.Node, ids: fx.Node) -> fx.Node:
    grad, num_rows = node.args[0], _argument(node, "num_weights", 0)
    (num_bags, length), width = shape_of(ids), shape_of(grad)[1]
    if _argument(node, "mode", _SUM) == _MEAN:
        grad = emit(node, aten.div.Scalar, (grad, length), shape_of(grad))
    expanded = emit(node, aten.unsqueeze.default, (grad, 1), (num_bags, 1, width))
    expanded = emit(
        node, aten.expand.default, (expanded, [num_bags, length, width]), (num_bags, length, width)
    )
    return emit(node, ops.embedding_backward, (expanded, ids, num_rows), (num_rows, width))


def replace_masked_rows(graph: fx.Graph) -> None:
    """Replace ``masked_scatter`` whose mask is constant along the last dim, and its backward."""
    places: dict[fx.Node, fx.Node] = {}
    for node in calls(graph, aten.masked_scatter.default):
        target, mask, source = node.args
        width = shape_of(target)[-1] if shape_of(target) else 0
        rows_of = _by_rows(mask, shape_of(target))
        if rows_of is None or not shape_of(source) or shape_of(source)[-1] != width:
            continue
        with graph.inserting_before(node):
            places[mask] = ids = _places(node, rows_of)
            num_rows = node.args[2].meta["val"].numel() // width
            rows = emit(
                node, ops.embedding, (view(node, source, (num_rows, width)), ids), shape_of(node)
            )
            node.replace_all_uses_with(
                emit(node, aten.where.self, (rows_of, rows, target), shape_of(node))
            )
    for node in calls(graph, aten.masked_scatter_backward.default):
        grad, mask, sizes = node.args
        if mask in places:
            with graph.inserting_before(node):
                node.replace_all_uses_with(
                    _rows_gradient(
                        node, grad, _by_rows(mask, shape_of(grad)), places[mask], tuple(sizes)
                    )
                )
    sweep(graph)


def _by_rows(mask: fx.Node, shape: tuple[int, ...]) -> fx.Node | None:
    """Return the mask with a last dim of size 1 if it selects whole rows of a tensor of shape
    `shape`; else None."""
    if mask.target is aten.expand.default and shape_of(mask) == shape:
        mask = mask.args[0]
    return mask if shape_of(mask) == (*shape[:-1], 1) else None


def _places(node: fx.Node, mask: fx.Node) -> fx.Node:
    """Return the row of the source for each position: the number of positions that the mask selects
    before it."""
    places = shape_of(mask)[:-1]
    flat = view(node, mask, (mask.meta["val"].numel(),))
    count = emit(node, aten.cumsum.default, (flat, 0), shape_of(flat), dtype=_INDEX)
    before = emit(node, aten.sub.Tensor, (count, 1), shape_of(flat), dtype=_INDEX)
    inside = emit(node, aten.clamp.default, (before, 0), shape_of(flat), dtype=_INDEX)
    return view(node, inside, places)


def _rows_gradient(
    node: fx.Node, grad: fx.Node, mask: fx.Node, ids: fx.Node, sizes: tuple[int, ...]
) -> fx.Node:
    others = emit(node, aten.logical_not.default, (mask,), shape_of(mask), dtype=dtype_of(mask))
    picked = emit(
        node, aten.masked_fill.Scalar, (grad, others, 0), shape_of(grad), dtype=dtype_of(grad)
    )
    width = sizes[-1]
    num_rows = node.meta["val"].numel() // width
    return view(
        node, emit(node, ops.embedding_backward, (picked, ids, num_rows), (num_rows, width)), sizes
    )


# --------------------------------------------------------------------------------------------------
# Table lookups become `autopar.ops.embedding`, which supports a sharded table.


def replace_embeddings(graph: fx.Graph) -> None:
    """Replace ``embedding`` and its dense backward, except gradients scaled by frequency, which
    need all ids."""
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


# --------------------------------------------------------------------------------------------------
# Lookups by position: rows of a table by the positions of tokens, and one row of each sample.
#
# The dims that ATen's ``index`` indexes must not be sharded, and its gradient, an ``index_put``
# into zeros, is not a partial sum. A lookup in a table by an arange becomes an
# `autopar.ops.embedding`, whose gradient is a partial sum. ``x[arange(n), picks]`` with n samples
# becomes a ``gather`` along dim 1, which does not combine samples; neither does its gradient, a
# ``scatter_add``.

_ZEROS = frozenset((aten.new_zeros.default, aten.zeros.default))
_ARRANGES = frozenset(
    (
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.view.default,
        aten.expand.default,
        aten.repeat.default,
        aten.clone.default,
        aten.permute.default,
        aten.transpose.int,
        aten._to_copy.default,
        aten.slice.Tensor,
    )
)


def replace_positions(graph: fx.Graph) -> None:
    """Replace lookups in tables by aranges, and lookups of one row of each sample, in forward and
    backward."""
    for node in calls(graph, aten.index.Tensor):
        with graph.inserting_before(node):
            replacement = _match_table_lookup(node) or _match_row_lookup(node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
    for node in calls(graph, aten.index_put.default):
        if tuple(node.args[3:]) != (True,):
            continue
        with graph.inserting_before(node):
            replacement = _table_gradient(node) or _picks_gradient(node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
    sweep(graph)


def _match_table_lookup(node: fx.Node) -> fx.Node | None:
    table, ids = node.args[0], _ids_of(node)
    return None if ids is None else emit(node, ops.embedding, (table, ids), shape_of(node))


def _table_gradient(node: fx.Node) -> fx.Node | None:
    zeros, ids, grad = node.args[0], _ids_of(node), node.args[2]
    if (
        ids is None
        or zeros.target not in _ZEROS
        or shape_of(grad) != (*shape_of(ids), shape_of(node)[1])
    ):
        return None
    return emit(node, ops.embedding_backward, (grad, ids, shape_of(node)[0]), shape_of(node))


def _ids_of(node: fx.Node) -> fx.Node | None:
    """Return the positions that are looked up in a table ``[v, d]``, if they cannot be negative;
    else None."""
    indices = node.args[1]
    if (
        len(shape_of(node.args[0])) != 2
        or len(indices) != 1
        or not dtype_of(node).is_floating_point
    ):
        return None
    return indices[0] if _is_arange(indices[0]) else None


def _is_arange(node: fx.Node) -> bool:
    """Return whether all elements of `node` are elements of an arange of nonnegative integers."""
    while node.target in _ARRANGES and not dtype_of(node).is_floating_point:
        node = node.args[0]
    match str(node.target), node.args:
        case "aten.arange.default", _:
            return not dtype_of(node).is_floating_point
        case "aten.arange.start" | "aten.arange.start_step", (start, *_):
            return (
                not dtype_of(node).is_floating_point
                and start >= 0
                and (node.args[2:] or (1,))[0] > 0
            )
    return False


def _match_row_lookup(node: fx.Node) -> fx.Node | None:
    picks = _picks_of(node)
    if picks is None:
        return None
    rows = emit(node, aten.gather.default, (node.args[0], 1, picks), shape_of(picks))
    return view(node, rows, shape_of(node))


def _picks_gradient(node: fx.Node) -> fx.Node | None:
    source, grad, picks = node.args[0], node.args[2], _picks_of(node)
    if picks is None or shape_of(grad) != (shape_of(node)[0], *shape_of(node)[2:]):
        return None
    return emit(
        node,
        aten.scatter_add.default,
        (source, 1, picks, view(node, grad, shape_of(picks))),
        shape_of(node),
    )


def _picks_of(node: fx.Node) -> fx.Node | None:
    """Return the row that is selected from each sample of ``node.args[0]`` ``[n, s, ...]``, as
    ``[n, 1, ...]``; None if `node` is not such a lookup."""
    indices = node.args[1]
    if len(indices) != 2 or None in indices:
        return None
    (num, length, *rest), (samples, picks) = shape_of(node.args[0]), indices
    plain = (
        samples.target is aten.arange.default
        and samples.args == (num,)
        and shape_of(picks) == (num,)
    )
    if not plain or not dtype_of(picks).is_signed or dtype_of(picks).is_floating_point:
        return None
    expanded = view(
        node,
        _from_start(node, cast(node, picks, torch.int64), length),
        (num, 1, *(1 for _ in rest)),
    )
    return (
        emit(
            node,
            aten.expand.default,
            (expanded, [num, 1, *rest]),
            (num, 1, *rest),
            dtype=torch.int64,
        )
        if rest
        else expanded
    )


def _from_start(node: fx.Node, picks: fx.Node, length: int) -> fx.Node:
    """Return the row numbers with negative ones, which count from the end, made nonnegative."""
    if picks.target is aten.argmax.default:
        return picks
    below = emit(node, aten.lt.Scalar, (picks, 0), shape_of(picks), dtype=torch.bool)
    again = emit(node, aten.add.Tensor, (picks, length), shape_of(picks), dtype=torch.int64)
    return emit(node, aten.where.self, (below, again, picks), shape_of(picks), dtype=torch.int64)
