"""Named plans (`autopar.constraints`) resolved to a trace.

A plan determines the labels of tensors on its axes, and the storage layouts of parameters.

Data parallelism starts from the batch, dim 0 of the inputs, and context parallelism from their dim
1 (`autopar.sharding.presets.batch_and_sequence`). Tensor parallelism starts from weights
(`autopar.sharding.presets.tensor`; on grids, `autopar.sharding.presets.grids`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.trace import Parameter, Trace
from autopar.constraints import Parallelism, axes_of
from autopar.core.mesh import Mesh
from autopar.core.placements import REPLICATE
from autopar.errors import ConstraintError
from autopar.rules import where_of
from autopar.sharding.presets.batch_and_sequence import (
    SampleWalk,
    along_sequence,
    by_experts,
    check_batch,
    notes_on,
)
from autopar.sharding.presets.grids import SIDES, walk_sides
from autopar.sharding.presets.tensor import by_columns, with_sequence
from autopar.sharding.propagate import (
    LabelRow,
    Policy,
    SpreadLabels,
    TraceIndex,
    nothing_to_split,
    read_trace,
)

Rest = tuple[
    frozenset[Placement] | None, ...
]  # for each mesh axis, the placements in which a parameter may be stored; None allows any


@dataclass(frozen=True, slots=True)
class Named:
    """The placements that named plans force.

    Attributes:
        rows: node name → (axis, row) for each axis with a plan.
        rests: parameter name → alternatives for its storage. The first one that can be stored
            applies.
        plans: for each axis, the plan as text, or "".
        grid: axes of grids. Over these, activations are kept for backward as split as in forward.
        gathered: parameter name → axes over which it is gathered without the others, so that they
            must be the innermost splitters.
        separate: nodes that read an operand in another placement than that in which it is produced.
        zero: axis of data parallelism → ZeRO stage; 0 if parameters are stored replicated.
        expert_axes: parameter name → axes of data parallelism over which it is read in parts, as
            the weights of experts are.
        notes: effects of plans that their names do not show, one sentence each.
    """

    rows: Mapping[str, tuple[tuple[int, LabelRow], ...]] = field(default_factory=dict)
    rests: Mapping[str, tuple[Rest, ...]] = field(default_factory=dict)
    plans: tuple[str, ...] = ()
    grid: tuple[int, ...] = ()
    gathered: Mapping[str, frozenset[int]] = field(default_factory=dict)
    separate: frozenset[str] = frozenset()
    zero: Mapping[int, int] = field(default_factory=dict)
    expert_axes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def stages_of(self, parameter: str) -> Mapping[int, int]:
        """Return axis → ZeRO stage of a parameter.

        The stage is that of `zero`, or 3 on axes over which the parameter is read in parts, since
        it is neither gathered nor summed there.
        """
        return {**self.zero, **dict.fromkeys(self.expert_axes.get(parameter, ()), 3)}

    @property
    def holds(self) -> bool:
        """Whether parameters stay gathered through a step, even with one microbatch."""
        return any(stage in (1, 2) for stage in self.zero.values())


class Walks:
    """The placements that named plans give the tensors of a trace, each computed once."""

    def __init__(self, trace: Trace) -> None:
        self.graph = read_trace(trace)
        self._known: dict[tuple[object, ...], dict[int, SpreadLabels]] = {}

    def spreads(self, plan: Parallelism, mesh: Mesh) -> dict[int, SpreadLabels]:
        """Return axis of a plan → the placements on it, for axes with more than one device.

        Args:
            plan: the plan.
            mesh: the mesh of the trace.

        Raises:
            ConstraintError: if the plan cannot split an op.
        """
        axes = [axis for axis in axes_of(plan, mesh) if mesh.shape[axis] > 1]
        name = "data" if plan.name in ("ddp", "fsdp") else plan.name
        sizes = tuple(mesh.shape[axis] for axis in axes)
        if plan.kind in SIDES or not axes:
            return _spread_plan(self.graph, plan, mesh)
        key = name, plan.sequence, self._parts(plan, sizes)
        if key not in self._known:
            self._known[key] = _spread_plan(self.graph, plan, mesh)
        return dict.fromkeys(axes, next(iter(self._known[key].values())))

    def _parts(self, plan: Parallelism, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of axes if placements depend on them: for experts, and for a batch that
        they do not divide."""
        is_experts = plan.name.startswith("expert_parallel")
        is_split_evenly = bool(plan.kind) or plan.name == "context_parallel"
        if not is_experts and (is_split_evenly or _batch_of(self.graph) % math.prod(sizes) == 0):
            return ()
        return sizes


