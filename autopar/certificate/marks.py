"""Check the fingerprint, the options and the pipeline of a plan against the model, the hardware and
each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autopar.capture.trace import Trace
from autopar.certificate.report import Certificate, Finding
from autopar.constraints import Pipelined, check, pipeline_in, read_constraint
from autopar.core.hardware import Hardware, Mixed
from autopar.core.schedules import AUTO, GPIPE
from autopar.cost.priced import OPTIMIZERS
from autopar.errors import AutoparError
from autopar.plans import OPTIONS, Pipeline, Plan
from autopar.version import VERSION


def identity(trace: Trace, plan: Plan, hardware: Hardware) -> Iterator[Finding]:
    """Yield a finding if the plan is for another model or other hardware.

    Args:
        trace: the trace of the call that the plan, or the stage, is for.
        plan: the plan, or the plan of a stage.
        hardware: the hardware on which the claims are checked.
    """
    mark = plan.fingerprint
    if mark.model != trace.fingerprint:
        other = (
            "the plan is for another model: its fingerprint is"
            f" {mark.model[:12]}, but this model's is {trace.fingerprint[:12]}"
        )
        yield Finding("model", mark.other_batch(trace.batch_in_words) or other)
    elif mark.inputs and mark.inputs != trace.batch_in_words:
        yield Finding(
            "model",
            f"the inputs are {_list_inputs(trace.batch_in_words)}, not {_list_inputs(mark.inputs)}",
        )
    if (mark.profile_hash, mark.profile) != (hardware.hash, hardware.name):
        message = f"the plan is for profile {mark.profile!r} of hash {mark.profile_hash}"
        yield Finding(
            "model", (f"{message}, but the profile is {hardware.name!r} of hash {hardware.hash}")
        )
    axis, profiles = (hardware.axis, hardware.profiles) if isinstance(hardware, Mixed) else ("", ())
    if (mark.axis, mark.profiles) != (axis, tuple((each.name, each.hash) for each in profiles)):
        message = f"the devices along an axis differ from those of profile {hardware.name!r}"
        yield Finding("model", f"{message}, for which it was planned")
    yield from _check_options(plan)


def named_so(report: Certificate, plan: Plan, name: str) -> Certificate:
    """Return the certificate, with a finding if the plan is for a model of another class.

    Args:
        report: the certificate of the plan.
        plan: the certified plan.
        name: name of the model's class.
    """
    if plan.fingerprint.model_name == name:
        return report
    message = (
        f"the plan is for {plan.fingerprint.model_name or 'a model without a name'}, but this"
        f" model is {name}"
    )
    return replace(report, findings=(*report.findings, Finding("model", message)))


def check_capture(trace: Trace, plan: Plan) -> Iterator[Finding]:
    """Yield a finding if the model was not captured as the plan states."""
    if plan.capture != str(trace.folding):
        yield Finding("words", f"the model was captured {trace.folding}, not {plan.capture}")


def notes(plan: Plan) -> Iterator[str]:
    """Yield remarks on the plan that do not affect its claims."""
    here = torch.__version__.split("+")[0]
    if plan.fingerprint.torch != here:
        yield f"planned with torch {plan.fingerprint.torch}, but this is torch {here}"
    if plan.fingerprint.autopar != VERSION:
        yield f"planned with autopar {plan.fingerprint.autopar}, but this is autopar {VERSION}"
    if not plan.fingerprint.inputs:
        yield "fingerprint.inputs is empty: the plan does not record its batch"


def of_stages(plan: Plan, pipeline: Pipeline) -> Iterator[Finding]:
    """Yield a finding for each stage that states another model or other versions than the plan."""
    for number, stage in enumerate(pipeline.stages):
        plan_mark, mark = plan.fingerprint, stage.fingerprint
        here = (plan_mark.model_name, plan_mark.autopar, plan_mark.torch)
        if (mark.model_name, mark.autopar, mark.torch) != here:
            message = (
                f"stage {number} is for {mark.model_name!r}, by autopar {mark.autopar} and torch"
                f" {mark.torch}"
            )
            yield Finding(
                "model",
                (
                    f"{message}, but the plan is for {here[0]!r}, by autopar {here[1]} and torch"
                    f" {here[2]}"
                ),
            )


def _check_options(plan: Plan) -> Iterator[Finding]:
    """Yield a finding for each option that the plan does not record or does not follow. The options
    of a stage must equal the plan's."""
    options = plan.options
    for name in OPTIONS:
        if name not in options:
            yield Finding("model", f"the plan does not record its option {name}")
    if options.get("optimizer") not in OPTIMIZERS:
        message = f"the plan is for an unknown optimizer {options.get('optimizer')!r}"
        yield Finding("model", message)
    without = [entry.key for stage in plan.stages for entry in stage.entries if entry.replicated]
    if options.get("strict") and without:
        message = "it has no sharding rule and runs replicated, which strict=True does not allow"
        yield Finding("model", message, without[0])


