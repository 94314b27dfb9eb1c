"""Small tools that the passes share: shapes of nodes, new nodes with their metadata, and removal of what is unused.

While passes run, ``val`` of a new node is an empty fake tensor of the right shape and dtype; exact strides are filled in
once, when all passes are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
TERM = "term"  # meta of a node of a stage that makes a part of a gradient whose others other stages make
IN_PLACE = "in_place"  # meta of a node that may write into its first operand where nothing else reads that then


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node with one tensor result."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Dtype of a node with one tensor result."""
    return node.meta["val"].dtype


def is_tensor(node: Any) -> bool:
    """Whether `node` is a node with one tensor result."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def calls(graph: fx.Graph, *targets: Callable[..., Any]) -> list[fx.Node]:
    """The nodes that call one of `targets`, in graph order."""
    wanted = set(targets)
    return [node for node in graph.nodes if node.op == "call_function" and node.target in wanted]


def emit(
    like: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    shape: Iterable[int],
    *,
    dtype: torch.dtype | None = None,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """A new node at the graph's insertion point: phase, module and source of `like`; its result has `shape` and `dtype`."""
    node = like.graph.call_function(target, args, kwargs or {})
    node.meta.update({name: like.meta[name] for name in ("phase", "module", "source")})
    sample = next(argument.meta["val"] for argument in (like, *node.all_input_nodes) if is_tensor(argument))
    node.meta["val"] = sample.new_empty(tuple(shape), dtype=dtype or sample.dtype)
    return node


def cast(like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`node` in another dtype."""
    if dtype_of(node) == dtype:
        return node
    return emit(like, aten._to_copy.default, (node,), shape_of(node), dtype=dtype, kwargs={"dtype": dtype})


def view(like: fx.Node, node: fx.Node, shape: Iterable[int]) -> fx.Node:
    """`node` seen with another shape: itself, what it is a view of, or a new ``aten.view``."""
    shape = tuple(shape)
    while node.target is aten.view.default and shape_of(node) != shape and shape_of(node.args[0]) == shape:
        node = node.args[0]
    if shape_of(node) == shape:
        return node
    return emit(like, aten.view.default, (node, list(shape)), shape, dtype=dtype_of(node))


def sweep(graph: fx.Graph) -> None:
    """Remove every call that nobody reads (the graph is functional: no call has another effect)."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def copied(graph: fx.Graph) -> fx.Graph:
    """The same nodes, under the same names."""
    result, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        env[node] = result.node_copy(node, env.__getitem__)
        assert node.op == "output" or env[node].name == node.name, "names are unique in a trace"
    return result
