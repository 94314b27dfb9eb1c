"""Reprices the decisions of a plan: the seconds of its step on another profile, with all layouts
and collectives of the plan.

Compute is priced as in planning, for the strategies of the plan. Communication is the emitted
collectives of the plan, priced on the links of the profile. Communication that the plan overlaps
with compute is overlapped in the repriced step, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.analysis.fusable import NORMED, normed_after
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.core.hardware import Hardware, HardwareProfile, profile_of
from autopar.core.layout import Strategy
from autopar.core.mesh import Mesh
from autopar.core.streams import Load, work
from autopar.cost.expert_routes import saved_of
from autopar.cost.kernel_times import KernelSite, seconds_saved, terms_of
from autopar.cost.op_times import CollectivePrices
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced, Source, output_broadcast_s
from autopar.cost.zero_stages import in_plan_form, own_time_s
from autopar.emit.context import (
    buffer_key,
    input_key,
    output_key,
    parameter_key,
    placeholder_keys,
    storage_key,
)
from autopar.emit.kernel_calls import product_of
from autopar.errors import PlanError
from autopar.planner.pipeline.step_schedule import scheduled_time
from autopar.plans import Communication, Plan, counted_time, moved_load
from autopar.request import UNLIMITED, PlanOptions
from autopar.rules import call_of, operands_of
from autopar.sharding import Forced, classes_of, resolve
from autopar.stages import cut_trace

_KEYS = {"parameter": parameter_key, "buffer": buffer_key, "input": input_key, "output": output_key}


def reprice_plan(
    plan: Plan, trace: Trace, mesh: Mesh, hardware: Hardware, options: PlanOptions
) -> float:
    """Compute the seconds of a step with the plan's decisions, on a mesh with the same axes and
    possibly other links.

    Args:
        plan: the plan.
        trace: the trace of one microbatch.
        mesh: the mesh.
        hardware: the hardware.
        options: the options that the plan was made with.

    Raises:
        PlanError: if a decision is not possible here.
    """
    pipeline = plan.as_pipeline
    times = [
        _phases(part, part.priced.profile, pipeline.num_microbatches)
        for part in problems_of(plan, trace, mesh, hardware, options)
    ]
    handed_s = output_broadcast_s(pipeline.axis, mesh, hardware, pipeline.handed_bytes)
    return (
        scheduled_time(
            pipeline.schedule,
            [f for f, _ in times],
            [b for _, b in times],
            pipeline.num_microbatches,
            pipeline.num_chunks,
        )
        + handed_s
    )


@dataclass(frozen=True, slots=True)
class PlanPart:
    """The plan of a stage and its problem.

    Attributes:
        plan: the plan of the stage.
        trace: the trace of the stage.
        mesh: the mesh without the pipeline axis.
        priced: the problem on the devices of the stage.
        shared: parameters that other stages hold, too.
    """

    plan: Plan
    trace: Trace
    mesh: Mesh
    priced: Priced
    shared: Collection[str]


def problems_of(
    plan: Plan, trace: Trace, mesh: Mesh, hardware: Hardware, options: PlanOptions
) -> Iterator[PlanPart]:
    """Generate the plans of the stages in order, each with the problem on its devices.

    The problems have no memory limit. Tensors may cross in any layout, and copies of a parameter
    have the storage layout of the preceding stages.

    Args:
        plan, trace, mesh, hardware, options: as in `reprice_plan`.
    """
    pipeline = plan.as_pipeline
    stage_mesh = mesh.without(pipeline.axis)
    forced = resolve(
        trace, [c for c in options.constraints if not isinstance(c, Pipelined)], stage_mesh
    )
    parts = cut_trace(trace, pipeline.positions)
    for number, (staged, stage) in enumerate(zip(pipeline.stages, parts.stages, strict=True)):
        here, crossing = (
            replace(forced, starts=staged.starts),
            Crossing.links_along(pipeline.axis, mesh, hardware, number),
        )
        profile = profile_of(hardware, pipeline.axis, number)
        priced = _price_trace(
            stage, stage_mesh, profile, options, here, crossing, pipeline.num_microbatches
        )
        yield PlanPart(staged, stage, stage_mesh, priced, parts.shared)
        chosen = staged.node_choices()
        shared = [p.name for p in stage.parameters if p.name in parts.shared]
        rests = {
            name: chosen.get(storage_key(name), chosen[parameter_key(name)]).outputs[0]
            for name in shared
        }
        forced = replace(forced, storage={**forced.storage, **rests})


def _phases(part: PlanPart, profile: HardwareProfile, num: int) -> tuple[float, float]:
    """Compute the seconds of a stage's microbatch, in forward and in all else."""
    plan, mesh, priced = part.plan, part.mesh, part.priced
    strategies, again = decisions(priced, plan)
    ops = priced.problem.ops
    loads = [Load(), Load()]  # forward, all else
    for op, s in zip(ops, strategies, strict=True):
        first = op.kind == "input" or (op.kind == "compute" and op.phase == "forward")
        loads[0 if first else 1] += work(
            op.phase, op.count * own_time_s(op, s), compute=op.kind == "compute"
        )
    loads[1] = sum(
        (
            work("backward", ops[i].count * own_time_s(ops[i], s), compute=True)
            for i, s in again.items()
        ),
        loads[1],
    )
    sizes, links = mesh.shape, [mesh.link(axis) for axis in range(len(mesh.axes))]
    for c in plan.communications:
        link = links[c.collective.axis] if c.collective.axis >= 0 else ""
        once_s = counted_time(c, c.collective.size_in(sizes), link, profile)
        saved_s = len(c.instances) * _saved_s(part, c, once_s, profile)
        loads[0 if c.phase == "forward" else 1] += moved_load(
            c, len(c.instances) * once_s / (num if c.phase == "step" else 1), saved_s
        )
    forward, rest = (load.least_s(profile.overlap_slowdown) for load in loads)
    return forward, rest


