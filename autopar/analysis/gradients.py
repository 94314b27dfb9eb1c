"""Casts of gradients: of a parameter that is read in a narrower dtype than it rests in, what
backward makes is narrow, and is cast.

Gradients are summed over devices in the dtype in which parameters rest, fp32 at least, so partial
sums are cast before they are reduced. What is only added to a sum of several microbatches that lies
as it does need not be: addition casts as it reads, to the same bits.
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
    """Names of the casts to a wider floating dtype of which parameters' gradients are made: of
    all of one, or of terms of it."""
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    left = [results[p.gradient] for p in trace.parameters if p.gradient is not None]  # type: ignore[index]
    seen, found = set[fx.Node](), set[str]()
    for node in left:  # grows while it is walked
        if node in seen or not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        seen.add(node)
        if node.target is _ADD:
            left += node.args
        elif _widens(node):
            found.add(node.name)
    return frozenset(found)


def addable_uncast(trace: Trace) -> dict[str, str]:
    """Name of a cast that makes a gradient, and that nothing else reads → the parameter.

    Not where the gradient is a term of one that several stages add up: in the model without stages
    the terms are added as they are cast.
    """
    output = next(iter(reversed(trace.graph.nodes)))
    casts, results = widening_casts(trace), list(output.args[0])  # type: ignore[arg-type]
    made = {p.name: results[p.gradient] for p in trace.parameters if p.gradient is not None}
    alone = {
        name: node for name, node in made.items() if node.name in casts and results.count(node) == 1
    }
    return {
        n.name: name
        for name, n in alone.items()
        if set(n.users) == {output} and dtype_of(n).itemsize >= 4 and not n.meta.get(TERM)
    }


def cast_alone(trace: Trace) -> dict[str, torch.dtype]:
    """Name of a node whose result, or views of it, only such casts read → the dtype that these
    make."""
    casts, found = widening_casts(trace), dict[str, torch.dtype]()
    for node in reversed(trace.graph.nodes):
        into = [
            (
                dtype_of(user)
                if user.name in casts
                else found.get(user.name)
                if _is_view(user)
                else None
            )
            for user in node.users
        ]
        dtypes = {dtype for dtype in into if dtype is not None}
        if node.op == "call_function" and len(dtypes) == 1 and None not in into:
            found[node.name] = dtypes.pop()
    return found


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and is_view(node.target)  # type: ignore[arg-type]


def _widens(node: fx.Node) -> bool:
    if node.target is not _CAST:
        return False
    before, after = dtype_of(node.args[0]), dtype_of(node)  # type: ignore[arg-type]
    return (
        before.is_floating_point and before != after and torch.promote_types(before, after) == after
    )


# --------------------------------------------------------------------------------------------------
# Which nodes of a trace write their result into an operand: a gradient into the one that it is
# made of, or of logits into the logits.

_expand = torch.ops.aten.expand.default


def has_own_memory(node: fx.Node) -> bool:
    """Whether a call's result lies in memory of its own: no view's does, but what getitem picks
    of an op's results."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "call_function" and not is_view(node.target)  # type: ignore[arg-type]


def owner_of(node: fx.Node) -> tuple[fx.Node, bool]:
    """What made the memory that a node's result lies in, and whether elements share a place in
    it, as those of an expanded one do."""
    expanded = False
    while node.op == "call_function" and not has_own_memory(node):
        expanded |= node.target is _expand
        node = node.args[0]  # type: ignore[assignment]
    return node, expanded


def operand_written(node: fx.Node) -> int | None:
    """The place among its arguments of the tensor that a node is to write its result into, or None.

    That is one which backward made, of the result's shape, strides and dtype, for an op that takes
    one element after another; or the first argument of a node that capture has marked, which
    forward may have made. It has memory of its own, of which there is no view, and no result of the
    model and no other op of the node's phase or a later one reads it. Of several, the one that is
    made first.

    A program may still not be able to: where the tensor is redistributed for another reader, say,
    or what it is read for runs again.
    """
    if node.op != "call_function" or in_place_form(node.target) is None:  # type: ignore[arg-type]
        return None
    places = (
        [0]
        if node.meta.get(IN_PLACE)
        else [place for place, operand in enumerate(node.args) if _is_alike(node, operand)]
    )
    found = [place for place in places if _may_be_written(node.args[place], node)]
    return min(
        found, key=node.args.__getitem__, default=None
    )  # nodes of a graph compare by their place in it


def _is_alike(node: fx.Node, operand: object) -> bool:
    """Whether an argument is a tensor of backward that is like the node's result."""
    if node.meta["phase"] != "backward" or not is_tensor(operand) or not is_tensor(node):
        return False
    assert isinstance(operand, fx.Node), "a tensor is made by a node"
    alike = shape_of(operand) == shape_of(node) and dtype_of(operand) == dtype_of(node)
    # lying otherwise than the op would have it, the result might be copied by what reads it
    return (
        alike
        and operand.meta["val"].stride() == node.meta["val"].stride()
        and operand.meta.get("phase") == "backward"
    )


def _may_be_written(operand: object, node: fx.Node) -> bool:
    assert isinstance(operand, fx.Node), "what is marked reads a tensor first"
    others = [user for user in operand.users if user is not node]
    return has_own_memory(operand) and all(
        has_own_memory(user) and _is_before(user, node) for user in others
    )


def _is_before(reader: fx.Node, node: fx.Node) -> bool:
    """Whether a reader's phase is over when the node's begins."""
    return reader.meta["phase"] == "forward" and node.meta["phase"] == "backward"


# --------------------------------------------------------------------------------------------------
# Which nodes of forward backward can have a use for running again.


def asked_again(trace: Trace) -> frozenset[str]:
    """Names of the nodes of forward whose results backward reads, or others that it reads are made
    of.

    What leaves for another stage counts as read, so that in the whole model no node is in this set
    that is not in its stage's. What else only leaves, as a loss does, is not run again, though
    others of its op may be: it is left out, with what it alone reads.
    """
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    gradients = (*(p.gradient for p in trace.parameters), *(i.gradient for i in trace.inputs))
    read = {results[i].name for i in gradients if i is not None}  # type: ignore[index, union-attr]
    read |= {o.node for o in trace.outputs if o.crosses}
    found = set[str]()
    for node in reversed(trace.graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == "forward":
            found |= (
                {node.name}
                if node.name in read or any(_asks(user, found) for user in node.users)
                else set()
            )
    return frozenset(found)


def _asks(user: fx.Node, found: set[str]) -> bool:
    return user.name in found or (user.op == "call_function" and user.meta["phase"] == "backward")
