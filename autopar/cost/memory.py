"""Moments: the memory that is live while one node of the step runs, as a budget row of the problem.

A moment follows the order of the trace, which emission keeps. A kept forward value is live from its
last forward reader to its last backward reader. A recomputed value is live from its first to its
last backward reader. Any other value is live from the op that computes it to its last reader.
Outputs of the model stay live, in the layout in which they are returned. Other memory (gathered
versions, buffers of collectives, tensors within a cluster) depends on the plan. The reserve of the
moment covers it, as measured on an emitted program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from autopar import ops
from autopar.capture.trace import Trace
from autopar.core.layout import local_shape
from autopar.core.problem import MemoryPoint, Value
from autopar.cost.gradient_dtypes import WIDENED, widened_bytes
from autopar.cost.priced import Priced
from autopar.cost.spans import Span, find_spans
from autopar.sharding import Cluster, ClusterClass, Ref


@dataclass(frozen=True, slots=True)
class _Tally:
    """The counts of a moment.

    Attributes:
        kept: variant → number of instances that wait for backward.
        live: op → bytes per strategy.
        recomputed: op → bytes per strategy, if backward recomputes the op.
        fetched: variant → number of instances that were copied back from the host.
    """

    kept: dict[int, int] = field(default_factory=dict)
    live: dict[int, list[int]] = field(default_factory=dict)
    recomputed: dict[int, list[int]] = field(default_factory=dict)
    fetched: dict[int, int] = field(default_factory=dict)


NodeBytes = dict[str, tuple[int, list[int]]]
"""Node → its op, and bytes for each strategy of the op."""


@dataclass(frozen=True)
class Liveness:
    """The lifetimes of the tensors of a trace, and the resulting moments."""

    trace: Trace
    priced: Priced

    @cached_property
    def positions(self) -> dict[str, int]:
        """Node → its position in the graph."""
        return {node.name: place for place, node in enumerate(self.trace.graph.nodes)}

    @cached_property
    def owner(self) -> dict[str, int]:
        """Node of a cluster → its op."""
        return {
            m.node: i
            for i, s in enumerate(self.priced.sources)
            if s.cluster
            for c in s.cluster.instances
            for m in c.members
        }

    @cached_property
    def variant(self) -> dict[Ref, int]:
        """Tensor → its variant."""
        return {ref: v for v, refs in enumerate(self.priced.refs) for ref in refs}

    @cached_property
    def spans(self) -> dict[str, Span]:
        """Node → lifetime of its result."""
        ops = self.priced.problem.ops
        recomputable = {node for node, op in self.owner.items() if ops[op].recomputable}
        return find_spans(self.trace, recomputable, self.parameter)

    @cached_property
    def scratch(self) -> NodeBytes:
        """Node → its op, and bytes of its temporary memory."""
        scratch = [
            (i, s.cluster, self._scratch_bytes(s.cluster))
            for i, s in enumerate(self.priced.sources)
            if s.cluster is not None
        ]
        return {
            c.members[0].node: (i, sizes)
            for i, cluster, sizes in scratch
            for c in cluster.instances
            if any(sizes)
        }

    @cached_property
    def parameter(self) -> dict[str, int]:
        """Node of a gradient → the op of the parameter."""
        output = next(iter(reversed(self.trace.graph.nodes)))
        results: Sequence[fx.Node] = output.args[0]
        named = {
            p.name: results[p.gradient].name
            for p in self.trace.parameters
            if p.gradient is not None
        }
        return {
            named[name]: i
            for i, s in enumerate(self.priced.sources)
            if s.kind == "parameter"
            for name in s.names
            if name in named
        }

    @cached_property
    def returned(self) -> NodeBytes:
        """Node of an output of the model → the op of the output, and the bytes that are
        returned."""
        outputs = [
            (i, s)
            for i, s in enumerate(self.priced.sources)
            if s.kind == "output" and not s.crosses and not set(s.names) & self.trace.mutated.keys()
        ]
        return {
            s.nodes[0]: (i, self._returned_bytes(i, s.nodes[0]))
            for i, s in outputs
            if self._is_made(s.nodes[0])
        }

    @cached_property
    def widened(self) -> NodeBytes:
        """Node that may compute partial sums → its op, and `widened_bytes`."""
        bytes_of_node: NodeBytes = {}
        for v, refs in enumerate(self.priced.refs):
            value = self.priced.problem.values[self.priced.problem.variants[v].value]
            sizes = widened_bytes(self.priced.problem, value) if value.phase == "backward" else []
            bytes_of_node |= {
                name: (value.op, sizes) for name, _ in refs if any(sizes) and self._is_made(name)
            }
        return bytes_of_node

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
        """Return whether an op computes the result of a node in its own memory."""
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
        """Return the time of a moment: the position of its node. While partial sums of the node are
        widened, the time is just after it."""
        return self.positions[moment.removesuffix(WIDENED)] + 0.5 * moment.endswith(WIDENED)

    def add_returned(self, live: dict[int, list[int]], now: float) -> None:
        """Add the outputs that the model has returned while a backward node runs.

        An output that backward may still read is not added here: it counts as a kept value. With
        several microbatches outputs are not counted, since the schedule may have released them.

        Args:
            live: op → bytes per strategy; changed in place.
            now: position of the node.
        """
        for node, (op, sizes) in (
            self.returned.items() if not self.priced.problem.accumulates else ()
        ):
            if self.spans[node].latest < now:
                add(live, sizes, op, 1)

    def moment(self, node: str, phase: str, running: Collection[str] = ()) -> MemoryPoint:
        """Return the live memory while a node runs, without reserve.

        Args:
            node: name of the node. With the suffix `WIDENED`: while its result is widened
                (`autopar.cost.gradient_dtypes`).
            phase: phase of the node.
            running: nodes whose results exist at this time if they are recomputed, although their
                readers run later.
        """
        now, tally = self.at(node), _Tally()
        live, problem = tally.live, self.priced.problem
        backward = phase == "backward"
        for v, (variant, refs) in enumerate(zip(problem.variants, self.priced.refs, strict=True)):
            value = problem.values[variant.value]
            if value.phase == "forward" and backward:
                self._add_in_backward(v, value, refs, now, running, tally)
            elif value.phase == "forward":
                self._add_in_forward(v, value, refs, now, tally)
            elif backward:
                self._backward_value(value, [self.spans[name] for name, _ in refs], refs, now, live)
        if backward:
            self.add_returned(live, now)
        self.add_scratch(live, node)
        if node.endswith(WIDENED):
            op, sizes = self.widened[node.removesuffix(WIDENED)]
            add(live, sizes, op, 1)
        return MemoryPoint(
            node,
            tuple((v, n) for v, n in tally.kept.items() if n),
            freeze_sizes(live),
            0,
            freeze_sizes(tally.recomputed),
            tuple((v, n) for v, n in tally.fetched.items() if n),
        )

    def _add_in_forward(
        self, v: int, value: Value, refs: Sequence[Ref], now: float, tally: _Tally
    ) -> None:
        """Add a forward value while a forward node runs."""
        spans = [self.spans[name] for name, _ in refs]
        tally.kept[v] = sum(0 <= s.last_forward <= now and s.until >= 0 for s in spans)
        stored_spans = [] if value.resident else [s for s in spans if not s.is_view]
        still = sum(
            s.producer == now
            or s.producer < now < s.last_forward
            or (s.last_forward == now and s.until < 0)
            for s in stored_spans
        )
        add(tally.live, self.sizes_of(value), value.op, still)

    def _add_in_backward(
        self,
        v: int,
        value: Value,
        refs: Sequence[Ref],
        now: float,
        running: Collection[str],
        tally: _Tally,
    ) -> None:
        """Add a forward value while a backward node runs."""
        spans = [(name, self.spans[name]) for name, _ in refs]
        tally.kept[v] = sum(s.until >= now for _, s in spans)
        if value.away_s:
            tally.fetched[v] = sum(
                not s.is_view and 0 <= s.first_needed <= now <= s.until for _, s in spans
            )
        if self.priced.problem.ops[value.op].recomputable:
            num_again = sum(
                not s.is_view and (name in running or 0 <= s.first_needed <= now <= s.until)
                for name, s in spans
            )
            add(tally.recomputed, self.sizes_of(value), value.op, num_again)

    def _backward_value(
        self,
        value: Value,
        spans: Sequence[Span],
        refs: Sequence[Ref],
        now: float,
        live: dict[int, list[int]],
    ) -> None:
        still = sum(
            s.is_made_anew(now) or (s.producer < now <= s.until and not s.is_view) for s in spans
        )
        add(live, self.sizes_of(value), value.op, still)
        for span, (name, _) in zip(spans, refs, strict=True):
            if (
                span.is_gradient
                and span.producer < now - 0.5
                and span.until < now
                and not self.priced.problem.accumulates
            ):
                parameter = self.parameter[name]
                sizes = [s.gradient_bytes for s in self.priced.problem.ops[parameter].strategies]
                add(live, sizes, parameter, 1)

    def sizes_of(self, value: Value) -> list[int]:
        """Return the bytes of a value as its op computes it, for each strategy of the op."""
        strategies = self.priced.problem.ops[value.op].strategies
        return [
            value.graph.bytes[value.graph.index[s.layouts.outputs[value.result]]]
            for s in strategies
        ]

    @cached_property
    def certain(self) -> tuple[MemoryPoint, ...]:
        """Return the memory that every plan holds while an op of backward runs.

        It consists of the results of the op, its operands in the layouts in which it reads them,
        every other kept value that no node has needed yet, and the outputs of the model. Of equal
        ops only the one that runs first is listed, since most memory is held then.
        """
        return (*self._at_ops(), *self.widenings())

    def _at_ops(self) -> Iterator[MemoryPoint]:
        for index, source in enumerate(self.priced.sources):
            if source.cluster is not None and self.priced.problem.ops[index].phase == "backward":
                now, instance = min(
                    (self.positions[c.members[0].node], n)
                    for n, c in enumerate(source.cluster.instances)
                )
                node_bytes = self.first_node_bytes(
                    index, source.cluster.instances[instance].members[0].node
                )
                if node_bytes:
                    yield self._while(index, source.cluster.instances[instance], now, node_bytes)

    def add_scratch(self, live: dict[int, list[int]], node: str) -> None:
        """Add the temporary memory of a node."""
        if node in self.scratch:
            op, sizes = self.scratch[node]
            add(live, sizes, op, 1)

    def widenings(self) -> Iterator[MemoryPoint]:
        """Yield the moments at which partial sums are widened.

        Each counts the sums in both dtypes, every kept value that no node has needed yet, the
        outputs of the model, and, in their fewest bytes, complete gradients and values that wait
        for a reader. Of equal nodes only the one that runs first is listed.
        """
        first: dict[int, str] = {}
        for name in sorted(self.widened, key=self.positions.__getitem__):
            first.setdefault(self.widened[name][0], name)
        for op, name in first.items():
            now, live, waiting = self.at(name + WIDENED), dict[int, list[int]](), dict[int, int]()
            for v, refs in enumerate(self.priced.refs):
                value = self.priced.problem.values[self.priced.problem.variants[v].value]
                others = [(n, self.spans[n]) for n, _ in refs if n != name]
                if value.phase == "forward":
                    waiting[v] = self._num_waiting(refs, now, value.num_versions)
                else:
                    num_waiting = sum(
                        s.producer < now < s.until and s.has_memory for _, s in others
                    )
                    add(
                        live,
                        [min(value.graph.bytes)] * len(self.sizes_of(value)),
                        value.op,
                        num_waiting,
                    )
                    for n in [
                        n for n, s in others if s.is_gradient and s.producer < now and s.until < now
                    ]:
                        self.add_gradient(n, value, live)
            self.add_returned(live, now)
            add(live, self.widened[name][1], op, 1)
            yield MemoryPoint(
                name + WIDENED, tuple((v, n) for v, n in waiting.items() if n), freeze_sizes(live)
            )

    def add_gradient(self, name: str, value: Value, live: dict[int, list[int]]) -> None:
        """Add a complete gradient in its fewest bytes, unless gradients are added to sums.

        Args:
            name: node that computes the gradient.
            value: the value of the gradient.
            live: op → bytes per strategy; changed in place.
        """
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

    def first_node_bytes(self, op: int, node: str) -> dict[int, list[int]]:
        """Return op → bytes per strategy of the results that its first node computes, and of the
        temporary memory of that node."""
        node_bytes: dict[int, list[int]] = {}
        self.add_scratch(node_bytes, node)
        for result in self.priced.problem.ops[op].results:
            if any(
                self.spans[name].is_made_anew(self.positions[node]) for name in self.names(result)
            ):
                add(node_bytes, self.sizes_of(self.priced.problem.values[result]), op, 1)
        return node_bytes

    def _while(
        self, op: int, cluster: Cluster, now: int, live: dict[int, list[int]]
    ) -> MemoryPoint:
        """Return the moment at which the first node of a cluster runs. `live` holds the memory of
        its results."""
        problem, first = self.priced.problem, cluster.members[0]
        values = [problem.values[variant.value] for variant in problem.variants]
        waiting = {
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
                if v in waiting:
                    waiting[v] -= self.spans[ref[0]].waits(now, value.num_versions)
        self.add_returned(live, now)
        return MemoryPoint(
            first.node, tuple((v, n) for v, n in waiting.items() if n), freeze_sizes(live)
        )

    def _num_waiting(self, refs: Sequence[Ref], now: float, num_versions: int) -> int:
        return sum(self.spans[name].waits(now, num_versions) for name, _ in refs)

    def is_view(self, node: str) -> bool:
        """Return whether a node's result shares the memory of its operand."""
        return self.spans[node].is_view

    def names(self, value: int) -> list[str]:
        """Return the nodes that compute a value."""
        pairs = zip(self.priced.problem.variants, self.priced.refs, strict=True)
        return [name for variant, refs in pairs if variant.value == value for name, _ in refs]


def add(total: dict[int, list[int]], sizes: Sequence[int], op: int, count: int) -> None:
    """Add the bytes of several tensors of one op to a total.

    Args:
        total: op → bytes per strategy; changed in place.
        sizes: bytes of one tensor, per strategy.
        op: index of the op.
        count: number of tensors.
    """
    if count:
        before = total.setdefault(op, [0] * len(sizes))
        total[op] = [a + count * b for a, b in zip(before, sizes, strict=True)]


def freeze_sizes(sizes: Mapping[int, Sequence[int]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Convert a mapping of sizes into tuples, as a `MemoryPoint` stores it."""
    return tuple((op, tuple(each)) for op, each in sizes.items())
