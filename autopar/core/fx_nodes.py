"""Creation of nodes of FX graphs.

`torch.fx.Graph.create_node` searches the arguments of a call for symbolic numbers, which takes half
of its time. Graphs of this package have none, so arguments are set after the node is created.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx


def add_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """Insert a call at the insertion point of a graph, as `torch.fx.Graph.call_function` does.

    Args:
        graph: the graph.
        target: the function.
        args, kwargs: its arguments, without symbolic numbers.
        name: candidate for the name of the node; by default the name of the function.
    """
    node = graph.create_node("call_function", target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    return node


def copy_node(graph: fx.Graph, node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Copy a node into a graph, as `torch.fx.Graph.node_copy` does.

    Args:
        graph: the graph that gets the copy.
        node: a node of another graph, whose arguments are without symbolic numbers.
        operand: maps an operand of the node to its copy.
    """
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    copy.args = fx.map_arg(node.args, operand)
    if node.kwargs:
        copy.kwargs = fx.map_arg(node.kwargs, operand)
    copy.meta.update(node.meta)
    return copy
