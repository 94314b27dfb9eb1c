"""Masks that are computed twice, as in ``out[~mask] = f(x[~mask])``, are one, and pick equally many rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.picked.rows import counted, tensor_of
from autopar.capture.picked.rowwise import SHAPING, name_of
from autopar.capture.raw_graphs import is_in_place

_COMPARING = frozenset(
    [
        "eq", "ne", "lt", "le", "gt", "ge", "invert", "logical_not", "logical_and", "logical_or", "logical_xor", "and_", "or_", "xor",
        "bitwise_and", "bitwise_or", "bitwise_not", "isnan", "isfinite", "isinf", "isin", "bool", "long", "int", "to", "squeeze",
        "unsqueeze", "getitem", "any", "all", "argmax", "roll", *SHAPING,
    ]
)  # fmt: skip
"""What masks are made by: of equal operands they give equal values."""


def join_equal_masks(graph: fx.Graph) -> None:
    """Of masks that are made in the same way of the same values the first stands for all, where none is written to; what they pick has one
    symbol for its number of rows. The nodes of the others stay, unused."""
    writes = [written for node in graph.nodes for written in _written(node)]
    version: dict[int, int] = {}
    made: dict[fx.Node, Any] = {}
    firsts: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        for storage in _written(node):
            version[storage] = version.get(storage, 0) + 1
        value = tensor_of(node)
        if value is None or name_of(node) not in _COMPARING or node.op == "placeholder" or _written(node):
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
    """How a value is made, from what no comparison makes, in the state of the latter when it is read."""

    def part(x: Any) -> Any:
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


def _written(node: fx.Node) -> set[int]:
    """The storages that a node writes to."""
    first = node.args[:1] if is_in_place(node) else ()
    return {_storage(tensor_of(x)) for x in (*first, node.kwargs.get("out")) if tensor_of(x) is not None}


def _count_alike(graph: fx.Graph) -> None:
    """What the same mask picks has equally many rows."""
    sizes: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        index = node.args[1] if name_of(node) == "getitem" and len(node.args) > 1 else None
        flags = index[0] if isinstance(index, tuple) and index else index
        picks, value = tensor_of(flags), tensor_of(node)
        if picks is None or picks.dtype is not torch.bool or value is None or not value.dim() or counted(value.shape[0]) is None:
            continue
        first = sizes.setdefault(flags, value.shape[0])
        if counted(first) != counted(value.shape[0]):
            node_of_size = value.shape[0].node  # type: ignore[attr-defined]
            node_of_size.shape_env._set_replacement(node_of_size.expr, first.node.expr, "of one mask")
