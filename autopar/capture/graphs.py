"""Helpers shared by the passes: shapes of nodes, creation of nodes with metadata, and removal of
unused nodes.

While passes run, ``val`` of a new node is an empty fake tensor of the correct shape and dtype.
Strides are set once, after all passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from autopar.core.fx_nodes import add_call, copy_node

aten = torch.ops.aten
# meta key of a node that computes one term of a gradient whose other terms are on other stages
TERM = "term"
# meta key of a node that may write into its first operand if no later node reads that operand
IN_PLACE = "in_place"


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node with one tensor result."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node with one tensor result."""
    return node.meta["val"].dtype


def is_tensor(node: Any) -> bool:
    """Return whether `node` is a node with one tensor result."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def calls(graph: fx.Graph, *targets: Callable[..., Any]) -> list[fx.Node]:
    """Return the nodes that call one of `targets`, in graph order."""
    target_set = set(targets)
    return [
        node for node in graph.nodes if node.op == "call_function" and node.target in target_set
    ]


def emit(
    like: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    shape: Iterable[int],
    *,
    dtype: torch.dtype | None = None,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Insert a call at the graph's insertion point.

    Args:
        like: the node whose phase, module and source are copied to the new node.
        target: the op.
        args: positional arguments of the op.
        shape: shape of the result.
        dtype: dtype of the result; by default that of `like`, or of the first operand with one
            tensor result.
        kwargs: keyword arguments of the op.

    Returns:
        The new node.
    """
    node = add_call(like.graph, target, args, kwargs)
    node.meta.update({name: like.meta[name] for name in ("phase", "module", "source")})
    sample = next(
        argument.meta["val"] for argument in (like, *node.all_input_nodes) if is_tensor(argument)
    )
    node.meta["val"] = sample.new_empty(tuple(shape), dtype=dtype or sample.dtype)
    return node


def cast(like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return `node` in `dtype`: itself, or a new cast.

    Args:
        like: the node whose phase, module and source are copied to a new node.
        node: a node with one tensor result.
        dtype: the dtype of the result.
    """
    if dtype_of(node) == dtype:
        return node
    return emit(
        like, aten._to_copy.default, (node,), shape_of(node), dtype=dtype, kwargs={"dtype": dtype}
    )


def view(like: fx.Node, node: fx.Node, shape: Iterable[int]) -> fx.Node:
    """Return `node` in another shape: the node itself, a node that it is a view of, or a new
    ``aten.view``.

    Args:
        like: the node whose phase, module and source are copied to a new node.
        node: a node with one tensor result.
        shape: the new shape, with the same number of elements.
    """
    shape = tuple(shape)
    while (
        node.target is aten.view.default
        and shape_of(node) != shape
        and shape_of(node.args[0]) == shape
    ):
        node = node.args[0]
    if shape_of(node) == shape:
        return node
    return emit(like, aten.view.default, (node, list(shape)), shape, dtype=dtype_of(node))


def sweep(graph: fx.Graph) -> None:
    """Remove every call whose result is not used; the graph is functional, so calls have no side
    effects."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the graph with the same node names."""
    result, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        env[node] = copy_node(result, node, env.__getitem__)
        assert node.op == "output" or env[node].name == node.name, "names are unique in a trace"
    return result


# --------------------------------------------------------------------------------------------------
# Graphs of Dynamo and AOTAutograd: in-place ops, assertions and torch's calling convention.

_ATEN = torch.ops.aten
_CHECKS = frozenset(
    (
        _ATEN._assert_scalar.default,
        _ATEN._assert_async.default,
        _ATEN._assert_async.msg,
        _ATEN._linalg_check_errors.default,
        torch._assert_async,
        torch._check,
    )
)

_IN_PLACE = frozenset(
    (
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "imatmul",
        "iand",
        "ior",
        "ixor",
    )
)


def is_in_place(node: fx.Node) -> bool:
    """Return whether a node of a graph of torch functions writes to its first operand."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")
    return bool(name in _IN_PLACE or by_name or node.kwargs.get("inplace"))


def drop_checks(graph: fx.Graph) -> None:
    """Erase assertions about values of tensors, and the calls that only they use."""
    dead = [node for node in graph.nodes if node.target in _CHECKS]
    while dead:
        node = dead.pop()
        if not node.users and node.op in ("call_function", "call_method"):
            operands = node.all_input_nodes
            graph.erase_node(node)
            dead += [operand for operand in operands if operand not in dead]


def plain_copy(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the graph without torch's code generation for arguments and results, and
    without an owning module."""
    plain = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    results = plain.graph_copy(graph, copied)
    plain.output(results).meta = dict(next(iter(reversed(graph.nodes))).meta)
    return plain
