"""The optimisation problem: the solver's whole input, without fx and without pulp. Its answer is in
`autopar.core.solution`.

Terms. An *op* is a group of graph nodes that share one decision; equal ops of repeated layers form
one op with a `count`. A *value* is a tensor that crosses between ops. A *variant* is a set of
instances of one value that have the same readers (the last layer's output is read by others than
the first layer's); redistribution is chosen per variant. The layouts of a value are the nodes of
its layout graph. Its *versions* are what may be kept of it until backward: the number of a layout
l, on the devices, and num layouts + l, the same parts on their hosts.

Phases: forward and backward. Backward readers of a forward value read a version that was *kept*, or
one that was *recomputed*. A parameter is an op of kind ``parameter``: it produces the parameter
(its storage layout) and reads the gradient in the same layout. Where a step has several
microbatches it rests in a storage layout, may be held gathered through the step, and its gradient
accumulates in a layout of its own (`autopar.cost.zero_stages`). Inputs are ops that produce
replicated values; outputs are ops that read.

Times are in seconds, sizes in bytes, both per device and per instance (multiply by `count`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import LayoutGraph

Phase = Literal["forward", "backward"]
Slack = Literal[
    "critical", "prefetchable", "deferrable"
]  # of a collective, see `autopar.solve.moves`
OpKind = Literal["compute", "parameter", "buffer", "input", "output"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses between ops.

    Attributes:
        key: stable name, in the user's words.
        op: index of the producing op.
        result: which of the op's results it is.
        phase: phase of the producing op.
        graph: all layouts it may take (as produced, as read, or on the way) and the collectives
            between them.
        resident: layouts' bytes are counted elsewhere (a parameter rests in its storage layout), so
            keeping the produced layout until backward is free.
        keepable: layouts in which it may be kept until backward; None is any that forward has it
            in. Where forward has it in none of these, backward makes it again.
        copied: it is a parameter's copy in a narrower dtype, made when the step begins, and held
            like what forward makes.
        dtype: of the tensor, as text.
        away_s: per layout the seconds of storing it on the host, and of fetching it from there, if
            it may wait there for backward; infinite where it may not in that layout; empty where it
            may in none.
    """

    key: str
    op: int
    result: int
    phase: Phase
    graph: LayoutGraph
    resident: bool = False
    keepable: frozenset[int] | None = None
    copied: bool = False
    dtype: str = ""
    away_s: tuple[float, ...] = ()

    @property
    def given(self) -> bool:
        """Whether it is there when the step begins, in the layout in which it is produced."""
        return self.resident or self.copied

    @property
    def num_versions(self) -> int:
        """In how many layouts it may be kept until backward, at most."""
        return len(self.graph.layouts if self.keepable is None else self.keepable)

    def away(self, layout: int) -> float:
        """Seconds of storing it, and of fetching it; infinite where it may not be."""
        return self.away_s[layout] if self.away_s else math.inf

    def stored(self, layout: int) -> int:
        """The version on the hosts, of a layout."""
        return layout + len(self.graph.layouts)

    def on_host(self, version: int) -> bool:
        """Whether a version is one that is stored."""
        return version >= len(self.graph.layouts)

    def layout(self, version: int) -> Layout:
        """Of a version."""
        num = len(self.graph.layouts)
        return (
            self.graph.layouts[version - num].on_host()
            if version >= num
            else self.graph.layouts[version]
        )

    def version(self, layout: Layout) -> int:
        """Of a layout. Raises `KeyError` where it has no such version."""
        if layout.host and layout not in self.graph.index:
            return self.stored(self.graph.index[layout.on_device()])
        return self.graph.index[layout]

    def bytes(self, version: int) -> int:
        """Of a device's memory, of a version."""
        return 0 if self.on_host(version) else self.graph.bytes[version]

    def host_bytes(self, version: int) -> int:
        """Of the host's memory, of a version that is stored."""
        return self.graph.bytes[version - len(self.graph.layouts)] if self.on_host(version) else 0


@dataclass(frozen=True, slots=True)
class Use:
    """Operand `operand` of op `op` reads the value, in `phase` (a parameter op reads its gradient
    in backward); of what forward reads, `again` says whether backward does, too, where it runs the
    op again."""

    op: int
    operand: int
    phase: Phase
    again: bool = True


