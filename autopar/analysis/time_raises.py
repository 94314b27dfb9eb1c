"""Where operands are raised: multiplied by powers of the number of microbatches.

What an op makes is raised by raising what the op is linear in. So where a large tensor has too
little, it is often enough to raise a number that it follows from, such as the tangent of one term
of a loss. Each operand is raised where the fewest elements are multiplied, and of equal places at
the nearest.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from torch import fx

from autopar.analysis.time_labels import Label
from autopar.analysis.time_sites import Edge, Site, output_of, size_of
from autopar.capture.trace import Trace
from autopar.rules import operands_of

_Cost = tuple[float, tuple[int, ...]]
"""Elements that are multiplied if some operands of a node are raised, and which operands."""
_NONE: _Cost = (math.inf, ())


class Raises:
    """Which operands are raised, by which power.

    Args:
        whole: the batch's trace. near: operands are raised where they are read, and not before.

    Attributes:
        edges: what is raised.
        elsewhere: whether anything was raised before it is read, so that other nodes read more, too.
        conflict: whether some of it had to be raised once more. Then what follows from it needs
            different powers, and nothing but raising operands where they are read helps.
    """

    def __init__(self, whole: Trace, *, near: bool) -> None:
        self.edges: dict[Edge, int] = {}
        self.elsewhere = self.conflict = False
        self._whole, self._near, self._output = whole, near, output_of(whole)
        self._tangents = {o.tangent for o in whole.differentiable}
        self._costs: dict[str, _Cost] = {}

    def read(self, label: Label, edge: Edge) -> Label:
        """The label of what is read along an edge."""
        return label.raised(self.edges.get(edge, 0))

    def note(
        self,
        site: Site,
        linear: tuple[tuple[int, ...], ...],
        label_of: Callable[[fx.Node], Label],
        given: Mapping[str, Label],
    ) -> None:
        """Note what a node is linear in, once it is labelled.

        Args:
            linear: sets of operands. given: nodes that are not computed.
        """

        def cost(index: int) -> float:
            operand = site.operands[index]
            if label_of(operand).kind == "zero":
                return 0.0
            if operand.op == "placeholder":
                return size_of(operand) if operand.name in self._tangents else math.inf
            if operand.meta["phase"] != site.node.meta["phase"] or operand.name in given:
                return math.inf
            return min(size_of(operand), self._costs.get(operand.name, _NONE)[0])

        groups = [tuple(n for n in group if cost(n)) for group in linear]
        costs = [(sum(map(cost, group)), group) for group in groups if group]
        self._costs[site.node.name] = min(costs, default=_NONE)

    def note_getitem(self, site: Site) -> None:
        """Note that one of several results is raised by raising all."""
        self._costs[site.node.name] = self._costs.get(site.operands[0].name, _NONE)

    def add(self, edges: Mapping[Edge, int]) -> list[str]:
        """Raise what is read along these edges further.

        Returns:
            The names of the nodes whose operands are raised.
        """
        found: dict[Edge, int] = {}
        stack = list(edges.items())
        while stack:
            (name, index), power = stack.pop()
            reader = self._output if name == self._output.name else self._whole.node(name)
            operand = operands_of(reader)[index]
            cost, group = self._costs.get(operand.name, _NONE)
            if self._near or cost >= size_of(operand):
                found[name, index] = power
                continue
            self.elsewhere = True
            if operand.target is operator.getitem:
                (operand,) = operands_of(operand)
            stack += [((operand.name, n), power) for n in group]
        self.conflict |= any(edge in self.edges and edge not in edges for edge in found)
        for edge, power in found.items():
            self.edges[edge] = self.edges.get(edge, 0) + power
        return [name for name, _ in found]
