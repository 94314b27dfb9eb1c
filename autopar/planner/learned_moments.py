"""Moments that are learned from the plans of one problem that were over the budget, and the groups
of equal layers whose problem they belong to.

The memory of an emitted program is measured node by node. If the program holds more than its
budget at a node, the moment of that node of the trace is added to the problem, with a reserve: the
bytes that were live there and that the moment alone does not account for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from autopar.analysis.gradients import has_own_memory
from autopar.capture.trace import Trace
from autopar.core.problem import MemoryPoint, Problem
from autopar.core.solution import FractionalGroups, Multipliers, Solution
from autopar.cost.gradient_dtypes import WIDENED
from autopar.cost.memory import Liveness
from autopar.cost.priced import Priced, Source
from autopar.program.peak_memory import NodePeak
from autopar.sharding import Starts, layer_of
from autopar.solve import evaluate_choices

_MOST_NEW = 24  # moments that one round adds: those most over the budget


class Sight(NamedTuple):
    """The measurement at a node of the trace: the phase, the peak while it ran, and the nodes that
    had run again and whose results were live then."""

    phase: str
    peak_bytes: int
    again: frozenset[str] = frozenset()


Seen = Mapping[str, Sight]
"""By node of the trace, or moment at which what it made is widened."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """Learned moments, in addition to those that are certain.

    Attributes:
        latest: by node, as they were in the last plan that was looked at. retained: as they were in
            others before.
    """

    liveness: Liveness
    latest: Mapping[str, MemoryPoint]
    retained: tuple[MemoryPoint, ...] = ()

    @staticmethod
    def empty(liveness: Liveness) -> Learnt:
        """Begin without learned moments."""
        return Learnt(liveness, {})

    @staticmethod
    def from_reserves(liveness: Liveness, reserves: Mapping[str, int]) -> Learnt:
        """Make moments with reserves that were learned with layers in other groups."""
        phases = {
            node: liveness.trace.node(node.removesuffix(WIDENED)).meta["phase"] for node in reserves
        }
        return Learnt(
            liveness,
            {
                n: replace(liveness.moment(n, phases[n]), reserve_bytes=size)
                for n, size in reserves.items()
            },
        )

    def __bool__(self) -> bool:
        return bool(self.latest)

    @property
    def moments(self) -> tuple[MemoryPoint, ...]:
        """All moments of the problem, those that are certain first."""
        return (*self.liveness.certain, *self.latest.values(), *self.retained)

    @property
    def reserves(self) -> dict[str, int]:
        """Bytes of reserve, by node."""
        return {node: moment.reserve_bytes for node, moment in self.latest.items()}

    def further(
        self, choices: Solution, peaks: Iterable[NodePeak], beside_bytes: int, budget: int
    ) -> Learnt:
        """Learn the moments at which a plan is over the budget, and update those that are known.

        Args:
            choices: of the plan.
            peaks: of the emitted program, by node.
            beside_bytes: memory in use that the program does not hold itself.
            budget: bytes per device.
        """
        seen = by_trace_node(self.liveness, peaks, beside_bytes)
        wanted = dict.fromkeys([*self.latest, *over_budget(self.liveness, seen, budget)])
        return replace(self, latest=explain_peaks(self.liveness, choices, seen, wanted))

    def retain_latest(self) -> Learnt:
        """Keep the latest moments as they are now; what is learned later does not replace them."""
        first = len(self.retained)
        now = (
            replace(moment, key=f"{moment.key} ({first + n})")
            for n, moment in enumerate(self.latest.values())
        )
        return replace(self, retained=(*self.retained, *now))


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layers in groups that decide alike, their problem, and what is known of it.

    Attributes:
        starts: where groups begin, by list of layers; empty where all equal layers decide alike.
        bound_s: no plan takes less; 0 where nothing is proven. multipliers: prove it by arithmetic.
    """

    priced: Priced
    learnt: Learnt
    starts: Starts
    bound_s: float = 0.0
    multipliers: Multipliers | None = None

    @staticmethod
    def of(trace: Trace, priced: Priced, starts: Starts) -> LayerGroups:
        """Make groups of which nothing is known yet.

        Args:
            trace: of the model.
            priced: the problem of layers in these groups.
            starts: where groups begin, by list of layers.
        """
        return LayerGroups(priced, Learnt.empty(Liveness(trace, priced)), starts)

    @property
    def problem(self) -> Problem:
        """The problem with all moments that are known."""
        return replace(self.priced.problem, moments=self.learnt.moments)

    def forget(self) -> LayerGroups:
        """Drop the learned moments; the bound stays."""
        return replace(self, learnt=Learnt.empty(self.learnt.liveness))


