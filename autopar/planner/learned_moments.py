"""Moments learned from plans that exceed the budget, and the groups of equal layers whose problem
the moments belong to.

The memory of an emitted program is measured node by node. If the program holds more than its
budget at a node, the moment of that node of the trace is added to the problem, with a reserve. The
reserve is the live bytes that the moment alone does not account for.
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

_MOST_NEW = 24  # moments that one round adds: those that exceed the budget by most


class NodeMeasurement(NamedTuple):
    """The measurement at a node of the trace: its phase, the peak while it ran, and the recomputed
    nodes whose results were live."""

    phase: str
    peak_bytes: int
    recomputed: frozenset[str] = frozenset()


Measurements = Mapping[str, NodeMeasurement]
"""Measurements by node of the trace, or by the moment at which the result of a node is widened."""


@dataclass(frozen=True, slots=True)
class LearnedMoments:
    """Learned moments, in addition to those that hold for every plan.

    Attributes:
        liveness: the liveness of the problem.
        latest: the moments by node, as measured in the last plan.
        retained: moments as measured in earlier plans.
    """

    liveness: Liveness
    latest: Mapping[str, MemoryPoint]
    retained: tuple[MemoryPoint, ...] = ()

    @staticmethod
    def empty(liveness: Liveness) -> LearnedMoments:
        """Return no learned moments."""
        return LearnedMoments(liveness, {})

    @staticmethod
    def from_reserves(liveness: Liveness, reserves: Mapping[str, int]) -> LearnedMoments:
        """Make moments from reserves that were learned with another grouping of the layers."""
        nodes = liveness.trace.nodes_by_name()
        phases = {node: nodes[node.removesuffix(WIDENED)].meta["phase"] for node in reserves}
        return LearnedMoments(
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
        """All moments of the problem, those that hold for every plan first."""
        return (*self.liveness.certain, *self.latest.values(), *self.retained)

    @property
    def reserves(self) -> dict[str, int]:
        """Bytes of reserve, by node."""
        return {node: moment.reserve_bytes for node, moment in self.latest.items()}

    def further(
        self, choices: Solution, peaks: Iterable[NodePeak], beside_bytes: int, budget: int
    ) -> LearnedMoments:
        """Add the moments at which a plan exceeds the budget, and update the known moments.

        Args:
            choices: the solution of the plan.
            peaks: peaks of the emitted program, by node.
            beside_bytes: memory in use that the program does not hold itself.
            budget: bytes per device.
        """
        peaks_by_node = by_trace_node(self.liveness, peaks, beside_bytes)
        node_names = dict.fromkeys(
            [*self.latest, *over_budget(self.liveness, peaks_by_node, budget)]
        )
        return replace(
            self, latest=explain_peaks(self.liveness, choices, peaks_by_node, node_names)
        )

    def retain_latest(self) -> LearnedMoments:
        """Retain the latest moments, so that later measurements do not replace them."""
        first = len(self.retained)
        now = (
            replace(moment, key=f"{moment.key} ({first + n})")
            for n, moment in enumerate(self.latest.values())
        )
        return replace(self, retained=(*self.retained, *now))


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups of layers that share their decisions, the problem with these groups, and what is known
    about it.

    Attributes:
        priced: the priced problem.
        learnt: the learned moments.
        starts: the first layers of groups, by list of layers; empty if all equal layers share their
            decisions.
        bound_s: a lower bound of the step in seconds; 0 if none is proven.
        multipliers: the multipliers that prove the bound by arithmetic.
    """

    priced: Priced
    learnt: LearnedMoments
    starts: Starts
    bound_s: float = 0.0
    multipliers: Multipliers | None = None

    @staticmethod
    def of(trace: Trace, priced: Priced, starts: Starts) -> LayerGroups:
        """Make groups without learned moments or a bound.

        Args:
            trace: the trace of the model.
            priced: the problem with these groups.
            starts: the first layers of groups, by list of layers.
        """
        return LayerGroups(priced, LearnedMoments.empty(Liveness(trace, priced)), starts)

    @property
    def problem(self) -> Problem:
        """The problem with all known moments."""
        return replace(self.priced.problem, moments=self.learnt.moments)

    def forget(self) -> LayerGroups:
        """Drop the learned moments and keep the bound."""
        return replace(self, learnt=LearnedMoments.empty(self.learnt.liveness))


def by_trace_node(
    liveness: Liveness, peaks: Iterable[NodePeak], resting_bytes: int
) -> Measurements:
    """Map the peaks of a program's nodes to nodes of the trace.

    Peaks of collectives and of recomputed ops count for the next node. The peak of a product in a
    kernel counts for all nodes that the kernel computes. Peaks of the reduction of a widened sum
    count for the moment at which it is widened.

    Args:
        liveness: the liveness of the trace.
        peaks: peaks of the program, in the order in which its nodes run.
        resting_bytes: memory in addition to the tensors of the program, such as optimizer state.
    """
    keys = {n.meta["key"]: n.name for n in liveness.trace.graph.nodes if n.op == "call_function"}
    peaks_by_node: dict[str, NodeMeasurement] = {}
    waiting, last = NodeMeasurement("", 0), ""

    for peak, again in _pair_with_recomputed(peaks, keys):
        now = NodeMeasurement(peak.phase, peak.peak_bytes + resting_bytes, again)
        node_name = keys.get(
            peak.node.meta.get("key", "").rpartition("/")[0], ""
        )  # nodes of the reduction of a sum
        if node_name in liveness.widened:
            _record(peaks_by_node, node_name + WIDENED, now)
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
            _record(peaks_by_node, name, waiting)
            last = name
        waiting = NodeMeasurement("", 0) if here else waiting
    if last:  # peaks after the last node count for that node
        _record(
            peaks_by_node, last, waiting._replace(phase=waiting.phase or peaks_by_node[last].phase)
        )
    return peaks_by_node


