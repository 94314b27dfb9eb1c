"""What is picked by known values (`autopar.capture._torch.constants`) stands in the graph as numbers: its shape follows from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.capture.picked.rows import tensor_of
from autopar.capture.picked.rowwise import name_of
from autopar.capture.raw_graphs import is_in_place

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


def _storage(node: Any) -> int | None:
    value = _known(node)
    return None if value is None else value.untyped_storage()._cdata
