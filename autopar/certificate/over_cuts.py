"""The bound of a plan with stages over all cuts, from the multipliers in the plan, by arithmetic
alone.

Each op and tensor of the microbatch's trace is an instance, so equal layers may decide differently.
Names are those of `autopar.certificate.bound`. A stored π is the total of all tensors with the same
readers, and each tensor gets its share. In addition to π there is μ ≥ 0 of one more row, which
holds for every solution, and a row that replaces (4) for stored tensors:

    (9)  k[v,l] ≤ strategies that produce l + Σ_{head(a)=l} r[a]
    (4') k[v,l] ≤ strategies of forward readers that read l

Given π and μ, the best of the others are κ[l] = max(0, Σ_c π[c,l] − μ[l]) over readers c in
backward, so that

    op            least of   time + Σ π of operands − Σ κ of operands in forward − Σ π of its supply
                             − Σ (κ + μ) of results
    again         min(0, least of   time + Σ π of operands read again − Σ π in backward of results)
    collective    min(0, time − μ[head] − Σ_c max(0, Δ[c]));   if no Δ is positive, with the largest
                                                               of them instead of the sum

If a kernel of some stage may compute a product together with collectives of a tensor, the product
costs less by the largest saving with one of them beyond max(0, time − μ[head] − …), with time in
full: if the collective is early, no stage offers a kernel. Products that several units compute
locally cost less by all savings of their kernels.

A unit is the part between neighbouring places to cut. Its cost is at least the sum over its ops and
over the tensors that these compute. Where tensor v crosses, the problems of the two stages have ops
that represent each other: one reads v in layout L, and the other produces it in L. With G the sum
of π of the readers on the far side, their costs for a forward tensor are

    before    G(L) − max(0, Σ π in backward of readers before it − μ)(L)
    behind    time to arrive − G(L) − Σ π in backward of readers behind it (L)

and for a backward tensor, which crosses in the other direction, G(L) behind and time to arrive −
G(L) before. Negative reduced costs of collectives are also subtracted on the side where the tensor
arrives, and on both sides with the costs in stages between which it crosses. Any cut into S stages,
each with the prices and multipliers of its own devices, then takes (M − 1) · max τ + Σ τ. τ is at
least the sum of its units and of its two borders, in some layouts. The least of these over all cuts
is the bound. For interleaved stages the bound follows from the least Σ τ
(`autopar.certificate.rank_schedules.least_of_cuts`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.capture.trace import Trace
from autopar.certificate.bound import Prices
from autopar.certificate.unit_places import (
    Flags,
    Floats,
    Ints,
    Places,
    UnitPlace,
    beyond_worth,
    ends_of,
    flags,
    in_full,
    raise_to_ends,
    reach_layouts,
    weigh_terms,
)
from autopar.core.collective import HOST_KINDS
from autopar.core.layout_graph import all_layouts
from autopar.core.problem import Value, at_best
from autopar.cost.kernel_offers import in_any_stage
from autopar.cost.priced import Priced, Wire
from autopar.sharding import Forced, Ref
from autopar.stages.placing import Placing

# --------------------------------------------------------------------------------------------------
# The least step over all cuts, from the seconds of each unit and the pairs at each border.

Pairs = list[tuple[float, float]]
_PAIRS = 8  # per border; above it, neighbours are replaced by the least of both


def few(pairs: Iterable[tuple[float, float]]) -> Pairs:
    """Return few pairs such that each given pair has one that is at most as large in both numbers.

    Pairs that another one dominates are dropped. If too many remain, neighbours are merged.
    """
    pairs_left: Pairs = []
    for pair in sorted(pairs):
        if not pairs_left or pair[1] < pairs_left[-1][1]:
            pairs_left.append(pair)
    while len(pairs_left) > _PAIRS:
        halves = [
            (pairs_left[i][0], pairs_left[i + 1][1]) for i in range(0, len(pairs_left) - 1, 2)
        ]
        pairs_left = halves + pairs_left[2 * len(halves) :]
    return pairs_left


def least_over_cuts(
    units: Sequence[Sequence[float]],
    borders: Sequence[Sequence[Pairs]],
    num_microbatches: int,
    allowed: Collection[int] | None,
) -> float:
    """Return the least step over all cuts before `allowed` units, and over all pairs at borders.

    Dynamic programming over stages finds the least Σ τ with every τ below a limit. The limit is
    then lowered.

    Args:
        units: for each stage, the seconds of each unit on its devices.
        borders: for each pair of neighbouring stages, the pairs before each unit except the first.
        num_microbatches: M.
        allowed: units before which the model may be cut; None allows all.
    """
    num = len(units[0])
    ends = [[(0, 0.0, 0.0)]]
    for pairs in borders:
        ends.append(
            [
                (b, *pair)
                for b, each in enumerate(pairs, 1)
                if allowed is None or b in allowed
                for pair in each
            ]
        )
    ends.append([(num, 0.0, 0.0)])
    if not all(ends):
        return float(np.inf)
    taus = [_taus(stage, ends[n], ends[n + 1]) for n, stage in enumerate(units)]
    slowest = taus[0][0]
    for tau in taus[1:]:
        slowest = np.maximum(slowest[:, None], tau).min(axis=0)
    least, limit = np.inf, np.inf
    while True:
        within = [np.where(tau < limit, tau, np.inf) for tau in taus]
        total, worst = within[0][0], within[0][0]
        for tau in within[1:]:
            ways = total[:, None] + tau
            chosen = ways.argmin(axis=0), np.arange(ways.shape[1])
            total, worst = ways[chosen], np.maximum(worst[:, None], tau)[chosen]
        least = min(least, float((num_microbatches - 1) * worst[-1] + total[-1]))
        if (num_microbatches - 1) * slowest[-1] + total[
            -1
        ] >= least:  # a lower limit only increases the sum
            return least
        limit = worst[-1]


def _taus(
    units: Sequence[float],
    begins: Sequence[tuple[int, float, float]],
    ends: Sequence[tuple[int, float, float]],
) -> np.ndarray:
    """Return the least seconds of a stage for each pair of places at which it may begin and end."""
    sums = np.concatenate([[0.0], np.cumsum(units)])
    (first, _, behind), (last, before, _) = (
        (np.array(column) for column in zip(*each, strict=True)) for each in (begins, ends)
    )
    taus: np.ndarray = np.maximum(sums[last] + before - (sums[first] - behind)[:, None], 0.0)
    taus[first[:, None] >= last] = np.inf
    return taus


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """The pipelines that a bound covers.

    Attributes:
        trace: the trace of one microbatch.
        priced, forced: the problem of the uncut microbatch, and its constraints.
        placing: the unit of each node when the model is cut at all places.
        exposed: nodes whose results may cross between stages.
        mesh_shape: the shape of a stage's mesh.
    """

    trace: Trace
    priced: Priced
    forced: Forced
    placing: Placing
    num_units: int
    exposed: frozenset[str]
    mesh_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Crosses:
    """A tensor at a border that it may cross, forward or backward. For each layout: its bytes, and
    its cost for the sending and the receiving stage, without the transfer."""

    forward: bool
    bytes: tuple[int, ...]
    makes_s: tuple[float, ...]
    reads_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of the trace: its makers and readers, and the multipliers of its layouts, in
    seconds per layout.

    Attributes:
        variant: its number in the problem.
        ref: (node, result).
        value: the value of the problem that it is an instance of.
        makers: instances that compute it: one, or one in each unit that computes it locally.
        reads: for each use of the variant, the instances that read it.
        now: use → π, of readers in the tensor's own phase.
        later: use → π, of backward readers of a forward tensor.
        mu: μ; 0 in layouts that cannot be kept.
        outputs: flags of layouts that some strategy produces.
        inputs: flags of layouts that readers in its phase may read.
        keepable: flags of layouts that may be kept for backward.
        exposed: whether it may cross between stages.
        hidden: whether the backward of some stage may recompute it elsewhere, or others also read
            it.
        has_unpriced: whether it has a reader without π in its phase.
    """

    variant: int
    ref: Ref
    value: Value
    makers: Sequence[UnitPlace]
    reads: Sequence[Sequence[UnitPlace]]
    now: Mapping[int, Floats]
    later: Mapping[int, Floats]
    mu: Floats
    outputs: Flags
    inputs: Flags
    keepable: Flags
    exposed: bool
    hidden: bool
    has_unpriced: bool

    @property
    def num(self) -> int:
        """The number of layouts."""
        return len(self.mu)

    def terms(self, pis: Mapping[int, Floats]) -> list[tuple[int, Floats]]:
        """Return, for each use with a π, the number of instances that read the tensor, and π."""
        return [(len(self.reads[use]), pi) for use, pi in pis.items()]


