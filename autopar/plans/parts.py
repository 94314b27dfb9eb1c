"""What a plan is made of: decisions, what is kept and moved, prediction and fingerprint; and the
reading of each from JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy
from autopar.core.problem import Slack
from autopar.errors import ChangedPlanError

_SHOWN = 3  # inputs of a batch, in an error


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The strategy of one node pattern."""

    node: str
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best other choice for an entry, all else fixed, and how much longer the step would
    take."""

    strategy: str
    delta_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision, taken by `len(instances)` equal clusters of nodes.

    Attributes:
        key: unique name of the decision: module pattern with ``*``, op, phase, ordinal.
        kind: ``compute``, ``parameter``, ``buffer``, ``input`` or ``output``.
        instances: the indices that the patterns take, one tuple per instance.
        nodes: the nodes that share the decision, with their layouts.
        recompute: the strategies with which backward runs the nodes again, empty where it does not.
        time_s: compute time of one instance; what is done once per step is shared among its
            microbatches.
        again_s: where backward runs it again, of that.
        replicated: whether a tensor op runs replicated for want of a rule (reported with its cost).
        source: the user's own line.
        discovered: the ops among the nodes whose rule was found by experiment.
    """

    key: str
    kind: str
    module: str
    op: str
    phase: str
    instances: tuple[tuple[int, ...], ...]
    nodes: tuple[NodeChoice, ...]
    recompute: tuple[NodeChoice, ...]
    time_s: float
    runner_up: RunnerUp | None
    replicated: bool
    source: str
    discovered: tuple[str, ...] = ()
    again_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A value kept for backward, in which layouts."""

    node: str
    result: int
    instances: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class InKernel:
    """The collective-overlap kernel that does a collective beside a matrix product
    (`autopar.cost.kernels`).

    Attributes:
        name: ``all_gather_matmul``, ``matmul_reduce_scatter``, or ``matmul_reduce_add_rmsnorm``,
            which adds up what it scattered with a residual and norms it. again: as backward runs it
            again.
        node: pattern of the product: the first that reads what is gathered, the one that makes what
            is scattered.
        num_chunks: in which each rank's part goes. saved_s: against one after the other, of one
            instance.
    """

    name: str
    node: str
    again: bool
    num_chunks: int
    saved_s: float

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise ChangedPlanError(f"{self.name} of {self.node} in {self.num_chunks} chunks")


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective, done for result `result` of every instance of node pattern `node`, or by the
    node itself.

    Attributes:
        phase: the phase it runs in; ``step`` at the begin (of a parameter) or the end (result 1, of
            the sum of its gradients) of a step of several microbatches. module: module pattern of
            the node.
        source, target: layouts before and after.
        time_s: of one instance, per microbatch, as the objective counts it: of what may share a
            bucket, and counts as running beside compute or as done once per step, its share of a
            bucket at best. alone_s: of such, by itself; None of all else.
        slack: ``critical``, or ``prefetchable`` or ``deferrable`` where it may run beside compute
            (`autopar.solve.moves`).
        beside: whether it counts as running beside compute in the objective: it has slack whatever
            is chosen (`autopar.solve.prices`).
        kernel: what does it together with a product, if anything does. why: else, where a product
            stands at its end, why none does; or, where a norm follows, why the kernel does not do
            that, too.
        own: whether the node does it by itself (`autopar.rules.dispatch`), in backward of a node of
            forward where it runs again; source and target are then the layouts of its first operand
            and of its first result.
    """

    node: str
    result: int
    instances: tuple[tuple[int, ...], ...]
    module: str
    phase: str
    collective: Collective
    source: Layout
    target: Layout
    time_s: float
    slack: Slack = "critical"
    beside: bool = False
    kernel: InKernel | None = None
    why: str = ""
    own: bool = False
    alone_s: float | None = None

    @property
    def by_itself_s(self) -> float:
        """Seconds of one instance, in no bucket."""
        return self.time_s if self.alone_s is None else self.alone_s


