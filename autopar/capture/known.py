"""What is picked by known values (`autopar.capture._torch.constants`) stands in the graph as numbers: its shape follows from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.capture._torch.fakes import no_modes
from autopar.capture.picked.rows import tensor_of
from autopar.capture.picked.rowwise import name_of
from autopar.capture.raw_graphs import is_in_place

_NUMBERS_FROM = {
    **dict.fromkeys(("arange", "linspace"), 0),
    **dict.fromkeys(("split", "split_with_sizes", "narrow", "view", "reshape", "expand", "repeat", "unflatten"), 1),
}  # fmt: skip
"""Name → from which argument on it takes numbers, of which tensors may take the place."""
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
        _read_numbers(node)
        value = _known(node)
        if value is None or not value.numel() or _storage(node) in written or not (_picks(node) or any(map(_picks, node.all_input_nodes))):
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


def _read_numbers(node: fx.Node) -> None:
    """Put in the known numbers that an op reads of tensors."""
    first = _NUMBERS_FROM.get(name_of(node))
    if first is not None:
        node.args = (*node.args[:first], *fx.map_arg(node.args[first:], _number))
        node.kwargs = fx.map_arg(node.kwargs, _number) if not first else node.kwargs
    elif name_of(node) == "getitem" and tensor_of(node.args[0]) is not None:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        read = tuple(fx.map_arg(each, _number) if isinstance(each, slice) else each for each in index)
        node.args = (node.args[0], read if isinstance(node.args[1], tuple) else read[0])


def _number(node: fx.Node) -> Any:
    value = _known(node)
    if value is None or value.numel() != 1:
        return node
    with no_modes():
        return value.item()


def _storage(node: Any) -> int | None:
    value = _known(node)
    return None if value is None else value.untyped_storage()._cdata
