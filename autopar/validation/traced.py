"""The traced model with look-ups for validation: nodes by key, values by name, and the dtypes in
which gradients must be reduced."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from autopar.capture.trace import CAPTURED_KEY, Trace
from autopar.rules import Call, call_of, operands_of
from autopar.validation.states import Ref

_CAST = torch.ops.aten._to_copy.default
_VIEWS = (
    "view",
    "reshape",
    "permute",
    "transpose",
    "unsqueeze",
    "squeeze",
    "expand",
    "t",
    "select",
    "slice",
    "alias",
    "detach",
)


class Nodes:
    """A graph of traced ops with look-ups.

    Attributes:
        graph: the graph.
        nodes: name → node.
        by_key: key → compute node.
        by_captured_key: key in the captured graph → compute node; equal to `by_key` unless the
            graph was rewritten (`autopar.capture.chunked_loss`).
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes: Mapping[str, fx.Node] = {node.name: node for node in graph.nodes}
        self.by_key: Mapping[str, fx.Node] = {
            node.meta["key"]: node for node in graph.nodes if node.op == "call_function"
        }
        self.by_captured_key: Mapping[str, fx.Node] = {
            captured: node
            for key, node in self.by_key.items()
            if (captured := node.meta.get(CAPTURED_KEY, key))
        }
        self._calls: dict[str, Call] = {}

    def ref(self, node: fx.Node) -> Ref:
        """Return the value that a node computes. For a getitem, return the selected result."""
        result = 0
        while node.target is operator.getitem:
            node, result = node.args
        return node.name, result

    def reads(self, node: fx.Node) -> list[Ref]:
        """Return the values that a node reads, in the order of its operands."""
        return [self.ref(operand) for operand in operands_of(node)]

    def call(self, node: fx.Node) -> Call:
        """Return the call that a node makes."""
        if node.name not in self._calls:
            self._calls[node.name] = call_of(node)
        return self._calls[node.name]

    def value(self, ref: Ref) -> torch.Tensor:
        """Return the traced value, a fake tensor."""
        value = self.nodes[ref[0]].meta["val"]
        return value[ref[1]] if isinstance(value, tuple | list) else value

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """Return the global shape of a value."""
        return tuple(int(size) for size in self.value(ref).shape)


class TracedModel(Nodes):
    """A trace with look-ups.

    Attributes:
        trace: the trace.
        results: the nodes that the graph returns, in order.
        widest: traced value → dtype in which its partial sums must be reduced, if wider than its
            own.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace.graph)
        self.trace = trace
        self.results: tuple[fx.Node, ...] = next(iter(reversed(trace.graph.nodes))).args[0]
        self.widest: Mapping[Ref, torch.dtype] = self._widest()

    def gradient_of(self, position: int) -> tuple[Ref, tuple[Ref, ...]]:
        """Return a result that is a gradient, and the values of which it is only a cast. One of
        these may be added to a sum instead."""
        node = self.results[position]
        before, casts = node, list[Ref]()
        while before.target is _CAST and not before.kwargs.keys() - {"dtype"}:
            before = before.args[0]
            casts.append(self.ref(before))
        return self.ref(node), tuple(casts)

    def reduced_in(self, ref: Ref) -> torch.dtype:
        """Return the narrowest dtype in which partial sums of a value may be reduced."""
        return self.widest.get(ref, self.value(ref).dtype)

    def _widest(self) -> dict[Ref, torch.dtype]:
        """Compute `widest`. Gradients of parameters are reduced in at least fp32, and a value that
        is only cast to a gradient in the dtype of the cast."""
        widest: dict[Ref, torch.dtype] = {}
        for p in self.trace.parameters:
            if p.gradient is None:
                continue
            node = self.results[p.gradient]
            if (
                not isinstance(node.meta["val"], torch.Tensor)
                or not node.meta["val"].dtype.is_floating_point
            ):
                continue
            own_dtype, wide = node.meta["val"].dtype, None
            widest[self.ref(node)] = own_dtype if own_dtype.itemsize >= 4 else torch.float32
            while self._is_passed_on(node):
                source: fx.Node = node.args[0]
                dtype, read = node.meta["val"].dtype, source.meta["val"].dtype
                if dtype != read and torch.promote_types(dtype, read) == dtype:
                    wide = dtype
                node = source
                if len(node.users) > 1:
                    break
                if wide is not None:
                    widest[self.ref(node)] = wide
        return widest

    def _is_passed_on(self, node: fx.Node) -> bool:
        """Return whether a node returns its operand, as a cast or a view."""
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
            return False
        name = getattr(node.target, "__name__", "").partition(".")[0]
        return node.target is _CAST or name in _VIEWS
