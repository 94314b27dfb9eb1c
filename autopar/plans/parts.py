"""The parts of a plan: decisions, kept values, communications and their buckets, overlap,
prediction and fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy
from autopar.core.problem import Slack
from autopar.errors import ChangedPlanError

_SHOWN = 3  # number of inputs of a batch that an error lists


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The strategy of one node pattern."""

    node: str
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best other strategy of an entry if all else is fixed, and by how many seconds the step
    would be longer with it."""

    strategy: str
    delta_s: float


@dataclass(frozen=True, slots=True)
class Fallback:
    """An op that runs replicated because it has no rule.

    Attributes:
        op: name of the op.
        reason: why experiments found no rule.
    """

    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision, taken by `len(instances)` equal clusters of nodes.

    Attributes:
        key: unique name of the decision: module pattern with ``*``, op, phase, ordinal.
        kind: ``compute``, ``parameter``, ``buffer``, ``input`` or ``output``.
        instances: the indices that the patterns take, one tuple per instance.
        nodes: the nodes that share the decision, with their layouts.
        recompute: the strategies with which backward runs the nodes again; empty if it does not.
        time_s: seconds of compute of one instance; work that is done once per step is divided by
            the number of microbatches.
        runner_up: the best other strategy, if there is one.
        replicated: whether a tensor op runs replicated because it has no rule (reported with its
            cost).
        source: the line of the user's model.
        discovered: the ops among the nodes whose rule was found by experiments.
        again_s: seconds of compute of one instance when backward runs it again.
        fallbacks: the ops among the nodes that run replicated because they have no rule. Files omit
            the field if it is empty.
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
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that is kept for backward.

    Attributes:
        node: the node pattern.
        result: the number of the node's output.
        instances: indices of the tensors that the pattern stands for.
        layouts: the layouts in which each is kept.
        bytes: bytes of one instance on a device, in all of these layouts.
        is_copy: whether it is a parameter's copy in the dtype of compute, which takes memory in
            addition to the parameter in every layout.
    """

    node: str
    result: int
    instances: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    bytes: int
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class InKernel:
    """The collective-overlap kernel that runs a collective concurrently with a matrix product
    (`autopar.cost.kernel_offers`).

    Attributes:
        name: ``all_gather_matmul``, ``matmul_reduce_scatter``, or ``matmul_reduce_add_rmsnorm``,
            which also adds a residual to the scattered sums and normalizes them.
        node: node pattern of the product: the first that reads the gathered tensor, or the one that
            makes the scattered sums.
        again: whether the product is run in backward, by recomputation.
        num_chunks: number of pieces in which each rank's part is moved.
        saved_s: seconds that one instance saves against the collective and the product one after
            the other.
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
    """One collective of result `result` of every instance of node pattern `node`, or one that the
    node runs itself.

    Attributes:
        module: module pattern of the node.
        phase: the phase in which it runs; ``step`` if it runs once per step of several
            microbatches, at its beginning (a parameter) or at its end (result 1, the sum of the
            parameter's gradients).
        source, target: layouts before and after.
        time_s: seconds of one instance per microbatch, as the objective counts them. If the
            collective may be in a bucket, and counts as overlapped or runs once per step, this is
            the least share of a bucket.
        slack: ``critical``; ``prefetchable`` or ``deferrable`` if it may overlap with compute
            (`autopar.solve.tensor_moves`).
        beside: whether the objective counts it as overlapped with compute, because it has slack for
            all choices (`autopar.solve.prices`).
        kernel: the kernel that runs it together with a product, if any.
        why: the reason why no kernel does, if a product reads or makes the tensor; or why the
            kernel does not include the norm that follows.
        own: whether the node runs it itself (`autopar.rules.dispatch`); `source` and `target` are
            then the layouts of the first operand and of the first result. It is also in backward
            if a node of forward runs again there.
        alone_s: seconds of one instance outside a bucket if `time_s` is the share of a bucket;
            otherwise None.
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
        """Seconds of one instance outside a bucket."""
        return self.time_s if self.alone_s is None else self.alone_s


KERNELS_BUFFERS = "kernels' buffers"
RESTING = ("parameters", "optimizer", "copies", "buffers", "inputs", KERNELS_BUFFERS)
"""Kinds of memory that is occupied during the whole step."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time and memory of a step, per device.

    Attributes:
        step_s: the objective: seconds of compute and communication, less the overlap that is
            possible if memory is ample (`autopar.core.streams`).
        compute_s: seconds of compute.
        communication_s: seconds of communication, as the objective counts it.
        peak_bytes: peak of live tensor bytes from the start of forward to the end of backward.
        memory_bytes: kind → bytes at the peak. Kinds are ``parameters``, ``gradients``,
            ``optimizer``, ``buffers``, ``inputs``, ``activations``, ``transient``, ``copies`` (of
            parameters, gathered or in the dtype in which they are read) and ``kernels' buffers``
            (which collective-overlap kernels share with their peers and keep between uses).
        timeline: (label, phase, kind ``compute`` or ``communication``, start_s, duration_s), in
            order, per module.
        hidden_s: seconds for which compute and communication run at once.
        simulated_s: seconds of the emitted program, with communication overlapped with compute
            (`autopar.emit.simulation`) as far as memory allows.
        in_kernels_s: seconds of both that collective-overlap kernels save.
        in_buckets_s: seconds that the plan's buckets save of `beyond_shares_s` and of other
            collectives; the rest is contained in `simulated_s`.
        beyond_shares_s: seconds by which collectives on their own take longer than their least
            share of a bucket. `step_s` and `communication_s` count only that share for collectives
            that may be in a bucket.
        host_bytes: kind (``parameters``, ``optimizer``, ``gradients``, ``copies``, ``activations``)
            → most bytes of the host's memory at once; empty if nothing is offloaded.
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
        """Bytes that are occupied in addition to the tensors of the emitted program: the
        optimizer's state and kernels' buffers."""
        return self.memory_bytes["optimizer"] + self.memory_bytes.get(KERNELS_BUFFERS, 0)

    @property
    def serial_s(self) -> float:
        """Seconds of compute and communication one after the other."""
        return self.compute_s + self.communication_s

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that does not overlap with compute."""
        return (
            self.communication_s
            + self.beyond_shares_s
            - self.hidden_s
            - self.in_kernels_s
            - self.in_buckets_s
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The model, batch, hardware and versions for which a plan was made.

    Attributes:
        model: fingerprint of the model.
        model_name: its name, for people.
        profile: name of the hardware profile.
        profile_hash: its hash.
        autopar, torch: the versions.
        axis: the mesh axis along which devices differ; empty if they do not.
        profiles: (name, hash) of the profile at each index along `axis`; `profile` and
            `profile_hash` are then those of all together.
        inputs: (path, dtype and shape) of each tensor of the batch; empty in plans of versions that
            did not record them.
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
        """Describe how a batch differs from that of the plan.

        Args:
            inputs: (path, dtype and shape) of each tensor of the batch.

        Returns:
            The difference in words; empty if there is none, or if the plan does not record its
            batch.
        """
        here, planned = dict(inputs), dict(self.inputs)
        if not planned or here == planned:
            return ""
        names = [
            name
            for name in (*planned, *(n for n in here if n not in planned))
            if planned.get(name) != here.get(name)
        ]
        differences = [
            f"{name} is {planned.get(name, 'missing')} in the plan and "
            f"{here.get(name, 'missing')} in the batch"
            for name in names[:_SHOWN]
        ]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"the plan is for another batch: {', '.join(differences)}{more}"


@dataclass(frozen=True, slots=True)
class Crossed:
    """A value that is sent from one stage to the next.

    Attributes:
        node: key of the node that makes it.
        layout: the layout in which it is sent.
        bytes: bytes that a device sends per microbatch.
        returns: whether its gradient is sent back, in the same layout.
    """

    node: str
    layout: Layout
    bytes: int
    returns: bool


# --------------------------------------------------------------------------------------------------
# Buckets: communications of many small tensors that a plan runs as one collective.


@dataclass(frozen=True, slots=True)
class Member:
    """One communication of a bucket: the one that makes result `result` of node `node` as
    `target`, in the bucket's phase."""

    node: str
    result: int
    target: Layout


@dataclass(frozen=True, slots=True)
class Bucket:
    """Communications of one kind, axis, dtype and reduction that run as one collective
    (`autopar.emit.buckets`).

    Attributes:
        phase: the phase in which it runs.
        members: the communications, in their order in the bucket.
        collective: the collective on the bucket, including padding; along dim 0, or -1 for
            all_reduce.
        time_s: seconds of it, including packing and unpacking; per microbatch, as
            `Communication.time_s`.
        saved_s: seconds that it saves against all members on their own.
    """

    phase: str
    members: tuple[Member, ...]
    collective: Collective
    time_s: float
    saved_s: float


# --------------------------------------------------------------------------------------------------
# Overlap of an emitted step's communication with its compute.

Piece = tuple[int, int]
"""A position in a phase, as a number of nodes, and the bytes that are free from there on."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Limits of the overlap of compute and communication that has slack (`autopar.emit.overlap`).

    Attributes:
        slowdown: seconds by which a hidden second of communication delays compute, from the
            hardware profile; with 1 no communication is started early.
        forward_bytes, backward_bytes: limit of the bytes that collectives which were started early,
            and their operands, may hold at a time in each phase.
        forward_room, backward_room: lower limits from given positions of the phase on, because the
            step itself needs more memory there. Positions do not count the nodes of such
            collectives.
    """

    slowdown: float = 1.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_room: tuple[Piece, ...] = ()
    backward_room: tuple[Piece, ...] = ()

    def misfit(self) -> str:
        """Return what is wrong with the limits, in words; ``""`` if nothing is."""
        if not 0.0 <= self.slowdown <= 1.0 or min(self.forward_bytes, self.backward_bytes) < 0:
            return f"its overlap is {self}"
        for pieces in (self.forward_room, self.backward_room):
            since = [place for place, _ in pieces]
            if (
                since != sorted(set(since))
                or min((n for piece in pieces for n in piece), default=0) < 0
            ):
                return f"its room for early collectives is {pieces}"
        return ""
