"""Where each op of a problem is when the model is cut at all places, instance by instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.capture.trace import Trace
from autopar.certificate.facts import Facts
from autopar.cost.priced import Priced
from autopar.stages.placing import Placing
from autopar.strategies import Forced, Ref


class Place(NamedTuple):
    """Instance `number` of an op, as it is in a unit."""

    op: int
    number: int
    unit: int


@dataclass
class Places:
    """All of them.

    Attributes:
        shares: of each op's time, what counts in the unit. again: ops that backward of some stage may run again.
        makers: tensor → what makes it: in each unit that has it for itself, or once.
        everywhere: tensors that any stage can make for itself.
        readers: (tensor, op, operand) → the ops that read it, of those that have one place.
        hidden: tensors that others read too, or that backward may make again elsewhere.
        alone: of what makes tensors in each unit that reads them.
        unasked: (tensor, op, operand) where some of the op's instances read it no more as backward runs them again.
    """

    priced: Priced
    placing: Placing
    shares: dict[Place, float] = field(default_factory=dict)
    again: set[Place] = field(default_factory=set)
    makers: dict[Ref, list[Place]] = field(default_factory=dict)
    readers: dict[tuple[Ref, int, int], list[Place]] = field(default_factory=dict)
    hidden: set[Ref] = field(default_factory=set)
    everywhere: set[Ref] = field(default_factory=set)
    alone: set[Place] = field(default_factory=set)
    unasked: set[tuple[Ref, int, int]] = field(default_factory=set)

    @staticmethod
    def of(trace: Trace, priced: Priced, placing: Placing, forced: Forced) -> Places:
        """Of a trace cut at all places."""
        found = Places(priced, placing)
        made = next(iter(reversed(trace.graph.nodes))).args[0]
        gradients = {p.name: (made[p.gradient].name, 0) for p in trace.parameters if p.gradient is not None}
        loose: list[tuple[int, int, tuple[Ref, ...]]] = []
        layers, asked = found._layers(), Facts.of(trace).asked
        for n, source in enumerate(priced.sources):
            for number, cluster in enumerate(source.cluster.instances if source.cluster else ()):
                first = cluster.members[0].node
                if first in placing.dropped or first in placing.copied:
                    found.hidden |= {*cluster.operands, *cluster.results}
                    loose += [(n, number, cluster.results)] if first in placing.copied else []
                    continue
                place = found._put(n, number, placing.stage[first], cluster.operands, cluster.results)
                read = {ref for m in cluster.members if m.key in asked or cluster.phase == "backward" for ref in m.reads}
                found.unasked |= {(ref, n, operand) for operand, ref in enumerate(cluster.operands) if ref not in read}
                op = priced.problem.ops[n]
                passes_on = any((layers.get(ref) or set()) - {cluster.indices} for ref in cluster.results)
                if op.phase == "forward" and (op.recomputable or forced.recompute is not None or not passes_on):
                    found.again.add(place)
            for number, (name, node) in enumerate(zip(source.names, source.nodes, strict=True)):
                gradient = (gradients[name],) if source.kind == "parameter" and name in gradients else ()
                if source.kind == "parameter":
                    found._parameter(n, number, name, (node, 0), gradient)
                elif source.kind == "output" and node not in placing.stage:
                    found.hidden.add((node, 0))
                elif node in placing.stage:
                    reads, makes = (((node, 0),), ()) if source.kind == "output" else ((), ((node, 0),))
                    found._put(n, number, placing.stage[node], reads, makes)
                else:
                    loose.append((n, number, ((node, 0),)))
        found._everywhere(loose)
        return found

    def _put(self, n: int, number: int, unit: int, reads: tuple[Ref, ...], makes: tuple[Ref, ...], share: float = 1.0) -> Place:
        place = Place(n, number, unit)
        self.shares[place] = share
        for operand, ref in enumerate(reads):
            self.readers.setdefault((ref, n, operand), []).append(place)
        for ref in makes:
            self.makers.setdefault(ref, []).append(place)
        return place

    def _parameter(self, n: int, number: int, name: str, here: Ref, gradient: tuple[Ref, ...]) -> None:
        held = self.placing.holders[name]
        if len(held) == 1:
            self._put(n, number, held[0], gradient, (here,))
            return
        self.hidden |= {*gradient}
        training = {self.placing.stage[term.name] for term in self.placing.terms.get(name, ())} or {*held}
        for unit in held:  # each with a part of the gradient, and of the time: a stage that holds it for several has it once
            self._put(n, number, unit, (), (here,), 1.0 / len(training) if unit in training else 0.0)

    def _everywhere(self, loose: list[tuple[int, int, tuple[Ref, ...]]]) -> None:
        read: dict[Ref, set[int]] = {}
        for (ref, _, _), places in self.readers.items():
            read.setdefault(ref, set()).update(p.unit for p in places)
        for n, number, refs in loose:
            units = sorted({unit for ref in refs for unit in read.get(ref, ())})
            self.everywhere |= {*refs}
            for unit in units:
                self.alone.add(self._put(n, number, unit, (), refs, 1.0 / len(units)))

    def _layers(self) -> dict[Ref, set[tuple[int, ...]]]:
        """Tensor → the layers that read it in forward, where they are ops."""
        found: dict[Ref, set[tuple[int, ...]]] = {}
        for source in self.priced.sources:
            for cluster in source.cluster.instances if source.cluster else ():
                for ref in cluster.operands if cluster.phase == "forward" else ():
                    found.setdefault(ref, set()).add(cluster.indices)
        return found
