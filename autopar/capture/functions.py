"""What nodes of a graph of torch functions compute, as the model calls them, before there is a backward.

One thing has many spellings there: a function, an operator or a method. `name_of` gives each the same name.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import fx

_ALSO_CALLED = {"special_erf": "erf", "special_expit": "sigmoid", "divide": "div", "multiply": "mul", "subtract": "sub", "truediv": "div"}
_NAMES = (
    "add", "sub", "mul", "div", "pow", "square", "neg", "divide", "multiply", "subtract", "tanh", "erf", "sigmoid",
    "sqrt", "rsqrt", "mean", "rms_norm",
)  # fmt: skip
_FUNCTIONS = {
    *(getattr(torch, name) for name in _NAMES),
    *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "pow", "neg")),
    torch.nn.functional.tanh, torch.nn.functional.sigmoid, torch.nn.functional.rms_norm, torch.special.erf, torch.special.expit,
}  # fmt: skip


def name_of(node: fx.Node) -> str:
    """Of what a node computes, be it written as a function, an operator or a method; empty for all else."""
    if node.op == "call_method":
        return _ALSO_CALLED.get(str(node.target), str(node.target))
    name = getattr(node.target, "__name__", "") if node.op == "call_function" and node.target in _FUNCTIONS else ""
    return _ALSO_CALLED.get(name, name)


def float_dtype(node: Any) -> torch.dtype | None:
    """Of a tensor of floating numbers; None of all else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def shape_given(node: fx.Node) -> tuple[int, ...]:
    """The shape of a tensor."""
    return tuple(node.meta["example_value"].shape)


class Places:
    """Where nodes stand in a graph, and which of them change what others compute: by writing into a tensor, or by switching gradients
    or autocast. Nothing is joined across these."""

    def __init__(self, graph: fx.Graph) -> None:
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._changes = [self._places[node] for node in graph.nodes if _changes_an_operand(node) or node.is_impure()]

    def any_change(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether one stands between two nodes."""
        return any(self._places[first] < place < self._places[last] for place in self._changes)

    def put(self, node: fx.Node, instead_of: fx.Node) -> None:
        """A new node takes another's place."""
        node.meta, self._places[node] = dict(instead_of.meta), self._places[instead_of]
        instead_of.replace_all_uses_with(node)


def erase(graph: fx.Graph, node: fx.Node, names: Container[str]) -> None:
    """A node that nobody reads, and what was computed for it alone by what has one of these names."""
    waiting = [node]
    while waiting:
        here = waiting.pop()
        operands = here.all_input_nodes
        graph.erase_node(here)
        waiting += [operand for operand in operands if not operand.users and name_of(operand) in names]


def _changes_an_operand(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    written = node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")
    return written or "out" in node.kwargs or node.target is operator.setitem or _is_augmented(node.target)


def _is_augmented(target: Any) -> bool:
    """Whether it is what ``x += y`` and its like call."""
    name = getattr(target, "__name__", "")
    return getattr(target, "__module__", "") == "_operator" and name.startswith("i") and hasattr(operator, f"__{name}__")
