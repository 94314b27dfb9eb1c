"""Moments: what is live while one node of the step runs, as a budget row of the problem.

A moment is modelled on the order of the trace, which emission keeps: a forward value that is kept lives from its last forward
reader to its last backward reader, one that is recomputed from its first backward reader to its last, any other from the op
that makes it to its last reader. What else is live then (gathered versions, buffers of collectives, tensors within a
cluster) depends on the plan; what was seen of it on an emitted program is the moment's reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.analysis.in_place import has_own_memory, operand_written
from autopar.capture.trace import Trace
from autopar.cost.priced import Priced
from autopar.problem import Choices, Moment, Value
from autopar.run.memory import NodePeak
from autopar.solve import evaluated
from autopar.strategies import Cluster, Ref

_NEVER = -1
_MOST_NEW = 24  # moments that one round adds: those most over the budget


@dataclass(frozen=True, slots=True)
class Span:
    """When a tensor is live: positions of nodes in the trace, `_NEVER` where there is none.

    Attributes:
        made: what makes it. last_forward: its last reader in forward.
        earliest: the first in backward that could ask for it; an op that runs again, because its own result is asked for, asks
            for its operands. read: the first in backward that itself reads it, or a view of it.
        asked: the first that asks for it if ops run again as late as they can. until: the last that does.
        is_view: it has no memory of its own. takes_over: it is written into what it reads. is_gradient: of a parameter.
    """

    made: int
    last_forward: int
    earliest: int
    read: int
    asked: int
    until: int
    is_view: bool
    takes_over: bool
    is_gradient: bool

    @property
    def has_memory(self) -> bool:
        """Of its own."""
        return not self.is_view and not self.takes_over

    def is_made_anew(self, now: int) -> bool:
        """Whether the node that runs makes it, beside what it reads."""
        return self.made == now and self.has_memory

    def waits(self, now: int) -> bool:
        """Whether it is there, where it is kept, while this node of backward runs, since nothing has asked for it yet. What only asks so
        that it can run again for this node has done so: it may be gone."""
        return self.earliest > now or (self.earliest == now and self.read != _NEVER)


@dataclass
class Liveness:
    """When each tensor of a trace is live, and from it any moment."""

    trace: Trace
    priced: Priced
    positions: dict[str, int] = field(init=False)
    owner: dict[str, int] = field(init=False)
    spans: dict[str, Span] = field(init=False)
    variant: dict[Ref, int] = field(init=False)
    parameter: dict[str, int] = field(init=False)  # gradient's node → the parameter's op

    def __post_init__(self) -> None:
        nodes = list(self.trace.graph.nodes)
        self.positions = {node.name: place for place, node in enumerate(nodes)}
        sources = list(enumerate(self.priced.sources))
        self.owner = {m.node: i for i, s in sources if s.cluster for c in s.cluster.instances for m in c.members}
        results = nodes[-1].args[0]
        named = {p.name: results[p.gradient].name for p in self.trace.parameters if p.gradient is not None}
        self.parameter = {named[name]: i for i, s in sources if s.kind == "parameter" for name in s.names if name in named}
        self.variant = {ref: v for v, refs in enumerate(self.priced.refs) for ref in refs}
        self.spans = {}
        for node in reversed(nodes[:-1]):
            self.spans[node.name] = self._span(node)

    def _span(self, node: fx.Node) -> Span:
        users = [user for user in node.users if user.op == "call_function"]
        backward = [self.positions[user.name] for user in users if user.meta["phase"] == "backward"]
        forward = [user for user in users if user.meta["phase"] == "forward"]
        again = [self.spans[u.name] for u in forward if self.priced.problem.ops[self.owner[u.name]].recomputable]
        views = [self.spans[u.name] for u in users if not has_own_memory(u) and u.meta["phase"] == node.meta.get("phase", "forward")]
        asking = [span.asked for span in again if span.asked >= 0]
        first = min(backward, default=_NEVER)
        soonest = [*backward, *(span.earliest for span in (*again, *views) if span.earliest >= 0)]
        return Span(
            made=self.positions[node.name],
            last_forward=max([_NEVER, *(self.positions[u.name] for u in forward), *(v.last_forward for v in views)]),
            earliest=min(soonest, default=_NEVER),
            read=min([*backward, *(span.read for span in views if span.read >= 0)], default=_NEVER),
            asked=first if first >= 0 else max(asking, default=_NEVER),
            until=max([_NEVER, *backward, *asking, *(v.until for v in views)]),  # memory lives on in views of it
            is_view=node.op == "call_function" and not has_own_memory(node),
            takes_over=operand_written(node) is not None,
            is_gradient=node.name in self.parameter,
        )

    def moment(self, node: str, phase: str) -> Moment:
        """What is live while `node` runs, without reserve."""
        now = self.positions[node]
        backward = phase == "backward"
        held: dict[int, int] = {}
        live: dict[int, list[int]] = {}
        again: dict[int, list[int]] = {}
        problem = self.priced.problem
        for v, (variant, refs) in enumerate(zip(problem.variants, self.priced.refs, strict=True)):
            value = problem.values[variant.value]
            spans = [self.spans[name] for name, _ in refs]
            if value.phase == "backward":
                if backward:
                    self._backward_value(value, spans, refs, now, live)
                continue
            held[v] = sum(s.until >= now if backward else 0 <= s.last_forward <= now and s.until >= 0 for s in spans)
            own = [] if value.resident else [s for s in spans if not s.is_view]
            if not backward:
                still = sum(s.made == now or s.made < now < s.last_forward or (s.last_forward == now and s.until < 0) for s in own)
                add(live, self.sizes_of(value), value.op, still)
            elif problem.ops[value.op].recomputable:
                add(again, self.sizes_of(value), value.op, sum(0 <= s.asked <= now <= s.until for s in own))
        return Moment(node, tuple((v, n) for v, n in held.items() if n), frozen(live), 0, frozen(again))

    def _backward_value(self, value: Value, spans: Sequence[Span], refs: Sequence[Ref], now: int, live: dict[int, list[int]]) -> None:
        still = sum(s.is_made_anew(now) or (s.made < now <= s.until and not s.is_view) for s in spans)
        add(live, self.sizes_of(value), value.op, still)
        for span, (name, _) in zip(spans, refs, strict=True):
            if span.is_gradient and span.made < now and span.until < now and not self.priced.problem.accumulates:
                parameter = self.parameter[name]
                sizes = [s.gradient_bytes for s in self.priced.problem.ops[parameter].strategies]
                add(live, sizes, parameter, 1)

    def sizes_of(self, value: Value) -> list[int]:
        """Bytes of a value as its op makes it, per strategy of the op."""
        strategies = self.priced.problem.ops[value.op].strategies
        return [value.graph.bytes[value.graph.index[s.layouts.outputs[value.result]]] for s in strategies]

    def certain(self) -> tuple[Moment, ...]:
        """What any plan holds while an op of backward runs: the op's results, what it reads, as it reads it, and each other kept value
        that nothing has asked for yet.

        Of equal ops the one that runs first, when most is held.
        """
        found = []
        for index, source in enumerate(self.priced.sources):
            if source.cluster is not None and self.priced.problem.ops[index].phase == "backward":
                now, which = min((self.positions[c.members[0].node], n) for n, c in enumerate(source.cluster.instances))
                made = self.made_at(index, now)
                if made:
                    found.append(self._while(index, source.cluster.instances[which], now, made))
        return tuple(found)

    def made_at(self, op: int, now: int) -> dict[int, list[int]]:
        """Bytes of the op's results, those that its first node makes."""
        made: dict[int, list[int]] = {}
        for result in self.priced.problem.ops[op].results:
            if any(self.spans[name].is_made_anew(now) for name in self.names(result)):
                add(made, self.sizes_of(self.priced.problem.values[result]), op, 1)
        return made

    def _while(self, op: int, cluster: Cluster, now: int, live: dict[int, list[int]]) -> Moment:
        """While the first node of a cluster runs, by which so much is made."""
        problem, first = self.priced.problem, cluster.members[0]
        held = {v: sum(self.spans[name].waits(now) for name, _ in refs) for v, refs in enumerate(self.priced.refs)}
        for operand, ref in enumerate(cluster.operands):
            v = self.variant[ref]
            value = problem.values[problem.variants[v].value]
            if ref in first.reads and not value.resident and not self.spans[ref[0]].is_view:
                read = [value.graph.bytes[value.graph.index[s.layouts.inputs[operand]]] for s in problem.ops[op].strategies]
                add(live, read, op, 1)
                held[v] -= self.spans[ref[0]].waits(now)
        forward = ((v, n) for v, n in held.items() if n and problem.values[problem.variants[v].value].phase == "forward")
        return Moment(first.node, tuple(forward), frozen(live))

    def is_view(self, node: str) -> bool:
        """Whether a node's result shares the memory of its operand."""
        return self.spans[node].is_view

    def names(self, value: int) -> list[str]:
        """The nodes that make a value."""
        pairs = zip(self.priced.problem.variants, self.priced.refs, strict=True)
        return [name for variant, refs in pairs if variant.value == value for name, _ in refs]


