"""Correspondence between the graph of one sample and the graph of two samples.

The graph of one sample lacks ops that have no effect on it: an ``expand`` to all samples, a sum
over them, a division by their number, a copy of a contiguous tensor. The keys of later nodes are
numbered without them. So nodes correspond if they have the same op, module and phase, and their
operands correspond, up to missing ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from autopar import ops
from autopar.analysis.microbatch_sites import Edge
from autopar.capture.trace import Trace
from autopar.errors import ConstraintError
from autopar.rules import operands_of

aten = torch.ops.aten
_MISSING = frozenset(
    (
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.mul.Tensor,
        aten.mul.Scalar,
        aten.div.Tensor,
        aten.div.Scalar,
        aten.sum.dim_IntList,
        aten.expand.default,
        aten.slice.Tensor,
    )
)
_MOST_MISSING = 8  # in a row
Path = tuple[Edge, ...]
"""Edges of the graph of two samples, from a reader back to a node that the graph of one has too."""


class Counterparts:
    """Maps nodes and edges of a graph of two samples to those of a graph of one sample.

    Args:
        two, one: the traces.
    """

    def __init__(self, two: Trace, one: Trace) -> None:
        self._node, self._edges = dict[str, str](), dict[Edge, list[Edge]]()
        self._stands_for = dict(zip(_placeholders(one), _placeholders(two), strict=True))
        self._alike: dict[str, list[fx.Node]] = defaultdict(list)
        calls = [node for node in two.graph.nodes if node.op == "call_function"]
        for node in calls:
            self._alike[_kind(node)].append(node)
        self._by_key = {node.meta["key"]: node for node in calls}
        for node in one.graph.nodes:
            if node.op == "call_function":
                self._match(node)
            elif node.op == "output":
                self._add(node, next(iter(reversed(two.graph.nodes))))

    def node(self, name: str) -> str:
        """Return the node of the graph of one sample that corresponds to a node.

        Raises:
            ConstraintError: if there is none.
        """
        if name not in self._node:
            raise _otherwise()
        return self._node[name]

    def edges(self, raised: Mapping[Edge, int]) -> dict[Edge, int]:
        """Map powers of raised operands to the edges of the graph of one sample.

        Raises:
            ConstraintError: if an edge has no counterpart.
        """
        found: dict[Edge, int] = {}
        for edge, power in raised.items():
            if edge not in self._edges:
                raise _otherwise()
            for own in self._edges[edge]:
                found[own] = found.get(own, 0) + power
        return found

    def _match(self, node: fx.Node) -> None:
        """Find the node that corresponds to a node of the graph of one sample, if there is one."""
        for other in self._candidates(node):
            if self._add(node, other):
                self._stands_for[node.name] = other.name
                self._node.setdefault(other.name, node.name)
                return

    def _candidates(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield nodes of the same op, module and phase, beginning with the one of the same key.

        A product with a bias may also correspond to an addition: torch adds the bias within the
        product only if the operand is contiguous.
        """
        own = self._by_key.get(node.meta["key"])
        alike = [n for n in self._alike[_kind(node)] if n is not own and n.target is node.target]
        yield from ([own] if own is not None and own.target is node.target else [])
        yield from alike
        if node.target is ops.dot and len(operands_of(node)) == 3:
            yield from self._alike[_kind(node).replace("/dot/", "/add.Tensor/")]

    def _add(self, node: fx.Node, other: fx.Node) -> bool:
        """Record the edges of a node if it corresponds to another one; returns whether it does."""
        reads = list(self._reads(other))
        if node.target is ops.dot and other.target is aten.add.Tensor:
            product = operands_of(other)[0]
            if product.target is not ops.dot or len(operands_of(product)) != 2 or len(reads) != 2:
                return False
            reads = [*self._reads(product), reads[1]]
        operands = operands_of(node)
        if len(operands) != len(reads):
            return False
        pairs = zip(operands, reads, strict=True)
        paths = [
            self._path(edge, found, self._stands_for.get(o.name)) for o, (edge, found) in pairs
        ]
        if any(path is None for path in paths):
            return False
        for index, path in enumerate(paths):
            for edge in path or ():
                self._edges.setdefault(edge, []).append((node.name, index))
        return True

    @staticmethod
    def _reads(node: fx.Node) -> Iterator[tuple[Edge, fx.Node]]:
        for index, operand in enumerate(operands_of(node)):
            yield (node.name, index), operand

    def _path(self, edge: Edge, found: fx.Node, due: str | None) -> Path | None:
        """The edges from a node back to the node `due`; None if another path leads there."""
        path = [edge]
        while found.name != due:
            operands: Sequence[fx.Node] = operands_of(found) if found.op == "call_function" else ()
            if found.target not in _MISSING or len(operands) != 1 or len(path) > _MOST_MISSING:
                return None
            path.append((found.name, 0))
            (found,) = operands
        return tuple(path)


def _kind(node: fx.Node) -> str:
    """The key of a node without the ordinal among nodes of the same module, op and phase."""
    return str(node.meta["key"]).rpartition("/")[0]


def _placeholders(trace: Trace) -> list[str]:
    return [node.name for node in trace.graph.nodes if node.op == "placeholder"]


def _otherwise() -> ConstraintError:
    return ConstraintError(
        "the loss of one sample is computed otherwise than that of two",
        remedy="use microbatches of two samples or more",
    )