def check_request(plan: Plan) -> Iterator[Finding]:
    """Yield a finding for each requested property that the plan does not have: the rows of the
    loss, the number of microbatches, and the pipeline."""
    rows = plan.options.get("loss_rows", AUTO)
    if rows not in (AUTO, plan.loss_rows):
        message = f"the loss uses {plan.loss_rows} rows at a time, but {rows} were requested"
        yield Finding("model", message)
    yield from _check_pipeline(plan)


def _check_pipeline(plan: Plan) -> Iterator[Finding]:
    """Yield findings if the plan does not have the microbatches and the pipeline that its options
    request."""
    pipeline, num = plan.as_pipeline, plan.num_microbatches
    asked_num = plan.options.get("num_microbatches", AUTO)
    if asked_num not in (AUTO, num):
        yield Finding("model", f"the plan has {num} microbatches, but {asked_num} were requested")
    try:
        asked = _read_asked_pipeline(plan)
    except AutoparError as error:
        yield Finding("model", error.what)
        return
    promised = asked is not None and asked.independent
    if pipeline.independent != promised:
        message = f"the options {'' if promised else 'do not '}promise independent samples"
        yield Finding("model", f"{message}, which differs from the pipeline")
    if asked is not None:
        yield from _compare_pipelines(pipeline, asked)


def _read_asked_pipeline(plan: Plan) -> Pipelined | None:
    """Return the pipeline among the constraints in a plan's options; None if none is requested.

    Raises:
        AutoparError: if a constraint cannot be read, or does not fit the plan's mesh.
    """
    constraints = [read_constraint(data) for data in plan.options.get("constraints", ())]
    asked = pipeline_in(constraints, plan.mesh)
    of_stage = plan.mesh.without(plan.stage_axis)
    for constraint in constraints:  # all others refer to the mesh of a stage
        check(constraint, plan.mesh if isinstance(constraint, Pipelined) else of_stage)
    return asked


def _compare_pipelines(pipeline: Pipeline, asked: Pipelined) -> Iterator[Finding]:
    """Yield a finding for each requested property that a plan's pipeline does not have."""
    waits = pipeline.schedule == GPIPE  # also if backward waits for a loss of the whole batch
    schedule = None if asked.schedule == AUTO or waits else asked.schedule
    requested_values = {  # property → (requested value or None, value in the plan)
        "axis": (asked.axis, pipeline.axis),
        "number of microbatches": (asked.microbatches, pipeline.num_microbatches),
        "schedule": (schedule, pipeline.schedule),
        "cuts": (asked.cuts and tuple(sorted(asked.cuts)), tuple(sorted(pipeline.modules))),
        "number of stages per device": (asked.chunks, pipeline.num_chunks),
    }
    for property_name, (requested, had) in requested_values.items():
        if requested is not None and requested != had:
            yield Finding(
                "model",
                f"the pipeline's {property_name} is {had!r}, but {requested!r} was requested",
            )


def _list_inputs(inputs: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{path} {what}" for path, what in inputs)