@dataclass
class Unfolded:
    """The reduced costs of all ops, unfolded into single instances, as the multipliers are added.

    Args:
        prices: the multipliers π.
        versions: the multipliers μ, by variant and layout.

    Attributes:
        units: seconds per unit.
        crosses: for each border, the tensors that may cross it.
    """

    ways: PipelineFigures
    prices: Prices
    versions: Mapping[int, Mapping[int, float]]
    places: Places = field(init=False)
    x: dict[UnitPlace, Floats] = field(default_factory=dict)
    recomputed: dict[UnitPlace, Floats] = field(default_factory=dict)
    units: list[float] = field(default_factory=list)
    crosses: list[dict[Ref, Crosses]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ways = self.ways
        self.problem = at_best(ways.priced.problem)
        self.places = Places.of(ways.trace, ways.priced, ways.placing, ways.forced)
        self._free = bool(ways.forced.named.grid) or ways.forced.recompute is not None
        self._shapes = {
            n.name: tuple(n.meta["val"].shape)
            for n in ways.trace.graph.nodes
            if n.name in ways.exposed
        }
        self.units, self.crosses = [0.0] * ways.num_units, [{} for _ in range(ways.num_units - 1)]
        self._at: dict[tuple[int, int, int, str, int], Ints] = {}
        self._kernels = in_any_stage(
            ways.trace, ways.priced, {p.op for p in self.places.recomputable}
        )
        for place, share in self.places.shares.items():
            self.x[place] = share * np.array(
                [s.time_s for s in self.problem.ops[place.op].strategies]
            )
            if place in self.places.recomputable:
                self.recomputed[place] = self.x[place].copy()
        for v, refs in enumerate(ways.priced.refs):
            for ref in refs:
                if ref in self.places.makers:
                    self._add_tensor(self._read_tensor(v, ref))
        self._add_alone()
        for place, costs in self.x.items():
            self.units[place.unit] += float(costs.min())
        for place, costs in self.recomputed.items():
            self.units[place.unit] += min(0.0, float(costs.min()))

    def _read_tensor(self, v: int, ref: Ref) -> _Tensor:
        """Return a tensor with its makers, its readers and its multipliers."""
        variant, value, makers = self.problem.variants[v], self._value(v), self.places.makers[ref]
        num, exposed = len(value.graph.layouts), ref[0] in self.ways.exposed
        reads = [self.places.readers.get((ref, u.op, u.operand), []) for u in variant.uses]
        forward = [i for i, u in enumerate(variant.uses) if u.phase == value.phase]
        hidden = ref in self.places.hidden or (ref in self.places.everywhere and len(makers) > 1)
        now = {i: self._pi(v, i, False, reads[i], num) for i in forward if reads[i]}
        later = self._read_later(v, ref, reads) if value.phase == "forward" and not hidden else {}
        if self._is_narrower(v, exposed):
            now, later = ({i: np.zeros(num) for i in each} for each in (now, later))
        made_layouts = flags(num, [self._layouts(value, value.op, "outputs", value.result)])
        read_layouts = flags(
            num,
            [
                self._layouts(value, variant.uses[i].op, "inputs", variant.uses[i].operand)
                for i in forward
            ],
        )
        versions = made_layouts | read_layouts
        if value.keepable is not None and not self._free:
            versions &= flags(num, [np.array(sorted(value.keepable), int)])
        wants = weigh_terms(num, ((len(reads[i]), pi) for i, pi in later.items()))
        mu = np.where(versions, np.minimum(self._mu(v, num), wants), 0.0)
        has_unpriced = ref in self.places.hidden or len(now) < len(forward)
        return _Tensor(
            v,
            ref,
            value,
            makers,
            reads,
            now,
            later,
            mu,
            made_layouts,
            read_layouts,
            versions,
            exposed,
            hidden,
            has_unpriced,
        )

    def _read_later(
        self, v: int, ref: Ref, reads: Sequence[Sequence[UnitPlace]]
    ) -> dict[int, Floats]:
        """Return use → π in backward, for uses whose instances all read the tensor when backward
        runs them."""
        uses, num = self.problem.variants[v].uses, len(self._value(v).graph.layouts)
        asked = [i for i, u in enumerate(uses) if (ref, u.op, u.operand) not in self.places.unasked]
        return {i: self._pi(v, i, True, reads[i], num) for i in asked if reads[i]}

    def _add_tensor(self, tensor: _Tensor) -> None:
        """Add the costs and savings of a tensor to its makers and readers, its units, and the
        borders that it may cross."""
        losses, remaining_costs = [0.0, 0.0], list[Floats]()
        for crosses in (False, True):
            early = tensor.exposed and (crosses or tensor.hidden)
            costs = [self._seconds(tensor.variant, early, later=late) for late in (False, True)]
            losses[crosses], beyond = self._reduce_collectives(tensor, costs)
            remaining_costs = [
                x + in_full(tensor.value.graph) - seconds
                for x, seconds in zip(beyond, costs, strict=True)
            ]
        self._save_in_kernels(tensor, remaining_costs)
        self._charge_readers(tensor)
        self._supply(tensor, losses[False])
        if tensor.exposed and tensor.ref not in self.places.everywhere and len(tensor.makers) == 1:
            self._cross(tensor, losses)

    def _charge_readers(self, tensor: _Tensor) -> None:
        """Charge readers π for the layouts that they read, minus κ in forward, since they may
        supply backward.

        With π of the readers in backward, ``κ[l] = max(0, Σ π[l] − μ[l])`` in layouts l that may be
        kept.
        """
        kappa = np.where(
            tensor.keepable,
            np.maximum(weigh_terms(tensor.num, tensor.terms(tensor.later)) - tensor.mu, 0.0),
            0.0,
        )
        for i, u in enumerate(self.problem.variants[tensor.variant].uses):
            at = self._layouts(tensor.value, u.op, "inputs", u.operand)
            late = self.recomputed if i in tensor.now else self.x
            for p in tensor.reads[i]:
                if i in tensor.now:
                    self.x[p] += tensor.now[i][at] - kappa[at]
                if i in tensor.later and p in late:
                    late[p] += tensor.later[i][at]

    def borders_to(self, behind: Unfolded, wire: Wire) -> list[Pairs]:
        """Return the pairs at each border between a stage with these multipliers and the next
        stage.

        Args:
            behind: the reduced costs on the devices of the next stage.
            wire: the link between both stages.
        """
        borders: list[Pairs] = []
        for mine, other in zip(self.crosses, behind.crosses, strict=True):
            pairs: Pairs = [(0.0, 0.0)]
            for ref, here in mine.items():
                there = other[ref]
                arrives = [wire.time_s(size) for size in here.bytes]
                before = (
                    here.makes_s
                    if here.forward
                    else [s + a for s, a in zip(here.reads_s, arrives, strict=True)]
                )
                after = (
                    [s + a for s, a in zip(there.reads_s, arrives, strict=True)]
                    if here.forward
                    else there.makes_s
                )
                border_pairs = few(zip(before, after, strict=True))
                pairs = few((a + c, b + d) for a, b in pairs for c, d in border_pairs)
            borders.append(pairs)
        return borders

    def _supply(self, tensor: _Tensor, loss: float) -> None:
        """Reduce the costs of a tensor's makers by its worth: to all readers if there is one maker,
        else to the readers in the unit of each maker.

        Args:
            loss: the sum of the negative reduced costs of its collectives in seconds.
        """
        at = self._layouts(tensor.value, tensor.value.op, "outputs", tensor.value.result)
        for p in tensor.makers:
            mine = [
                sum(len(tensor.makers) == 1 or r.unit == p.unit for r in each)
                for each in tensor.reads
            ]
            first = weigh_terms(tensor.num, ((mine[i], pi) for i, pi in tensor.now.items()))
            then = weigh_terms(tensor.num, ((mine[i], pi) for i, pi in tensor.later.items()))
            self.x[p] -= (
                first + (then if tensor.value.resident else np.where(tensor.keepable, then, 0.0))
            )[at]
            if p in self.recomputed:
                self.recomputed[p] -= then[at]
            self.units[p.unit] += loss

    def _cross(self, tensor: _Tensor, losses: Sequence[float]) -> None:
        """Add the borders that a tensor may cross.

        Args:
            losses: the negative reduced costs of its collectives in seconds, inside a stage and
                across a border. The sending side loses the difference, and the other side the whole
                second number.
        """
        unit, reads, num = tensor.makers[0].unit, tensor.reads, tensor.num
        units = [p.unit for each in reads for p in each] or [unit]
        forward, more = tensor.value.phase == "forward", losses[True] - losses[False]
        graph = tensor.value.graph
        at = [
            graph.index[layout]
            for layout in all_layouts(self._shapes[tensor.ref[0]], self.ways.mesh_shape)
        ]
        sizes = tuple(graph.bytes[n] for n in at)
        for border in (
            range(unit + 1, max(units) + 1) if forward else range(min(units) + 1, unit + 1)
        ):
            far = [sum((p.unit >= border) == forward for p in each) for each in reads]
            gain = weigh_terms(num, ((far[i], pi) for i, pi in tensor.now.items()))
            behind = weigh_terms(num, ((far[i], pi) for i, pi in tensor.later.items()))
            before = weigh_terms(
                num, ((len(reads[i]) - far[i], pi) for i, pi in tensor.later.items())
            )
            near = np.maximum(before - tensor.mu, 0.0) if forward else np.zeros(num)
            makes_s, reads_s = (
                gain - near + more,
                losses[True] - gain - (behind if forward else 0.0),
            )
            crosses = Crosses(
                forward, sizes, tuple(makes_s[at].tolist()), tuple(reads_s[at].tolist())
            )
            self.crosses[border - 1][tensor.ref] = crosses

    def _reduce_collectives(
        self, tensor: _Tensor, costs: Sequence[Floats]
    ) -> tuple[float, list[Floats]]:
        """Return the reduced costs of a tensor's collectives. For a tensor that may cross, π is
        first raised in layouts that it never has in the whole model.

        Args:
            costs: seconds per collective, in the tensor's phase and later.

        Returns:
            The sum of the negative costs, and the cost of each collective beyond its worth, in the
            tensor's phase and later, in seconds.
        """
        graph = tensor.value.graph
        worth = np.where(
            reach_layouts(graph, tensor.inputs | tensor.exposed, back=True), tensor.mu, 0.0
        )
        first = tensor.terms(tensor.now) + (
            [(1, np.zeros(tensor.num))] if tensor.has_unpriced else []
        )
        later = tensor.terms(tensor.later)
        phases = (
            (first, tensor.outputs, worth, costs[0]),
            (later, tensor.outputs | tensor.keepable, np.zeros(tensor.num), costs[1]),
        )
        loss, remaining_costs = 0.0, list[Floats]()
        for pis, begin, gain, seconds in phases:
            reached = reach_layouts(graph, begin)
            if tensor.exposed:
                for _, pi in pis:
                    raise_to_ends(graph, pi, reached)
            beyond = beyond_worth(graph, pis, gain, seconds)
            loss += float(np.minimum(beyond, 0.0)[reached[ends_of(graph)[0]]].sum())
            remaining_costs.append(beyond)
        return loss, remaining_costs

    def _save_in_kernels(self, tensor: _Tensor, left: Sequence[Floats]) -> None:
        """Reduce the costs of products by the largest saving of a kernel with one collective of the
        tensor.

        Args:
            left: for each phase, the cost of each collective beyond its worth, with its time in
                full, in seconds.
        """
        for later, beyond in enumerate(left):
            for kernel in self._kernels.get((tensor.variant, bool(later)), ()):
                most = max(h.saved_s - max(float(beyond[h.arc]), 0.0) for h in kernel.hides)
                ends = {
                    p
                    for places in (tensor.makers, *tensor.reads)
                    for p in places
                    if p.op == kernel.op
                }
                costs = self.recomputed if kernel.recomputed else self.x
                for p in ends - self.places.alone:
                    if p in costs:
                        costs[p][[*kernel.strategies]] -= max(most, 0.0)

    def _add_alone(self) -> None:
        """Subtract the largest savings of kernels for products that several units compute
        locally."""
        offers = self._kernels.values()
        kernels = [kernel for some in offers for kernel in some if not kernel.recomputed]
        for p in self.places.alone if kernels else ():
            for kernel in kernels:
                if kernel.op == p.op:
                    self.x[p][[*kernel.strategies]] -= max(h.saved_s for h in kernel.hides)

    def _value(self, v: int) -> Value:
        return self.problem.values[self.problem.variants[v].value]

    def _layouts(self, value: Value, op: int, side: str, position: int) -> Ints:
        """Return, for each strategy of an op, the layout of one operand or result."""
        key = value.op, value.result, op, side, position
        if key not in self._at:
            strategies = self.problem.ops[op].strategies
            self._at[key] = np.array(
                [value.graph.index[getattr(s.layouts, side)[position]] for s in strategies]
            )
        return self._at[key]

    def _pi(self, v: int, use: int, later: bool, reads: Sequence[UnitPlace], num: int) -> Floats:
        """Return π of one reader, shifted so that the least is 0, as only differences count."""
        potential = np.zeros(num)
        for layout, worth in self.prices.get((v, use, later), {}).items():
            potential[layout] = max(worth, 0.0) / self.problem.variants[v].count / len(reads)
        return potential - potential.min()

    def _mu(self, v: int, num: int) -> Floats:
        worths = np.zeros(num)
        for layout, worth in self.versions.get(v, {}).items():
            worths[layout] = max(worth, 0.0) / self.problem.variants[v].count
        return worths

    def _seconds(self, v: int, exposed: bool, *, later: bool) -> Floats:
        """Return the seconds of a tensor's collectives.

        Compute hides early collectives (λ = 1). If the tensor may cross, these include collectives
        that are early only in some stage.
        """
        variant, ops, phase = self.problem.variants[v], self.problem.ops, self._value(v).phase
        value, maker = self._value(v), ops[self._value(v).op]
        same = [x for x in self.problem.variants if x.value == variant.value]
        trained = any(ops[u.op].kind == "parameter" for x in same for u in x.uses)
        if later:
            early = value.is_given or (
                maker.kind == "compute" and (exposed or not maker.recomputable)
            )
        else:
            step_only = {ops[u.op].kind for u in variant.uses if u.phase == phase} <= {"parameter"}
            early = value.is_given or step_only or (exposed and phase == "backward" and trained)
        weight = self.problem.overlap_slowdown if early else 1.0
        weights = {"slice": 1.0, **dict.fromkeys(HOST_KINDS, self.problem.overlap_slowdown)}
        return np.array(
            [
                a.seconds(shares=early) * weights.get(a.collective.kind, weight)
                for a in value.graph.arcs
            ]
        )

    def _is_narrower(self, v: int, exposed: bool) -> bool:
        """Return whether a stage may reduce its partial sums in a narrower dtype, since no
        parameter reads them there."""
        variants = [x for x in self.problem.variants if x.value == self.problem.variants[v].value]
        wide = [any(self.problem.ops[u.op].kind == "parameter" for u in x.uses) for x in variants]
        return any(wide) and (exposed or not all(wide))
