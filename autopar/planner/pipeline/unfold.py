"""Unfolds a problem and its multipliers into single ops and tensors, by unit (see
`autopar.planner.pipeline.lagrangian`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.analysis.gradients import needed_by_backward
from autopar.capture.trace import Trace
from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Value
from autopar.core.solution import Multipliers
from autopar.core.streams import COMPUTE_BOUND
from autopar.cost.priced import Priced
from autopar.sharding import Cluster, Forced, Ref
from autopar.solve.prices import arc_loads
from autopar.stages.placing import Placing


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance of an op.

    Attributes:
        op: index of the op in the problem.
        unit: index of its unit.
        operands: its operands whose rows have multipliers, with their positions.
        results: its tensors.
        recomputable: whether backward of some stage may recompute it.
        alone: whether it is the unit's copy of an op that other units copy too. A copy supplies
            only readers in its unit.
        share: the share of the op's time that counts for this instance.
    """

    op: int
    unit: int
    operands: tuple[tuple[int, Ref], ...]
    results: tuple[Ref, ...]
    recomputable: bool = False
    alone: bool = False
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class UnfoldedRead:
    """A reader of a tensor: the index of its use in the tensor's variant, and its unit."""

    use: int
    unit: int


@dataclass
class Instances:
    """All instances of a problem's ops.

    Attributes:
        trace, priced, placing, forced: the trace, its problem, the units of its nodes and the
            resolved constraints.
        instances: the instances.
        variant: tensor → its variant.
        reads: tensor → its readers whose rows have multipliers.
        hidden: tensors that have other readers, too, or that backward may recompute elsewhere.
        everywhere: tensors of which stages have copies.
        unasked: (tensor, use) if some reader does not read the tensor when backward recomputes it.
    """

    trace: Trace
    priced: Priced
    placing: Placing
    forced: Forced
    instances: list[Instance] = field(default_factory=list)
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
        self._asked = needed_by_backward(self.trace)
        everywhere: list[tuple[int, tuple[Ref, ...]]] = []  # ops that every stage copies
        borders = self._borders()
        for n, source in enumerate(self.priced.sources):
            if source.cluster is not None:
                for cluster in source.cluster.instances:
                    self._add_cluster(
                        n,
                        cluster,
                        self._may_recompute(n, borders.isdisjoint(cluster.results)),
                        everywhere,
                    )
            else:
                for name, node in zip(source.names, source.nodes, strict=True):
                    self._add_single(n, name, node, everywhere)
        for instance in self.instances:
            for operand, ref in instance.operands:
                self.reads.setdefault(ref, []).append(
                    UnfoldedRead(self.use(instance.op, operand, ref), instance.unit)
                )
        for n, refs in everywhere:
            units = sorted({r.unit for ref in refs for r in self.reads.get(ref, ())})
            self.instances += [
                Instance(n, unit, (), refs, False, True, 1.0 / len(units)) for unit in units
            ]
            self.everywhere.update(refs)

    def shared_tensors(self) -> set[Ref]:
        """Find the tensors of which several stages may have copies."""
        return {
            ref for ref in self.everywhere if len({r.unit for r in self.reads.get(ref, ())}) > 1
        }

    def use(self, op: int, operand: int, ref: Ref) -> int:
        """Find the use of a tensor's variant that corresponds to an operand of an op.

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
        self.instances.append(
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
            self.instances.append(Instance(n, self.placing.stage[node], ((0, here),), ()))
        elif kind == "output":
            self.hidden.add(here)
        elif node in self.placing.stage:  # the tangent of the loss
            self.instances.append(Instance(n, self.placing.stage[node], (), (here,)))
        else:
            everywhere.append((n, (here,)))

    def _parameter(self, n: int, name: str, here: Ref) -> None:
        """Add a parameter. If several units hold it, each has an instance with a share of the
        gradient; a stage with several of these units counts it once."""
        units, gradient = self.placing.holders[name], self._gradients.get(name)
        operands = ((0, gradient),) if gradient else ()
        if len(units) == 1:
            self.instances.append(Instance(n, units[0], operands, (here,)))
            return
        self.hidden |= {ref for _, ref in operands}
        trained = {
            self.placing.stage[term.name] for term in self.placing.terms.get(name, ())
        } or set(units)
        self.instances += [
            Instance(n, unit, (), (here,), False, True, (unit in trained) / len(trained))
            for unit in units
        ]

    def _may_recompute(self, n: int, inside: bool) -> bool:
        """Whether backward of some stage may recompute an op; constraints may allow less."""
        op = self.priced.problem.ops[n]
        return (
            op.kind == "compute"
            and op.phase == "forward"
            and (op.recomputable or inside or self.forced.recompute is not None)
        )

    def _borders(self) -> set[Ref]:
        """Find the tensors that another layer reads in forward, which no stage recomputes
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


