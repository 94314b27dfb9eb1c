"""A tensor that is taken apart and put together again in the same order is itself.

Loops over samples or time steps select one entry of a dim at a time, and projections that are made at once are sliced; each of these, and
the sum of padded gradients that mirrors it, would make the dim whole. Terms: the *parts* of a dim are its entries (`select`, `unbind`) or
its consecutive slices.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from autopar.capture.graphs import aten, calls, emit, shape_of, sweep, view


def rejoin(graph: fx.Graph) -> None:
    """Gradients of all parts as one join of them; then joins of all parts of a dim along it as a view of what they are parts of."""
    for node in calls(graph, aten.add.Tensor):
        pieces = None if _goes_on(node) else _parts_summed(node)
        if pieces is not None:
            join, dim, parts = pieces
            with graph.inserting_before(node):
                node.replace_all_uses_with(emit(node, join, (parts, dim), shape_of(node)))
    sweep(graph)
    for node in calls(graph, aten.stack.default, aten.cat.default):
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node))
        whole = _whole(node.args[0], dim)
        if whole is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_seen_as(node, whole))
    sweep(graph)


def _seen_as(node: fx.Node, whole: fx.Node) -> fx.Node:
    """`whole` with the shape of `node`; the copy goes where memory allows the view without."""
    if shape_of(whole) == shape_of(node):
        return whole
    order = {"memory_format": torch.contiguous_format}
    return view(node, emit(node, aten.clone.default, (whole,), shape_of(whole), kwargs=order), shape_of(node))


def _whole(parts: Sequence[fx.Node], dim: int) -> fx.Node | None:
    """The tensor whose dim `dim` has these parts, all and in order; None where they are something else."""
    sources, end = set(), 0
    for part in parts:
        found = _part(part)
        if found is None or found[1:3] != (dim, end):
            return None
        sources.add(found[0])
        end = found[3]
    whole = sources.pop()
    return whole if not sources and end == shape_of(whole)[dim] and len({shape_of(part) for part in parts}) == 1 else None


def _part(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """(tensor, dim, first, end) of a part; an entry is one from `first`."""
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:
        source, at = node.args[0].args[0], node.args[1]
        dim = node.args[0].args[1] if len(node.args[0].args) > 1 else 0
        return source, dim % len(shape_of(source)), at, at + 1
    if node.target is aten.select.int:
        source, dim, at = node.args
        dim %= len(shape_of(source))
        return source, dim, at % shape_of(source)[dim], at % shape_of(source)[dim] + 1
    if node.target is aten.slice.Tensor and len(node.args) == 5 and node.args[4] == 1:  # as `clean` spells it
        return node.args[:4]
    return None


def _goes_on(node: fx.Node) -> bool:
    """Whether the sum is but a step of a longer one."""
    return len(node.users) == 1 and next(iter(node.users)).target is aten.add.Tensor


def _parts_summed(node: fx.Node) -> tuple[OpOverload, int, list[fx.Node]] | None:
    """(how they are joined, dim, gradients of its parts in order), where the sum pads each of them once and leaves none out."""
    terms, parts, dims = [node], {}, set()
    while terms:
        term = terms.pop()
        if not isinstance(term, fx.Node):
            return None
        if term.target is aten.add.Tensor and (term is node or _goes_on(term)) and not term.kwargs:
            terms += term.args
            continue
        padded = _padded(term)
        if padded is None or shape_of(term) != shape_of(node) or padded[2] in parts:
            return None
        join, dim, first, end = padded
        dims.add((join, dim))
        parts[first] = end, term.args[0]
    if len(dims) != 1:
        return None
    (join, dim), ends = dims.pop(), [0, *(parts[first][0] for first in sorted(parts))]
    if ends != [*sorted(parts), shape_of(node)[dim]]:
        return None
    return join, dim, [parts[first][1] for first in sorted(parts)]


def _padded(node: fx.Node) -> tuple[OpOverload, int, int, int] | None:
    """(how such parts are joined, dim, first, end) of the gradient of one part, padded with zeros."""
    if node.target is aten.select_backward.default:
        _, sizes, dim, at = node.args
        return aten.stack.default, dim % len(sizes), at % sizes[dim], at % sizes[dim] + 1
    if node.target is aten.slice_backward.default and node.args[5] == 1:
        _, sizes, dim, first, end, _ = node.args
        size = sizes[dim]
        first, end = (min(at if at >= 0 else at + size, size) for at in (first, end))
        return (aten.cat.default, dim % len(sizes), first, end) if first < end else None
    return None
