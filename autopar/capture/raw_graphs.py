"""Graphs as Dynamo and AOTAutograd give them, without what is theirs alone."""

from __future__ import annotations

import torch
from torch import fx

_ATEN = torch.ops.aten
_CHECKS = frozenset(
    (
        _ATEN._assert_scalar.default, _ATEN._assert_async.default, _ATEN._assert_async.msg, _ATEN._linalg_check_errors.default,
        torch._assert_async, torch._check,
    )
)  # fmt: skip

_IN_PLACE = frozenset(("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"))


def is_in_place(node: fx.Node) -> bool:
    """Whether a node of torch functions writes to its first operand."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")
    return bool(name in _IN_PLACE or by_name or node.kwargs.get("inplace"))


def drop_checks(graph: fx.Graph) -> None:
    """Erase assertions about a tensor's values, and what was computed for them alone: there are no values to look at."""
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
