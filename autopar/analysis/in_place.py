"""Which nodes of a trace write their result into an operand: a gradient into the one that it is made of, or of logits into the logits."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.analysis.work import is_view
from autopar.capture.graphs import IN_PLACE, dtype_of, is_tensor, shape_of
from autopar.ops.in_place import in_place_form

_expand = torch.ops.aten.expand.default


def has_own_memory(node: fx.Node) -> bool:
    """Whether a call's result lies in memory of its own: no view's does, but what getitem picks of an op's results."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "call_function" and not is_view(node.target)  # type: ignore[arg-type]


def owner_of(node: fx.Node) -> tuple[fx.Node, bool]:
    """What made the memory that a node's result lies in, and whether elements share a place in it, as those of an expanded one do."""
    expanded = False
    while node.op == "call_function" and not has_own_memory(node):
        expanded |= node.target is _expand
        node = node.args[0]  # type: ignore[assignment]
    return node, expanded


def operand_written(node: fx.Node) -> int | None:
    """The place among its arguments of the tensor that a node is to write its result into, or None.

    That is one which backward made, of the result's shape, strides and dtype, for an op that takes one element after another; or the first
    argument of a node that capture has marked, which forward may have made. It has memory of its own, of which there is no view, and no
    result of the model and no other op of the node's phase or a later one reads it. Of several, the one that is made first.

    A program may still not be able to: where the tensor is redistributed for another reader, say, or what it is read for runs again.
    """
    if node.op != "call_function" or in_place_form(node.target) is None:  # type: ignore[arg-type]
        return None
    places = [0] if node.meta.get(IN_PLACE) else [place for place, operand in enumerate(node.args) if _is_alike(node, operand)]
    found = [place for place in places if _may_be_written(node.args[place], node)]
    return min(found, key=node.args.__getitem__, default=None)  # nodes of a graph compare by their place in it


def _is_alike(node: fx.Node, operand: object) -> bool:
    """Whether an argument is a tensor of backward that is like the node's result."""
    if node.meta["phase"] != "backward" or not is_tensor(operand) or not is_tensor(node):
        return False
    assert isinstance(operand, fx.Node), "a tensor is made by a node"
    alike = shape_of(operand) == shape_of(node) and dtype_of(operand) == dtype_of(node)
    # lying otherwise than the op would have it, the result might be copied by what reads it
    return alike and operand.meta["val"].stride() == node.meta["val"].stride() and operand.meta.get("phase") == "backward"


def _may_be_written(operand: object, node: fx.Node) -> bool:
    assert isinstance(operand, fx.Node), "what is marked reads a tensor first"
    others = [user for user in operand.users if user is not node]
    return has_own_memory(operand) and all(has_own_memory(user) and _is_before(user, node) for user in others)


def _is_before(reader: fx.Node, node: fx.Node) -> bool:
    """Whether a reader's phase is over when the node's begins."""
    return reader.meta["phase"] == "forward" and node.meta["phase"] == "backward"
