"""Casts of gradients: of a parameter that is read in a narrower dtype than it rests in, what backward makes is narrow, and is cast.

Gradients are summed over devices in the dtype in which parameters rest, fp32 at least, so partial sums are cast before they are reduced.
What is only added to a sum of several microbatches that lies as it does need not be: addition casts as it reads, to the same bits.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.analysis.work import is_view
from autopar.capture.graphs import TERM, dtype_of
from autopar.capture.trace import Trace

_ADD, _CAST = torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default


def widening_casts(trace: Trace) -> frozenset[str]:
    """Names of the casts to a wider floating dtype of which parameters' gradients are made: of all of one, or of terms of it."""
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

    Not where the gradient is a term of one that several stages add up: in the model without stages the terms are added as they are cast.
    """
    output = next(iter(reversed(trace.graph.nodes)))
    casts, results = widening_casts(trace), list(output.args[0])  # type: ignore[arg-type]
    made = {p.name: results[p.gradient] for p in trace.parameters if p.gradient is not None}
    alone = {name: node for name, node in made.items() if node.name in casts and results.count(node) == 1}
    return {n.name: name for name, n in alone.items() if set(n.users) == {output} and dtype_of(n).itemsize >= 4 and not n.meta.get(TERM)}


def cast_alone(trace: Trace) -> dict[str, torch.dtype]:
    """Name of a node whose result, or views of it, only such casts read → the dtype that these make."""
    casts, found = widening_casts(trace), dict[str, torch.dtype]()
    for node in reversed(trace.graph.nodes):
        into = [dtype_of(user) if user.name in casts else found.get(user.name) if _is_view(user) else None for user in node.users]
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
    return before.is_floating_point and before != after and torch.promote_types(before, after) == after