KERNELS_BUFFERS = "kernels' buffers"
RESTING = ("parameters", "optimizer", "copies", "buffers", "inputs", KERNELS_BUFFERS)
"""Kinds of memory that are there during the whole step."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step will take, per device.

    Attributes:
        memory_bytes: kind (``parameters``, ``gradients``, ``optimizer``, ``buffers``, ``inputs``,
            ``activations``, ``transient``; ``copies``: of parameters, gathered or in the dtype in
            which they are read; ``kernels' buffers``: what collective-overlap kernels share with
            their peers and keep from one use to the next) → bytes at the peak.
        host_bytes: kind (``parameters``, ``optimizer``, ``gradients``, ``copies``, ``activations``)
            → bytes of the host's memory, all at once at most; empty where nothing is offloaded.
        peak_bytes: peak of live tensor bytes from the start of forward to the end of backward.
        timeline: (label, phase, kind ``compute`` or ``communication``, start_s, duration_s), in
            order, per module.
        step_s: the objective: compute and communication, less what may be hidden of them where
            memory is ample (`autopar.core.streams`).
        simulated_s: of the emitted program, with communication beside compute
            (`autopar.emit.simulation`), as far as memory allows.
        hidden_s: how long both run at once. in_kernels_s: what collective-overlap kernels save of
            both.
        beyond_shares_s: what collectives take by themselves, beyond their share of a bucket at
            best, which is all that `step_s` and `communication_s` count of those that may share
            one. in_buckets_s: what of that, and of others, the plan's buckets save; the rest is in
            `simulated_s`.
        exposed_s: communication that nothing runs beside.
    """

    step_s: float
    compute_s: float
    communication_s: float
    peak_bytes: int
    memory_bytes: Mapping[str, int]
    timeline: tuple[tuple[str, str, str, float, float], ...]
    hidden_s: float
    simulated_s: float
    in_kernels_s: float = 0.0
    in_buckets_s: float = 0.0
    beyond_shares_s: float = 0.0
    host_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def beside_bytes(self) -> int:
        """What rests beside the tensors of the emitted program: the optimizer's state, and
        kernels' buffers."""
        return self.memory_bytes["optimizer"] + self.memory_bytes.get(KERNELS_BUFFERS, 0)

    @property
    def serial_s(self) -> float:
        """Compute and communication one after the other."""
        return self.compute_s + self.communication_s

    @property
    def exposed_s(self) -> float:
        return (
            self.communication_s
            + self.beyond_shares_s
            - self.hidden_s
            - self.in_kernels_s
            - self.in_buckets_s
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the plan was made for.

    Attributes:
        axis, profiles: where devices differ along a mesh axis, that axis, and (name, hash) of the
            profile at each index along it; `profile` and `profile_hash` are then of all together.
        inputs: (path, dtype and shape) of each tensor of the batch; none in plans that did not
            record them yet.
    """

    model: str
    model_name: str
    profile: str
    profile_hash: str
    autopar: str
    torch: str
    axis: str = ""
    profiles: tuple[tuple[str, str], ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()

    def other_batch(self, inputs: Sequence[tuple[str, str]]) -> str:
        """How a batch with these inputs differs from the plan's, in words; nothing where it does
        not, or that is not known."""
        here, planned = dict(inputs), dict(self.inputs)
        if not planned or here == planned:
            return ""
        names = [
            name
            for name in (*planned, *(n for n in here if n not in planned))
            if planned.get(name) != here.get(name)
        ]
        told = [
            f"{name} is {planned.get(name, 'not there')} in the plan and"
            f" {here.get(name, 'not there')} here"
            for name in names[:_SHOWN]
        ]
        return (
            "the plan is for another batch:"
            f" {', '.join(told)}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        )


@dataclass(frozen=True, slots=True)
class Crossed:
    """A value that goes from one stage to the next, in which layout.

    Attributes:
        node: its key. bytes: that a device sends per microbatch. returns: whether its gradient
            comes back, in the same layout.
    """

    node: str
    layout: Layout
    bytes: int
    returns: bool


def _strategy(data: Mapping[str, Any]) -> Strategy:
    return Strategy(
        tuple(map(Layout.parse, data["inputs"])), tuple(map(Layout.parse, data["outputs"]))
    )


def _choices(data: list[Mapping[str, Any]]) -> tuple[NodeChoice, ...]:
    return tuple(NodeChoice(c["node"], _strategy(c["strategy"])) for c in data)


def read_instances(data: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(i) for i in data)


def read_entry(data: Mapping[str, Any]) -> Entry:
    runner_up = RunnerUp(**data["runner_up"]) if data["runner_up"] else None
    changed = {
        "instances": read_instances(data["instances"]),
        "nodes": _choices(data["nodes"]),
        "recompute": _choices(data["recompute"]),
    }
    return Entry(
        **{
            **data,
            **changed,
            "runner_up": runner_up,
            "discovered": tuple(data.get("discovered", ())),
        }
    )


def read_communication(data: Mapping[str, Any]) -> Communication:
    changed: dict[str, Any] = {
        "source": Layout.parse(data["source"]),
        "target": Layout.parse(data["target"]),
    }
    kernel = InKernel(**data["kernel"]) if data.get("kernel") else None
    changed |= {
        "instances": read_instances(data["instances"]),
        "collective": Collective(**data["collective"]),
        "kernel": kernel,
    }
    return Communication(**{**data, **changed})


def read_fingerprint(data: Mapping[str, Any]) -> Fingerprint:
    pairs = {name: tuple(map(tuple, data.get(name, ()))) for name in ("profiles", "inputs")}
    return Fingerprint(**{**data, **pairs})


# --------------------------------------------------------------------------------------------------
# Communications that a plan does together: one collective on one bucket of many small tensors.


@dataclass(frozen=True, slots=True)
class Member:
    """One communication of a bucket: the one that makes result `result` of node `node` as
    `target`, in the bucket's phase."""

    node: str
    result: int
    target: Layout


@dataclass(frozen=True, slots=True)
class Bucket:
    """Communications of one kind, axis, dtype and reduction that are one collective
    (`autopar.emit.buckets`).

    Attributes:
        phase: of all of them. members: in the order in which they lie in the bucket.
        collective: on the bucket, padding included; along dim 0, or -1 for all_reduce.
        time_s: of it, packing and unpacking included; per microbatch, as of `Communication`.
            saved_s: against each of them alone.
    """

    phase: str
    members: tuple[Member, ...]
    collective: Collective
    time_s: float
    saved_s: float


def read_bucket(data: Mapping[str, Any]) -> Bucket:
    """From JSON."""
    members = tuple(Member(**{**m, "target": Layout.parse(m["target"])}) for m in data["members"])
    return Bucket(**{**data, "members": members, "collective": Collective(**data["collective"])})


# --------------------------------------------------------------------------------------------------
# How far an emitted step's communication runs beside its compute.

Piece = tuple[int, int]
"""From the so-many-th node on, so many bytes."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far communication that has slack runs beside compute (`autopar.emit.overlap`).

    Attributes:
        slowdown: what a hidden second costs compute, from the hardware profile; with 1 nothing is
            started early.
        forward_bytes, backward_bytes: the most that started steps, and what they wait for, may hold
            at once in each phase.
        forward_room, backward_room: what they may hold at most from a place in the phase on, where
            that is less than elsewhere because the step holds so much there itself. Places count
            nodes other than such steps' (`autopar.emit.overlap`).
    """

    slowdown: float = 1.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_room: tuple[Piece, ...] = ()
    backward_room: tuple[Piece, ...] = ()

    def misfit(self) -> str:
        """What is wrong with it, ``""`` where nothing is."""
        if not 0.0 <= self.slowdown <= 1.0 or min(self.forward_bytes, self.backward_bytes) < 0:
            return f"its overlap is {self}"
        for pieces in (self.forward_room, self.backward_room):
            since = [place for place, _ in pieces]
            if (
                since != sorted(set(since))
                or min((n for piece in pieces for n in piece), default=0) < 0
            ):
                return f"its room for early steps is {pieces}"
        return ""


def read_overlap(data: Mapping[str, Any]) -> Overlap:
    """From JSON."""
    pieces = {
        name: tuple(map(tuple, data[name]))
        for name in ("forward_room", "backward_room")
        if name in data
    }
    return Overlap(**{**data, **pieces})
