"""Products at an end of a tensor's collectives, and what kernels do with them beside (`autopar.cost.kernels`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar import ops
from autopar.cost.kernel_times import terms_of
from autopar.layout import Layout, Strategy
from autopar.rules import Call
from autopar.strategies import Cluster, ClusterClass, ClusterStrategy, Ref

Place = tuple[int, ClusterClass]  # an op of the problem, and what it may do
Strategies = tuple[tuple[int, tuple[int, ...]], ...]
"""Ops, each with some of its strategies."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The op that adds something to a product's partial sums."""

    op: int
    classes: ClusterClass

    def strategies(self, layout: Layout) -> tuple[int, ...]:
        """With which it has both, and what it makes, in a layout."""
        return tuple(s for s, head in _heads(self.classes) if {*head.inputs, *head.outputs} == {layout})


@dataclass(frozen=True, slots=True)
class NormedSum:
    """What comes after a product in its instances.

    Attributes:
        total: the sum. norms: the squares and the norm of it, of several pairs where some instances have other ones.
    """

    total: Sum
    norms: tuple[tuple[Place, Place], ...]

    def strategies(self, layout: Layout) -> Strategies:
        """Those with which all of it has whole rows in a layout; nothing where an op has none."""
        found = [(self.total.op, self.total.strategies(layout))]
        for (squares, squaring), (norm, norming) in self.norms:
            sums = {s: head.outputs[0] for s, head in _heads(squaring) if head.inputs[0] == layout and not head.outputs[0].has_partial}
            reads = [(layout, squared) for squared in set(sums.values()) if len(set(sums.values())) == 1]
            rows = ((s, head.inputs, head.outputs[0]) for s, head in _heads(norming))
            normed = [s for s, (*read, weight), y in rows if tuple(read) in reads and weight.is_replicated and y == layout]
            found += [(squares, tuple(sums)), (norm, tuple(normed))]
        return tuple(found) if all(strategies for _, strategies in found) else ()

    def calls(self, layout: Layout) -> tuple[tuple[Call, Strategy], ...]:
        """What it is in one instance, with whole rows in a layout."""
        first = dict(self.strategies(layout))
        places = (self.total.op, self.total.classes), *self.norms[0]
        return tuple((classes.first.members[0].call, classes.strategies[first[op][0]].members[0]) for op, classes in places)


@dataclass(frozen=True, slots=True)
class Product:
    """A product at an end of a tensor's collectives: its op, `again` as backward runs it again, and which factor the tensor is; None where
    it is the result, or the sum of that and more. `normed`: what it does after that."""

    op: int
    again: bool
    classes: ClusterClass
    factor: int | None
    total: Sum | None = None
    normed: NormedSum | None = None

    @property
    def cluster(self) -> Cluster:
        return self.classes.first

    def layout(self, strategy: ClusterStrategy) -> Layout:
        """In which the product has the tensor."""
        own = strategy.members[0]
        return own.outputs[0] if self.factor is None else own.inputs[self.factor]

    def result_dim(self, dim: int) -> int | None:
        """Of the product's result, what a dim of the tensor is; None where that is summed over, or both factors have it."""
        if self.factor is None:
            return dim
        mine, other, made = (terms_of(self.cluster.members[0].call)[i] for i in (self.factor, 1 - self.factor, 2))
        return made.index(mine[dim]) if mine[dim] in made and mine[dim] not in other else None


def _heads(classes: ClusterClass) -> Iterator[tuple[int, Strategy]]:
    yield from ((s, strategy.members[0]) for s, strategy in enumerate(classes.strategies))


def factor_of(cluster: Cluster, ref: Ref) -> int | None:
    """Which factor of the cluster's product a tensor is, if nothing else in the cluster reads it; a bias is none."""
    head = cluster.members[0]
    at = [i for i, read in enumerate(head.reads) if read == ref]
    alone = head.call.target is ops.dot and len(at) == 1 and not any(ref in m.reads for m in cluster.members[1:])
    return at[0] if alone and at[0] < 2 else None


def makes(cluster: Cluster, ref: Ref, target: Callable[..., object]) -> bool:
    """Whether a tensor is what the first op of a cluster makes, `target`, and nothing else in the cluster reads it."""
    head = cluster.members[0]
    return head.call.target is target and head.makes[0] == ref and not any(ref in m.reads for m in cluster.members[1:])
