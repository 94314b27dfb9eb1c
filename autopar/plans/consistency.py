"""Check plans that were read from files for contradictions. Only files that were edited by hand or
written by another program have any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from autopar.core.collective import HOST_KINDS
from autopar.core.schedules import SCHEDULES
from autopar.plans.parts import Overlap
from autopar.plans.stored import from_data

if TYPE_CHECKING:
    from autopar.plans.parts import NodeChoice
    from autopar.plans.plan import Pipeline, Plan


# --------------------------------------------------------------------------------------------------
# The options that a plan records: their names and types.

OPTIONS: Mapping[str, Any] = {
    "memory_bytes": int,
    "optimizer": str,
    "constraints": tuple[Any, ...],
    "strict": bool,
    "gap": float,
    "num_microbatches": int | Literal["auto"],
    "loss_rows": int | Literal["auto"],
    "precision": Literal["bf16", "fp16"] | None,
    "inference": bool,
    "batch": Literal["global", "local"],
    "outputs": Literal["full", "local", "dtensor", "loss", "auto"],
}
"""Name → annotation of the options that `autopar.request.PlanOptions` writes into a plan."""


def misfit_of_options(options: Mapping[str, Any]) -> str:
    """Check the options of a plan.

    Args:
        options: the options, as in the file.

    Returns:
        The first option that is unknown or has a value of another type, in words; ``""`` if there
        is none.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            return f"its option {name!r} is unknown"
        try:
            from_data(value, OPTIONS[name], f"options.{name}")
        except ValueError as error:
            return str(error)
    return ""


_FIELD = re.compile(r"\{(\d+)\}")  # index of a layer in a pattern


def find_contradiction(plan: Plan) -> str:
    """Find a contradiction in a plan whose fields have the right types, such as layouts of another
    mesh or a decision without nodes.

    Returns:
        The first contradiction in words; ``""`` if there is none.
    """
    mark, sizes = plan.fingerprint, {axis.name: axis.size for axis in plan.mesh.axes} | {"": 0}
    if sizes.get(mark.axis) != len(mark.profiles):
        return f"it names {len(mark.profiles)} profiles along {mark.axis!r} of mesh {plan.mesh}"
    if wrong := misfit_of_options(plan.options):
        return wrong
    for balance in (plan.proof.balance, *(case.balance for case in plan.proof.cases)):
        if not all(0.0 <= share <= 1.0 for share in balance):
            return f"its proof's balance is {balance}"
    if plan.pipeline is not None:
        return _of_stages(plan, plan.pipeline)
    checks = (_of_mesh, _of_decisions, _of_instances, _of_phases)
    wrong = next(filter(None, (check(plan) for check in checks)), "") or plan.overlap.misfit()
    if wrong:
        return wrong
    if plan.loss_rows < 0:
        return f"its loss processes {plan.loss_rows} rows at a time"
    if any(not cuts or list(cuts) != sorted(set(cuts)) for cuts in plan.starts.values()):
        return f"its groups of layers are {dict(plan.starts)}"
    return ""


def _of_mesh(plan: Plan) -> str:
    """Return the first layout, axis or dtype that does not exist or does not fit its mesh."""
    num_axes = len(plan.mesh.axes)
    layouts = [x for c in _choices(plan) for x in (*c.strategy.inputs, *c.strategy.outputs)]
    layouts += [x for k in plan.kept for x in k.layouts] + [
        x for c in plan.communications for x in (c.source, c.target)
    ]
    layouts += [m.target for bucket in plan.buckets for m in bucket.members]
    for layout in layouts:
        if len(layout.placements) != num_axes:
            return (
                f"layout {str(layout)!r} has {len(layout.placements)} placements, but mesh "
                f"{plan.mesh} has {num_axes} axes"
            )
    for move in plan.communications:
        if not 0 <= move.collective.axis < num_axes and move.collective.kind not in HOST_KINDS:
            return (
                f"{move.node} moves along axis {move.collective.axis}, but mesh {plan.mesh} has "
                f"{num_axes} axes"
            )
    for collective in (
        *(move.collective for move in plan.communications),
        *(bucket.collective for bucket in plan.buckets),
    ):
        if not isinstance(getattr(torch, collective.dtype, None), torch.dtype):
            return f"a collective has the unknown dtype {collective.dtype!r}"
    for bucket in plan.buckets:
        if not 0 <= bucket.collective.axis < num_axes:
            return (
                f"a bucket moves along axis {bucket.collective.axis}, but mesh {plan.mesh} has "
                f"{num_axes} axes"
            )
    return ""


def _of_decisions(plan: Plan) -> str:
    """Return the first key that is not a node key, or decision without nodes."""
    potentials = plan.proof.potentials, *(case.potentials for case in plan.proof.cases)
    priced = [key for each in potentials for p in each for key in (p.node, p.reader)]
    priced += [condition.node for case in plan.proof.cases for condition in case.conditions]
    for key in (
        *(c.node for c in _choices(plan)),
        *(k.node for k in plan.kept),
        *(c.node for c in plan.communications),
        *priced,
    ):
        if "/" not in key:
            return f"{key!r} is not a node key"
    for entry in plan.entries:
        if not entry.nodes or (
            entry.kind in ("parameter", "buffer", "input") and not entry.nodes[0].strategy.outputs
        ):
            return f"entry {entry.key} has no nodes"
    return (
        ""
        if plan.entries and all(k.layouts for k in plan.kept)
        else "it has no decisions, or a kept value without layouts"
    )


