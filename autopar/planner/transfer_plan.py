"""Transfers the decisions of a plan to a mesh with other axes or sizes, and predicts their time and
memory there.

All ops run in the layouts of the plan, and all values have its layouts at rest, when they cross
between stages and when they are kept. Cuts, schedule and the number of microbatches are those of
the plan. Redistributions are the cheapest on the new mesh. Collectives share buckets and start
early as in a plan made for that mesh, so a plan transferred to its own mesh keeps its predictions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.capture.trace import Trace
from autopar.constraints import Megatron
from autopar.constraints.together import axes_from, constraints_on_mesh
from autopar.core.hardware import Hardware, HardwareProfile, profile_of
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.core.solution import Solution
from autopar.core.stored_placements import storable
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced, output_broadcast_s
from autopar.emit.context import input_key, parameter_key, placeholder_keys, storage_key
from autopar.errors import ChangedPlanError, PlanError
from autopar.planner.candidates import Candidate
from autopar.planner.clock import Clock
from autopar.planner.comm_schedule import Peaks, StageSchedule
from autopar.planner.emitter import Emitter
from autopar.planner.learned_moments import LayerGroups
from autopar.planner.pipeline.assemble import RankBudgets
from autopar.planner.pipeline.stage_cache import StageCache
from autopar.planner.pipeline.step_schedule import step_of
from autopar.planner.reprice import decisions
from autopar.planner.search import Planned
from autopar.plans import Entry, Kept, NodeChoice, Overlap, Pipeline, Plan
from autopar.program.executor import ReturnedOutputs
from autopar.program.program import Program
from autopar.request import PlanOptions
from autopar.sharding import Forced, classes_of, resolve
from autopar.sharding.presets.tensor import around_softmax
from autopar.stages import cut_trace

# --------------------------------------------------------------------------------------------------
# The decisions of a plan on a mesh with other axes. Axes correspond by name.
#
# An axis of the plan that the mesh lacks has size 1 there, so tensors that were split over it are
# whole. Over an axis that the plan lacks, all tensors are replicated, and its devices do the same
# work. The same holds for an axis of size 1.


def stages_on(plan: Plan, mesh: Mesh) -> tuple[Plan, ...]:
    """Return the plans of the stages, with all layouts on the axes of another mesh and without
    communications.

    Args:
        plan: the plan.
        mesh: the other mesh.

    Raises:
        PlanError: if no axis name is common to both meshes, or the size of the pipeline axis
            differs.
    """
    _check(plan, mesh)
    stage_mesh = mesh.without(plan.stage_axis)
    return tuple(_decisions(stage, stage_mesh) for stage in plan.stages)


def notes(plan: Plan, mesh: Mesh) -> tuple[str, ...]:
    """Describe the axes that only one of the two meshes has, one sentence each."""
    return tuple(_notes(plan, mesh))


def _notes(plan: Plan, mesh: Mesh) -> Iterator[str]:
    before = {axis.name: axis.size for axis in plan.mesh.axes}
    for axis in mesh.axes:
        if axis.size > 1 and before.get(axis.name, 1) == 1:
            why = "is new" if axis.name not in before else "has size 1 in the plan"
            yield (
                f"axis {axis.name!r} {why}: with the plan's decisions its {axis.size} devices"
                " repeat the same work"
            )
    for name, size in before.items():
        if size > 1 and name not in mesh.names:
            yield (
                f"axis {name!r} of the plan is not in this mesh: it has size 1 here, and tensors"
                " that the plan shards over it are replicated"
            )


def _check(plan: Plan, mesh: Mesh) -> None:
    if not set(plan.mesh.names) & set(mesh.names):
        message = (
            f"the plan is for {plan.mesh}, but this mesh is {mesh}: they have no common axis name"
            " through which decisions could be transferred"
        )
        raise PlanError(
            message,
            remedy=(
                f"name the axes as in the plan, {', '.join(plan.mesh.names)}, or plan for this mesh"
            ),
        )
    name, num = plan.stage_axis, len(plan.stages)
    size, planned_size = ({a.name: a.size for a in m.axes}.get(name, 1) for m in (mesh, plan.mesh))
    if size != planned_size:
        message = (
            f"the plan has {num} stages along {name!r}, {planned_size} devices, but the axis has "
            f"size {size} in mesh {mesh}"
        )
        raise PlanError(
            message,
            remedy=(
                f"use a mesh with {name}={planned_size} and any other axes, or plan for this mesh"
            ),
        )


def _decisions(plan: Plan, mesh: Mesh) -> Plan:
    axes = axes_from(plan.mesh, mesh)
    entries = tuple(_entry(entry, axes) for entry in plan.entries)
    kept_values = tuple(_kept_of_axis(value, axes) for value in plan.kept)
    return replace(
        plan, mesh=mesh, entries=entries, kept=kept_values, communications=(), buckets=()
    )


def _entry(entry: Entry, axes: Sequence[int | None]) -> Entry:
    nodes, again = (
        tuple(NodeChoice(c.node, _strategy(c.strategy, axes)) for c in choices)
        for choices in (entry.nodes, entry.recompute)
    )
    if (
        entry.kind == "parameter" and len(nodes) > 1 and nodes[0].strategy == nodes[1].strategy
    ):  # the layout in use is the storage layout
        nodes = nodes[:1]
    return replace(entry, nodes=nodes, recompute=again)


def _strategy(strategy: Strategy, axes: Sequence[int | None]) -> Strategy:
    inputs, outputs = (
        tuple(layout.over(axes) for layout in layouts)
        for layouts in (strategy.inputs, strategy.outputs)
    )
    return Strategy(inputs, outputs)


def _kept_of_axis(kept: Kept, axes: Sequence[int | None]) -> Kept:
    layouts: dict[Layout, None] = dict.fromkeys(layout.over(axes) for layout in kept.layouts)
    return replace(kept, layouts=tuple(layouts))


@dataclass(frozen=True, slots=True)
class TransferredPlan:
    """Seconds of a step, and peak bytes of a device by index along the pipeline axis."""

    step_s: float
    peaks: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest device, in bytes."""
        return max(self.peaks)


