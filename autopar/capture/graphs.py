"""Small tools that the passes share: shapes of nodes, new nodes with their metadata, and removal of
what is unused.

While passes run, ``val`` of a new node is an empty fake tensor of the right shape and dtype; exact
strides are filled in once, when all passes are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
# meta of a node of a stage that makes a part of a gradient whose others other stages make
TERM = "term"
# meta of a node that may write into its first operand where nothing else reads that then
IN_PLACE = "in_place"


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
    """A new node at the graph's insertion point: phase, module and source of `like`; its result
    has `shape` and `dtype`."""
    node = like.graph.call_function(target, args, kwargs or {})
    node.meta.update({name: like.meta[name] for name in ("phase", "module", "source")})
    sample = next(
        argument.meta["val"] for argument in (like, *node.all_input_nodes) if is_tensor(argument)
    )
    node.meta["val"] = sample.new_empty(tuple(shape), dtype=dtype or sample.dtype)
    return node


def cast(like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`node` in another dtype."""
    if dtype_of(node) == dtype:
        return node
    return emit(
        like, aten._to_copy.default, (node,), shape_of(node), dtype=dtype, kwargs={"dtype": dtype}
    )


def view(like: fx.Node, node: fx.Node, shape: Iterable[int]) -> fx.Node:
    """`node` seen with another shape: itself, what it is a view of, or a new ``aten.view``."""
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
    """Remove every call that nobody reads (the graph is functional: no call has another effect)."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same nodes, under the same names."""
    result, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        env[node] = result.node_copy(node, env.__getitem__)
        assert node.op == "output" or env[node].name == node.name, "names are unique in a trace"
    return result


# --------------------------------------------------------------------------------------------------
# Graphs as Dynamo and AOTAutograd give them, without what is theirs alone.

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
    """Whether a node of torch functions writes to its first operand."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")
    return bool(name in _IN_PLACE or by_name or node.kwargs.get("inplace"))


def drop_checks(graph: fx.Graph) -> None:
    """Erase assertions about a tensor's values, and what was computed for them alone: there are
    no values to look at."""
    dead = [node for node in graph.nodes if node.target in _CHECKS]
    while dead:
        node = dead.pop()
        if not node.users and node.op in ("call_function", "call_method"):
            operands = node.all_input_nodes
            graph.erase_node(node)
            dead += [operand for operand in operands if operand not in dead]


def plain_copy(graph: fx.Graph) -> fx.Graph:
    """The same graph without torch's own calling convention, and without a module that owns it."""
    plain = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    results = plain.graph_copy(graph, copied)
    plain.output(results).meta = dict(next(iter(reversed(graph.nodes))).meta)
    return plain