def resolve_named(
    trace: Trace, plans: Iterable[Parallelism], mesh: Mesh, walks: Walks | None = None
) -> Named:
    """Apply named plans to a trace.

    Args:
        trace: the trace.
        plans: the plans.
        mesh: the mesh of the trace.
        walks: the walks of the trace, if plans were applied to it before.

    Returns:
        The placements that the plans force.

    Raises:
        ConstraintError: if a plan cannot split an op. The error names the op.
    """
    plans = tuple(plans)
    if not plans:
        return Named()
    walks = walks or Walks(trace)
    on_axes = [
        _PlanOnAxis(plan, axis, labels)
        for plan in plans
        for axis, labels in walks.spreads(plan, mesh).items()
    ]
    rows: dict[str, list[tuple[int, LabelRow]]] = {}
    for on in on_axes:
        for name, row in on.labels.rows.items():
            rows.setdefault(name, []).append((on.axis, row))
    words = {on.axis: str(on.plan) for on in on_axes}
    grid = tuple(on.axis for on in on_axes if on.plan.kind in SIDES)
    sharded = {
        p.name: [on.axis for on in on_axes if on.shards_storage(p, mesh)] for p in trace.parameters
    }
    rests: dict[str, tuple[Rest, ...]] = {}
    for p in trace.parameters:
        placements = {on.axis: frozenset((on.placement_at_rest(p),)) for on in on_axes}
        rest = [placements.get(axis) for axis in range(len(mesh.axes))]
        rests[p.name] = _alternatives(p, rest, sharded[p.name], apart=bool(grid))
    return Named(
        rows={name: tuple(sorted(r, key=lambda x: x[0])) for name, r in rows.items()},
        rests=rests,
        plans=tuple(words.get(axis, "") for axis in range(len(mesh.axes))),
        grid=grid,
        gathered={name: frozenset(axes).intersection(grid) for name, axes in sharded.items()},
        separate=frozenset().union(*(on.labels.separate for on in on_axes)),
        zero={on.axis: on.plan.zero for on in on_axes if not on.plan.kind},
        expert_axes={
            p.name: frozenset(on.axis for on in on_axes if on.splits_reads(p))
            for p in trace.parameters
        },
        notes=tuple(
            dict.fromkeys(
                note for on in on_axes for note in notes_on(on.plan, walks.graph, on.labels)
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class _PlanOnAxis:
    """A named plan on one of its axes, with the placements that it gives the tensors there."""

    plan: Parallelism
    axis: int
    labels: SpreadLabels

    def placement_at_rest(self, p: Parameter) -> Placement:
        """Return the placement in which the plan leaves a parameter, before ZeRO shards it. Data
        parallelism replicates all parameters except `SpreadLabels.weights`."""
        if self.plan.kind or p.node in self.labels.weights:
            return self.labels.labels.get((p.node, 0), REPLICATE)
        return REPLICATE

    def splits_reads(self, p: Parameter) -> bool:
        """Return whether data parallelism reads a parameter in parts."""
        return p.node in self.labels.weights and self.placement_at_rest(p) != REPLICATE

    def shards_storage(self, p: Parameter, mesh: Mesh) -> bool:
        """Return whether a parameter that is read whole is stored in parts."""
        return self.placement_at_rest(p) == REPLICATE and (
            bool(self.plan.zero) or _is_side(self.plan, mesh, self.axis)
        )


def _spread_plan(graph: TraceIndex, plan: Parallelism, mesh: Mesh) -> dict[int, SpreadLabels]:
    """Return axis of a plan → the placements on it, for axes with more than one device."""
    axes = [axis for axis in axes_of(plan, mesh) if mesh.shape[axis] > 1]
    if not axes:
        return {}
    if plan.kind in SIDES:
        return _walk_grid(graph, plan, mesh, axes)
    if not plan.kind and plan.name != "context_parallel":
        sizes = [mesh.shape[axis] for axis in axes]
        return dict.fromkeys(axes, _data_parallel(graph, plan, sizes))
    labels = (_tensor_parallel if plan.kind else _context_parallel)(graph, plan)
    if plan.sequence:
        labels = with_sequence(graph, plan, labels)
        if labels.failure is not None:
            _refuse_part(graph, plan, labels)
    return dict.fromkeys(axes, labels)


def _walk_grid(
    graph: TraceIndex, plan: Parallelism, mesh: Mesh, axes: Sequence[int]
) -> dict[int, SpreadLabels]:
    """Return axis → the placements on it, for these axes of a grid."""
    side_of = dict(zip(plan.axes or (), SIDES[plan.kind or ""], strict=True))
    of_samples = [mesh.shape[axis] for axis in axes if side_of[mesh.names[axis]] is None]
    samples, sides = _data_parallel(graph, plan, of_samples), walk_sides(graph, plan)
    for labels in sides.values():
        if labels.failure is not None:
            _refuse(
                graph,
                plan,
                labels.failure.node,
                "it cannot read the shards that the previous ops return",
            )
    return {axis: sides[side] if (side := side_of[mesh.names[axis]]) else samples for axis in axes}


def _is_side(plan: Parallelism, mesh: Mesh, axis: int) -> bool:
    """Return whether parameters are stored split over an axis of a grid: all axes except the
    depth."""
    return (
        plan.kind in SIDES
        and mesh.names[axis] in (plan.axes or ())[: 2 if plan.kind == "2.5d" else None]
    )


def _alternatives(
    p: Parameter, rest: Sequence[frozenset[Placement] | None], axes: Sequence[int], *, apart: bool
) -> tuple[Rest, ...]:
    """Return the alternatives for the storage of a parameter.

    In the first ones some dim is split over each of `axes`, in later ones over fewer of them, and
    in the last one over none. With `apart`, dims that no other axis splits come first.
    """
    shards = frozenset(Shard(dim) for dim, size in enumerate(p.view) if size > 1)
    used_dims = frozenset(
        placement
        for axis, allowed in enumerate(rest)
        if axis not in axes
        for placement in allowed or ()
    )
    subsets = [
        some for count in range(len(axes), -1, -1) for some in itertools.combinations(axes, count)
    ]
    choices = (
        (some, dims)
        for some in subsets
        for dims in ((shards - used_dims, shards) if apart and shards - used_dims else (shards,))
    )
    return tuple(
        tuple(dims if axis in some else allowed for axis, allowed in enumerate(rest))
        for some, dims in choices
    )


def _batch_of(graph: TraceIndex) -> int:
    """Return the number of samples: dim 0 of the first input that has one; 0 if there is none."""
    return next((i.shape[0] for i in graph.trace.inputs if i.shape), 0)


def _data_parallel(graph: TraceIndex, plan: Parallelism, sizes: Sequence[int]) -> SpreadLabels:
    """Split every input over its dim 0, on axes of these sizes, and propagate.

    Experts are split as well if the plan requests it.
    """
    inputs, batch = [i for i in graph.trace.inputs if i.shape], _batch_of(graph)
    split = {i.node: Shard(0) for i in inputs if i.shape[0] == batch and batch > 1}
    if not split:
        message = f"{plan}: no input has a batch dim (dim 0) to shard"
        raise ConstraintError(
            message, remedy="plan with more than one sample in the batch, or remove the constraint"
        )
    policy = Policy(split, slices=True)
    experts = plan.name.startswith("expert_parallel")
    labels = (
        by_experts(graph, plan, policy, batch, sizes)
        if experts
        else SampleWalk(graph, policy, batch, sizes).run()
    )
    check_batch(plan, batch, sizes)  # `by_experts` has raised its own errors before
    if labels.failure is not None:
        _refuse(
            graph,
            plan,
            labels.failure.node,
            "the batch is sharded, but it cannot compute on a shard of the batch",
        )
    return labels


def _context_parallel(graph: TraceIndex, plan: Parallelism) -> SpreadLabels:
    """Split every input over its dim 1, the sequence, and propagate. The walk ends at nodes that
    read all of it."""
    labels = along_sequence(graph)
    if labels is None:
        raise nothing_to_split(plan, "no input has a sequence dim (dim 1) to shard")
    if labels.failure is not None:
        _refuse_part(graph, plan, labels)
    return labels


def _tensor_parallel(graph: TraceIndex, plan: Parallelism) -> SpreadLabels:
    """Split weights and propagate."""
    labels = by_columns(graph, plan)
    if labels.failure is not None:
        _refuse(
            graph,
            plan,
            labels.failure.node,
            ("it cannot read the shards that the previous ops return"),
        )
    return labels


def _refuse_part(graph: TraceIndex, plan: Parallelism, labels: SpreadLabels) -> NoReturn:
    """Raise the error for a node that cannot compute on a part of the sequence.

    It states which dim was taken for the sequence, and what the node reads.
    """
    assert labels.failure is not None, "a node refuses"
    inputs = [i for i in graph.trace.inputs if isinstance(labels.labels.get((i.node, 0)), Shard)]
    inputs_text = " and ".join(f"dim 1 of input {i.path}, {list(i.shape)}" for i in inputs)
    read = zip(
        graph.reads[labels.failure.node], graph.calls[labels.failure.node].inputs, strict=True
    )
    parts = " and ".join(
        f"{tensor.shape} as {label}"
        for ref, tensor in read
        if isinstance(label := labels.labels.get(ref), Shard)
    )
    if all(len(i.shape) == 2 and i.dtype.is_floating_point for i in inputs):
        why = (
            f"{inputs_text}, which is the features dim of (batch, features), is sharded as a "
            "sequence, but it reads all features"
        )
        remedy = (
            "remove the constraint, which is for inputs with a sequence; ddp(), fsdp() and"
            " tensor_parallel() shard other dims"
        )
        _refuse(graph, plan, labels.failure.node, f"{why}: it has {parts}", remedy)
    split = (
        f"the sequence ({inputs_text}) is sharded, but it cannot compute on a shard of the sequence"
    )
    _refuse(graph, plan, labels.failure.node, f"{split}: it reads {parts}")


def _refuse(
    graph: TraceIndex,
    plan: Parallelism,
    name: str,
    why: str,
    remedy: str = "remove the constraint, or use other axes for it",
) -> NoReturn:
    node = graph.nodes[name]
    message = f"{plan} cannot hold: at {node.meta['key']}, {why}"
    raise ConstraintError(message, where=where_of(node), remedy=remedy)