def carry_plan(
    plan: Plan,
    trace: Trace,
    mesh: Mesh,
    hardware: Hardware,
    options: PlanOptions,
    batch_bytes: int,
    returned: ReturnedOutputs,
) -> TransferredPlan:
    """Predict the time and memory of a plan's decisions on another mesh.

    Args:
        plan: the plan.
        trace: the trace of one microbatch.
        mesh: the other mesh.
        hardware: the hardware.
        options: the options, with the constraints as the plan records them.
        batch_bytes: bytes of the whole batch.
        returned: the values that a call returns.

    Raises:
        PlanError: if a decision is not possible on the mesh, no axis name is common to both meshes,
            or the size of the pipeline axis differs.
        ConstraintError: if a recorded constraint cannot hold on the mesh.
    """
    there = replace(plan.as_pipeline, stages=stages_on(plan, mesh))
    carrier = _Carrier(
        mesh.without(there.axis),
        there.num_microbatches,
        options,
        _force_constraints(plan, trace, mesh, options),
    )
    sharing = _share_memory(plan, there, hardware, options, batch_bytes, returned)
    planned = [
        _planned_of(carrier.emit(piece, Crossing.links_along(there.axis, mesh, hardware, number)))
        for number, piece in enumerate(_pieces(plan, there, trace, hardware, sharing))
    ]
    step_s = step_of(
        there.schedule,
        [each.plan for each in planned],
        there.num_microbatches,
        there.num_chunks,
    )
    step_s += output_broadcast_s(there.axis, mesh, hardware, there.handed_bytes)
    return TransferredPlan(step_s, tuple(rank.peak_bytes for rank in sharing.ranks(planned)))


