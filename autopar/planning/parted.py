"""What each part of a model costs at least, wherever it is cut: the Lagrangian of the whole, part by part.

Terms. A *unit* is what lies between neighbouring places to cut; a *border* lies before a unit. An *instance* is one op or tensor of the
model as it is, where the problem folds equal ones. Rows and multipliers are those of `autopar.solve.formulation`; π of rows (3) are
given for all instances of a variant together, and are shared among them.

**Instances.** The problem in which every instance decides for itself has the same rows for each, so the shared multipliers prove a bound
of it (weak duality): per instance of an op the least reduced cost of its strategies,

    d[x] = time + Σ π of what it reads − Σ π of what it supplies − Σ κ of what it makes or reads        κ[l] = Σ π[l] of backward readers
    d[rc] = time + Σ π of what it reads again − Σ π of what backward reads of it                        min(0, ·)

Equal instances with equal neighbours have equal costs. What collectives' reduced costs fall below 0 by is subtracted.

**Borders.** A stage's problem is that of its units, with an op in place of what lies outside at each tensor that crosses. Let tensor v
leave the stage before a border in layout L and arrive behind it, and let G(L) be Σ π(L) of v's readers of its own phase behind the border.
The reader that stands for what lies behind takes multipliers G: of each collective, max(0, ΔG) ≤ Σ max(0, Δπ), so no reduced cost falls. So

    stage before   ≥ its units' least + G(L) − κ(L) of backward readers before the border
    stage behind   ≥ its units' least − G(L) − κ(L) of backward readers behind the border + time of arriving in L

since leaving is one more forward reader, and arriving one more thing that is made. Gradients go the other way and are not kept. Over all
stages G cancels. The layouts of what crosses, forward and backward, are chosen apart, and κ in a unit counts all backward readers, those in
other stages as well: both can only lower the bound.

**What stages run again or hold together.** Masks, positions and inputs, which stages have each for themselves, supply each unit on its
own; multipliers of their backward readers, and of what they read, are 0. So are those of a gradient that is a sum over several
holders of a parameter. The time of such an op is shared among the units.

**Overlap.** A stage takes no less than what its work costs where compute hides all that is early (`autopar.solve.prices`, λ = 1), and so do
collectives here, at the least that they cost in the whole and in any stage.

Any multipliers ≥ 0 prove something; what has to hold beside is that a stage's problem has no choice that the whole's lacks. For that the
whole is to be priced with `apart` and `exposed` of `seams`: no cluster crosses a border, and what crosses can take any layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost.priced import Crossing
from autopar.planning.instances import Instance, Instances, Read
from autopar.planning.over_cuts import Pair, Parts, front, joined
from autopar.problem import Multipliers, Value
from autopar.redistribute import LayoutGraph, all_layouts
from autopar.solve.prices import arc_loads
from autopar.strategies import Ref
from autopar.streams import ON_COMPUTE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = tuple[int, tuple[tuple[int, int], ...], bool, bool]
"""What decides the multipliers of a tensor: its variant, how many readers share those of each use, whether backward's are 0, whether
it may cross."""


@dataclass(frozen=True, slots=True)
class _Worth:
    """Multipliers of a tensor: per use those of one reader over layouts, in the tensor's phase and in backward of what forward made.

    Attributes:
        made: μ. versions: layouts in which it may be kept. loss_s: what its collectives' reduced costs fall below 0 by.
    """

    now: Mapping[int, Floats]
    later: Mapping[int, Floats]
    made: Floats
    versions: NDArray[np.bool_]
    loss_s: float

    def summed(self, which: Mapping[int, Floats], reads: Iterable[Read]) -> Floats:
        """Σ π of these readers."""
        return sum((which[r.use] for r in reads if r.use in which), np.zeros(len(self.versions)))

    def kappa(self, later: Floats) -> Floats:
        """κ, where readers of backward take so much."""
        return np.where(self.versions, np.maximum(later - self.made, 0.0), 0.0)


@dataclass
class Parting:
    """The parts of one problem in the making.

    Args:
        instances: of the whole's problem, see the module. num_units: that its placing has. exposed: nodes whose results may cross.
        crossing: the link between stages.
    """

    instances: Instances
    num_units: int
    mesh_shape: Sequence[int]
    crossing: Crossing
    multipliers: Multipliers
    exposed: frozenset[str]
    _worths: dict[Kind, _Worth] = field(default_factory=dict)
    _least: dict[object, float] = field(default_factory=dict)
    _fronts: dict[object, tuple[Pair, ...]] = field(default_factory=dict)
    _layouts: dict[tuple[int, str, int, int], Ints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem = self.instances.priced.problem
        self._by_use: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
        for (v, later, use, layout), worth in self.multipliers.potentials_s.items():
            self._by_use.setdefault((v, later, use), []).append((layout, worth / self.problem.variants[v].count))
        self._made_worth: dict[int, list[tuple[int, float]]] = {}
        for (v, layout), worth in self.multipliers.versions_s.items():
            self._made_worth.setdefault(v, []).append((layout, worth / self.problem.variants[v].count))
        self._free_keeping = bool(self.instances.forced.named.grid) or self.instances.forced.recompute is not None
        self._nodes = {n.name: n for n in self.instances.trace.graph.nodes}

    def parts(self) -> Parts:
        """Seconds of units and borders."""
        units = [0.0] * self.num_units
        borders: list[tuple[Pair, ...]] = [((0.0, 0.0),)] * (self.num_units - 1)
        for instance in self.instances.found:
            units[instance.unit] += self._instance(instance)
            for ref in instance.results:
                if ref in self.instances.variant:
                    units[instance.unit] += self._worth(ref).loss_s
                    for border, pairs in () if instance.alone else self._crosses(ref, instance.unit):
                        borders[border - 1] = joined(borders[border - 1], pairs)
        return Parts(tuple(units), tuple(borders))

    # ops

    def _instance(self, instance: Instance) -> float:
        """The least reduced costs of an op."""
        supplied = {ref: self._supplied(ref, instance) for ref in instance.results if ref in self.instances.variant}
        key = (
            instance.op, instance.again, instance.share, tuple((k, self._kind(ref)) for k, ref in instance.operands),
            tuple((self._kind(ref), tuple(sorted(Counter(r.use for r in reads).items()))) for ref, reads in supplied.items()),
        )  # fmt: skip
        if key not in self._least:
            self._least[key] = self._least_of(instance, supplied)
        return self._least[key]

    def _supplied(self, ref: Ref, instance: Instance) -> list[Read]:
        return [r for r in self.instances.reads.get(ref, ()) if not instance.alone or r.unit == instance.unit]

    def _least_of(self, instance: Instance, supplied: Mapping[Ref, Sequence[Read]]) -> float:
        op = self.problem.ops[instance.op]
        x = instance.share * np.array([s.time_s for s in op.strategies])
        again = x.copy()
        for operand, ref in instance.operands:
            worth, layouts = self._worth(ref), self._reads(ref, instance.op, operand)
            use = self.instances.use(instance.op, operand, ref)
            if use in worth.now:
                kept = worth.summed(worth.later, self.instances.reads[ref])
                x += worth.now[use][layouts] - worth.kappa(kept)[layouts]
                again += worth.later[use][layouts] if use in worth.later else 0.0
            elif use in worth.later:
                x += worth.later[use][layouts]
        for ref, reads in supplied.items():
            worth, value = self._worth(ref), self._value(ref)
            layouts = self._made(ref)
            later = worth.summed(worth.later, reads)
            x -= worth.summed(worth.now, reads)[layouts] + (later if value.resident else np.where(worth.versions, later, 0.0))[layouts]
            again -= later[layouts]
        return float(x.min()) + (min(float(again.min()), 0.0) if instance.again else 0.0)

    # tensors

    def _value(self, ref: Ref) -> Value:
        return self.problem.values[self.problem.variants[self.instances.variant[ref]].value]

    def _kind(self, ref: Ref) -> Kind:
        reads = self.instances.reads.get(ref, ())
        counts = tuple(sorted(Counter(r.use for r in reads).items()))
        hidden = ref in self.instances.hidden or (ref in self.instances.everywhere and len({r.unit for r in reads}) > 1)
        return self.instances.variant[ref], counts, hidden, ref[0] in self.exposed

    def _worth(self, ref: Ref) -> _Worth:
        kind = self._kind(ref)
        if kind not in self._worths:
            self._worths[kind] = self._worth_of(kind, ref)
        return self._worths[kind]

    def _worth_of(self, kind: Kind, ref: Ref) -> _Worth:
        v, counts, hidden, exposed = kind
        variant, value = self.problem.variants[v], self._value(ref)
        num = len(value.graph.layouts)
        read = [self._reads(ref, u.op, u.operand) for u in variant.uses if u.phase == value.phase]
        made = self._at(self._made(ref), num)
        versions = np.logical_or.reduce([made, *(self._at(layouts, num) for layouts in read)])
        if value.keepable is not None and not self._free_keeping:
            versions &= self._at(np.array(sorted(value.keepable), np.int64), num)
        now = {use: self._potential(v, 0, use, share, num) for use, share in counts if variant.uses[use].phase == value.phase}
        later = {} if hidden or value.phase == "backward" else {u: self._potential(v, 1, u, share, num) for u, share in counts}
        if self._narrower(v, exposed):
            now, later = {use: np.zeros(num) for use in now}, {use: np.zeros(num) for use in later}
        graph, times = value.graph, dict(counts)
        first = [made] if value.phase == "backward" else [made, versions | made]
        loss = 0.0
        kept = sum((times[use] * worth for use, worth in later.items()), np.zeros(num))
        if len(now) < len(read) or ref in self.instances.hidden:
            now = {**now, -1: np.zeros(num)}  # those without multipliers
            times[-1] = 1
        wanted = np.logical_or.reduce([np.full(num, exposed), *(self._at(layouts, num) for layouts in read)])
        made_worth = np.where(versions, np.minimum(self._versions(v, num), kept), 0.0)
        free = made_worth * _reachable(graph, wanted, back=True)
        for potentials, start in zip((now, later), first, strict=False):
            reach = _reachable(graph, start)
            if exposed:
                for worth in potentials.values():
                    _extend(graph, worth, reach)
            seconds = self._seconds(v, exposed, late=potentials is later)
            loss += _loss(graph, [(times[use], worth) for use, worth in potentials.items()], reach, free, seconds)
            free = np.zeros(num)
        return _Worth(now, later, made_worth, versions, loss)

    def _potential(self, v: int, later: int, use: int, share: int, num: int) -> Floats:
        """π of one of so many readers; the least over layouts is 0, since only differences count."""
        worth = np.zeros(num)
        for layout, seconds in self._by_use.get((v, later, use), ()):
            worth[layout] = max(seconds, 0.0) / share
        return worth - worth.min()

    def _versions(self, v: int, num: int) -> Floats:
        worth = np.zeros(num)
        for layout, seconds in self._made_worth.get(v, ()):
            worth[layout] = max(seconds, 0.0)
        return worth

    def _seconds(self, v: int, exposed: bool, *, late: bool) -> Floats:
        """What collectives cost at least in the whole and in any stage, where compute hides what is early there.

        Of what may cross, a stage may keep what the whole could make again, and have parameters for its only readers.
        """
        value = self.problem.values[self.problem.variants[v].value]
        load, slowdown = arc_loads(self.problem, v, late=late), self.problem.overlap_slowdown
        costs = np.array([load(arc).priced_s(slowdown, ON_COMPUTE) for arc in value.graph.arcs])
        kept = late and self.problem.ops[value.op].kind == "compute"
        if exposed and (kept or (value.phase == "backward" and self._read_by_parameters(v))):
            local = np.array([arc.collective.kind == "slice" for arc in value.graph.arcs], bool)
            times = np.array([arc.time_s for arc in value.graph.arcs])
            costs = np.where(local, costs, np.minimum(costs, slowdown * times))
        return costs

    def _read_by_parameters(self, v: int) -> bool:
        value = self.problem.variants[v].value
        return any(self.problem.ops[u.op].kind == "parameter" for x in self.problem.variants if x.value == value for u in x.uses)

    def _narrower(self, v: int, exposed: bool) -> bool:
        """Whether in some stage partial sums may be reduced in fewer bytes than in the whole, since no parameter reads them there."""
        value = self.problem.variants[v].value
        read = [any(self.problem.ops[u.op].kind == "parameter" for u in x.uses) for x in self.problem.variants if x.value == value]
        return any(read) and (exposed or not all(read))

    def _made(self, ref: Ref) -> Ints:
        value = self._value(ref)
        return self._indices(value, value.op, "outputs", value.result)

    def _reads(self, ref: Ref, op: int, operand: int) -> Ints:
        return self._indices(self._value(ref), op, "inputs", operand)

    def _indices(self, value: Value, op: int, side: str, position: int) -> Ints:
        """Per strategy of an op, the layout of one operand or result."""
        key = (id(value), side, op, position)
        if key not in self._layouts:
            strategies = self.problem.ops[op].strategies
            self._layouts[key] = np.array([value.graph.index[getattr(s.layouts, side)[position]] for s in strategies], np.int64)
        return self._layouts[key]

    @staticmethod
    def _at(layouts: Ints, num: int) -> NDArray[np.bool_]:
        found = np.zeros(num, bool)
        found[layouts] = True
        return found

    # borders

    def _crosses(self, ref: Ref, maker: int) -> Iterator[tuple[int, tuple[Pair, ...]]]:
        """The borders that a tensor may cross, and what each layout costs there."""
        reads = self.instances.reads.get(ref, [])
        units = [r.unit for r in reads]
        forward = self._value(ref).phase == "forward"
        for border in range(maker + 1, max(units) + 1) if units and forward else range(min(units, default=maker) + 1, maker + 1):
            before, behind = [r for r in reads if r.unit < border], [r for r in reads if r.unit >= border]
            far = behind if forward else before
            sides = tuple(tuple(sorted(Counter(r.use for r in side).items())) for side in (before, behind))
            key = self._kind(ref), sides
            if key not in self._fronts:
                self._fronts[key] = self._front(ref, forward, before, behind, far)
            yield border, self._fronts[key]

    def _front(self, ref: Ref, forward: bool, before: Sequence[Read], behind: Sequence[Read], far: Sequence[Read]) -> tuple[Pair, ...]:
        value, worth, node = self._value(ref), self._worth(ref), self._nodes[ref[0]]
        gains = worth.summed(worth.now, far)
        later = worth.summed(worth.later, before), worth.summed(worth.later, behind)
        kept, arrives = np.maximum(later[0] - worth.made, 0.0), later[1]
        pairs = []
        for layout in all_layouts(tuple(node.meta["val"].shape), self.mesh_shape):
            at = value.graph.index[layout]
            arrives_s = self.crossing.time_s(value.graph.bytes[at])
            if forward:
                pairs.append((float(gains[at] - kept[at]), float(arrives_s - gains[at] - arrives[at] + worth.loss_s)))
            else:
                pairs.append((float(arrives_s - gains[at]), float(gains[at] + worth.loss_s)))
        return front(pairs)


def _ends(graph: LayoutGraph) -> tuple[Ints, Ints]:
    tails, heads = (np.array([getattr(a, end) for a in graph.arcs], np.int64) for end in ("src", "dst"))
    return tails, heads


def _reachable(graph: LayoutGraph, start: NDArray[np.bool_], *, back: bool = False) -> NDArray[np.bool_]:
    """Layouts to which collectives lead from `start`, or, `back`, from which they lead there."""
    tails, heads = _ends(graph)
    tails, heads = (heads, tails) if back else (tails, heads)
    found = start.copy()
    while len(tails) and not found[heads[found[tails]]].all():
        found[heads[found[tails]]] = True
    return found


def _extend(graph: LayoutGraph, worth: Floats, reach: NDArray[np.bool_]) -> None:
    """Where nothing leads in the whole, a layout is worth what the best that it leads to is: then nothing rises behind it."""
    tails, heads = _ends(graph)
    free = ~reach[tails] if len(tails) else np.zeros(0, bool)
    while (worth[heads[free]] > worth[tails[free]]).any():
        np.maximum.at(worth, tails[free], worth[heads[free]])


def _loss(graph: LayoutGraph, worths: Sequence[tuple[int, Floats]], reach: NDArray[np.bool_], kept: Floats, costs: Floats) -> float:
    """What reduced costs of collectives fall below 0 by, ≤ 0; what they lead to is worth so much to those who keep it."""
    tails, heads = _ends(graph)
    if not len(tails) or not worths:
        return 0.0
    steps = np.array([w[heads] - w[tails] for _, w in worths])
    rises = np.array([num for num, _ in worths]) @ np.maximum(0.0, steps)
    rises += np.minimum(0.0, steps.max(axis=0))  # a collective runs for one reader at least
    return float(np.minimum(0.0, costs - rises - kept[heads])[reach[tails]].sum())
