"""Place each instance of each op of a problem in a unit. The model is cut at all places that allow
it, and a unit is the part between two neighbouring cuts.

The second section computes with the multipliers of one tensor's layouts as arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.capture.trace import Trace
from autopar.certificate.facts import Facts
from autopar.core.layout_graph import LayoutGraph
from autopar.cost.priced import Priced
from autopar.sharding import Forced, Ref
from autopar.sharding.clusters import Cluster
from autopar.stages.placing import Placing

Loose = tuple[
    int, int, tuple[Ref, ...]
]  # (op, number of the instance, tensors that it computes in each unit that reads them)


class UnitPlace(NamedTuple):
    """Instance `number` of an op, in one unit."""

    op: int
    number: int
    unit: int


@dataclass
class Places:
    """The units of all instances of all ops.

    Attributes:
        priced: the problem.
        placing: the unit of each node, and the units that hold each parameter.
        shares: share of an op's time that counts in the unit.
        recomputable: ops that the backward of some stage may recompute.
        makers: tensor → the ops that compute it: one op, or one in each unit that computes it
            locally.
        readers: (tensor, op, operand) → the instances that read it and have one unit.
        hidden: tensors with other readers, or that backward may recompute elsewhere.
        everywhere: tensors that any stage can compute locally.
        alone: instances that compute a tensor in each unit that reads it.
        unasked: (tensor, op, operand) if some instances of the op do not read it when backward
            recomputes them.
    """

    priced: Priced
    placing: Placing
    shares: dict[UnitPlace, float] = field(default_factory=dict)
    recomputable: set[UnitPlace] = field(default_factory=set)
    makers: dict[Ref, list[UnitPlace]] = field(default_factory=dict)
    readers: dict[tuple[Ref, int, int], list[UnitPlace]] = field(default_factory=dict)
    hidden: set[Ref] = field(default_factory=set)
    everywhere: set[Ref] = field(default_factory=set)
    alone: set[UnitPlace] = field(default_factory=set)
    unasked: set[tuple[Ref, int, int]] = field(default_factory=set)

    @staticmethod
    def of(trace: Trace, priced: Priced, placing: Placing, forced: Forced) -> Places:
        """Place every instance of every op of a trace that is cut at all places.

        Args:
            trace: the trace of a microbatch of the whole model.
            priced: the problem stated for it.
            placing: the unit of each node, and the units that hold each parameter.
            forced: the layouts and choices that the user forces.

        Raises:
            KeyError: if `placing` belongs to another trace.
        """
        places = Places(priced, placing)
        outputs = next(iter(reversed(trace.graph.nodes))).args[0]
        gradients = {
            p.name: (outputs[p.gradient].name, 0)
            for p in trace.parameters
            if p.gradient is not None
        }
        layers, asked = places._find_layers(), Facts.of(trace).needed
        loose: list[Loose] = []
        for op, source in enumerate(priced.sources):
            if source.cluster is not None:
                may_run_again = places._is_recomputable(op, forced)
                loose += places._put_clusters(
                    op, source.cluster.instances, asked, layers, always=may_run_again
                )
            for number, (name, node) in enumerate(zip(source.names, source.nodes, strict=True)):
                if source.kind == "parameter":
                    places._put_parameter(
                        op, number, name, (node, 0), (gradients[name],) if name in gradients else ()
                    )
                else:
                    loose += places._put_interface(op, number, source.kind, node)
        places._put_everywhere(loose)
        return places

    def _put_clusters(
        self,
        op: int,
        clusters: Sequence[Cluster],
        asked: frozenset[str],
        layers: Mapping[Ref, set[tuple[int, ...]]],
        *,
        always: bool,
    ) -> list[Loose]:
        """Place all instances of a compute op. Return those that have no unit, since each unit that
        reads them has a copy.

        Args:
            op: number of the op.
            clusters: its instances.
            asked: nodes of forward whose results backward or another stage reads.
            layers: tensor → the layers that read it in forward.
            always: whether backward may recompute the op even if another layer reads its results.
        """
        loose: list[Loose] = []
        is_forward = self.priced.problem.ops[op].phase == "forward"
        for number, cluster in enumerate(clusters):
            first = cluster.members[0].node
            if first in self.placing.dropped or first in self.placing.copied:
                self.hidden |= {*cluster.operands, *cluster.results}
                loose += [(op, number, cluster.results)] if first in self.placing.copied else []
                continue
            place = self._add_place(
                op, number, self.placing.stage[first], cluster.operands, cluster.results
            )
            read = {
                ref
                for m in cluster.members
                if m.key in asked or cluster.phase == "backward"
                for ref in m.reads
            }
            self.unasked |= {
                (ref, op, operand)
                for operand, ref in enumerate(cluster.operands)
                if ref not in read
            }
            stays = not any(
                (layers.get(ref) or set()) - {cluster.indices} for ref in cluster.results
            )
            if is_forward and (always or stays):
                self.recomputable.add(place)
        return loose

    def _is_recomputable(self, op: int, forced: Forced) -> bool:
        """Return whether backward may recompute an op, by the problem or by the user's choice of
        recomputed ops."""
        return self.priced.problem.ops[op].recomputable or forced.recompute is not None

    def _put_interface(self, op: int, number: int, kind: str, node: str) -> list[Loose]:
        """Place a buffer, an input or an output of the model. Return those that have no unit, since
        each unit can have a copy."""
        if node not in self.placing.stage:
            if kind != "output":
                return [(op, number, ((node, 0),))]
            self.hidden.add((node, 0))
        elif kind == "output":
            self._add_place(op, number, self.placing.stage[node], ((node, 0),), ())
        else:
            self._add_place(op, number, self.placing.stage[node], (), ((node, 0),))
        return []

    def _add_place(
        self,
        op: int,
        number: int,
        unit: int,
        reads: tuple[Ref, ...],
        makes: tuple[Ref, ...],
        share: float = 1.0,
    ) -> UnitPlace:
        """Record that instance `number` of an op is in a unit, with the tensors that it reads and
        computes there and its share of the op's time."""
        place = UnitPlace(op, number, unit)
        self.shares[place] = share
        for operand, ref in enumerate(reads):
            self.readers.setdefault((ref, op, operand), []).append(place)
        for ref in makes:
            self.makers.setdefault(ref, []).append(place)
        return place

    def _put_parameter(
        self, op: int, number: int, name: str, here: Ref, gradient: tuple[Ref, ...]
    ) -> None:
        units = self.placing.holders[name]
        if len(units) == 1:
            self._add_place(op, number, units[0], gradient, (here,))
            return
        self.hidden |= {*gradient}
        training = {self.placing.stage[term.name] for term in self.placing.terms.get(name, ())} or {
            *units
        }
        # Each unit has a part of the gradient and of the time. A stage that contains several of
        # them has the parameter once.
        for unit in units:
            self._add_place(
                op, number, unit, (), (here,), 1.0 / len(training) if unit in training else 0.0
            )

    def _put_everywhere(self, loose: Sequence[Loose]) -> None:
        read: dict[Ref, set[int]] = {}
        for (ref, _, _), places in self.readers.items():
            read.setdefault(ref, set()).update(p.unit for p in places)
        for op, number, refs in loose:
            units = sorted({unit for ref in refs for unit in read.get(ref, ())})
            self.everywhere |= {*refs}
            for unit in units:
                self.alone.add(self._add_place(op, number, unit, (), refs, 1.0 / len(units)))

    def _find_layers(self) -> dict[Ref, set[tuple[int, ...]]]:
        """Return tensor → the layers whose ops read it in forward."""
        layers: dict[Ref, set[tuple[int, ...]]] = {}
        for source in self.priced.sources:
            for cluster in source.cluster.instances if source.cluster else ():
                for ref in cluster.operands if cluster.phase == "forward" else ():
                    layers.setdefault(ref, set()).add(cluster.indices)
        return layers


