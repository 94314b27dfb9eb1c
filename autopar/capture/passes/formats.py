"""Ops whose kernels want operands in one memory format become functions that take operands in any (`autopar.ops.formats`)."""

from __future__ import annotations

from torch import fx

from autopar.ops.formats import ANY_FORMAT


def take_any_format(graph: fx.Graph) -> None:
    """Replace the targets; arguments stay."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = ANY_FORMAT.get(node.target, node.target)
