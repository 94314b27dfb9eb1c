"""Unfolds a problem into single ops and tensors, by unit (see
`autopar.planner.pipeline.lagrangian`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.analysis.gradients import asked_again
from autopar.capture.trace import Trace
from autopar.cost.priced import Priced
from autopar.sharding import Cluster, Forced, Ref
from autopar.stages.placing import Placing


@dataclass(frozen=True, slots=True)
class Instance:
    """One op.

    Attributes:
        op: of the problem. unit: in which it is. operands: those whose rows have multipliers.
            results: its tensors.
        again: whether backward may run it again in some stage.
        alone: whether the unit has it for itself, as others may: it supplies no other. share: of
            its time, that counts here.
    """

    op: int
    unit: int
    operands: tuple[tuple[int, Ref], ...]
    results: tuple[Ref, ...]
    again: bool = False
    alone: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class UnfoldedRead:
    """A reader of a tensor: by which use of its variant, in which unit."""

    use: int
    unit: int


@dataclass
class Instances:
    """All instances of a problem's ops.

    Attributes:
        variant: tensor → its variant. reads: tensor → its readers whose rows have multipliers.
        hidden: tensors that have other readers too, or that backward may make again elsewhere.
        everywhere: tensors that stages have each for themselves.
        unasked: (tensor, use) where some reader reads it no more as backward runs that again.
    """

    trace: Trace
    priced: Priced
    placing: Placing
    forced: Forced
    found: list[Instance] = field(default_factory=list)
    variant: dict[Ref, int] = field(default_factory=dict)
    reads: dict[Ref, list[UnfoldedRead]] = field(default_factory=dict)
    hidden: set[Ref] = field(default_factory=set)
    everywhere: set[Ref] = field(default_factory=set)
    unasked: set[tuple[Ref, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for v, refs in enumerate(self.priced.refs):
            self.variant |= dict.fromkeys(refs, v)
        results = next(iter(reversed(self.trace.graph.nodes))).args[0]
        self._gradients = {
            p.name: (results[p.gradient].name, 0)
            for p in self.trace.parameters
            if p.gradient is not None
        }
        self._asked = asked_again(self.trace)
        everywhere: list[tuple[int, tuple[Ref, ...]]] = []  # what every stage has for itself
        borders = self._borders()
        for n, source in enumerate(self.priced.sources):
            if source.cluster is not None:
                for cluster in source.cluster.instances:
                    self._add_cluster(
                        n, cluster, self._again(n, borders.isdisjoint(cluster.results)), everywhere
                    )
            else:
                for name, node in zip(source.names, source.nodes, strict=True):
                    self._add_single(n, name, node, everywhere)
        for instance in self.found:
            for operand, ref in instance.operands:
                self.reads.setdefault(ref, []).append(
                    UnfoldedRead(self.use(instance.op, operand, ref), instance.unit)
                )
        for n, refs in everywhere:
            units = sorted({r.unit for ref in refs for r in self.reads.get(ref, ())})
            self.found += [
                Instance(n, unit, (), refs, False, True, 1.0 / len(units)) for unit in units
            ]
            self.everywhere.update(refs)

    def shared_tensors(self) -> set[Ref]:
        """Find the tensors that several stages may have each for itself."""
        return {
            ref for ref in self.everywhere if len({r.unit for r in self.reads.get(ref, ())}) > 1
        }

    def use(self, op: int, operand: int, ref: Ref) -> int:
        """Find the use of a tensor's variant by which an op reads it.

        Args:
            op: index of the op.
            operand: its position among the op's operands.
            ref: the tensor.

        Returns:
            Position among the uses of the variant.
        """
        uses = self.priced.problem.variants[self.variant[ref]].uses
        return next(i for i, use in enumerate(uses) if (use.op, use.operand) == (op, operand))

    def _add_cluster(
        self, n: int, cluster: Cluster, again: bool, everywhere: list[tuple[int, tuple[Ref, ...]]]
    ) -> None:
        node = cluster.members[0].node
        if node in self.placing.copied or node in self.placing.dropped:
            self.hidden |= {*cluster.results, *cluster.operands}
            everywhere += [(n, cluster.results)] if node in self.placing.copied else []
            return
        self.found.append(
            Instance(
                n,
                self.placing.stage[node],
                tuple(enumerate(cluster.operands)),
                cluster.results,
                again,
            )
        )
        asked = {ref for m in cluster.members if m.node in self._asked for ref in m.reads}
        for operand, ref in enumerate(cluster.operands) if cluster.phase == "forward" else ():
            if ref not in asked:
                self.unasked.add((ref, self.use(n, operand, ref)))

    def _add_single(
        self, n: int, name: str, node: str, everywhere: list[tuple[int, tuple[Ref, ...]]]
    ) -> None:
        """Add an instance of a parameter, input, buffer or output."""
        kind, here = self.priced.sources[n].kind, (node, 0)
        if kind == "parameter":
            self._parameter(n, name, here)
        elif kind == "output" and node in self.placing.stage:
            self.found.append(Instance(n, self.placing.stage[node], ((0, here),), ()))
        elif kind == "output":
            self.hidden.add(here)
        elif node in self.placing.stage:  # the loss' tangent
            self.found.append(Instance(n, self.placing.stage[node], (), (here,)))
        else:
            everywhere.append((n, (here,)))

    def _parameter(self, n: int, name: str, here: Ref) -> None:
        """Add a parameter. If several units hold it, each has an instance of its own, with a part
        of the gradient; a stage with several of these units pays for it once."""
        held, gradient = self.placing.holders[name], self._gradients.get(name)
        operands = ((0, gradient),) if gradient else ()
        if len(held) == 1:
            self.found.append(Instance(n, held[0], operands, (here,)))
            return
        self.hidden |= {ref for _, ref in operands}
        trained = {
            self.placing.stage[term.name] for term in self.placing.terms.get(name, ())
        } or set(held)
        self.found += [
            Instance(n, unit, (), (here,), False, True, (unit in trained) / len(trained))
            for unit in held
        ]

    def _again(self, n: int, inside: bool) -> bool:
        """Whether backward of some stage may run an op again; constraints may allow less."""
        op = self.priced.problem.ops[n]
        return (
            op.kind == "compute"
            and op.phase == "forward"
            and (op.recomputable or inside or self.forced.recompute is not None)
        )

    def _borders(self) -> set[Ref]:
        """Find the tensors that another layer reads in forward, which no stage computes again
        (`autopar.cost.price`)."""
        clusters = [
            c
            for s in self.priced.sources
            if s.cluster is not None
            for c in s.cluster.instances
            if c.phase == "forward"
        ]
        layers: Mapping[Ref, tuple[int, ...]] = {
            ref: c.indices for c in clusters for ref in c.results
        }
        return {
            ref
            for c in clusters
            for ref in c.operands
            if ref in layers and layers[ref] != c.indices
        }
