"""The calls of a batch's joint graph beside those of a microbatch's, in the order of labelling."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from torch import fx

from autopar.analysis.time_refusals import refusal
from autopar.capture.graphs import is_tensor
from autopar.capture.trace import Trace
from autopar.rules import Call, call_of, operands_of

Edge = tuple[str, int]
"""Name of a node, and which of its operands."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node of the batch's graph.

    Attributes:
        call, part: its call in the batch's graph and in a microbatch's; None of a getitem.
    """

    node: fx.Node
    operands: tuple[fx.Node, ...]
    call: Call | None
    part: Call | None

    @property
    def is_forward(self) -> bool:
        """Whether it is a node of forward."""
        return bool(self.node.meta["phase"] == "forward")


def find_sites(whole: Trace, part: Trace, num: int) -> list[Site]:
    """The calls that outputs and gradients depend on: those of forward, then those of backward.

    Raises:
        CoupledError: where the graph of a microbatch has no such call, or one of other operands.
    """
    here = {n.meta["key"]: n for n in part.graph.nodes if n.op == "call_function"}
    words = _words(whole), _words(part)

    def site(node: fx.Node) -> Site:
        operands = operands_of(node)
        if node.target is operator.getitem:
            return Site(node, operands, None, None)
        its = here.get(node.meta["key"])
        if its is None:
            raise refusal(node, num, "the graph of one microbatch has no such op")
        if [words[0][o.name] for o in operands] != [words[1][o.name] for o in operands_of(its)]:
            raise refusal(node, num, "the op of one microbatch reads what other ops make")
        return Site(node, operands, call_of(node), call_of(its))

    nodes = _wanted(whole)
    return [
        site(node)
        for forward in (True, False)
        for node in nodes
        if (node.meta["phase"] == "forward") == forward
    ]


def _wanted(trace: Trace) -> list[fx.Node]:
    """The calls that outputs and gradients depend on, in graph order."""
    results = output_of(trace).args[0]
    stack: list[fx.Node] = list(results[: len(trace.outputs)])  # type: ignore[arg-type, index]
    gradients = [p.gradient for p in trace.parameters if p.gradient is not None]
    stack += [results[index] for index in gradients]  # type: ignore[index, misc]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return [node for node in trace.graph.nodes if node in found and node.op == "call_function"]


def _words(trace: Trace) -> dict[str, str]:
    """Nodes by what they are, in words that the graphs of batch and microbatch share."""
    found = {p.node: f"tensor {p.name}" for p in (*trace.parameters, *trace.buffers)}
    found |= {i.node: f"input {i.path}" for i in trace.inputs}
    found |= {o.tangent: f"tangent {o.path}" for o in trace.differentiable}
    calls = (node for node in trace.graph.nodes if node.op == "call_function")
    return found | {node.name: node.meta["key"] for node in calls}


def find_unknown(trace: Trace) -> dict[str, str]:
    """What is not known before the first microbatch runs: node → what it follows from."""
    found = {p.node: f"parameter {p.name!r}" for p in trace.parameters}
    found |= {o.tangent: "the loss" for o in trace.differentiable}
    for node in trace.graph.nodes:
        reason = next((found[o.name] for o in node.all_input_nodes if o.name in found), "")
        if reason and node.op == "call_function":
            found[node.name] = reason
    return found


def output_of(trace: Trace) -> fx.Node:
    """The node that returns the graph's results."""
    return next(iter(reversed(trace.graph.nodes)))


def size_of(node: fx.Node) -> float:
    """Elements of a tensor; several tensors cannot be raised."""
    return float(node.meta["val"].numel()) if is_tensor(node) else math.inf


def is_floating(node: fx.Node) -> bool:
    """Whether a node has one result, of floats."""
    return is_tensor(node) and bool(node.meta["val"].dtype.is_floating_point)
