"""Value numbering: which nodes of a graph compute equal values, up to their shape.

Elements are compared as a flat sequence in row-major order. A reshape keeps that sequence, an elementwise
op of operands of one shape applies to it, and the sum of all elements follows from it alone. So
``(labels != -100).sum()`` equals ``(labels.view(-1) != -100).sum()``. Counts are compared whatever dtype
they are added up in, and ``~(x == c)`` equals ``x != c``.

Only values that follow from the call and from buffers alone get a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.capture.graphs import is_tensor, shape_of
from autopar.capture.trace import Trace

aten = torch.ops.aten
_RESHAPES = frozenset(
    (
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default,
        aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    )
)  # fmt: skip
_SUMS = frozenset((aten.sum.default, aten.sum.dim_IntList))
_NOT = frozenset((aten.logical_not.default, aten.bitwise_not.default))
_OPPOSITES = {
    aten.eq.Scalar: aten.ne.Scalar, aten.ne.Scalar: aten.eq.Scalar,
    aten.gt.Scalar: aten.le.Scalar, aten.le.Scalar: aten.gt.Scalar,
    aten.lt.Scalar: aten.ge.Scalar, aten.ge.Scalar: aten.lt.Scalar,
    aten.eq.Tensor: aten.ne.Tensor, aten.ne.Tensor: aten.eq.Tensor,
}  # fmt: skip
_ORDERED = frozenset((aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar))


def number_known_values(trace: Trace) -> dict[str, int]:
    """Number the values that follow from the call and from buffers alone.

    Args:
        trace: a joint forward and backward graph.

    Returns:
        The number of each known ``call_function`` node, by name, in graph order. Equal numbers mean
        equal elements in the same order; shapes may differ.
    """
    return _Numbering(trace).numbers


@dataclass(frozen=True, slots=True)
class _Operand:
    """Stands for an operand in the arguments of a node, so that no string argument is taken for it."""

    number: int
    shape: tuple[int, ...]  # () for the operands of an elementwise op


@dataclass(frozen=True, slots=True)
class _Expression:
    """What a number stands for."""

    target: object
    arguments: str
    is_flat: bool
    """Whether it is an elementwise op, which does not depend on the shape of its operands."""


class _Numbering:
    def __init__(self, trace: Trace) -> None:
        self.numbers: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._of: dict[_Expression, int] = {}
        self._opposite: dict[int, _Expression] = {}
        self._counted: dict[int, int] = {}  # a cast of booleans → the booleans
        varies = {p.node for p in trace.parameters} | {o.tangent for o in trace.outputs}
        for node in trace.graph.nodes:
            if node.op == "placeholder" and node.name not in varies:
                self._known[node.name] = self._number(_Expression(node.name, "", False))
            elif node.op == "call_function" and all(o.name in self._known for o in node.all_input_nodes):
                self._known[node.name] = self.numbers[node.name] = self._find(node)

    def _find(self, node: fx.Node) -> int:
        operands = node.all_input_nodes
        if node.target in _RESHAPES and self._keeps_elements(node):
            return self._known[operands[0].name]
        if node.target in _SUMS and is_tensor(node) and node.meta["val"].numel() == 1:
            number = self._known[operands[0].name]
            counted = self._counted.get(number, number)
            dtype = "" if counted != number or _is_bool(operands[0]) else str(node.meta["val"].dtype)
            return self._number(_Expression("sum of all elements", f"{counted} {dtype}", True))
        if node.target in _NOT and _is_bool(operands[0]):
            opposite = self._opposite.get(self._known[operands[0].name])
            if opposite is not None:
                return self._number(opposite)
        number = self._number(self._expression(node, node.target))
        self._note(node, number)
        return number

    def _note(self, node: fx.Node, number: int) -> None:
        """Keep what later nodes may be equal by."""
        operands = node.all_input_nodes
        if node.target in _OPPOSITES and not (node.target in _ORDERED and _is_floating(operands[0])):
            self._opposite[number] = self._expression(node, _OPPOSITES[node.target])
        if node.target is aten._to_copy.default and _is_bool(operands[0]):
            self._counted[number] = self._known[operands[0].name]

    def _expression(self, node: fx.Node, target: object) -> _Expression:
        is_flat = self._is_elementwise(node)

        def stand_in(operand: fx.Node) -> _Operand:
            return _Operand(self._known[operand.name], () if is_flat else _shape(operand))

        arguments = fx.map_arg((node.args, node.kwargs), stand_in)  # type: ignore[arg-type]
        return _Expression(target, repr(arguments), is_flat)

    def _number(self, expression: _Expression) -> int:
        return self._of.setdefault(expression, len(self._of))

    @staticmethod
    def _keeps_elements(node: fx.Node) -> bool:
        operand = node.all_input_nodes[0]
        return is_tensor(node) and is_tensor(operand) and node.meta["val"].dtype == operand.meta["val"].dtype

    @staticmethod
    def _is_elementwise(node: fx.Node) -> bool:
        tags = getattr(node.target, "tags", ())
        if not is_tensor(node) or not (torch.Tag.pointwise in tags or node.target is aten._to_copy.default):
            return False
        return all(_shape(operand) == shape_of(node) for operand in node.all_input_nodes)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return shape_of(node) if is_tensor(node) else ()


def _is_bool(node: fx.Node) -> bool:
    return is_tensor(node) and node.meta["val"].dtype == torch.bool


def _is_floating(node: fx.Node) -> bool:
    """NaN is neither less than a number nor at least as large."""
    return is_tensor(node) and bool(node.meta["val"].dtype.is_floating_point)
