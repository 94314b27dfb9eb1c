"""Properties of gradients: casts, in-place writes, and forward ops that backward may recompute.

If ops read a parameter in a narrower dtype than its own, backward computes a narrow gradient and
casts it. Gradients are summed over devices in the dtype of the parameter, but at least in fp32, so
partial sums are cast before they are reduced. With several microbatches, a gradient that is only
added to a sum in the same layout needs no cast: the addition casts as it reads, with the same bits.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.analysis.work import is_view
from autopar.capture.graphs import IN_PLACE, TERM, dtype_of, is_tensor, shape_of
from autopar.capture.trace import Trace
from autopar.ops.in_place import in_place_form

_ADD, _CAST = torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default


def widening_casts(trace: Trace) -> frozenset[str]:
    """Return the casts to a wider floating dtype that produce gradients of parameters, or terms of
    them.

    Returns:
        Names of nodes.
    """
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    pending = [results[p.gradient] for p in trace.parameters if p.gradient is not None]
    visited, casts = set[fx.Node](), set[str]()
    for node in pending:  # grows during the loop
        if node in visited or not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        visited.add(node)
        if node.target is _ADD:
            pending += node.args
        elif _widens(node):
            casts.add(node.name)
    return frozenset(casts)


def addable_uncast(trace: Trace) -> dict[str, str]:
    """Return cast → parameter, for each cast that produces a gradient which nothing else reads.

    Casts of gradients to which several stages contribute are left out: in the model without stages,
    the terms are added after the cast.
    """
    output = next(iter(reversed(trace.graph.nodes)))
    casts, results = widening_casts(trace), list(output.args[0])
    gradients = {p.name: results[p.gradient] for p in trace.parameters if p.gradient is not None}
    alone = {
        name: node
        for name, node in gradients.items()
        if node.name in casts and results.count(node) == 1
    }
    return {
        n.name: name
        for name, n in alone.items()
        if set(n.users) == {output} and dtype_of(n).itemsize >= 4 and not n.meta.get(TERM)
    }


def only_widened(trace: Trace) -> dict[str, torch.dtype]:
    """Return node → dtype, for each node whose result is only read by widening casts to this dtype,
    directly or through views."""
    casts, dtypes_read = widening_casts(trace), dict[str, torch.dtype]()
    for node in reversed(trace.graph.nodes):
        into = [
            (
                dtype_of(user)
                if user.name in casts
                else dtypes_read.get(user.name)
                if _is_view(user)
                else None
            )
            for user in node.users
        ]
        dtypes = {dtype for dtype in into if dtype is not None}
        if node.op == "call_function" and len(dtypes) == 1 and None not in into:
            dtypes_read[node.name] = dtypes.pop()
    return dtypes_read


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and is_view(node.target)


def _widens(node: fx.Node) -> bool:
    if node.target is not _CAST:
        return False
    before, after = dtype_of(node.args[0]), dtype_of(node)
    return (
        before.is_floating_point and before != after and torch.promote_types(before, after) == after
    )


# --------------------------------------------------------------------------------------------------
# Nodes that write their result into an operand, such as the gradient of logits into the logits.

_expand = torch.ops.aten.expand.default


def has_own_memory(node: fx.Node) -> bool:
    """Return whether the result of a call has its own memory. A view does not. A getitem does if
    the op whose result it selects does."""
    while node.target is operator.getitem:
        node = node.args[0]
    return node.op == "call_function" and not is_view(node.target)


def owner_of(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the node that allocated the memory of a node's result.

    Returns:
        The node, and whether elements of the result share memory, as in an expanded tensor.
    """
    expanded = False
    while node.op == "call_function" and not has_own_memory(node):
        expanded |= node.target is _expand
        node = node.args[0]
    return node, expanded


def operand_written(node: fx.Node) -> int | None:
    """Return the index of the argument that a node may overwrite with its result, or None.

    For an elementwise op, this is a backward tensor with the shape, strides and dtype of the
    result. For a node that capture has marked, it is the first argument, which may be a forward
    tensor. The tensor has its own memory and no views, and is not a result of the model. No other
    op of the node's phase or of a later phase reads it. If several arguments qualify, the one that
    is computed first is used.

    A program may still be unable to overwrite it, for example if the tensor is redistributed for
    another reader, or if an op that reads it is recomputed.
    """
    if node.op != "call_function" or in_place_form(node.target) is None:
        return None
    places = (
        [0]
        if node.meta.get(IN_PLACE)
        else [place for place, operand in enumerate(node.args) if _is_alike(node, operand)]
    )
    writable = [place for place in places if _may_be_written(node.args[place], node)]
    return min(
        writable, key=node.args.__getitem__, default=None
    )  # nodes compare by their position in the graph


def _is_alike(node: fx.Node, operand: object) -> bool:
    """Return whether an argument is a backward tensor with the shape, strides and dtype of the
    result."""
    if node.meta["phase"] != "backward" or not is_tensor(operand) or not is_tensor(node):
        return False
    assert isinstance(operand, fx.Node), "a tensor is the result of a node"
    same_form = shape_of(operand) == shape_of(node) and dtype_of(operand) == dtype_of(node)
    # strides that the op would not return might make readers copy the result
    return (
        same_form
        and operand.meta["val"].stride() == node.meta["val"].stride()
        and operand.meta.get("phase") == "backward"
    )


def _may_be_written(operand: object, node: fx.Node) -> bool:
    assert isinstance(operand, fx.Node), "the first argument of a marked node is a tensor"
    others = [user for user in operand.users if user is not node]
    return has_own_memory(operand) and all(
        has_own_memory(user) and _is_before(user, node) for user in others
    )


def _is_before(reader: fx.Node, node: fx.Node) -> bool:
    """Return whether a reader's phase ends before the node's phase begins."""
    return reader.meta["phase"] == "forward" and node.meta["phase"] == "backward"


# --------------------------------------------------------------------------------------------------
# Forward nodes that backward may have to recompute.


def needed_by_backward(trace: Trace) -> frozenset[str]:
    """Return the forward nodes whose results backward needs, directly or to recompute others.

    A tensor that leaves for another stage counts as read, so that the set of the whole model
    contains no node that is missing in the set of its stage. A node whose result is only returned,
    such as a loss, is not recomputed and is left out, together with the nodes that only it reads.

    Returns:
        Names of nodes.
    """
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    gradients = (*(p.gradient for p in trace.parameters), *(i.gradient for i in trace.inputs))
    read = {results[i].name for i in gradients if i is not None}
    read |= {o.node for o in trace.outputs if o.crosses}
    needed = set[str]()
    for node in reversed(trace.graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == "forward":
            needed |= (
                {node.name}
                if node.name in read or any(_is_needed_by(user, needed) for user in node.users)
                else set()
            )
    return frozenset(needed)


def _is_needed_by(user: fx.Node, found: set[str]) -> bool:
    return user.name in found or (user.op == "call_function" and user.meta["phase"] == "backward")