def by_trace_node(liveness: Liveness, peaks: Iterable[NodePeak], resting_bytes: int) -> Seen:
    """Map the peaks of a program's nodes to nodes of the trace.

    Peaks of collectives, and of ops that run again, count for the node that comes after them. The
    peak of a product in a kernel counts for all nodes that the kernel computes. Peaks of the
    reduction of a widened sum count for the moment at which it is widened.

    Args:
        liveness: of the trace.
        peaks: of the program, in the order in which its nodes run.
        resting_bytes: memory that rests beside the program's own tensors (the optimizer's state).
    """
    keys = {n.meta["key"]: n.name for n in liveness.trace.graph.nodes if n.op == "call_function"}
    seen: dict[str, Sight] = {}
    waiting, last = Sight("", 0), ""

    def see(name: str, sight: Sight) -> None:
        """Record a measurement; the larger peak of a node stays."""
        before = seen.get(
            name
        )  # a node that picks a result has the key of the op, which may have needed more
        seen[name] = (
            before._replace(phase=sight.phase)
            if before is not None and before.peak_bytes > sight.peak_bytes
            else sight
        )

    for peak, again in _with_what_ran_again(peaks, keys):
        now = Sight(peak.phase, peak.peak_bytes + resting_bytes, again)
        made = keys.get(
            peak.node.meta.get("key", "").rpartition("/")[0], ""
        )  # of the steps that a sum is reduced by
        if made in liveness.widened:
            see(made + WIDENED, now)
            continue
        waiting = now if now.peak_bytes > waiting.peak_bytes else waiting._replace(phase=peak.phase)
        others = peak.node.meta["kernel"].others if "kernel" in peak.node.meta else ()
        names = [keys.get(key, "") for key in (peak.node.meta.get("key", ""), *others)]
        here = [
            name
            for name in names
            if name in liveness.owner and not peak.node.meta.get("recomputed")
        ]
        for name in here:
            see(name, waiting)
            last = name
        waiting = Sight("", 0) if here else waiting
    if last:  # what comes after the last node counts for it
        see(last, waiting._replace(phase=waiting.phase or seen[last].phase))
    return seen


def _with_what_ran_again(
    peaks: Iterable[NodePeak], keys: Mapping[str, str]
) -> Iterator[tuple[NodePeak, frozenset[str]]]:
    """Pair each peak with the nodes of the trace whose results, computed again, are live then."""
    peaks = tuple(peaks)
    place = {peak.node: i for i, peak in enumerate(peaks)}
    until = dict[fx.Node, int]()
    for node in reversed(place):
        lasting = [until[user] for user in node.users if user in until and not has_own_memory(user)]
        until[node] = max(
            [place[node], *(place[user] for user in node.users if user in place), *lasting]
        )
    ends: dict[int, list[str]] = {}
    live: dict[str, int] = {}
    for i, peak in enumerate(peaks):
        name = (
            keys.get(peak.node.meta.get("key", ""), "")
            if peak.node.meta.get("recomputed") and has_own_memory(peak.node)
            else ""
        )
        if name:
            live[name] = max(live.get(name, 0), until[peak.node])
            ends.setdefault(live[name], []).append(name)
        yield peak, frozenset(live)
        for over in ends.pop(i, ()):
            if live.get(over, i + 1) <= i:
                del live[over]