# --------------------------------------------------------------------------------------------------
# Multipliers of single tensors, from those of the whole problem.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = tuple[int, tuple[tuple[int, int], ...], bool, bool, tuple[int, ...]]
"""A key of the multipliers of a tensor: its variant, the number of readers that share those of each
use, whether those of backward are 0, whether it may cross, and the uses whose multipliers in
backward are 0, since not all of their readers read it again."""


@dataclass(frozen=True, slots=True)
class TensorWorth:
    """The multipliers of a tensor.

    Attributes:
        now: per use, π of one reader over layouts, in the tensor's phase.
        later: the same in backward, of a tensor of forward.
        made_s: μ.
        versions: layouts in which the tensor may be kept.
        loss_s: the sum of the negative reduced costs of its collectives.
        crossing_loss_s: the same in the stages between which it crosses.
        remaining_costs: in the tensor's phase, and in backward of a tensor of forward, the cost of
            its collectives, counted in full, minus their worth.
    """

    now: Mapping[int, Floats]
    later: Mapping[int, Floats]
    made_s: Floats
    versions: NDArray[np.bool_]
    loss_s: float
    crossing_loss_s: float
    remaining_costs: tuple[Floats, ...]

    def sum_of(self, which: Mapping[int, Floats], reads: Iterable[UnfoldedRead]) -> Floats:
        """Compute Σ π of readers, by layout."""
        return sum((which[r.use] for r in reads if r.use in which), np.zeros(len(self.versions)))

    def kappa(self, later: Floats) -> Floats:
        """Compute κ from Σ π of the readers in backward, by layout."""
        return np.where(self.versions, np.maximum(later - self.made_s, 0.0), 0.0)


