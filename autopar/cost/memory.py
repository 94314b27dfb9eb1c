"""Moments: what is live while one node of the step runs, as a budget row of the problem.

A moment is modelled on the order of the trace, which emission keeps: a forward value that is kept
lives from its last forward reader to its last backward reader, one that is recomputed from its
first backward reader to its last, any other from the op that makes it to its last reader. What the
model returns lives on, in the layout in which it is returned. What else is live then (gathered
versions, buffers of collectives, tensors within a cluster) depends on the plan; what was seen of it
on an emitted program is the moment's reserve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar import ops
from autopar.capture.trace import Trace
from autopar.core.layout import local_shape
from autopar.core.problem import Moment, Value
from autopar.cost.gradient_dtypes import WIDENED, widened_bytes
from autopar.cost.priced import Priced
from autopar.cost.spans import Span, find_spans
from autopar.sharding import Cluster, ClusterClass, Ref


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
    returned: dict[str, tuple[int, list[int]]] = field(
        init=False
    )  # node → the output's op, bytes by its strategies
    scratch: dict[str, tuple[int, list[int]]] = field(
        init=False
    )  # node → its op, bytes that it needs for a while, beside its result
    widened: dict[str, tuple[int, list[int]]] = field(
        init=False
    )  # node → its op, `widened_bytes`; nodes that may make partial sums
    _certain: tuple[Moment, ...] | None = None

    def __post_init__(self) -> None:
        nodes = list(self.trace.graph.nodes)
        self.positions = {node.name: place for place, node in enumerate(nodes)}
        sources = list(enumerate(self.priced.sources))
        self.owner = {
            m.node: i
            for i, s in sources
            if s.cluster
            for c in s.cluster.instances
            for m in c.members
        }
        results = nodes[-1].args[0]
        named = {
            p.name: results[p.gradient].name
            for p in self.trace.parameters
            if p.gradient is not None
        }
        self.parameter = {
            named[name]: i
            for i, s in sources
            if s.kind == "parameter"
            for name in s.names
            if name in named
        }
        self.variant = {ref: v for v, refs in enumerate(self.priced.refs) for ref in refs}
        ops = self.priced.problem.ops
        recomputable = {node for node, op in self.owner.items() if ops[op].recomputable}
        self.spans = find_spans(self.trace, recomputable, self.parameter)
        outputs = [
            (i, s)
            for i, s in sources
            if s.kind == "output" and not s.crosses and not set(s.names) & self.trace.mutated.keys()
        ]
        self.returned = {
            s.nodes[0]: (i, self._returned_bytes(i, s.nodes[0]))
            for i, s in outputs
            if self._is_made(s.nodes[0])
        }
        scratch = [
            (i, s.cluster, self._scratch_bytes(s.cluster))
            for i, s in sources
            if s.cluster is not None
        ]
        self.scratch = {
            c.members[0].node: (i, sizes)
            for i, cluster, sizes in scratch
            for c in cluster.instances
            if any(sizes)
        }
        self.widened = {}
        for v, refs in enumerate(self.priced.refs):
            value = self.priced.problem.values[self.priced.problem.variants[v].value]
            sizes = widened_bytes(self.priced.problem, value) if value.phase == "backward" else []
            self.widened |= {
                name: (value.op, sizes) for name, _ in refs if any(sizes) and self._is_made(name)
            }

    def _scratch_bytes(self, cluster: ClusterClass) -> list[int]:
        first = cluster.first.members[0].call
        if first.target is not ops.cross_entropy_backward:
            return []
        logits, shape = first.inputs[0], self.priced.moves.mesh_shape
        layouts = [strategy.members[0].inputs[0] for strategy in cluster.strategies]
        return [
            ops.cross_entropy_backward_scratch(local_shape(logits.shape, at, shape), logits.dtype)
            for at in layouts
        ]

    def _is_made(self, node: str) -> bool:
        """Whether an op makes it, in memory of its own."""
        return node in self.owner and self.spans[node].has_memory

    def _returned_bytes(self, op: int, node: str) -> list[int]:
        graph = self.priced.problem.values[
            self.priced.problem.variants[self.variant[node, 0]].value
        ].graph
        return [
            graph.bytes[graph.index[s.layouts.inputs[0]]]
            for s in self.priced.problem.ops[op].strategies
        ]

    def at(self, moment: str) -> float:
        """When it is: at a node's position, or, while its partial sums are widened, just after
        that."""
        return self.positions[moment.removesuffix(WIDENED)] + 0.5 * moment.endswith(WIDENED)

    def add_returned(self, live: dict[int, list[int]], now: float) -> None:
        """Add what the model has returned, while a node of backward runs: of what backward may
        still read, what is kept counts.

        Where there are several microbatches it is not counted: their schedule may have let go of
        it.
        """
        for node, (op, sizes) in (
            self.returned.items() if not self.priced.problem.accumulates else ()
        ):
            if self.spans[node].latest < now:
                add(live, sizes, op, 1)

    def moment(self, node: str, phase: str, running: Collection[str] = ()) -> Moment:
        """What is live while `node` runs, or what it made is widened
        (`autopar.cost.gradient_dtypes`), without reserve.

        Args:
            running: nodes whose results are there then if they are made again, though their readers
                ask for them later.
        """
        now = self.at(node)
        backward = phase == "backward"
        held: dict[int, int] = {}
        live: dict[int, list[int]] = {}
        again: dict[int, list[int]] = {}
        fetched: dict[int, int] = {}
        problem = self.priced.problem
        for v, (variant, refs) in enumerate(zip(problem.variants, self.priced.refs, strict=True)):
            value = problem.values[variant.value]
            spans = [self.spans[name] for name, _ in refs]
            if value.phase == "backward":
                if backward:
                    self._backward_value(value, spans, refs, now, live)
                continue
            held[v] = sum(
                s.until >= now if backward else 0 <= s.last_forward <= now and s.until >= 0
                for s in spans
            )
            own = [] if value.resident else [s for s in spans if not s.is_view]
            if not backward:
                still = sum(
                    s.made == now
                    or s.made < now < s.last_forward
                    or (s.last_forward == now and s.until < 0)
                    for s in own
                )
                add(live, self.sizes_of(value), value.op, still)
                continue
            if value.away_s:
                fetched[v] = sum(not s.is_view and 0 <= s.asked <= now <= s.until for s in spans)
            if problem.ops[value.op].recomputable:
                named = zip(refs, spans, strict=True)
                num_again = sum(
                    not s.is_view and (name in running or 0 <= s.asked <= now <= s.until)
                    for (name, _), s in named
                )
                add(again, self.sizes_of(value), value.op, num_again)
        if backward:
            self.add_returned(live, now)
        self.add_scratch(live, node)
        if node.endswith(WIDENED):
            op, sizes = self.widened[node.removesuffix(WIDENED)]
            add(live, sizes, op, 1)
        back = tuple((v, n) for v, n in fetched.items() if n)
        return Moment(
            node,
            tuple((v, n) for v, n in held.items() if n),
            freeze_sizes(live),
            0,
            freeze_sizes(again),
            back,
        )

    def _backward_value(
        self,
        value: Value,
        spans: Sequence[Span],
        refs: Sequence[Ref],
        now: float,
        live: dict[int, list[int]],
    ) -> None:
        still = sum(
            s.is_made_anew(now) or (s.made < now <= s.until and not s.is_view) for s in spans
        )
        add(live, self.sizes_of(value), value.op, still)
        for span, (name, _) in zip(spans, refs, strict=True):
            if (
                span.is_gradient
                and span.made < now - 0.5
                and span.until < now
                and not self.priced.problem.accumulates
            ):
                parameter = self.parameter[name]
                sizes = [s.gradient_bytes for s in self.priced.problem.ops[parameter].strategies]
                add(live, sizes, parameter, 1)

    def sizes_of(self, value: Value) -> list[int]:
        """Bytes of a value as its op makes it, per strategy of the op."""
        strategies = self.priced.problem.ops[value.op].strategies
        return [
            value.graph.bytes[value.graph.index[s.layouts.outputs[value.result]]]
            for s in strategies
        ]

    def certain(self) -> tuple[Moment, ...]:
        """What any plan holds while an op of backward runs: the op's results, what it reads, as it
        reads it, each other kept value that nothing has asked for yet, and what the model has
        returned.

        Of equal ops the one that runs first, when most is held.
        """
        if self._certain is None:
            self._certain = (*self._at_ops(), *self.widenings())
        return self._certain

    def _at_ops(self) -> Iterator[Moment]:
        for index, source in enumerate(self.priced.sources):
            if source.cluster is not None and self.priced.problem.ops[index].phase == "backward":
                now, which = min(
                    (self.positions[c.members[0].node], n)
                    for n, c in enumerate(source.cluster.instances)
                )
                made = self.made_at(index, source.cluster.instances[which].members[0].node)
                if made:
                    yield self._while(index, source.cluster.instances[which], now, made)

    def add_scratch(self, live: dict[int, list[int]], node: str) -> None:
        """Add what a node needs for a while, beside its result."""
        if node in self.scratch:
            op, sizes = self.scratch[node]
            add(live, sizes, op, 1)

    def widenings(self) -> Iterator[Moment]:
        """While partial sums are widened: these, each kept value that nothing has asked for yet,
        what the model has returned, each gradient that is done and each value that waits for a
        reader, these two in their fewest bytes. Of equal nodes, of the one that runs first."""
        first: dict[int, str] = {}
        for name in sorted(self.widened, key=self.positions.__getitem__):
            first.setdefault(self.widened[name][0], name)
        for op, name in first.items():
            now, live, held = self.at(name + WIDENED), dict[int, list[int]](), dict[int, int]()
            for v, refs in enumerate(self.priced.refs):
                value = self.priced.problem.values[self.priced.problem.variants[v].value]
                others = [(n, self.spans[n]) for n, _ in refs if n != name]
                if value.phase == "forward":
                    held[v] = self._num_waiting(refs, now, value.num_versions)
                else:
                    num_waiting = sum(s.made < now < s.until and s.has_memory for _, s in others)
                    add(
                        live,
                        [min(value.graph.bytes)] * len(self.sizes_of(value)),
                        value.op,
                        num_waiting,
                    )
                    for n in [
                        n for n, s in others if s.is_gradient and s.made < now and s.until < now
                    ]:
                        self.add_gradient(n, value, live)
            self.add_returned(live, now)
            add(live, self.widened[name][1], op, 1)
            yield Moment(
                name + WIDENED, tuple((v, n) for v, n in held.items() if n), freeze_sizes(live)
            )

    def add_gradient(self, name: str, value: Value, live: dict[int, list[int]]) -> None:
        """Add a gradient that is done, in its fewest bytes, where none is added to a sum."""
        problem = self.priced.problem
        if not problem.accumulates:
            parameter = self.parameter[name]
            add(
                live,
                [
                    min(s.gradient_bytes, *value.graph.bytes)
                    for s in problem.ops[parameter].strategies
                ],
                parameter,
                1,
            )

    def made_at(self, op: int, node: str) -> dict[int, list[int]]:
        """Bytes of the op's results, those that its first node makes, and of what that needs
        beside them for a while."""
        made: dict[int, list[int]] = {}
        self.add_scratch(made, node)
        for result in self.priced.problem.ops[op].results:
            if any(
                self.spans[name].is_made_anew(self.positions[node]) for name in self.names(result)
            ):
                add(made, self.sizes_of(self.priced.problem.values[result]), op, 1)
        return made

    def _while(self, op: int, cluster: Cluster, now: int, live: dict[int, list[int]]) -> Moment:
        """While the first node of a cluster runs, by which so much is made."""
        problem, first = self.priced.problem, cluster.members[0]
        values = [problem.values[variant.value] for variant in problem.variants]
        held = {
            v: self._num_waiting(refs, now, value.num_versions)
            for v, (value, refs) in enumerate(zip(values, self.priced.refs, strict=True))
            if value.phase == "forward"
        }
        for operand, ref in enumerate(cluster.operands):
            v = self.variant[ref]
            value = values[v]
            if ref in first.reads and not value.resident and not self.spans[ref[0]].is_view:
                read = [
                    value.graph.bytes[value.graph.index[s.layouts.inputs[operand]]]
                    for s in problem.ops[op].strategies
                ]
                add(live, read, op, 1)
                if v in held:
                    held[v] -= self.spans[ref[0]].waits(now, value.num_versions)
        self.add_returned(live, now)
        return Moment(first.node, tuple((v, n) for v, n in held.items() if n), freeze_sizes(live))

    def _num_waiting(self, refs: Sequence[Ref], now: float, num_versions: int) -> int:
        return sum(self.spans[name].waits(now, num_versions) for name, _ in refs)

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


def freeze_sizes(sizes: Mapping[int, Sequence[int]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((op, tuple(each)) for op, each in sizes.items())