def _of_instances(plan: Plan) -> str:
    """Return the first instance with more or fewer indices than the patterns of its nodes."""
    entries = [([c.node for c in (*e.nodes, *e.recompute)], e.instances) for e in plan.entries]
    entries += [([kept.node], kept.instances) for kept in plan.kept]
    entries += [([move.node], move.instances) for move in plan.communications]
    for patterns, instances in entries:
        indices = {int(number) for pattern in patterns for number in _FIELD.findall(pattern)}
        odd = next((i for i in instances if indices != set(range(len(i)))), None)
        if odd is not None:
            return f"{patterns[0]!r:.80} does not match the indices {odd}"
    return ""


def _of_phases(plan: Plan) -> str:
    """Return the first unknown phase."""
    phases = [(entry.key, entry.phase) for entry in plan.entries]
    moved = [(move.node, move.phase) for move in plan.communications] + [
        ("a bucket", bucket.phase) for bucket in plan.buckets
    ]
    phases += [each for each in moved if each[1] != "step"]
    odd = next((each for each in phases if each[1] not in ("forward", "backward")), None)
    return "" if odd is None else f"{odd[0]} has the unknown phase {odd[1]!r}"


def _choices(plan: Plan) -> list[NodeChoice]:
    return [choice for entry in plan.entries for choice in (*entry.nodes, *entry.recompute)]


def _of_stages(plan: Plan, pipeline: Pipeline) -> str:
    """Return the first contradiction between stages, cuts, budgets and the mesh."""
    return (
        _of_cuts(plan, pipeline)
        or _of_ranks(plan, pipeline)
        or _of_stage_plans(plan, pipeline)
        or _of_whole(plan)
    )


def _of_cuts(plan: Plan, pipeline: Pipeline) -> str:
    """Return the first contradiction in the numbers of stages, cuts and microbatches, or in the
    schedule.
    """
    num = len(pipeline.stages)
    sizes = _sizes(plan)
    if pipeline.axis not in sizes or not num or num % sizes[pipeline.axis]:
        return f"{num} stages do not match axis {pipeline.axis!r} of mesh {plan.mesh}"
    if pipeline.schedule not in SCHEDULES:
        return f"its schedule is {pipeline.schedule!r}"
    per_cut = {len(pipeline.positions), len(pipeline.modules), len(pipeline.crossings)}
    if per_cut != {num - 1} or len(pipeline.num_in_flight) != num or pipeline.num_microbatches < 1:
        return "the number of cuts of its pipeline is not one less than the number of stages"
    return ""


def _sizes(plan: Plan) -> dict[str, int]:
    """Return the number of devices along each axis by name; one along ``""``."""
    return {axis.name: axis.size for axis in plan.mesh.axes} | {"": 1}


def _of_ranks(plan: Plan, pipeline: Pipeline) -> str:
    """Return the first contradiction in the bytes and budgets of the ranks of the axis."""
    num, ranks = len(pipeline.stages), _sizes(plan)[pipeline.axis]
    if (len(pipeline.rank_bytes), len(pipeline.budgets)) != (
        (ranks, num) if num > ranks else (0, 0)
    ):
        return f"the peak memory of {ranks} ranks with {num} stages is missing"
    if pipeline.handed_bytes < 0 or pipeline.handed_s < 0.0:
        return (
            f"outputs of {pipeline.handed_bytes} bytes are sent to all stages in "
            f"{pipeline.handed_s} s"
        )
    if pipeline.rank_budgets and (
        len(pipeline.rank_budgets) != ranks or min(pipeline.rank_budgets) <= 0
    ):
        return f"the budgets of its {ranks} ranks are {pipeline.rank_budgets}"
    return ""


def _of_stage_plans(plan: Plan, pipeline: Pipeline) -> str:
    """Return the first contradiction in the plans of the stages, or in the values that cross
    between them.
    """
    mesh = plan.mesh.without(pipeline.axis)
    for crossed in (c for cut in pipeline.crossings for c in cut):
        if len(crossed.layout.placements) != len(mesh.axes):
            return (
                f"{crossed.node} crosses as {str(crossed.layout)!r}, but the mesh {mesh} of a "
                f"stage has {len(mesh.axes)} axes"
            )
    for stage in pipeline.stages:
        if stage.mesh != mesh or stage.pipeline is not None:
            return f"a stage is for mesh {stage.mesh}, not {mesh}"
        if stage.loss_rows:
            return (
                f"a stage processes {stage.loss_rows} rows of the loss at a time, which only the "
                "whole plan records"
            )
        wrong = find_contradiction(stage)
        if wrong:
            return wrong
    return ""


def _of_whole(plan: Plan) -> str:
    """Return whether a plan with stages has decisions that are not in the plans of its stages."""
    stage_decisions = (
        plan.entries,
        plan.kept,
        plan.communications,
        plan.buckets,
        plan.starts,
        plan.prediction.timeline,
    )
    return (
        "it has decisions outside its stages"
        if any(stage_decisions) or plan.overlap != Overlap()
        else ""
    )