@dataclass
class Worths:
    """The multipliers of every tensor of a model.

    Args:
        instances: the instances of the whole model's problem.
        multipliers: the multipliers of the problem.
        exposed: nodes whose results may cross.
    """

    instances: Instances
    multipliers: Multipliers
    exposed: frozenset[str]
    _known: dict[Kind, TensorWorth] = field(default_factory=dict)
    _layouts: dict[tuple[int, str, int, int], Ints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem = self.instances.priced.problem
        self._by_use: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
        for (v, later, use, layout), worth in self.multipliers.potentials_s.items():
            self._by_use.setdefault((v, later, use), []).append(
                (layout, worth / self.problem.variants[v].count)
            )
        self._made_worth: dict[int, list[tuple[int, float]]] = {}
        for (v, layout), worth in self.multipliers.versions_s.items():
            self._made_worth.setdefault(v, []).append(
                (layout, worth / self.problem.variants[v].count)
            )
        self._free_keeping = (
            bool(self.instances.forced.named.grid) or self.instances.forced.recompute is not None
        )

    def value(self, ref: Ref) -> Value:
        """Return the value of a tensor."""
        return self.problem.values[self.problem.variants[self.instances.variant[ref]].value]

    def kind(self, ref: Ref) -> Kind:
        """Return a key of a tensor's multipliers. Tensors with equal keys have equal
        multipliers."""
        reads = self.instances.reads.get(ref, ())
        counts = tuple(sorted(Counter(r.use for r in reads).items()))
        hidden = ref in self.instances.hidden or (
            ref in self.instances.everywhere and len({r.unit for r in reads}) > 1
        )
        unasked = tuple(use for use, _ in counts if (ref, use) in self.instances.unasked)
        return self.instances.variant[ref], counts, hidden, ref[0] in self.exposed, unasked

    def of(self, ref: Ref) -> TensorWorth:
        """Return the multipliers of a tensor."""
        kind = self.kind(ref)
        if kind not in self._known:
            self._known[kind] = self._derive(kind, ref)
        return self._known[kind]

    def _derive(self, kind: Kind, ref: Ref) -> TensorWorth:
        v, counts, hidden, exposed, _ = kind
        value, uses = self.value(ref), self.problem.variants[v].uses
        graph, num, times = value.graph, len(value.graph.layouts), dict(counts)
        reads = [
            self._at(self.reads(ref, u.op, u.operand), num) for u in uses if u.phase == value.phase
        ]
        made_layouts = self._at(self.layouts_made(ref), num)
        versions = self._keepable(value, np.logical_or.reduce([made_layouts, *reads]))
        now, later = self._potentials(kind, value)
        later_worth = sum((times[use] * worth for use, worth in later.items()), np.zeros(num))
        if len(now) < len(reads) or ref in self.instances.hidden:
            now[-1] = np.zeros(num)  # readers without multipliers
            times[-1] = 1
        read_layouts = np.logical_or.reduce([np.full(num, exposed), *reads])
        made_worth = np.where(versions, np.minimum(self._versions(v, num), later_worth), 0.0)
        free = made_worth * _reachable(graph, read_layouts, back=True)
        first = (
            [made_layouts] if value.phase == "backward" else [made_layouts, versions | made_layouts]
        )
        losses, remaining_costs = [0.0, 0.0], list[Floats]()
        in_full = np.array([arc.time_s for arc in graph.arcs])
        for potentials, start in zip((now, later), first, strict=False):
            reach = _reachable(graph, start)
            if exposed:
                for worth in potentials.values():
                    _extend(graph, worth, reach)
            for crosses in (False, True):
                seconds = self._seconds(
                    v, exposed and (crosses or hidden), late=potentials is later
                )
                costs = _cost_left(
                    graph, [(times[use], worth) for use, worth in potentials.items()], free, seconds
                )
                losses[crosses] += float(np.minimum(0.0, costs)[reach[_ends(graph)[0]]].sum())
            remaining_costs.append(costs + in_full - seconds)
            free = np.zeros(num)
        return TensorWorth(
            now, later, made_worth, versions, losses[False], losses[True], tuple(remaining_costs)
        )

    def _keepable(self, value: Value, versions: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Select the layouts among `versions` in which a value may be kept."""
        if value.keepable is None or self._free_keeping:
            return versions
        return versions & self._at(np.array(sorted(value.keepable), np.int64), len(versions))

    def _potentials(self, kind: Kind, value: Value) -> tuple[dict[int, Floats], dict[int, Floats]]:
        """Compute π of one reader of each use, in the tensor's phase and in backward of a tensor of
        forward."""
        v, counts, hidden, exposed, unasked = kind
        uses, num = self.problem.variants[v].uses, len(value.graph.layouts)
        now = [(use, share) for use, share in counts if uses[use].phase == value.phase]
        later = [(use, share) for use, share in counts if use not in unasked]
        if hidden or value.phase == "backward":
            later = []
        if self.narrower(v, exposed):
            return {use: np.zeros(num) for use, _ in now}, {use: np.zeros(num) for use, _ in later}
        return (
            {use: self._potential(v, 0, use, share, num) for use, share in now},
            {use: self._potential(v, 1, use, share, num) for use, share in later},
        )

    def _potential(self, v: int, later: int, use: int, share: int, num: int) -> Floats:
        """Compute π of one of `share` readers, by layout. The minimum is 0, since only differences
        count."""
        worth = np.zeros(num)
        for layout, seconds in self._by_use.get((v, later, use), ()):
            worth[layout] = max(seconds, 0.0) / share
        return worth - worth.min()

    def _versions(self, v: int, num: int) -> Floats:
        worth = np.zeros(num)
        for layout, seconds in self._made_worth.get(v, ()):
            worth[layout] = max(seconds, 0.0)
        return worth

    def _seconds(self, v: int, crosses: bool, *, late: bool) -> Floats:
        """Compute the least cost of collectives in the whole model and, if the tensor crosses, in
        any stage in which compute hides early communication.

        A stage may keep a crossing tensor that the whole model could recompute, and parameters may
        be its only readers there.
        """
        value = self.problem.values[self.problem.variants[v].value]
        load, slowdown = arc_loads(self.problem, v, late=late), self.problem.overlap_slowdown
        costs = np.array([load(arc).priced_s(slowdown, COMPUTE_BOUND) for arc in value.graph.arcs])
        may_keep = late and self.problem.ops[value.op].kind == "compute"
        if crosses and (may_keep or (value.phase == "backward" and self._read_by_parameters(v))):
            local = np.array([arc.collective.kind == "slice" for arc in value.graph.arcs], bool)
            shares = np.array([arc.seconds(shares=True) for arc in value.graph.arcs])
            costs = np.where(local, costs, np.minimum(costs, slowdown * shares))
        return costs

    def _read_by_parameters(self, v: int) -> bool:
        value = self.problem.variants[v].value
        return any(
            self.problem.ops[u.op].kind == "parameter"
            for x in self.problem.variants
            if x.value == value
            for u in x.uses
        )

    def narrower(self, v: int, exposed: bool) -> bool:
        """Whether some stage may reduce partial sums in fewer bytes than the whole model, since no
        parameter reads them there."""
        value = self.problem.variants[v].value
        read = [
            any(self.problem.ops[u.op].kind == "parameter" for u in x.uses)
            for x in self.problem.variants
            if x.value == value
        ]
        return any(read) and (exposed or not all(read))

    def layouts_made(self, ref: Ref) -> Ints:
        """Return the layout of a tensor, by strategy of its op."""
        value = self.value(ref)
        return self._indices(value, value.op, "outputs", value.result)

    def reads(self, ref: Ref, op: int, operand: int) -> Ints:
        """Return the layout in which an op reads a tensor, by strategy.

        Args:
            ref: the tensor.
            op: index of the op.
            operand: position of the tensor among its operands.
        """
        return self._indices(self.value(ref), op, "inputs", operand)

    def _indices(self, value: Value, op: int, side: str, position: int) -> Ints:
        """Return the layout of one operand or result, by strategy of an op."""
        key = (id(value), side, op, position)
        if key not in self._layouts:
            strategies = self.problem.ops[op].strategies
            self._layouts[key] = np.array(
                [value.graph.index[getattr(s.layouts, side)[position]] for s in strategies],
                np.int64,
            )
        return self._layouts[key]

    @staticmethod
    def _at(layouts: Ints, num: int) -> NDArray[np.bool_]:
        mask = np.zeros(num, bool)
        mask[layouts] = True
        return mask


def _ends(graph: LayoutGraph) -> tuple[Ints, Ints]:
    tails, heads = (
        np.array([getattr(a, end) for a in graph.arcs], np.int64) for end in ("src", "dst")
    )
    return tails, heads


def _reachable(
    graph: LayoutGraph, start: NDArray[np.bool_], *, back: bool = False
) -> NDArray[np.bool_]:
    """Find the layouts that collectives reach from `start`; if `back`, those that reach `start`."""
    tails, heads = _ends(graph)
    tails, heads = (heads, tails) if back else (tails, heads)
    reached = start.copy()
    while len(tails) and not reached[heads[reached[tails]]].all():
        reached[heads[reached[tails]]] = True
    return reached


def _extend(graph: LayoutGraph, worth: Floats, reach: NDArray[np.bool_]) -> None:
    """Set the worth of layouts that are unreachable in the whole model to the worth of the best
    layout that they reach. Then π does not increase over the collectives from there."""
    tails, heads = _ends(graph)
    free = ~reach[tails] if len(tails) else np.zeros(0, bool)
    while (worth[heads[free]] > worth[tails[free]]).any():
        np.maximum.at(worth, tails[free], worth[heads[free]])


def _cost_left(
    graph: LayoutGraph, worths: Sequence[tuple[int, Floats]], kept: Floats, costs: Floats
) -> Floats:
    """Compute the cost of collectives minus their worth to readers, and minus `kept`, the worth of
    keeping their target layouts."""
    tails, heads = _ends(graph)
    if not len(tails) or not worths:
        return costs
    steps = np.array([w[heads] - w[tails] for _, w in worths])
    rises = np.array([num for num, _ in worths]) @ np.maximum(0.0, steps)
    rises += np.minimum(0.0, steps.max(axis=0))  # a collective runs for at least one reader
    return costs - rises - kept[heads]