def over_budget(liveness: Liveness, seen: Seen, budget_bytes: int) -> list[str]:
    """List the nodes at which a program is over the budget, the worst first.

    Of equal nodes of repeated layers only the worst is listed, and only the first `_MOST_NEW`
    nodes: others follow once these hold.

    Args:
        liveness: of the trace.
        seen: peaks by node.
        budget_bytes: per device.
    """
    worst: dict[tuple[int, bool], tuple[int, str]] = {}
    for node, sight in seen.items():
        peak = sight.peak_bytes
        op = liveness.owner[node.removesuffix(WIDENED)], node.endswith(WIDENED)
        if peak > budget_bytes and peak > worst.get(op, (0, ""))[0]:
            worst[op] = (peak, node)
    return [node for _, node in sorted(worst.values(), reverse=True)[:_MOST_NEW]]


def explain_peaks(
    liveness: Liveness, choices: Solution, seen: Seen, nodes: Iterable[str]
) -> dict[str, MemoryPoint]:
    """Make the moments of nodes, each with the reserve that explains the measured peak.

    Results that were live since they had been computed again count for the ops that run again, even
    if they are needed only because other ops do.

    Args:
        liveness: of the trace.
        choices: of the plan that was measured.
        seen: peaks by node.
        nodes: those to make moments of.
    """
    moments = {node: liveness.moment(node, seen[node].phase, seen[node].again) for node in nodes}
    problem = replace(liveness.priced.problem, moments=tuple(moments.values()))
    rows = evaluate_choices(problem, choices).resting_bytes
    sizes = rows[len(rows) - len(moments) :]
    return {
        node: replace(m, reserve_bytes=seen[node].peak_bytes - size)
        for (node, m), size in zip(moments.items(), sizes, strict=True)
    }


# --------------------------------------------------------------------------------------------------
# The groups into which a list of equal layers is cut, each of which decides for itself: cuts are
# at the shares in which the relaxation mixes decisions.
#
# A relaxation that keeps something in 45 of 100 layers wants two groups. With two such shares that
# are far apart, three: more groups mean a larger program and a plan that is harder to read, for
# less and less time.

_CUTS = 2  # of a list
_NEAR = 16  # cuts that are nearer to each other than this part of the list are one


def starts_of(priced: Priced, choices: Solution | FractionalGroups) -> Starts:
    """Find the groups that would bring a plan nearer to the bound; none if all equal layers decide
    alike in the relaxation."""
    wanted: dict[str, Counter[int]] = {}
    for n, shares in choices.mixed.items():
        for layers, numbers in _layers(priced.sources[n]).items():
            for share in shares:
                num = round(min(share, 1.0 - share) * len(numbers))
                if 0 < num < len(numbers):
                    wanted.setdefault(layers, Counter())[numbers[num]] += 1
    return {
        layers: _cuts(found, max(_span(priced, layers) // _NEAR, 1))
        for layers, found in sorted(wanted.items())
    }


def _layers(source: Source) -> dict[str, list[int]]:
    """Map the lists of layers that an op's instances lie in to the indices of their layers."""
    found: dict[str, set[int]] = {}
    for layers, number in filter(None, map(layer_of, _keys(source))):
        found.setdefault(layers, set()).add(number)
    return {layers: sorted(numbers) for layers, numbers in found.items()}


def _keys(source: Source) -> Iterator[str]:
    yield from source.names
    yield from (
        cluster.members[0].key for cluster in (source.cluster.instances if source.cluster else ())
    )


def _span(priced: Priced, layers: str) -> int:
    return max(len(_layers(source).get(layers, ())) for source in priced.sources)


def _cuts(wanted: Counter[int], near: int) -> tuple[int, ...]:
    """Choose the layers at which most decisions change, none near another."""
    cuts: list[int] = []
    for layer, _ in sorted(wanted.items(), key=lambda item: (-item[1], item[0])):
        if len(cuts) < _CUTS and all(abs(layer - cut) >= near for cut in cuts):
            cuts.append(layer)
    return tuple(sorted(cuts))