def _record(seen: dict[str, NodeMeasurement], name: str, sight: NodeMeasurement) -> None:
    """Record a measurement, keeping the larger peak of a node. A node that picks a result has the
    key of its op, and the op may have the larger peak."""
    before = seen.get(name)
    if before is not None and before.peak_bytes > sight.peak_bytes:
        sight = before._replace(phase=sight.phase)
    seen[name] = sight


def _pair_with_recomputed(
    peaks: Iterable[NodePeak], keys: Mapping[str, str]
) -> Iterator[tuple[NodePeak, frozenset[str]]]:
    """Pair each peak with the nodes of the trace whose recomputed results are live then."""
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


def over_budget(liveness: Liveness, seen: Measurements, budget_bytes: int) -> list[str]:
    """List the nodes at which a program exceeds the budget, the largest excess first.

    Only the worst of equal nodes of repeated layers is listed, and at most `_MOST_NEW` nodes. Later
    rounds add the others.

    Args:
        liveness: the liveness of the trace.
        seen: peaks by node.
        budget_bytes: bytes per device.
    """
    worst: dict[tuple[int, bool], tuple[int, str]] = {}
    for node, sight in seen.items():
        peak = sight.peak_bytes
        op = liveness.owner[node.removesuffix(WIDENED)], node.endswith(WIDENED)
        if peak > budget_bytes and peak > worst.get(op, (0, ""))[0]:
            worst[op] = (peak, node)
    return [node for _, node in sorted(worst.values(), reverse=True)[:_MOST_NEW]]


def explain_peaks(
    liveness: Liveness, choices: Solution, seen: Measurements, nodes: Iterable[str]
) -> dict[str, MemoryPoint]:
    """Make the moments of nodes, each with the reserve that explains the measured peak.

    Live results of recomputed ops are attributed to these ops, even if the ops are recomputed only
    for other recomputed ops.

    Args:
        liveness: the liveness of the trace.
        choices: the solution of the measured plan.
        seen: peaks by node.
        nodes: the nodes.
    """
    moments = {
        node: liveness.moment(node, seen[node].phase, seen[node].recomputed) for node in nodes
    }
    problem = replace(liveness.priced.problem, moments=tuple(moments.values()))
    rows = evaluate_choices(problem, choices).resting_bytes
    sizes = rows[len(rows) - len(moments) :]
    return {
        node: replace(m, reserve_bytes=seen[node].peak_bytes - size)
        for (node, m), size in zip(moments.items(), sizes, strict=True)
    }


# --------------------------------------------------------------------------------------------------
# The groups into which a list of equal layers is divided. Each group has separate decisions. Groups
# begin at the shares in which the relaxation mixes decisions.
#
# If the relaxation keeps a value in 45 of 100 layers, two groups are made; with two such shares far
# apart, three. More groups make the program larger and the plan harder to read, for less and less
# time.

_MAX_CUTS = 2  # cuts per list of layers
_MIN_DISTANCE = 16  # cuts nearer than 1 / 16 of the list are merged


def starts_of(priced: Priced, choices: Solution | FractionalGroups) -> Starts:
    """Find the groups that bring a plan nearer to the bound; none if all equal layers share their
    decisions in the relaxation."""
    layer_counts: dict[str, Counter[int]] = {}
    for n, shares in choices.mixed.items():
        for layers, numbers in _layers(priced.sources[n]).items():
            for share in shares:
                num = round(min(share, 1.0 - share) * len(numbers))
                if 0 < num < len(numbers):
                    layer_counts.setdefault(layers, Counter())[numbers[num]] += 1
    return {
        layers: _cuts(found, max(_span(priced, layers) // _MIN_DISTANCE, 1))
        for layers, found in sorted(layer_counts.items())
    }


def _layers(source: Source) -> dict[str, list[int]]:
    """Map the lists of layers that contain an op's instances to the indices of the layers."""
    layer_numbers: dict[str, set[int]] = {}
    for layers, number in filter(None, map(layer_of, _keys(source))):
        layer_numbers.setdefault(layers, set()).add(number)
    return {layers: sorted(numbers) for layers, numbers in layer_numbers.items()}


def _keys(source: Source) -> Iterator[str]:
    yield from source.names
    yield from (
        cluster.members[0].key for cluster in (source.cluster.instances if source.cluster else ())
    )


def _span(priced: Priced, layers: str) -> int:
    return max(len(_layers(source).get(layers, ())) for source in priced.sources)


def _cuts(wanted: Counter[int], near: int) -> tuple[int, ...]:
    """Choose the layers at which most decisions change, with a minimum distance."""
    cuts: list[int] = []
    for layer, _ in sorted(wanted.items(), key=lambda item: (-item[1], item[0])):
        if len(cuts) < _MAX_CUTS and all(abs(layer - cut) >= near for cut in cuts):
            cuts.append(layer)
    return tuple(sorted(cuts))
