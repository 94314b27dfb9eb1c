"""Which nodes of a trace write their result into their first operand: a gradient of logits into the logits, say."""

from __future__ import annotations

import operator

from torch import fx

from autopar.analysis.work import is_view
from autopar.capture.graphs import IN_PLACE


def has_own_memory(node: fx.Node) -> bool:
    """Whether a call's result lies in memory of its own: no view's does, but what getitem picks."""
    return node.op == "call_function" and (node.target is operator.getitem or not is_view(node.target))  # type: ignore[arg-type]


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node is to write into its first operand, which it is marked for: where that has memory of its own, of which there is no
    view, and no result of the model and no other op of the node's phase or a later one reads it.

    A program may still not be able to: where what the operand is read for runs again in backward.
    """
    if not node.meta.get(IN_PLACE):
        return False
    operand = node.args[0]
    assert isinstance(operand, fx.Node), "what is marked reads a tensor first"
    others = [user for user in operand.users if user is not node]
    return has_own_memory(operand) and all(has_own_memory(user) and _is_before(user, node) for user in others)


def _is_before(reader: fx.Node, node: fx.Node) -> bool:
    """Whether a reader's phase is over when the node's begins."""
    return reader.meta["phase"] == "forward" and node.meta["phase"] == "backward"
