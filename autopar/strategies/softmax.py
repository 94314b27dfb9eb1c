"""What lies around a softmax in attention, which selective recomputation runs again.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5: the product of queries and keys,
the softmax and its dropout make tensors of [heads, s, s], which are large and cheap to make again from queries, keys and values. Where
attention is one op, it makes none, and it runs again as a whole: its result and its softmax' sums are not kept, but what the linear
behind it reads is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from autopar import ops
from autopar.capture.trace import Trace
from autopar.strategies.clusters import HEADS

_SOFTMAX = frozenset((torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default))


def around_softmax(trace: Trace) -> frozenset[str]:
    """Names of the forward nodes that make scores, what becomes of them up to their product with values, and attention as one op."""
    found: set[str] = set()
    for node in trace.graph.nodes:
        if node.op != "call_function" or node.meta["phase"] != "forward":
            continue
        if node.target in (ops.attention, ops.flex_attention):
            found |= {node.name, *(user.name for user in node.users if user.target is operator.getitem)}
        elif node.target in _SOFTMAX:
            before, after = _reach(node, backwards=True), _reach(node, backwards=False)
            if any(n.target in HEADS for n in before) and any(n.target in HEADS for n in after):
                found |= {n.name for n in (*before, *(n for n in after if n.target not in HEADS))}
    return frozenset(found)


def _reach(start: fx.Node, *, backwards: bool) -> list[fx.Node]:
    """The node, and forward nodes next to it with as many elements, up to products, these included."""
    found, stack = {start: None}, [start]
    while stack:
        node = stack.pop()
        for other in _next(node, backwards):
            if other not in found:
                found[other] = None
                if other.target not in HEADS:
                    stack.append(other)
    return list(found)


def _next(node: fx.Node, backwards: bool) -> Iterable[fx.Node]:
    for other in node.all_input_nodes if backwards else node.users:
        if other.op == "call_function" and other.meta["phase"] == "forward":
            value = other.meta["val"]
            alike = isinstance(value, torch.Tensor) and value.numel() == node.meta["val"].numel()
            if alike or (not backwards and other.target in HEADS):
                yield other
