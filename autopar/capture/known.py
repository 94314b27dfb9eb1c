"""What is picked by known values (`autopar.capture._torch.constants`) stands in the graph as numbers: its shape follows from them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.capture._torch.fakes import no_modes
from autopar.capture.picked.rows import tensor_of
from autopar.capture.picked.rowwise import name_of
from autopar.capture.raw_graphs import is_in_place

_MOST = 1 << 16  # numbers that a graph holds as a literal
_PICKING = frozenset(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "where"))


def settle_known(graph: fx.Graph) -> None:
    """Of ops whose shapes depend on values, those of known values become literals, where nothing writes to the result; a number that is
    read of known values stands for itself."""
    written = {_storage(x) for node in graph.nodes if is_in_place(node) for x in node.args[:1]} - {None}
    for node in list(graph.nodes):
        number = node.meta.get("example_value")
        if name_of(node) == "item" and isinstance(number, int | float):
            node.replace_all_uses_with(number)  # type: ignore[arg-type]
            graph.erase_node(node)
            continue
        _read_by_numbers(node, written)
        value = _known(node)
        if value is None or not 0 < value.numel() <= _MOST or _storage(node) in written:
            continue
        if not any(map(_picks, (node, *node.all_input_nodes))):
            continue
        with graph.inserting_before(node):
            literal = graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype})
        literal.meta = dict(node.meta)
        node.replace_all_uses_with(literal)
        picking = [operand for operand in node.all_input_nodes if _picks(operand)]  # of several results, that it is one of
        graph.erase_node(node)
        for operand in picking:
            if not operand.users:
                graph.erase_node(operand)


def _read_by_numbers(node: fx.Node, written: Collection[int | None]) -> None:
    """Let what known masks pick, or known numbers repeat, be read by the numbers of rows: ``x[mask]``, ``x[mask] = y``, ``masked_select``,
    ``repeat_interleave``."""
    name = name_of(node)
    if name in ("getitem", "setitem") and tensor_of(node.args[0]) is not None and _known(node) is None:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        found = tuple(entry for each in index for entry in _numbers(node, each, written))
        if found != index:
            node.args = (node.args[0], found, *node.args[2:])
    elif name == "masked_select" and not node.kwargs and _known(node) is None:
        source, mask = node.args
        numbers = _numbers(node, mask, written)
        if numbers != (mask,) and tensor_of(source).shape == tensor_of(mask).shape:  # type: ignore[union-attr]
            node.op, node.target, node.args = "call_function", operator.getitem, (source, numbers)
    elif name == "repeat_interleave" and _known(node) is None:
        _repeat_by_numbers(node)


def _numbers(node: fx.Node, mask: Any, written: Collection[int | None]) -> tuple[Any, ...]:
    """Of a known mask the numbers along each of its dims of what it picks; else the entry of an index as it is."""
    value = _known(mask)
    if value is None or value.dtype is not torch.bool or not value.dim() or value.numel() > _MOST or _storage(mask) in written:
        return (mask,)
    with node.graph.inserting_before(node):
        with no_modes():
            places = value.nonzero(as_tuple=True)
        return tuple(_literal(node, numbers) for numbers in places)


def _repeat_by_numbers(node: fx.Node) -> None:
    given = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | dict(node.kwargs)
    repeats, source, dim = _known(given.get("repeats")), given.get("input"), given.get("dim")
    held = tensor_of(source)
    if repeats is None or held is None or not isinstance(source, fx.Node) or repeats.numel() > _MOST:
        return
    length = held.numel() if dim is None else held.shape[dim]
    with no_modes():
        each = repeats.expand(length) if repeats.numel() == 1 else repeats
        numbers = torch.arange(length).repeat_interleave(each)
    with node.graph.inserting_before(node):
        rows = source if dim is not None else node.graph.call_method("reshape", (source, -1))
        rows.meta = dict(rows.meta or node.meta)
        literal = _literal(node, numbers)
    node.op, node.target, node.args, node.kwargs = "call_function", torch.index_select, (rows, 0 if dim is None else dim, literal), {}


def _literal(node: fx.Node, value: torch.Tensor) -> fx.Node:
    made = node.graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype})
    made.meta = {name: held for name, held in node.meta.items() if name != "example_value"}
    return made


def _picks(node: fx.Node) -> bool:
    """Whether the shape of what it gives depends on values."""
    name = name_of(node)
    if name == "getitem" and tensor_of(node.args[0]) is not None:
        return any((flags := tensor_of(x)) is not None and flags.dtype is torch.bool for x in tree_leaves(node.args[1]))
    if name == "repeat_interleave":
        return any(tensor_of(x) is not None for x in (*node.args[1:2], node.kwargs.get("repeats")))
    return name in _PICKING and (name != "where" or len(node.args) == 1)


def _known(node: Any) -> torch.Tensor | None:
    """The value, where it is known."""
    tensor = tensor_of(node)
    return getattr(tensor, "constant", None)


def _storage(node: Any) -> int | None:
    value = _known(node)
    return None if value is None else value.untyped_storage()._cdata
