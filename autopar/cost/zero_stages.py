"""ZeRO stages: the three layouts of a parameter in a step with several microbatches.

    storage   layout between steps, also of its optimizer state
    working   layout that microbatches read: gathered once at the beginning of a step and held
              through it, or the storage layout
    sums      layout in which gradients are accumulated, possibly as partial sums over ranks, in
              fp32 or a wider dtype of the parameter; they are reduced to storage once, at the end
              of a step; a narrower gradient need not be cast before
              (`autopar.cost.gradient_dtypes`)

For each mesh axis over which the stored parameter is sharded, these are the stages of ZeRO
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
section 5). The table shows the elements that a device sends in a step, for Ψ elements over P
devices and M microbatches:

    stage   working      sums       moves
    1       gathered     partial    gathered once, reduced once: 2Ψ(P−1)/P
    2       gathered     sharded    gathered once, reduced per microbatch: (1 + M)Ψ(P−1)/P
    3       as stored    sharded    gathered once or twice per microbatch, reduced per microbatch:
                                    2MΨ(P−1)/P or 3MΨ(P−1)/P

If the stored parameter is replicated, its gradients are accumulated after each reduction, or as
partial sums that are reduced once. Each axis of each parameter has its own stage, and the planner
may mix them. Partial sums of a parameter that is gathered per use are not offered: they need more
memory than stage 1.

If several axes split a dim, only the innermost splitters can be gathered or summed alone. A forced
stage 1 or 2 on an outer axis involves the inner ones: once per step these are gathered first and
split again, so that the held tensor is still split over them.

A parameter that is stored on the hosts (`Layout.host`) is copied to the devices once per step, and
held there in its storage layout or gathered; or it is copied once per use. Sums are on the devices,
and are copied to the hosts at the end of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.trace import Parameter
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import all_layouts
from autopar.core.mesh import Mesh
from autopar.core.placements import PARTIAL, REPLICATE
from autopar.core.problem import Op, OpStrategy
from autopar.core.redistribute import Step, cheapest_chain
from autopar.core.stored_placements import storable
from autopar.cost.op_times import CollectivePrices
from autopar.errors import ConstraintError, LayoutError
from autopar.kernels.collectives import sum_dtype
from autopar.sharding import Forced

ZeroStages = Mapping[int, int]
"""Mesh axis → the ZeRO stage that is forced on it; 0 if parameters are stored whole."""

_MOST_TOLD = 8  # largest number of layouts in an error message


@dataclass(frozen=True, slots=True)
class HeldLayouts:
    """The three layouts of a parameter (see the module docstring).

    Without a gradient, `sums` is the storage layout.
    """

    storage: Layout
    working: Layout
    sums: Layout


def parameter_layouts(strategy: OpStrategy) -> HeldLayouts:
    """Return the three layouts of a parameter in a strategy."""
    working = strategy.layouts.outputs[0]
    storage = strategy.storage or working
    return HeldLayouts(
        storage, working, strategy.layouts.inputs[0].plain if strategy.layouts.inputs else storage
    )


def in_plan_form(strategy: OpStrategy) -> tuple[Strategy, ...]:
    """Convert a strategy of an op other than a cluster to the form of plans: the layouts that the
    graph sees, then the storage layout if it differs."""
    op_strategy, at = strategy.layouts, strategy.storage
    return (
        (op_strategy,)
        if at is None
        else (op_strategy, Strategy((at,) if op_strategy.inputs else (), (at,)))
    )


def own_time_s(op: Op, strategy: int) -> float:
    """Return the seconds of one instance of an op, without its internal collectives.

    The collectives of a parameter at the beginning and the end of a step are not counted either.
    """
    chosen = op.strategies[strategy]
    return (
        chosen.time_s - chosen.communication_s
        if op.kind in ("compute", "parameter")
        else chosen.time_s
    )


def held_ways(
    storage: Layout, mesh_shape: Sequence[int], *, trained: bool, stages: ZeroStages
) -> Iterator[HeldLayouts]:
    """Yield every way to hold a parameter.

    Args:
        storage: its storage layout.
        mesh_shape: devices per mesh axis.
        trained: whether it has a gradient.
        stages: the forced ZeRO stages.
    """
    # An inner part of a stored dim is split in mesh order only. So there may be no storage layout
    # whose innermost splitters are the axes of forced stages, and these axes are ignored below.
    through = frozenset(axis for axis, stage in stages.items() if stage in (1, 2))
    axes = [axis for axis, size in enumerate(mesh_shape) if size > 1]
    options = [list(_on_axis(storage.placements[axis], trained, stages.get(axis))) for axis in axes]
    for chosen in itertools.product(*options):
        working, sums = list(storage.placements), list(storage.placements)
        for axis, (reads, adds) in zip(axes, chosen, strict=True):
            working[axis], sums[axis] = reads, adds
        way = HeldLayouts(storage, Layout(working, storage.order), Layout(sums, storage.order))
        if _inner(storage, way.working, through) and _inner(storage, way.sums, through):
            yield way
            if storage.host and way.working == storage.on_device():
                yield replace(way, working=storage)


def _on_axis(
    rests: Placement, trained: bool, stage: int | None
) -> Iterator[tuple[Placement, Placement]]:
    """Yield pairs of placements on one axis: of the working layout and of the sums."""
    if not isinstance(rests, Shard):
        yield from ((rests, REPLICATE), (rests, PARTIAL)) if trained else ((rests, REPLICATE),)
        return
    stages = {1: (REPLICATE, PARTIAL), 2: (REPLICATE, rests), 3: (rests, rests)}
    allowed = {None: (1, 2, 3), 1: (1, 2)}.get(
        stage, (stage,)
    )  # a gradient without partial sums has stage 2
    yield from (
        pair for number, pair in stages.items() if number in allowed and (trained or number > 1)
    )


def _inner(storage: Layout, other: Layout, through: frozenset[int]) -> bool:
    """Return whether, for each split dim, the axes that do not split it in `other` are its
    innermost splitters. Axes in `through` are ignored."""
    for dim in {p.dim for p in storage.placements if isinstance(p, Shard)}:
        gone = [
            not isinstance(other.placements[axis], Shard)
            for axis in storage.splitters(dim)
            if axis not in through
        ]
        if gone != sorted(gone):
            return False
    return True


@dataclass
class StepMoves:
    """The collectives of parameters at the beginning and at the end of a step.

    Args:
        mesh_shape: devices per mesh axis.
        price: seconds of a collective, alone and as a share of a bucket.
        num_microbatches: microbatches of a step, among which its time is divided.
    """

    mesh_shape: tuple[int, ...]
    price: CollectivePrices
    num_microbatches: int

    def __post_init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Step, ...]] = {}

    def gathers(self, p: Parameter, held: HeldLayouts) -> tuple[Step, ...]:
        """Return the collectives from the storage to the working layout, in order.

        Their seconds are per microbatch. `seconds` counts them as shares of buckets.

        Raises:
            LayoutError: if no collectives lead there.
        """
        return self._chain(p.view, p.compute_dtype, held.storage, held.working)

    def reduces(self, p: Parameter, held: HeldLayouts) -> tuple[Step, ...]:
        """Return the collectives from the sums to the storage layout (see `gathers`)."""
        return (
            self._chain(p.view, sum_dtype(p.dtype), held.sums, held.storage)
            if p.gradient is not None
            else ()
        )

    def seconds(self, p: Parameter, held: HeldLayouts) -> float | None:
        """Return the seconds of `gathers` and `reduces` per microbatch; None if no collectives lead
        there."""
        try:
            return sum(step.counted_s for step in (*self.gathers(p, held), *self.reduces(p, held)))
        except LayoutError:
            return None

    def _chain(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: Layout, target: Layout
    ) -> tuple[Step, ...]:
        key = shape, dtype, source, target
        if key not in self._known:
            steps = cheapest_chain(
                shape, dtype, self.mesh_shape, source, target, self.price, self.price.share
            )
            num = self.num_microbatches
            self._known[key] = tuple(step.divide(num) for step in steps)
        return self._known[key]


def stage_on(held: HeldLayouts, axis: int) -> int:
    """Return the ZeRO stage on a mesh axis; 0 if the stored parameter is replicated there.

    Args:
        held: the layouts of the parameter.
        axis: index of the mesh axis.
    """
    if not isinstance(held.storage.placements[axis], Shard):
        return 0
    if isinstance(held.sums.placements[axis], Partial):
        return 1
    return 2 if held.working.placements[axis] == REPLICATE else 3


def cannot_rest(
    p: Parameter, forced: Forced, layouts: Sequence[Layout], mesh: Mesh
) -> ConstraintError:
    """Return the error for a parameter without a storage layout.

    Args:
        p: the parameter.
        forced: the constraints.
        layouts: the layouts that the mesh and the constraints allow.
        mesh: the mesh.
    """
    asked = forced.describe_storage(p.name)
    message = f"{p.name} of shape {p.shape} cannot be stored as {asked} on mesh {mesh}"
    if not forced.filter_storage(p.name, layouts):
        some = (
            layout
            for layout in all_layouts(p.view, mesh.shape)
            if storable(p.shape, p.view, layout, mesh.shape)
        )
        possible_layouts = sorted(
            {str(layout) for layout in forced.filter_storage(p.name, list(some))}
        )
        listed = ", ".join(possible_layouts[:_MOST_TOLD]) + (
            f" and {len(possible_layouts) - _MOST_TOLD} more"
            if len(possible_layouts) > _MOST_TOLD
            else ""
        )
        possible = (
            f"{message}: with its other constraints it can be stored as {listed or 'nothing'}"
        )
        return ConstraintError(possible, remedy="force one of these, or drop a constraint")
    inner_parts = (
        f"{message}: these are dims of {tuple(p.view)}, and a DTensor cannot shard two inner parts "
        "of a dim, or one part out of mesh order"
    )
    return ConstraintError(
        inner_parts,
        remedy=(
            "shard one part of it, such as heads, over axes in mesh order, and another dim over"
            " other axes"
        ),
    )