def add(total: dict[int, list[int]], sizes: Sequence[int], op: int, count: int) -> None:
    if count:
        before = total.setdefault(op, [0] * len(sizes))
        total[op] = [a + count * b for a, b in zip(before, sizes, strict=True)]


def frozen(sizes: Mapping[int, Sequence[int]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((op, tuple(each)) for op, each in sizes.items())


Seen = Mapping[str, tuple[str, int]]
"""By node of the trace: the phase, and the peak that was seen while it ran."""


def by_trace_node(liveness: Liveness, peaks: Iterable[NodePeak], resting_bytes: int) -> Seen:
    """Peaks by node of the trace: those of collectives and of what runs again count for the node that comes after them, that of a product
    which is added to others as it scatters them for it and for the sum.

    Args:
        resting_bytes: what rests beside the program's own tensors (the optimizer's state).
    """
    keys = {n.meta["key"]: n.name for n in liveness.trace.graph.nodes if n.op == "call_function"}
    seen: dict[str, tuple[str, int]] = {}
    waiting, last = 0, ""
    for peak in peaks:
        waiting = max(waiting, peak.peak_bytes)
        total = peak.node.meta["kernel"].total if "kernel" in peak.node.meta else ""
        names = [keys.get(key, "") for key in (peak.node.meta.get("key", ""), total)]
        here = [name for name in names if name in liveness.owner and not peak.node.meta.get("recomputed")]
        for name in here:
            before = seen.get(name, ("", 0))[1]  # a node that picks a result has the key of the op, which may have needed more
            seen[name], last = (peak.phase, max(before, waiting + resting_bytes)), name
        waiting = 0 if here else waiting
    if last:  # what comes after the last node counts for it
        phase, before = seen[last]
        seen[last] = phase, max(before, waiting + resting_bytes)
    return seen


def over_budget(liveness: Liveness, seen: Seen, budget_bytes: int) -> list[str]:
    """The nodes at which a program is over the budget: of equal nodes of repeated layers the worst, and no more than some,
    since others come when these hold."""
    worst: dict[int, tuple[int, str]] = {}
    for node, (_, peak) in seen.items():
        op = liveness.owner[node]
        if peak > budget_bytes and peak > worst.get(op, (0, ""))[0]:
            worst[op] = (peak, node)
    return [node for _, node in sorted(worst.values(), reverse=True)[:_MOST_NEW]]


def explained(liveness: Liveness, choices: Choices, seen: Seen, nodes: Iterable[str]) -> dict[str, Moment]:
    """The moments of these nodes, each with the reserve that makes it what was seen of the choices."""
    moments = {node: liveness.moment(node, seen[node][0]) for node in nodes}
    problem = replace(liveness.priced.problem, moments=tuple(moments.values()))
    rows = evaluated(problem, choices).resting_bytes
    sizes = rows[len(rows) - len(moments) :]
    return {node: replace(m, reserve_bytes=seen[node][1] - size) for (node, m), size in zip(moments.items(), sizes, strict=True)}
