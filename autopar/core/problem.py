"""The optimisation problem: the whole input of the solver, without fx and without pulp. Its
solution is in `autopar.core.solution`.

Terms. An *op* is a group of graph nodes that share one decision; equal ops of repeated layers form
one op with a `count`. A *value* is a tensor that crosses between ops. A *variant* is a set of
instances of one value that have the same readers (the last layer's output is read by others than
the first layer's); redistribution is chosen per variant. The layouts of a value are the nodes of
its layout graph. Its *versions* are the forms in which it may be kept until backward: l for layout
l on the devices, and num layouts + l for the same parts on their hosts.

Phases: forward and backward. Backward readers of a forward value read a version that was *kept*, or
one that was *recomputed*. A parameter is an op of kind ``parameter``: it produces the parameter
(its storage layout) and reads the gradient in the same layout. If a step has several microbatches,
it has a separate storage layout, may be held gathered through the step, and its gradient
accumulates in another separate layout (`autopar.cost.zero_stages`). Inputs are ops that produce
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
from autopar.core.placements import REPLICATE

Phase = Literal["forward", "backward"]
Slack = Literal[
    "critical", "prefetchable", "deferrable"
]  # of a collective, see `autopar.solve.tensor_moves`
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
        keepable: layouts in which it may be kept until backward; None means any that it has in
            forward. If forward has it in none of these, backward computes it again.
        copied: whether it is a copy of a parameter in a narrower dtype, made when the step begins
            and held like a result of forward.
        dtype: dtype of the tensor, as text.
        away_s: per layout, the seconds of storing it on the host and of fetching it from there;
            infinite for layouts in which it may not be stored on the host until backward; empty if
            there are no others.
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
    def is_given(self) -> bool:
        """Whether it exists when the step begins, in the layout in which it is produced."""
        return self.resident or self.copied

    @property
    def num_versions(self) -> int:
        """Number of layouts in which it may be kept until backward, at most."""
        return len(self.graph.layouts if self.keepable is None else self.keepable)

    def away(self, layout: int) -> float:
        """Return the seconds of storing it on the host in a layout and of fetching it from there;
        infinite if it may not be stored there."""
        return self.away_s[layout] if self.away_s else math.inf

    def stored_version(self, layout: int) -> int:
        """Return the version with the parts of a layout on the hosts."""
        return layout + len(self.graph.layouts)

    def on_host(self, version: int) -> bool:
        """Whether a version is on the hosts."""
        return version >= len(self.graph.layouts)

    def layout(self, version: int) -> Layout:
        """Return the layout of a version."""
        num = len(self.graph.layouts)
        return (
            self.graph.layouts[version - num].on_host()
            if version >= num
            else self.graph.layouts[version]
        )

    def version(self, layout: Layout) -> int:
        """Return the version with a layout.

        Raises:
            KeyError: if there is none.
        """
        if layout.host and layout not in self.graph.index:
            return self.stored_version(self.graph.index[layout.on_device()])
        return self.graph.index[layout]

    def bytes(self, version: int) -> int:
        """Return the bytes of a device's memory that a version takes; 0 if it is on the hosts."""
        return 0 if self.on_host(version) else self.graph.bytes[version]

    def host_bytes(self, version: int) -> int:
        """Return the bytes of the host's memory, per device, that a version takes; 0 if it is on
        the devices."""
        return self.graph.bytes[version - len(self.graph.layouts)] if self.on_host(version) else 0


@dataclass(frozen=True, slots=True)
class Use:
    """Operand `operand` of op `op` reads the value, in `phase` (a parameter op reads its gradient
    in backward). For readers in forward, `read_again` tells whether the operand is also read when
    backward recomputes the op."""

    op: int
    operand: int
    phase: Phase
    read_again: bool = True


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
        time_s: time of one instance.
        communication_s: the part of `time_s` that is communication for which everything waits:
            collectives inside the op (`autopar.rules.dispatch`), transfers between stages, and the
            collectives of a parameter that run once per step.
        static_bytes: bytes that rest for the whole step (parameters with their optimizer state,
            copies that are held).
        gradient_bytes: bytes of the gradient as the parameter reads it, or of the sum that it is
            added to (parameters only).
        storage: where a parameter rests between steps, if microbatches read it, or add up its
            gradient, in another layout.
        host_bytes: bytes of the host's memory: of parameters that rest there, with their optimizer
            state and gradients.
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
        recomputable: whether backward may recompute it.
    """

    key: str
    kind: OpKind
    phase: Phase
    count: int
    results: tuple[int, ...]
    strategies: tuple[OpStrategy, ...]
    recomputable: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A point of the step, and the bytes that are live then in any plan, in addition to the bytes
    held for the whole step.

    Attributes:
        key: the node that runs, in the user's words.
        kept: (variant, number of its instances whose kept versions are live).
        live: (op, bytes per strategy): results that still have readers, and gradients.
        recomputed: (op, bytes per strategy) of the results of ops that backward recomputes.
        fetched: (variant, number of its instances that would already be fetched from the hosts if
            they had been stored there).
        reserve_bytes: a constant for everything else that was measured to be live then.
    """

    key: str
    kept: tuple[tuple[int, int], ...]
    live: tuple[tuple[int, tuple[int, ...]], ...]
    reserve_bytes: int = 0
    recomputed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    fetched: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class OverlapOption:
    """The saving of a kernel that runs its product and collective `arc` (of the tensor's layout
    graph) concurrently, in chunks.

    Attributes:
        saved_s: seconds saved by one instance.
        num_chunks: number of pieces of each rank's part.
        region: index of the problem's region (`Problem.regions`) through which it reaches its
            peers; None if it needs none.
    """

    arc: int
    saved_s: float
    num_chunks: int
    region: int | None = None


