"""Masks in a graph of torch functions: equal masks are merged, and masks whose number of picked
rows is fixed are rewritten to fixed shapes.

A mask that is computed twice, as in ``out[~mask] = f(x[~mask])``, becomes one mask, so that both
uses pick equally many rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.graphs import is_in_place
from autopar.capture.ragged_rows.rows import Writer, count_symbol, tensor_of
from autopar.capture.ragged_rows.rowwise import SHAPING, name_of

_COMPARING = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "invert",
        "logical_not",
        "logical_and",
        "logical_or",
        "logical_xor",
        "and_",
        "or_",
        "xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "isnan",
        "isfinite",
        "isinf",
        "isin",
        "bool",
        "long",
        "int",
        "to",
        "squeeze",
        "unsqueeze",
        "getitem",
        "any",
        "all",
        "argmax",
        "roll",
        *SHAPING,
    ]
)
"""What masks are made by: of equal operands they give equal values."""


def join_equal_masks(graph: fx.Graph) -> None:
    """Replace masks that are computed by the same ops from the same values with the first of them.

    Masks that are written to are left alone. All that one mask picks gets the same symbol for its
    number of rows. The replaced nodes stay in the graph, unused.
    """
    writes = [written for node in graph.nodes for written in _storages_written(node)]
    version: dict[int, int] = {}
    made: dict[fx.Node, Any] = {}
    firsts: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        for storage in _storages_written(node):
            version[storage] = version.get(storage, 0) + 1
        value = tensor_of(node)
        if (
            value is None
            or name_of(node) not in _COMPARING
            or node.op == "placeholder"
            or _storages_written(node)
        ):
            continue
        try:
            made[node] = _story(node, made, version)
            first = firsts.setdefault(made[node], node) if value.dtype is torch.bool else node
        except TypeError:
            continue  # an argument that cannot be compared
        if first is not node and not {_storage(value), _storage(tensor_of(first))} & set(writes):
            node.replace_all_uses_with(first)
    _count_alike(graph)


def _story(node: fx.Node, made: dict[fx.Node, Any], version: dict[int, int]) -> Any:
    """Return a hashable description of how a value is computed.

    The description ends at operands that are not themselves comparisons; these count with the
    number of writes to their storage so far.

    Raises:
        TypeError: an argument is not hashable.
    """

    def part(x: Any) -> Any:
        """Return the description of one argument."""
        if isinstance(x, slice):
            return "slice", part(x.start), part(x.stop), part(x.step)
        if isinstance(x, fx.Node):
            return made.get(x, x), version.get(_storage(tensor_of(x)), 0)
        return tuple(map(part, x)) if isinstance(x, tuple | list) else (type(x), x)

    settings = tuple((name, part(x)) for name, x in sorted(node.kwargs.items()))
    story = node.op, node.target, tuple(part(x) for x in node.args), settings
    hash(story)
    return story


def _storage(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.untyped_storage()._cdata


def _storages_written(node: fx.Node) -> set[int]:
    """The storages that a node writes to."""
    first = node.args[:1] if is_in_place(node) else ()
    return {
        _storage(tensor_of(x)) for x in (*first, node.kwargs.get("out")) if tensor_of(x) is not None
    }


def _count_alike(graph: fx.Graph) -> None:
    """Give all results that one mask picks the same symbol for their number of rows."""
    sizes: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        index = node.args[1] if name_of(node) == "getitem" and len(node.args) > 1 else None
        flags = index[0] if isinstance(index, tuple) and index else index
        picks, value = tensor_of(flags), tensor_of(node)
        if (
            picks is None
            or picks.dtype is not torch.bool
            or value is None
            or not value.dim()
            or count_symbol(value.shape[0]) is None
        ):
            continue
        first = sizes.setdefault(flags, value.shape[0])
        if count_symbol(first) != count_symbol(value.shape[0]):
            node_of_size = value.shape[0].node
            node_of_size.shape_env._set_replacement(
                node_of_size.expr, first.node.expr, "of one mask"
            )


# --------------------------------------------------------------------------------------------------
# Masks that must pick a fixed number of rows: ``x[mask] + given`` and ``x[mask] = given``, where
# `given` has that many rows.
#
# With another number the plain model raises an error. So shapes are fixed: rows are read by the
# places that the mask picks, and written back in their order.


def is_required(node: fx.Node) -> bool:
    """Whether `node` reads or writes rows by a mask that must pick a fixed number of rows."""
    return name_of(node) in ("getitem", "setitem") and _match_picked(node) is not None


def settle_required(graph: fx.Graph) -> None:
    """Read and write the rows of such masks in fixed shapes.

    A symbolic number that torch has determined to be one integer is replaced by that integer.
    """
    for node in list(graph.nodes):
        number = node.meta.get("example_value")
        if isinstance(number, torch.SymInt) and number.node.expr.is_Integer:
            node.replace_all_uses_with(int(number.node.expr))
            graph.erase_node(node)
        elif name_of(node) == "getitem" and (picked := _match_picked(node)):
            _replace_read(node, *picked, Writer(graph, node))
        elif name_of(node) == "setitem" and (picked := _match_picked(node)):
            _replace_write(node, *picked, Writer(graph, node))


def _match_picked(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...], int] | None:
    """Match ``x[mask]`` or ``x[mask] = rows`` with a fixed number of rows.

    Returns:
        (mask, other indices, number of rows); None if the number is not fixed, or the index is not
        a mask.
    """
    held, index = tensor_of(node.args[0]), node.args[1]
    flags, *others = index if isinstance(index, tuple) else (index,)
    picks = tensor_of(flags)
    if held is None or picks is None or picks.dtype is not torch.bool or not picks.dim():
        return None
    if any(isinstance(x, fx.Node) for x in others):
        return None
    rank = 1 + held.dim() - picks.dim()
    rows = _picked_rows(node, others, rank)
    num = None if rows is None else rows.shape[0]
    if isinstance(num, torch.SymInt):
        num = int(num.node.expr) if num.node.expr.is_Integer else None
    elif num == 1:  # of one row each that is picked takes a copy
        num = None
    return None if num is None else (flags, tuple(others), num)


def _picked_rows(node: fx.Node, others: Sequence[Any], rank: int) -> torch.Tensor | None:
    """Return the rows that an index reads or writes; None for rows that it does not write whole.

    Args:
        node: a call of ``getitem`` or ``setitem``.
        others: the indices after the mask.
        rank: rank of the rows in the tensor that is indexed.
    """
    if name_of(node) == "getitem":
        return tensor_of(node)
    rows = tensor_of(node.args[2])
    if rows is None or rows.dim() != rank or any(x != slice(None) for x in others):
        return None
    return rows


def _replace_read(
    node: fx.Node, flags: fx.Node, others: tuple[Any, ...], num: int, write: Writer
) -> None:
    first = write.method("to", write.method("reshape", flags, -1), torch.int8)
    order = write.call(torch.argsort, first, descending=True, stable=True)
    rows = write.method("flatten", node.args[0], 0, _rank(flags) - 1)
    made = write.call(torch.index_select, rows, 0, write.method("narrow", order, 0, 0, num))
    if others:
        made = write.call(operator.getitem, made, (slice(None), *others))
    _replace(node, made, write)


def _replace_write(
    node: fx.Node, flags: fx.Node, _: tuple[Any, ...], num: int, write: Writer
) -> None:
    held, shape = tensor_of(node.args[0]), tuple(getattr(tensor_of(flags), "shape", ()))
    assert (
        held is not None and isinstance(node.args[0], fx.Node) and isinstance(node.args[2], fx.Node)
    ), "a tensor, and rows to put in"
    number = write.method(
        "cumsum", write.method("to", write.method("reshape", flags, -1), torch.int64), 0
    )
    number = write.method("clamp", write.call(torch.sub, number, 1), 0, num - 1)
    rest = tuple(held.shape[len(shape) :])
    rows = write.method(
        "view", write.call(torch.index_select, node.args[2], 0, number), *shape, *rest
    )
    where = write.method("view", flags, *shape, *[1] * len(rest))
    write.method(
        "copy_",
        node.args[0],
        write.call(torch.where, where, write.method("to", rows, held.dtype), node.args[0]),
    )
    node.graph.erase_node(node)


def _replace(node: fx.Node, made: fx.Node, write: Writer) -> None:
    write.replace(made)
    node.graph.erase_node(node)


def _rank(node: fx.Node) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else tensor.dim()
