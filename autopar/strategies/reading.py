"""A trace, read once for all axes before plans are spread over it.

Terms. A tensor is *constant* where it does not depend on the batch; a *weight* is a constant that depends on parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar import ops
from autopar.capture.trace import Trace
from autopar.rules import Call, call_of, operands_of
from autopar.strategies.clusters import HEADS, Ref, pattern_of

_SAME_SHAPE = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default))


@dataclass(frozen=True, slots=True)
class Read:
    """A trace, and what depends on what in it.

    Attributes:
        nodes, calls, reads: per compute node its name, its call and the tensors that it reads.
        on_batch, on_parameters: names of the nodes that depend on inputs or the loss' tangent, and on parameters.
        masked: forward nodes, no products or lookups, that join weights with what depends on the batch alone: a bias with a mask.
        gradient_of: node that makes a parameter's gradient, or a part of the sum that it is → the parameter's placeholder.
    """

    trace: Trace
    nodes: Mapping[str, fx.Node]
    calls: Mapping[str, Call]
    reads: Mapping[str, tuple[Ref, ...]]
    on_batch: frozenset[str]
    on_parameters: frozenset[str]
    masked: frozenset[str]
    gradient_of: Mapping[str, str]

    def is_weight(self, name: str) -> bool:
        """Whether the node makes weights."""
        return name in self.on_parameters and name not in self.on_batch

    def pattern(self, node: fx.Node) -> str:
        """What equal nodes of repeated layers have in common."""
        return pattern_of(node.meta["key"])[0]


def read(trace: Trace) -> Read:
    """Read a trace."""
    nodes = {node.name: node for node in trace.graph.nodes if node.op == "call_function"}
    calls: dict[str, Call] = {}
    reads: dict[str, tuple[Ref, ...]] = {}
    on_batch = {i.node for i in trace.inputs} | {o.tangent for o in trace.differentiable}
    on_parameters = {p.node for p in trace.parameters}
    for name, node in nodes.items():
        operands = operands_of(node)
        calls[name] = call_of(node)
        index = int(node.args[1]) if node.target is operator.getitem else 0  # type: ignore[arg-type]
        reads[name] = tuple((operand.name, index) for operand in operands)
        for depending in (on_batch, on_parameters):
            if any(operand.name in depending for operand in operands):
                depending.add(name)
    masked: set[str] = set()
    for name, node in nodes.items():
        names = {operand.name for operand in operands_of(node)}
        joins = name in on_batch and name in on_parameters and node.meta["phase"] == "forward" and node.target not in HEADS
        if joins and not any(other in on_batch and other in on_parameters and other not in masked for other in names):
            masked.add(name)
    return Read(trace, nodes, calls, reads, frozenset(on_batch), frozenset(on_parameters), frozenset(masked), _gradients(trace))


def _gradients(trace: Trace) -> dict[str, str]:
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    found: dict[str, str] = {}
    for p in trace.parameters:
        left = [] if p.gradient is None else [results[p.gradient]]  # type: ignore[index]
        while left:
            node = left.pop()
            if isinstance(node, fx.Node) and node.op == "call_function" and node.meta["phase"] == "backward":
                found[node.name] = p.node
                left += node.all_input_nodes if node.target in _SAME_SHAPE else ()
    return found


def product_of(graph: Read, node: fx.Node) -> tuple[Ref, Ref] | None:
    """(activation, weight) of a forward product of the two, or None."""
    if node.target is not ops.dot or node.meta["phase"] != "forward":
        return None
    first, second = graph.reads[node.name][:2]
    if graph.is_weight(first[0]):
        first, second = second, first
    return (first, second) if graph.is_weight(second[0]) and first[0] in graph.on_batch else None
