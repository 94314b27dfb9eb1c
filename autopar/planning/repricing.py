"""A plan's decisions priced again: what the step takes on another profile, with every layout and every collective as in the plan.

Compute is priced as in planning, for the strategies that the plan names; communication is the plan's own collectives, which are
those that it is emitted with, on the profile's links; what counts as running beside compute does so there too.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.trace import Trace
from autopar.collective import collective_time
from autopar.constraints import Pipelined
from autopar.cost.held import offered_as, own_time_s
from autopar.cost.price import price
from autopar.cost.priced import Crossing, Priced
from autopar.emit.choices import buffer_key, input_key, output_key, parameter_key, storage_key
from autopar.errors import PlanError
from autopar.hardware import HardwareProfile
from autopar.layout import Strategy
from autopar.mesh import Mesh
from autopar.planning.options import PlanOptions
from autopar.planning.schedules import scheduled_time
from autopar.plans import Plan, moved_load
from autopar.solve import op_load
from autopar.stages import cut
from autopar.strategies import classes_of, resolve
from autopar.streams import Load, work

_KEYS = {"parameter": parameter_key, "buffer": buffer_key, "input": input_key, "output": output_key}
_NO_LIMIT = 2**60  # what fits does not bear on what it takes


def repriced(plan: Plan, trace: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions) -> float:
    """Seconds of a step with the plan's decisions, on a mesh of the same axes, whose links may be others.

    Args:
        trace: of the batch; of a plan with a pipeline, of one microbatch. options: those that the plan was made with.

    Raises:
        PlanError: where a decision is not one that can be taken here.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        return sum(_phases(plan, trace, trace, mesh, profile, options, Crossing(), 1))
    left = mesh.without(pipeline.axis) if pipeline.axis else mesh
    crossing = Crossing.along(pipeline.axis, mesh, profile)
    num = pipeline.num_microbatches
    stages = cut(trace, pipeline.positions).stages if pipeline.positions else (trace,)
    pairs = zip(pipeline.stages, stages, strict=True)
    times = [_phases(staged, stage, trace, left, profile, options, crossing, num) for staged, stage in pairs]
    return scheduled_time(pipeline.schedule, [f for f, _ in times], [b for _, b in times], num, pipeline.num_chunks)


def _phases(
    plan: Plan, trace: Trace, whole: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions, crossing: Crossing, num: int
) -> tuple[float, float]:
    """Of a step, or of a stage's microbatch, forward and all else; `whole` is the trace that constraints speak of."""
    priced = _priced(trace, whole, mesh, profile, options, crossing, num)
    strategies, again = decisions(priced, plan)
    ops = priced.problem.ops
    loads = [Load(), Load()]  # of forward, and of all else
    for op, s in zip(ops, strategies, strict=True):
        first = op.kind == "input" or (op.kind == "compute" and op.phase == "forward")
        loads[0 if first else 1] += work(op.phase, op.count * own_time_s(op, s), compute=op.kind == "compute")
    loads[1] = sum((op_load(priced.problem, i, s, again=True) for i, s in again.items()), loads[1])
    sizes, links = mesh.shape, [mesh.link(axis) for axis in range(len(mesh.axes))]
    for c in plan.communications:
        once_s = collective_time(c.collective, sizes[c.collective.axis], links[c.collective.axis], profile)
        loads[0 if c.phase == "forward" else 1] += moved_load(c, len(c.instances) * once_s / (num if c.phase == "step" else 1))
    forward, rest = (load.least_s(profile.overlap_slowdown) for load in loads)
    return forward, rest


def priced_for(plan: Plan, trace: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions) -> Priced:
    """The problem that a plan without a pipeline answers."""
    assert plan.pipeline is None, "stages have problems of their own"
    return _priced(trace, trace, mesh, profile, options, Crossing(), 1)


def decisions(priced: Priced, plan: Plan) -> tuple[tuple[int, ...], dict[int, int]]:
    """The plan's strategy per op, and per op that backward runs again, as indices into those of the problem.

    Raises:
        PlanError: where a decision is not one that can be taken here.
    """
    return tuple(_found(priced, plan.node_choices()).values()), _found(priced, plan.recomputed_choices(), every=False)


def _priced(trace: Trace, whole: Trace, mesh: Mesh, profile: HardwareProfile, options: PlanOptions, crossing: Crossing, num: int) -> Priced:
    forced = resolve(whole, [c for c in options.constraints if not isinstance(c, Pipelined)], mesh)
    classes = classes_of(trace, mesh.shape, forced)
    return price(
        trace, classes, mesh, profile, budget_bytes=_NO_LIMIT, optimizer=options.optimizer, forced=forced, crossing=crossing,
        num_microbatches=num,
    )  # fmt: skip


def _found(priced: Priced, chosen: Mapping[str, Strategy], *, every: bool = True) -> dict[int, int]:
    """Op → strategy of the problem that is the plan's; with `every` of all ops, else of those that the plan speaks of."""
    found: dict[int, int] = {}
    for index, (op, source) in enumerate(zip(priced.problem.ops, priced.sources, strict=True)):
        if source.cluster is not None:
            keys = [m.key for m in source.cluster.first.members]
            offered: list[tuple[Strategy, ...]] = [s.members for s in source.cluster.strategies]
        else:
            keys = [_KEYS[source.kind](source.names[0])]
            offered = [offered_as(s) for s in op.strategies]
            keys += [storage_key(source.names[0])] if source.kind == "parameter" else []
        if not every and keys[0] not in chosen:
            continue
        wanted = tuple(chosen[key] for key in keys if key in chosen)
        if wanted not in offered:
            raise PlanError(f"what the plan decides for {keys[0]} cannot be done here", remedy="plan again for this model and mesh")
        found[index] = offered.index(wanted)  # type: ignore[arg-type]
    return found