def _saved_s(part: PlanPart, c: Communication, once_s: float, profile: HardwareProfile) -> float:
    """Compute the seconds that a kernel saves of one instance of a collective and its product; 0 if
    there is no kernel."""
    if c.kernel is None:
        return 0.0
    key = c.node.format(*c.instances[0])
    crossing = placeholder_keys(part.trace)
    source_node = next(
        n for n in part.trace.graph.nodes if crossing.get(n.name, n.meta.get("key")) == key
    )
    chosen = part.plan.recomputed_choices() if c.kernel.again else part.plan.node_choices()
    if c.own:
        return saved_of(
            call_of(source_node), chosen[key], CollectivePrices(part.mesh, profile), profile, c
        )
    product, gathers = product_of(source_node, c), c.collective.kind == "all_gather"
    call, dim = call_of(product), c.collective.dim
    if gathers:
        terms = terms_of(call)
        dim = terms[2].index(terms[operands_of(product).index(source_node)][dim])
    strategy, sizes = chosen[product.meta["key"]], tuple(part.mesh.shape)
    adds = not gathers and product is not source_node
    after = normed_after(product) if c.kernel.name == NORMED else None
    normed = tuple((call_of(node), chosen[node.meta["key"]]) for node in after or ())
    site = KernelSite(
        call, strategy, sizes, c.collective.kind, sizes[c.collective.axis], dim, adds, normed
    )
    return seconds_saved(site, once_s, profile)[0]


def decisions(priced: Priced, plan: Plan) -> tuple[tuple[int, ...], dict[int, int]]:
    """Look up the plan's strategy of each op, and of each recomputed op, as indices of the
    problem's strategies.

    Raises:
        PlanError: if a decision is not possible here.
    """
    return tuple(_find_strategies(priced, plan.node_choices()).values()), _find_strategies(
        priced, plan.recomputed_choices(), every=False
    )


def _price_trace(
    trace: Trace,
    mesh: Mesh,
    profile: HardwareProfile,
    options: PlanOptions,
    forced: Forced,
    crossing: Crossing,
    num: int,
) -> Priced:
    """Price the trace of one of `num` microbatches per step."""
    classes = classes_of(trace, mesh.shape, forced)
    return price(
        trace,
        classes,
        mesh,
        profile,
        budget_bytes=UNLIMITED,
        optimizer=options.optimizer,
        forced=forced,
        crossing=crossing,
        num_microbatches=num,
        all_ways=True,
    )


def _find_strategies(
    priced: Priced, chosen: Mapping[str, Strategy], *, every: bool = True
) -> dict[int, int]:
    """Map ops to the plan's strategies, as indices of the problem's strategies. With `every`, all
    ops are mapped, else those that `chosen` contains."""
    strategies: dict[int, int] = {}
    for index, (op, source) in enumerate(zip(priced.problem.ops, priced.sources, strict=True)):
        if source.cluster is not None:
            keys = [m.key for m in source.cluster.first.members]
            offered: list[tuple[Strategy, ...]] = [s.members for s in source.cluster.strategies]
        else:
            keys = [_KEYS[source.kind](source.names[0])]
            offered = [in_plan_form(s) for s in op.strategies]
            keys += [storage_key(source.names[0])] if source.kind == "parameter" else []
        if not every and keys[0] not in chosen:
            continue
        chosen_layouts = tuple(chosen[key] for key in keys if key in chosen)
        if chosen_layouts not in offered:
            raise _refusal(keys[0], source, chosen_layouts, priced.moves.mesh_shape)
        strategies[index] = offered.index(chosen_layouts)  # type: ignore[arg-type]
    return strategies


def _refusal(
    key: str, source: Source, wanted: Sequence[Strategy], mesh_shape: Sequence[int]
) -> PlanError:
    """Make the error for a decision that the problem does not offer. It names a tensor that cannot
    have its layout, if there is one."""
    message = f"the plan's decision for {key} is not possible here"
    members = () if source.cluster is None else source.cluster.first.members
    for member, strategy in zip(
        members, wanted, strict=False
    ):  # a plan of another model may have fewer strategies
        tensors = (*member.call.inputs, *member.call.outputs)
        for tensor, layout in zip(tensors, (*strategy.inputs, *strategy.outputs), strict=False):
            if not layout.fits(tensor.shape, mesh_shape):
                sizes = " and ".join(map(str, mesh_shape))
                has = "it has" if member.key == key else f"{member.key} has"
                why = (
                    f"{has} a tensor of shape {tensor.shape}, which cannot have layout"
                    f" {str(layout)!r} over axes of {sizes} devices"
                )
                remedy = "use smaller axes, or plan for that mesh"
                return PlanError(f"{message}: {why}", where=member.call.where, remedy=remedy)
    return PlanError(
        f"{message}: the rules and constraints do not allow it",
        remedy="plan again for this model and mesh",
    )