@dataclass(frozen=True, slots=True)
class _CarriedPiece:
    """The plan of a stage on the other mesh.

    Attributes:
        has_kernels: whether the plan uses collective-overlap kernels.
        schedule: the schedule; None if the batch is not divided into microbatches.
        in_flight: microbatches in flight.
    """

    plan: Plan
    trace: Trace
    profile: HardwareProfile
    budget: int
    has_kernels: bool
    schedule: StageSchedule | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class _Carrier:
    """Emits the plans of stages on the other mesh.

    Attributes:
        mesh: the mesh of a stage.
        num_microbatches: the number of microbatches per step.
    """

    mesh: Mesh
    num_microbatches: int
    options: PlanOptions
    forced: Forced
    stage_cache: StageCache = field(default_factory=StageCache)

    def emit(self, piece: _CarriedPiece, crossing: Crossing) -> Candidate:
        """Emit the plan of a stage on this mesh, in the fastest order within its budget.

        Args:
            piece: the plan of the stage.
            crossing: the links to the stage's neighbours.
        """
        _check_inputs(piece, self.mesh, self.num_microbatches)
        priced = self._price_piece(piece, crossing)
        peaks = Peaks(self.options, piece.schedule, piece.in_flight, self.stage_cache)
        emitter = Emitter(
            piece.trace,
            self.mesh,
            self.options,
            Clock(lambda _: None),
            piece.plan.fingerprint,
            self.options.to_json(piece.profile),
            piece.budget,
            peaks,
        )
        strategies, again = decisions(priced, piece.plan)
        regions = None if piece.has_kernels else frozenset[int]()
        kept_versions = _kept_variants(priced, piece.plan, piece.trace)
        choices = Solution(strategies, again, kept_versions, 0.0, 0.0, regions=regions)
        candidate = emitter.emit(LayerGroups.of(piece.trace, priced, piece.plan.starts), choices)
        if emitter.fits(candidate):
            return emitter.order(candidate)
        return replace(
            candidate,
            plan=replace(candidate.plan, overlap=Overlap(priced.problem.overlap_slowdown)),
        )

    def _price_piece(self, piece: _CarriedPiece, crossing: Crossing) -> Priced:
        forced = replace(
            self.forced,
            starts=piece.plan.starts,
            storage={**self.forced.storage, **_storage_layouts(piece, self.mesh)},
        )
        return price(
            piece.trace,
            classes_of(piece.trace, self.mesh.shape, forced),
            self.mesh,
            piece.profile,
            budget_bytes=piece.budget,
            optimizer=self.options.optimizer,
            forced=forced,
            crossing=crossing,
            num_microbatches=self.num_microbatches,
            num_in_flight=piece.in_flight,
        )


def _force_constraints(plan: Plan, trace: Trace, mesh: Mesh, options: PlanOptions) -> Forced:
    """Resolve constraints on the plan's axes; other axes are free."""
    before, stage_mesh = plan.mesh.without(plan.stage_axis), mesh.without(plan.stage_axis)
    forced = resolve(
        trace, constraints_on_mesh(options.constraints, before, stage_mesh), stage_mesh
    )
    again = next(
        (c.recompute for c in options.constraints if isinstance(c, Megatron) and c.recompute), None
    )
    return replace(
        forced,
        recompute=again,
        softmax=around_softmax(trace) if again == "selective" else frozenset(),
    )