@dataclass(frozen=True, slots=True)
class OverlapKernel:
    """A collective-overlap kernel that may be chosen: a matrix product that reads a gathered
    operand, or whose partial sums are scattered.

    Attributes:
        op: the op that computes the product, or that adds other tensors to its partial sums.
        recomputed: whether this is the run of the op in backward, by recomputation.
        strategies: strategies of `op` with which the kernel can be used.
        hides: the collectives of one tensor of which the kernel can run one.
        added: if `op` adds, the op whose product is the last addend, and the strategies of it with
            which the kernel can be used; None if the product is that of `op`.
        also: further ops that the kernel computes (a sum, and norms of it), which read the
            scattered tensor; each with the strategies for which it can.
    """

    op: int
    recomputed: bool
    strategies: tuple[int, ...]
    hides: tuple[OverlapOption, ...]
    added: tuple[int, tuple[int, ...]] | None = None
    also: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def product(self) -> tuple[int, tuple[int, ...]]:
        """The op that computes the product, and the strategies with which the kernel can be
        used."""
        return self.added or (self.op, self.strategies)


@dataclass(frozen=True, slots=True)
class PeerRoute:
    """An alternative for the rows that an op sends itself: it writes them directly into the memory
    of their receivers.

    Attributes:
        saved_s: seconds saved by one instance, each time it runs.
        regions: indices of all the problem's regions (`Problem.regions`) that it uses.
    """

    saved_s: float
    regions: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Condition:
    """A condition on the strategy of an op: whether the op runs whole along a mesh axis, that is,
    with every operand and result replicated on this axis. A choice meets the condition or its
    `opposite`, never both. What backward runs again is not restricted.

    Attributes:
        op: index of the op.
        axis: index of the mesh axis.
        is_whole: whether the op has to run whole along the axis.
    """

    op: int
    axis: int
    is_whole: bool

    @property
    def opposite(self) -> Condition:
        """Return the condition that exactly the other choices meet."""
        return replace(self, is_whole=not self.is_whole)

    def admits(self, layouts: Strategy) -> bool:
        """Whether a strategy with these layouts meets the condition."""
        is_replicated = all(
            layout.placements[self.axis] == REPLICATE
            for layout in (*layouts.inputs, *layouts.outputs)
        )
        return is_replicated == self.is_whole


Kernels = Mapping[tuple[int, bool], tuple[OverlapKernel, ...]]
"""(variant, whether it is moved in backward though forward made it) → the offered kernels."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The input of the solver.

    `budget_bytes` bounds, per device, static bytes plus kept bytes, static plus gradient bytes, and
    static bytes plus what is live at each moment. Without moments these are lower bounds of the
    peak; the peak itself is re-derived on the emitted order, and what was missing comes back as
    moments with their reserves.

    Attributes:
        num_in_flight: number of microbatches whose kept values are held at once, if there are
            several (`accumulates`): those of the running one, and at every moment all of the
            others'.
        accumulates: whether gradients are added to sums that are held through the step.
        overlap_slowdown: seconds by which a second of concurrent communication delays compute; 1 if
            nothing is hidden.
        kernels: the offered collective-overlap kernels (`autopar.cost.kernel_offers`).
        routes: (op, strategy) → the offered route (`autopar.cost.expert_routes`).
        regions: bytes of each region that kernels and routes share with their peers
            (`autopar.kernels.chunked`); each is allocated for the whole step, once for all its
            users.
        host_budget_bytes: bytes of the host's memory, per device.
        conditions: restrict the problem to a case (`autopar.solve.cases`).
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    variants: tuple[Variant, ...]
    budget_bytes: int
    moments: tuple[MemoryPoint, ...] = ()
    num_in_flight: int = 1
    accumulates: bool = False
    overlap_slowdown: float = 1.0
    kernels: Kernels = field(default_factory=dict)
    routes: Mapping[tuple[int, int], PeerRoute] = field(default_factory=dict)
    regions: tuple[int, ...] = ()
    host_budget_bytes: int = 0
    conditions: tuple[Condition, ...] = ()

    def ruled_out(self) -> dict[int, tuple[int, ...]]:
        """Return, for each op that conditions restrict, the strategies that it may not run with."""
        excluded: dict[int, tuple[int, ...]] = {}
        for n in sorted({condition.op for condition in self.conditions}):
            excluded[n] = tuple(
                s
                for s, strategy in enumerate(self.ops[n].strategies)
                if not all(c.admits(strategy.layouts) for c in self.conditions if c.op == n)
            )
        return excluded

    @property
    def computing_s(self) -> float:
        """Least seconds that a step computes, for any choice of layouts: every op with the strategy
        that has the least compute."""
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
        True if all these collectives are prefetchable or deferrable (`autopar.solve.tensor_moves`).
    """
    variant = problem.variants[v]
    value = problem.values[variant.value]
    made_by = problem.ops[value.op]
    if value.is_given or late:
        return value.is_given or (made_by.kind == "compute" and not made_by.recomputable)
    return all(
        problem.ops[use.op].kind == "parameter" for use in variant.uses if use.phase == value.phase
    )


def at_best(problem: Problem) -> Problem:
    """Return a relaxation of the problem in which every op with a route saves its seconds without
    the route's memory. A lower bound of the relaxation is one of the problem."""
    if not problem.routes:
        return problem
    ops = list(problem.ops)
    for (n, s), route in problem.routes.items():
        strategies = list(ops[n].strategies)
        strategies[s] = replace(strategies[s], time_s=strategies[s].time_s - route.saved_s)
        ops[n] = replace(ops[n], strategies=tuple(strategies))
    return replace(problem, ops=tuple(ops), routes={})
