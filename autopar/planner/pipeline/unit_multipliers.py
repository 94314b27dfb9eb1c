"""Multipliers of single tensors, from those of the whole problem; see
`autopar.planner.pipeline.lagrangian`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Value
from autopar.core.solution import Multipliers
from autopar.core.streams import COMPUTE_BOUND
from autopar.planner.pipeline.unfold import Instances, UnfoldedRead
from autopar.sharding import Ref
from autopar.solve.prices import arc_loads

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = tuple[int, tuple[tuple[int, int], ...], bool, bool, tuple[int, ...]]
"""Key of the multipliers of a tensor: its variant, how many readers share those of each use,
whether backward's are 0, whether it may cross, and the uses of which backward's are 0, since not
all of their readers read it again."""


@dataclass(frozen=True, slots=True)
class TensorWorth:
    """Multipliers of a tensor: per use those of one reader over layouts, in the tensor's phase and
    in backward of what forward made.

    Attributes:
        made: μ. versions: layouts in which it may be kept.
        loss_s: what its collectives' reduced costs fall below 0 by. crossing_loss_s: the same in
            stages that it crosses between.
        left: in the tensor's phase and in backward of what forward made, what collectives cost
            beyond their worth, counted in full.
    """

    now: Mapping[int, Floats]
    later: Mapping[int, Floats]
    made: Floats
    versions: NDArray[np.bool_]
    loss_s: float
    crossing_loss_s: float
    left: tuple[Floats, ...]

    def sum_of(self, which: Mapping[int, Floats], reads: Iterable[UnfoldedRead]) -> Floats:
        """Compute Σ π of these readers, by layout."""
        return sum((which[r.use] for r in reads if r.use in which), np.zeros(len(self.versions)))

    def kappa(self, later: Floats) -> Floats:
        """Compute κ from Σ π of the readers in backward, by layout."""
        return np.where(self.versions, np.maximum(later - self.made, 0.0), 0.0)


@dataclass
class Worths:
    """The multipliers of every tensor of a model.

    Args:
        instances: of the whole's problem. exposed: nodes whose results may cross.
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
        """Return the value that a tensor is an instance of."""
        return self.problem.values[self.problem.variants[self.instances.variant[ref]].value]

    def kind(self, ref: Ref) -> Kind:
        """Key of a tensor's multipliers: tensors with equal keys have equal multipliers."""
        reads = self.instances.reads.get(ref, ())
        counts = tuple(sorted(Counter(r.use for r in reads).items()))
        hidden = ref in self.instances.hidden or (
            ref in self.instances.everywhere and len({r.unit for r in reads}) > 1
        )
        unasked = tuple(use for use, _ in counts if (ref, use) in self.instances.unasked)
        return self.instances.variant[ref], counts, hidden, ref[0] in self.exposed, unasked

    def of(self, ref: Ref) -> TensorWorth:
        """Return a tensor's multipliers."""
        kind = self.kind(ref)
        if kind not in self._known:
            self._known[kind] = self._derive(kind, ref)
        return self._known[kind]

    def _derive(self, kind: Kind, ref: Ref) -> TensorWorth:
        v, counts, hidden, exposed, unasked = kind
        variant, value = self.problem.variants[v], self.value(ref)
        num = len(value.graph.layouts)
        read = [self.reads(ref, u.op, u.operand) for u in variant.uses if u.phase == value.phase]
        made = self._at(self.layouts_made(ref), num)
        versions = np.logical_or.reduce([made, *(self._at(layouts, num) for layouts in read)])
        if value.keepable is not None and not self._free_keeping:
            versions &= self._at(np.array(sorted(value.keepable), np.int64), num)
        now = {
            use: self._potential(v, 0, use, share, num)
            for use, share in counts
            if variant.uses[use].phase == value.phase
        }
        then = (
            ()
            if hidden or value.phase == "backward"
            else [(u, share) for u, share in counts if u not in unasked]
        )
        later = {u: self._potential(v, 1, u, share, num) for u, share in then}
        if self.narrower(v, exposed):
            now, later = {use: np.zeros(num) for use in now}, {use: np.zeros(num) for use in later}
        graph, times = value.graph, dict(counts)
        first = [made] if value.phase == "backward" else [made, versions | made]
        losses, left = [0.0, 0.0], list[Floats]()
        in_full = np.array([arc.time_s for arc in graph.arcs])
        kept = sum((times[use] * worth for use, worth in later.items()), np.zeros(num))
        if len(now) < len(read) or ref in self.instances.hidden:
            now = {**now, -1: np.zeros(num)}  # those without multipliers
            times[-1] = 1
        wanted = np.logical_or.reduce(
            [np.full(num, exposed), *(self._at(layouts, num) for layouts in read)]
        )
        made_worth = np.where(versions, np.minimum(self._versions(v, num), kept), 0.0)
        free = made_worth * _reachable(graph, wanted, back=True)
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
            left.append(costs + in_full - seconds)
            free = np.zeros(num)
        return TensorWorth(
            now, later, made_worth, versions, losses[False], losses[True], tuple(left)
        )

    def _potential(self, v: int, later: int, use: int, share: int, num: int) -> Floats:
        """Compute π of one of `share` readers, by layout. The least is 0, since only differences
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
        """Compute the least cost of collectives in the whole and, if the tensor crosses, in any
        stage in which compute hides early communication.

        A stage may keep a tensor that crosses although the whole could compute it again, and
        parameters may be its only readers there.
        """
        value = self.problem.values[self.problem.variants[v].value]
        load, slowdown = arc_loads(self.problem, v, late=late), self.problem.overlap_slowdown
        costs = np.array([load(arc).priced_s(slowdown, COMPUTE_BOUND) for arc in value.graph.arcs])
        kept = late and self.problem.ops[value.op].kind == "compute"
        if crosses and (kept or (value.phase == "backward" and self._read_by_parameters(v))):
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
        """Whether in some stage partial sums may be reduced in fewer bytes than in the whole,
        since no parameter reads them there."""
        value = self.problem.variants[v].value
        read = [
            any(self.problem.ops[u.op].kind == "parameter" for u in x.uses)
            for x in self.problem.variants
            if x.value == value
        ]
        return any(read) and (exposed or not all(read))

    def layouts_made(self, ref: Ref) -> Ints:
        """Return the layout of a tensor by strategy of the op that makes it."""
        value = self.value(ref)
        return self._indices(value, value.op, "outputs", value.result)

    def reads(self, ref: Ref, op: int, operand: int) -> Ints:
        """Return the layouts in which an op reads a tensor, by strategy.

        Args:
            ref: the tensor.
            op: index of the op.
            operand: position of the tensor among its operands.
        """
        return self._indices(self.value(ref), op, "inputs", operand)

    def _indices(self, value: Value, op: int, side: str, position: int) -> Ints:
        """Per strategy of an op, the layout of one operand or result."""
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
        found = np.zeros(num, bool)
        found[layouts] = True
        return found


def _ends(graph: LayoutGraph) -> tuple[Ints, Ints]:
    tails, heads = (
        np.array([getattr(a, end) for a in graph.arcs], np.int64) for end in ("src", "dst")
    )
    return tails, heads


def _reachable(
    graph: LayoutGraph, start: NDArray[np.bool_], *, back: bool = False
) -> NDArray[np.bool_]:
    """Layouts to which collectives lead from `start`, or, `back`, from which they lead there."""
    tails, heads = _ends(graph)
    tails, heads = (heads, tails) if back else (tails, heads)
    found = start.copy()
    while len(tails) and not found[heads[found[tails]]].all():
        found[heads[found[tails]]] = True
    return found


def _extend(graph: LayoutGraph, worth: Floats, reach: NDArray[np.bool_]) -> None:
    """Set the worth of layouts that nothing leads to in the whole to that of the best layout that
    they lead to: then π does not rise over the collectives from there."""
    tails, heads = _ends(graph)
    free = ~reach[tails] if len(tails) else np.zeros(0, bool)
    while (worth[heads[free]] > worth[tails[free]]).any():
        np.maximum.at(worth, tails[free], worth[heads[free]])


def _cost_left(
    graph: LayoutGraph, worths: Sequence[tuple[int, Floats]], kept: Floats, costs: Floats
) -> Floats:
    """Compute the cost of collectives beyond their worth to readers, and beyond `kept`, the worth
    of keeping the layouts that they lead to."""
    tails, heads = _ends(graph)
    if not len(tails) or not worths:
        return costs
    steps = np.array([w[heads] - w[tails] for _, w in worths])
    rises = np.array([num for num, _ in worths]) @ np.maximum(0.0, steps)
    rises += np.minimum(0.0, steps.max(axis=0))  # a collective runs for one reader at least
    return costs - rises - kept[heads]