def _share_memory(
    plan: Plan,
    pipeline: Pipeline,
    hardware: Hardware,
    options: PlanOptions,
    batch_bytes: int,
    returned: ReturnedOutputs,
) -> RankBudgets:
    """Make the memory of the ranks. Stages that share a rank have the same shares of its budget as
    in the plan."""
    num, chunks = len(pipeline.stages), pipeline.num_chunks
    budgets = [
        options.budget(profile_of(hardware, pipeline.axis, rank)) for rank in range(num // chunks)
    ]
    sharing = RankBudgets(
        num,
        chunks,
        pipeline.num_in_flight,
        pipeline.num_microbatches,
        batch_bytes,
        returned,
        budgets,
        options,
        StageCache(),
    )
    shares = [
        share * budgets[n % len(budgets)] // plan.budget_of(n)
        for n, share in enumerate(pipeline.budgets)
    ]
    sharing.budgets = shares or sharing.budgets
    return sharing


def _pieces(
    plan: Plan, there: Pipeline, trace: Trace, hardware: Hardware, sharing: RankBudgets
) -> Iterator[_CarriedPiece]:
    """Generate the stages."""
    parts = cut_trace(trace, there.positions)
    for number, (old, new, part) in enumerate(
        zip(plan.stages, there.stages, parts.stages, strict=True)
    ):
        has_kernels = any(c.kernel for c in old.communications)
        schedule = sharing.schedule(there.schedule, number) if plan.pipeline else None
        profile = profile_of(hardware, there.axis, number)
        yield _CarriedPiece(
            new,
            part,
            profile,
            sharing.budgets[number],
            has_kernels,
            schedule,
            there.num_in_flight[number],
        )


def _planned_of(candidate: Candidate) -> Planned:
    prediction = replace(candidate.plan.prediction, peak_bytes=candidate.peak_bytes)
    program = Program.of_one_stage(candidate.draft.trace, candidate.program)
    return Planned(replace(candidate.plan, prediction=prediction), program, {})


def _check_inputs(piece: _CarriedPiece, mesh: Mesh, num: int) -> None:
    """Check that the batch, or a microbatch, can be split as in the plan.

    Raises:
        PlanError: if an input cannot be split; the error names the first one.
    """
    chosen = piece.plan.node_choices()
    for i in piece.trace.inputs:
        layout = (
            None
            if i.crosses or input_key(i.path) not in chosen
            else chosen[input_key(i.path)].outputs[0]
        )
        if layout is not None and not layout.fits(i.shape, mesh.shape):
            text = (
                f"each of the plan's {num} microbatches has input {i.path}"
                if num > 1
                else f"the plan has input {i.path}"
            )
            message = (
                f"{text} of shape {tuple(i.shape)}, which cannot have layout {str(layout)!r} on"
                f" mesh {mesh}"
            )
            fewer = ", with fewer microbatches" if num > 1 else ""
            raise PlanError(message, remedy=f"use smaller axes, or plan for that mesh{fewer}")


def _storage_layouts(piece: _CarriedPiece, mesh: Mesh) -> dict[str, Layout]:
    """Return the storage layouts of parameters, where they are possible on the mesh."""
    chosen, storages = piece.plan.node_choices(), {}
    for p in piece.trace.parameters:
        strategy = chosen.get(storage_key(p.name), chosen.get(parameter_key(p.name)))
        layout = None if strategy is None else strategy.outputs[0]
        if (
            layout is not None
            and layout.fits(p.view, mesh.shape)
            and storable(p.shape, p.view, layout, mesh.shape)
        ):
            storages[p.name] = layout
    return storages


def _kept_variants(priced: Priced, plan: Plan, trace: Trace) -> dict[int, tuple[int, ...]]:
    """Map variants to the versions that the plan keeps.

    Raises:
        ChangedPlanError: if a kept layout is not computed on this mesh.
    """
    layouts: dict[tuple[str, int], tuple[Layout, ...]] = {}
    for value_plan in plan.kept:
        layouts |= {
            (value_plan.node.format(*at), value_plan.result): value_plan.layouts
            for at in value_plan.instances
        }
    keys = placeholder_keys(trace)
    keys |= {n.name: n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    kept_versions: dict[int, tuple[int, ...]] = {}
    for v, refs in enumerate(priced.refs):
        value = priced.problem.values[priced.problem.variants[v].value]
        name, result = refs[0]
        layouts_of_value = layouts.get((keys[name], result), ())
        try:
            kept_versions |= (
                {v: tuple(map(value.version, layouts_of_value))} if layouts_of_value else {}
            )
        except KeyError:
            raise ChangedPlanError(
                f"the layout that the plan keeps of {keys[name]} is not computed here"
            ) from None
    return kept_versions