@dataclass(frozen=True, slots=True)
class Variant:
    """`count` instances of value `value` that all have the same readers."""

    value: int
    count: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """One strategy of an op and what it costs.

    Attributes:
        layouts: the layouts its operands must have and its results then have.
        time_s: time of one instance. communication_s: what of it is communication, for which
            everything waits: collectives of the op's own (`autopar.rules.dispatch`), what crosses
            between stages, what a parameter moves once per step.
        static_bytes: bytes that rest for the whole step (parameters with their optimizer state,
            copies that are held).
        gradient_bytes: bytes of the gradient as the parameter reads it, or of the sum that it is
            added to (parameters only).
        storage: where a parameter rests between steps, if microbatches read it, or add up its
            gradient, in another layout.
        host_bytes: of the host's memory: of parameters that rest there, with their optimizer state
            and gradients.
    """

    layouts: Strategy
    time_s: float
    static_bytes: int = 0
    gradient_bytes: int = 0
    communication_s: float = 0.0
    storage: Layout | None = None
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """A decision: `count` equal instances of one cluster of nodes.

    Attributes:
        key: stable name, in the user's words (module path with ``*`` for repeated indices, and op).
        results: value index per result. What an operand reads is given by the variants, since
            instances may differ in it.
        recomputable: whether backward may run it again.
    """

    key: str
    kind: OpKind
    phase: Phase
    count: int
    results: tuple[int, ...]
    strategies: tuple[OpStrategy, ...]
    recomputable: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of the step, and what is certainly live then beside what rests for the whole step.

    Attributes:
        key: the node that runs, in the user's words.
        held: (variant, number of its instances whose kept versions are live).
        live: (op, bytes per strategy of it): results that are there and still read, gradients.
        again: (op, bytes per strategy with which backward runs it again): such results.
        fetched: (variant, number of its instances that would be back from the hosts, were they
            stored there).
        reserve_bytes: what else was seen to be live then, as a constant.
    """

    key: str
    held: tuple[tuple[int, int], ...]
    live: tuple[tuple[int, tuple[int, ...]], ...]
    reserve_bytes: int = 0
    again: tuple[tuple[int, tuple[int, ...]], ...] = ()
    fetched: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a kernel saves where it does its product and collective `arc` (of the tensor's layout
    graph) at once, in chunks.

    Attributes:
        saved_s: of one instance. num_chunks: pieces of each rank's part.
        region: which of the problem's `regions` it reaches its peers through; None where it needs
            none.
    """

    arc: int
    saved_s: float
    num_chunks: int
    region: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A collective-overlap kernel on offer: a matrix product that waits for what is gathered, or
    whose partial sums are scattered.

    Attributes:
        op: whose product it is, or that adds others to its partial sums. again: as backward runs it
            again. strategies: with any of which.
        hides: the collectives of one tensor, one of which it can do.
        added: where `op` adds, the op whose product is the last addend, and with which strategies;
            None where the product is its own.
        also: ops that read what is scattered and that the kernel does as well, each with which
            strategies: a sum, and norms of it.
    """

    op: int
    again: bool
    strategies: tuple[int, ...]
    hides: tuple[Hidden, ...]
    added: tuple[int, tuple[int, ...]] | None = None
    also: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def product(self) -> tuple[int, tuple[int, ...]]:
        """The op whose product it is, and with which of its strategies."""
        return self.added or (self.op, self.strategies)


@dataclass(frozen=True, slots=True)
class Route:
    """Another way for rows that an op sends by itself: straight into the memory of those that they
    go to.

    Attributes:
        saved_s: of one instance, each time it runs. regions: which of the problem's `regions` it
            takes, all of them.
    """

    saved_s: float
    regions: tuple[int, ...]


Kernels = Mapping[tuple[int, bool], tuple[Kernel, ...]]
"""By variant, and whether in backward of what forward made."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything the solver sees.

    `budget_bytes` bounds, per device, static bytes plus kept bytes, static plus gradient bytes, and
    static bytes plus what is live at each moment. Without moments these are lower bounds of the
    peak; the peak itself is re-derived on the emitted order, and what was missing comes back as
    moments with their reserves.

    Attributes:
        num_in_flight: how many microbatches' kept values are held at once where there are several
            (`accumulates`): beside the one that is running, the others' at every moment.
        accumulates: whether gradients are added to sums that are held through the step.
        overlap_slowdown: what a second of communication beside compute costs compute; 1 where
            nothing is hidden.
        kernels: the collective-overlap kernels on offer (`autopar.cost.kernels`).
        routes: those on offer (`autopar.cost.expert_routes`), by op and strategy.
        regions: bytes of what both share with their peers (`autopar.kernels.chunked`): there for
            the whole step, once for all that use it.
        host_budget_bytes: of the host's memory, per device.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    variants: tuple[Variant, ...]
    budget_bytes: int
    moments: tuple[Moment, ...] = ()
    num_in_flight: int = 1
    accumulates: bool = False
    overlap_slowdown: float = 1.0
    kernels: Kernels = field(default_factory=dict)
    routes: Mapping[tuple[int, int], Route] = field(default_factory=dict)
    regions: tuple[int, ...] = ()
    host_budget_bytes: int = 0

    @property
    def computing_s(self) -> float:
        """Seconds that a step computes at least, whatever its layouts are: every op with the
        strategy that computes for the shortest."""
        return sum(
            op.count * min((s.time_s - s.communication_s for s in op.strategies), default=0.0)
            for op in self.ops
        )


def is_early(problem: Problem, v: int, *, late: bool) -> bool:
    """Whether every collective that moves variant `v` in one phase has slack, whatever is chosen.

    This holds in two cases. In the first, the tree of collectives starts from versions that exist
    when its phase starts: values that rest, and, in backward, values of forward that were kept
    because backward cannot recompute them. In the second, only parameters read the result: it is a
    gradient. Transfers to another stage are not counted as early, because the whole model counts
    them like all other values.

    Args:
        problem: the problem that the variant belongs to.
        v: index of the variant.
        late: whether the phase is backward and the value was made in forward; otherwise the phase
            is the one that makes the value.

    Returns:
        True if all these collectives are prefetchable or deferrable (`autopar.solve.moves`).
    """
    variant = problem.variants[v]
    value = problem.values[variant.value]
    made_by = problem.ops[value.op]
    if value.given or late:
        return value.given or (made_by.kind == "compute" and not made_by.recomputable)
    return all(
        problem.ops[use.op].kind == "parameter" for use in variant.uses if use.phase == value.phase
    )


def at_best(problem: Problem) -> Problem:
    """Every op with the best route that it could have, for nothing: what is proven of that holds
    for the problem."""
    if not problem.routes:
        return problem
    ops = list(problem.ops)
    for (n, s), route in problem.routes.items():
        strategies = list(ops[n].strategies)
        strategies[s] = replace(strategies[s], time_s=strategies[s].time_s - route.saved_s)
        ops[n] = replace(ops[n], strategies=tuple(strategies))
    return replace(problem, ops=tuple(ops), routes={})