# --------------------------------------------------------------------------------------------------
# Multipliers over the layouts of one tensor, as arrays: the layouts that collectives reach, and the
# cost of a collective beyond its worth.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def flags(num: int, layouts: Iterable[Ints]) -> Flags:
    """Return a boolean array of length `num` that is True at the given layouts."""
    mask = np.zeros(num, bool)
    for layout in layouts:
        mask[layout] = True
    return mask


def weigh_terms(num: int, terms: Iterable[tuple[int, Floats]]) -> Floats:
    """Return the weighted sum of multipliers over layouts. The weight of a term is its number of
    readers."""
    return sum((times * pi for times, pi in terms), np.zeros(num))


def ends_of(graph: LayoutGraph) -> tuple[Ints, Ints]:
    """Return the source layouts and the target layouts of all collectives, as two index arrays."""
    return np.array([a.src for a in graph.arcs], int), np.array([a.dst for a in graph.arcs], int)


def reach_layouts(graph: LayoutGraph, start: Flags, *, back: bool = False) -> Flags:
    """Return the layouts that collectives reach from `start` or, with `back`, the layouts from
    which they reach `start`.

    Args:
        graph: layouts of a tensor and the collectives between them.
        start: one flag per layout.
        back: whether to follow collectives backwards.

    Returns:
        One flag per layout.
    """
    tails, heads = ends_of(graph)[:: -1 if back else 1]
    reached = start.copy()
    for _ in graph.layouts:
        reached[heads[reached[tails]]] = True
    return reached


def raise_to_ends(graph: LayoutGraph, pi: Floats, reached: Flags) -> None:
    """Raise π in layouts that are never reached, to the largest π that collectives lead to. `pi`
    changes in place.

    Args:
        graph: layouts of a tensor and the collectives between them.
        pi: multiplier of each layout in seconds.
        reached: one flag per layout.
    """
    tails, heads = ends_of(graph)
    free = ~reached[tails]
    for _ in graph.layouts:
        np.maximum.at(pi, tails[free], pi[heads[free]])


def in_full(graph: LayoutGraph) -> Floats:
    """Return the seconds of each collective."""
    return np.array([a.time_s for a in graph.arcs])


def beyond_worth(
    graph: LayoutGraph, pis: Sequence[tuple[int, Floats]], worth: Floats, seconds: Floats
) -> Floats:
    """Return the cost of each collective beyond its worth and beyond the rise of π along it.

    The rise counts for all readers for whom π rises. If it rises for none, it counts for the reader
    for whom it falls least.

    Args:
        graph: layouts of a tensor and the collectives between them.
        pis: (number of readers, π per layout) for each use of the tensor.
        worth: for each layout, the worth of arriving there in seconds.
        seconds: cost of each collective in seconds.
    """
    if not pis or not graph.arcs:
        return seconds
    tails, heads = ends_of(graph)
    steps = [pi[heads] - pi[tails] for _, pi in pis]
    up = sum(times * np.maximum(step, 0.0) for (times, _), step in zip(pis, steps, strict=True))
    rises = np.where(np.max(steps, axis=0) > 0.0, up, np.max(steps, axis=0))
    return seconds - worth[heads] - rises
