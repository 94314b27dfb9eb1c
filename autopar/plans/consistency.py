"""Checks of plans that were read from files: contradictions that no plan has, unless its file was
changed by hand or written by another program."""

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
"""Name → annotation of the options that `autopar.planner.PlanOptions` writes into a plan."""


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
            return f"its option {name!r} is not known"
        try:
            from_data(value, OPTIONS[name], f"options.{name}")
        except ValueError as error:
            return str(error)
    return ""


_FIELD = re.compile(r"\{(\d+)\}")  # the index of a layer in a pattern


def misfit(plan: Plan) -> str:
    """Find a contradiction in a plan whose fields have the right types, such as layouts of another
    mesh or decisions about no nodes.

    Returns:
        The first one in words; ``""`` if there is none.
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
        return f"its loss has {plan.loss_rows} rows at a time"
    if any(not cuts or list(cuts) != sorted(set(cuts)) for cuts in plan.starts.values()):
        return f"its groups of layers are {dict(plan.starts)}"
    return ""


def _of_mesh(plan: Plan) -> str:
    """The first layout, axis or dtype that does not fit its mesh or does not exist."""
    num_axes = len(plan.mesh.axes)
    layouts = [x for c in _choices(plan) for x in (*c.strategy.inputs, *c.strategy.outputs)]
    layouts += [x for k in plan.kept for x in k.layouts] + [
        x for c in plan.communications for x in (c.source, c.target)
    ]
    layouts += [m.target for bucket in plan.buckets for m in bucket.members]
    for layout in layouts:
        if len(layout.placements) != num_axes:
            return (
                f"layout {str(layout)!r} has {len(layout.placements)} placements, mesh {plan.mesh}"
                f" has {num_axes} axes"
            )
    for move in plan.communications:
        if not 0 <= move.collective.axis < num_axes and move.collective.kind not in HOST_KINDS:
            return (
                f"{move.node} moves along axis {move.collective.axis}, mesh {plan.mesh} has"
                f" {num_axes} axes"
            )
    for collective in (
        *(move.collective for move in plan.communications),
        *(bucket.collective for bucket in plan.buckets),
    ):
        if not isinstance(getattr(torch, collective.dtype, None), torch.dtype):
            return f"a collective moves {collective.dtype!r}, which is no dtype"
    for bucket in plan.buckets:
        if not 0 <= bucket.collective.axis < num_axes:
            return (
                f"a bucket moves along axis {bucket.collective.axis}, mesh {plan.mesh} has"
                f" {num_axes} axes"
            )
    return ""


def _of_decisions(plan: Plan) -> str:
    """The first key that is not of a node, or decision about nothing."""
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
            return f"{key!r} is no key of a node"
    for entry in plan.entries:
        if not entry.nodes or (
            entry.kind in ("parameter", "buffer", "input") and not entry.nodes[0].strategy.outputs
        ):
            return f"{entry.key} decides nothing"
    return (
        ""
        if plan.entries and all(k.layouts for k in plan.kept)
        else "it holds no decisions, or keeps something in no layout"
    )


def _of_instances(plan: Plan) -> str:
    """The first instance with more or fewer indices than the patterns of its nodes have."""
    said = [([c.node for c in (*e.nodes, *e.recompute)], e.instances) for e in plan.entries]
    said += [([kept.node], kept.instances) for kept in plan.kept]
    said += [([move.node], move.instances) for move in plan.communications]
    for patterns, instances in said:
        indices = {int(number) for pattern in patterns for number in _FIELD.findall(pattern)}
        odd = next((i for i in instances if indices != set(range(len(i)))), None)
        if odd is not None:
            return f"{patterns[0]!r:.80} does not take the indices {odd}"
    return ""


def _of_phases(plan: Plan) -> str:
    """The first phase that a step does not have."""
    said = [(entry.key, entry.phase) for entry in plan.entries]
    moved = [(move.node, move.phase) for move in plan.communications] + [
        ("a bucket", bucket.phase) for bucket in plan.buckets
    ]
    said += [each for each in moved if each[1] != "step"]
    odd = next((each for each in said if each[1] not in ("forward", "backward")), None)
    return "" if odd is None else f"{odd[0]} is of phase {odd[1]!r}"


def _choices(plan: Plan) -> list[NodeChoice]:
    return [choice for entry in plan.entries for choice in (*entry.nodes, *entry.recompute)]


def _of_stages(plan: Plan, pipeline: Pipeline) -> str:
    """The first contradiction of stages, cuts and budgets with each other or with the mesh."""
    return (
        _of_cuts(plan, pipeline)
        or _of_ranks(plan, pipeline)
        or _of_stage_plans(plan, pipeline)
        or _of_whole(plan)
    )


def _of_cuts(plan: Plan, pipeline: Pipeline) -> str:
    """The first contradiction of the numbers of stages, cuts and microbatches, or in the
    schedule."""
    num = len(pipeline.stages)
    sizes = _sizes(plan)
    if pipeline.axis not in sizes or not num or num % sizes[pipeline.axis]:
        return f"{num} stages do not lie along axis {pipeline.axis!r} of mesh {plan.mesh}"
    if pipeline.schedule not in SCHEDULES:
        return f"its schedule is {pipeline.schedule!r}"
    per_cut = {len(pipeline.positions), len(pipeline.modules), len(pipeline.crossings)}
    if per_cut != {num - 1} or len(pipeline.num_in_flight) != num or pipeline.num_microbatches < 1:
        return "its pipeline's cuts are not one less than its stages"
    return ""


def _sizes(plan: Plan) -> dict[str, int]:
    """Return the number of devices along each axis by name; one along ``""``."""
    return {axis.name: axis.size for axis in plan.mesh.axes} | {"": 1}


def _of_ranks(plan: Plan, pipeline: Pipeline) -> str:
    """The first contradiction in the bytes and budgets of the ranks of the axis."""
    num, ranks = len(pipeline.stages), _sizes(plan)[pipeline.axis]
    if (len(pipeline.rank_bytes), len(pipeline.budgets)) != (
        (ranks, num) if num > ranks else (0, 0)
    ):
        return f"it does not say what {ranks} ranks of {num} stages hold"
    if pipeline.handed_bytes < 0 or pipeline.handed_s < 0.0:
        return (
            f"outputs of {pipeline.handed_bytes} bytes go to all of its stages in"
            f" {pipeline.handed_s} s"
        )
    if pipeline.rank_budgets and (
        len(pipeline.rank_budgets) != ranks or min(pipeline.rank_budgets) <= 0
    ):
        return f"the budgets of its {ranks} ranks are {pipeline.rank_budgets}"
    return ""


def _of_stage_plans(plan: Plan, pipeline: Pipeline) -> str:
    """The first contradiction in the plans of the stages, or in the values that cross between
    them."""
    mesh = plan.mesh.without(pipeline.axis)
    for crossed in (c for cut in pipeline.crossings for c in cut):
        if len(crossed.layout.placements) != len(mesh.axes):
            return (
                f"{crossed.node} crosses as {str(crossed.layout)!r}, a stage's mesh {mesh} has"
                f" {len(mesh.axes)} axes"
            )
    for stage in pipeline.stages:
        if stage.mesh != mesh or stage.pipeline is not None:
            return f"a stage is for mesh {stage.mesh}, not {mesh}"
        if stage.loss_rows:
            return (
                f"a stage has {stage.loss_rows} rows of the loss at a time, which the plan says"
                " for all"
            )
        wrong = misfit(stage)
        if wrong:
            return wrong
    return ""


def _of_whole(plan: Plan) -> str:
    """Decisions of a plan with stages that are not in the plans of its stages."""
    beside = (
        plan.entries,
        plan.kept,
        plan.communications,
        plan.buckets,
        plan.starts,
        plan.prediction.timeline,
    )
    return (
        "it has decisions beside those of its stages"
        if any(beside) or plan.overlap != Overlap()
        else ""
    )
