"""Plan and verify without a process group and without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from autopar.api.alternatives import SearchStatus, WorkBudget
from autopar.api.arguments import (
    Example,
    MeshLike,
    as_call,
    as_hardware,
    as_mesh,
    default_hardware,
    of_plan,
    runs_on,
    within_this_gpu,
)
from autopar.api.cached_captures import captures_cached, recorded_captures
from autopar.api.chooser import Chooser
from autopar.api.mesh_search import shapes, shapes_in_three
from autopar.api.options import PlanRequest, takes_options
from autopar.api.plan_options import check_fits, recorded_options
from autopar.api.plan_search import PlanSearch
from autopar.api.shortage import find_low_memory_plan
from autopar.api.tracing import (
    as_planned,
    as_wanted,
    emit_traced,
    planned_part,
    program_of,
    refuse_parts,
    refuse_wrapped,
    settle_outputs,
    staged_trace,
    trace_unplanned,
    traced_for,
    with_validation,
)
from autopar.cache.entries import Key, load_plan, recorded_warnings, save_plan
from autopar.cache.walk import Opaque
from autopar.capture import Trace
from autopar.certificate import Certificate, certify, named_so
from autopar.constraints import speak_of
from autopar.core.garbage import collected_seldom
from autopar.core.hardware import Hardware, Mixed, slowest
from autopar.core.keywords import named
from autopar.core.mesh import HardwareLike, Mesh, is_unshaped
from autopar.core.private_folder import is_cache_on
from autopar.core.terminal import PHASES, check_writable, progress_of_long
from autopar.core.units import share
from autopar.errors import InfeasibleError, VerificationError
from autopar.planner import Planned
from autopar.planner.clock import Progress
from autopar.planner.reprice import reprice_plan
from autopar.plans import Plan
from autopar.report import card as card  # lets notebooks display plans
from autopar.request import OPTIONS, PlanKeywords, PlanOptions
from autopar.solve import check_solver
from autopar.verification import Verification, verify_program

log = logging.getLogger("autopar")

# --------------------------------------------------------------------------------------------------
# Warn if the gap of a plan is larger than requested.

_SAME = 1e-6  # an excess of the gap up to this value is ignored


def warn_of_gap(found: Planned, *, is_late: bool) -> Planned:
    """Return the plan unchanged, and warn if its gap is larger than requested.

    Args:
        found: the plan.
        is_late: whether planning ended because the time limit was reached.
    """
    plan, requested_gap = found.plan, found.plan.options["gap"]
    if plan.proof.gap <= requested_gap + _SAME:
        return found
    if is_late:
        why, remedy = "the time limit was reached", "pass a larger time_limit_s"
    else:
        planned_choices = "cuts and stages" if plan.stage_axis else "layouts"
        why = f"the bound over all {planned_choices} is not tighter"
        remedy = (
            f"autopar.explain(plan) shows what the bound covers; gap={plan.proof.gap:.2g} accepts "
            "this plan"
        )
    log.warning(
        "a plan that is %s faster is not excluded, but gap=%s was requested: %s; %s",
        share(plan.proof.gap),
        requested_gap,
        why,
        remedy,
    )
    return found


# --------------------------------------------------------------------------------------------------
# Time that unequal devices, which run one program in lockstep, wait for the slowest.


def with_waits(found: Planned, hardware: Hardware, part: Callable[[Plan], Trace]) -> Planned:
    """Return the plan with its step time on each type of device alone, if devices are unequal and
    not separated by stages; otherwise unchanged.

    Args:
        found: the plan.
        hardware: the profile, or one per index along an axis.
        part: returns the trace that a plan is for: that of the batch, or of one microbatch.
    """
    plan = found.plan
    if (
        not isinstance(hardware, Mixed)
        or slowest(hardware) in hardware.profiles
        or plan.stage_axis == hardware.axis
    ):
        return found
    options, trace = recorded_options(plan), part(plan)
    times = {
        profile: reprice_plan(plan, trace, plan.mesh, profile, options)
        for profile in dict.fromkeys(hardware.profiles)
    }
    steps = trace.loss is not None and bool(trace.differentiable)
    way = (
        f"; constraints=[autopar.constraints.pipeline({hardware.axis!r})] gives each its own stage"
        if steps and not plan.stage_axis
        else ""
    )
    log.warning(
        "the devices along %s are unequal and run in lockstep at the pace of the slowest%s",
        hardware.axis,
        way,
    )
    plan = replace(plan, alone_s=tuple(times[profile] for profile in hardware.profiles))
    return replace(found, plan=plan, program=replace(found.program, plan_hash=plan.hash))


def settle_request(
    request: PlanRequest, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Hardware, PlanOptions]:
    """Return the hardware of a request (the default if none is named), and the options, with the
    clock of planning started.

    Args:
        request: see `plan_call`.
        args, kwargs: the call.

    Raises:
        CaptureError, HardwareError, MeshError, AutoparError: if the model, the batch, the mesh or
            the hardware cannot be used.
    """
    model, mesh, hardware, chosen = request.model, request.mesh, request.hardware, request.options
    if isinstance(model, nn.Module):  # an invalid mesh is rejected below
        refuse_wrapped(model)
    check_solver(chosen.solver)
    devices = as_hardware(
        default_hardware(runs_on(model, mesh, (args, kwargs))) if hardware is None else hardware,
        mesh,
    )
    if hardware is None and not isinstance(devices, Mixed):
        chosen = within_this_gpu(chosen, devices)
    return devices, chosen.begun()


def plan_call(
    request: PlanRequest,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    progress: Progress = lambda _: None,
) -> tuple[Trace, Planned]:
    """Capture ``model(*args, **kwargs)`` and plan it.

    Args:
        request: the model, the mesh, the hardware and the options.
        args, kwargs: the call; values are not read.
        progress: called with the name of each phase that starts.

    Returns:
        The trace, and the plan with its program and phase times.

    Raises:
        CaptureError, ConstraintError, InfeasibleError, HardwareError, MeshError: as `autopar.plan`.
    """
    model, mesh = request.model, request.mesh
    devices, chosen = settle_request(request, args, kwargs)
    trace = trace_unplanned(model, args, kwargs, chosen)
    if not trace.differentiable and not chosen.inference:
        log.warning(
            "no output of the model has a gradient: planning inference, without gradients and "
            "optimizer state"
        )
    refuse_parts(trace, chosen.batch)
    outputs = (
        "auto"
        if request.is_further and chosen.outputs == "loss" and trace.loss is None
        else chosen.outputs
    )
    inference, has_loss = not trace.differentiable, trace.loss is not None
    chosen = replace(
        chosen, inference=inference, outputs=settle_outputs(outputs, has_loss, inference)
    )
    trace = as_wanted(trace, chosen.outputs)
    budget, status = WorkBudget.of(chosen), SearchStatus(progress)

    def chooser(shape: Mesh) -> Chooser:
        return Chooser(
            model,
            trace,
            args,
            kwargs,
            shape,
            devices,
            chosen,
            status,
            request.captured,
            budget=budget,
            status=status,
        )

    def part_of(plan: Plan) -> Trace:
        return planned_part(plan, model, trace, args, kwargs, request.captured)[0]

    meshes, further = (
        (shapes(mesh), shapes_in_three(mesh)) if is_unshaped(mesh) else ((as_mesh(mesh),), ())
    )
    holds = partial(speak_of, chosen.constraints)
    try:
        with collected_seldom():
            result = PlanSearch(chooser, chosen, meshes, further, holds, budget).run()
    except InfeasibleError as error:
        if outputs == "auto" and chosen.outputs == "full" and has_loss:
            log.warning(
                "full outputs do not fit into memory together with the loss, so each rank keeps "
                "its shard: %s",
                error.what,
            )
            parts = replace(chosen, outputs="dtensor")
            return plan_call(replace(request, options=parts), args, kwargs, progress=progress)
        if len(meshes) > 1:
            raise
        result = find_low_memory_plan(error, chooser(meshes[0]))
    result = result.closer_proven(in_time=not chosen.is_late)
    return trace, with_waits(warn_of_gap(result, is_late=chosen.is_late), devices, part_of)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield the function that shows slow phases of planning: on a terminal, or else in the log."""
    with progress_of_long("capturing the model") as tell:
        yield lambda phase: tell(PHASES.get(phase, phase))


# --------------------------------------------------------------------------------------------------
# The cache of plans. Its key covers everything that planning reads. What a capture reads beyond
# that is compared when an entry is used (`autopar.cache`).


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan, and whether it was planned in this call.

    Attributes:
        planned: the plan with its program and phase times; None if the plan comes from the cache.
        trace: the capture; None if the plan comes from the cache.
        key: key of the cache entry; empty if the cache is not used.
    """

    plan: Plan
    planned: Planned | None = None
    trace: Trace | None = None
    key: str = ""


def find_plan(
    request: PlanRequest,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    progress: Progress | None = None,
) -> PlanResult:
    """Return the plan of a request from the cache, or plan and store it.

    Args:
        request, args, kwargs: as for `plan_call`.
        progress: called with the name of each phase that begins; by default the phases are shown
            (`shown_progress`).

    Raises:
        see `plan_call`.
    """
    devices, chosen = settle_request(request, args, kwargs)
    request = replace(request, hardware=devices, options=chosen)
    key = _key_of(request, devices, args, kwargs)
    if key is not None and (plan := load_plan(key)) is not None:
        log.info("plan loaded from the cache: %s", key.text)
        return PlanResult(plan, key=key.text)
    cached = captures_cached(use=chosen.cache)
    shown = shown_progress() if progress is None else nullcontext(progress)
    with cached, shown as tell, recorded_captures() as traces, recorded_warnings() as messages:
        trace, planned = plan_call(request, args, kwargs, progress=tell)
    is_final = not (chosen.is_late or planned.was_interrupted)  # more time may give another plan
    if key is not None and is_final:
        save_plan(key, planned.plan, traces, messages)
    return PlanResult(planned.plan, planned, trace, "" if key is None else key.text)


def _key_of(
    request: PlanRequest, devices: Hardware, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Key | None:
    """Return the cache key of a request; None if its plan cannot be cached, which is logged."""
    options = request.options
    if not (options.cache and is_cache_on("plans")):
        return None
    mesh = request.mesh if is_unshaped(request.mesh) else as_mesh(request.mesh)
    settings = {name: getattr(options, name) for name in OPTIONS if name != "cache"}
    try:
        if options.solver != "highs":
            raise Opaque(f"the version of the solver {options.solver} is unknown")
        return Key.of(
            "plan", request.model, args, kwargs, (mesh, devices, settings, request.is_further)
        )
    except Opaque as reason:
        log.debug("cache of plans not used: %s", reason)
        return None


def plan_model(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Example,
    hardware: HardwareLike | None = None,
    write_lp: str | Path | None = None,
    **options: Unpack[PlanKeywords],
) -> tuple[Trace, Planned]:
    """Plan without the cache. Also return the trace, the program and the phase times."""
    check_writable(None if write_lp is None else Path(write_lp))
    plan_options = PlanOptions(**options)  # type: ignore[arg-type]  # any sequence of constraints
    request = PlanRequest(model, mesh, hardware, plan_options)
    with shown_progress() as progress:
        trace, planned = plan_call(request, *as_call(example_inputs), progress=progress)
    if write_lp is not None:
        planned.write_lp(write_lp)
    return trace, planned


@named("autopar.plan", "docs/planning.md")
@takes_options("plan")
def plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Example,
    hardware: HardwareLike | None = None,
    write_lp: str | Path | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan a model for a mesh. Needs no GPU and no process group. The weights may be on meta.

    Args:
        mesh: an `autopar.Mesh`, a torch DeviceMesh, sizes of axes by name; or nodes and devices per
            node, ``(4, 8)``, or a device count (eight to a node), whose shape is then the planner's
            choice: at most three axes, of one node two, unless constraints hold on none of those;
            `Plan.proof.covers` says which were tried.
        example_inputs: the global batch: a mapping of keyword arguments, a sequence of positional
            arguments, or one tensor. Values are not read.
        hardware: a profile, the name of one (`HardwareProfile.names`), its path, or ``"local"``.
            Default: ``local`` if this machine was measured for the device type of the weights,
            otherwise its GPU (unless the weights are on a CPU), otherwise ``cpu-gloo``. For unequal
            devices, a mapping from an axis to one profile per index along it, ``{"stage":
            ["h100-sxm", "a100-sxm-80gb"]}``. Pipeline stages along that axis
            (`autopar.constraints.pipeline`) are each planned for their own profile; stage k runs on
            index k mod n. Without stages, all devices run in lockstep at the pace of the slowest
            and in the memory of the smallest; `explain` shows how long the others wait. All devices
            process the same number of samples.
        write_lp: file to write the integer program to, in LP format. Not available for plans with
            stages.
        options: the options that `autopar.request.PlanOptions` declares; `help` lists them.

    Raises:
        CaptureError, ConstraintError, InfeasibleError, HardwareError, MeshError: see each class.
    """
    if write_lp is not None:  # a cached plan has no integer program
        return plan_model(
            model,
            mesh,
            example_inputs=example_inputs,
            hardware=hardware,
            write_lp=write_lp,
            **options,
        )[1].plan
    plan_options = PlanOptions(**options)  # type: ignore[arg-type]  # any sequence of constraints
    request = PlanRequest(model, mesh, hardware, plan_options)
    return find_plan(request, *as_call(example_inputs)).plan


def verify(
    plan: Plan | str | Path,
    model: nn.Module,
    batch: Example,
    *,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
) -> Verification:
    """Run all ranks of a plan in one process, in lockstep. Compare outputs and every gradient with
    the plain model.

    Args:
        plan: a plan or its file.
        dtype: float64 or float32; all floating-point tensors are promoted to it on both sides. None
            computes in the dtypes of the model.
        tolerance: largest relative error allowed. Default: 1e-9 in float64 (2e-6 if the model
            itself computes a part in float32), 1e-4 in float32, 5e-2 below.

    Raises:
        VerificationError: with the first node that diverges and its module path; or if the dtype is
            not supported.
        PlanError: if the plan is for another model.
    """
    if dtype not in (None, torch.float32, torch.float64):
        remedy = "pass torch.float64, torch.float32, or None for the dtypes of the model"
        raise VerificationError(
            f"cannot verify in {dtype}: sums that ops keep in float32 would be in it, too",
            remedy=remedy,
        )
    plan, (args, kwargs) = Plan.of(plan), as_call(batch)
    trace = traced_for(plan, model, args, kwargs)
    check_fits(plan, trace, plan.mesh, type(model).__name__)
    reference = as_planned(trace, plan)
    return verify_program(
        reference,
        program_of(plan, model, trace, args, kwargs),
        model,
        args,
        kwargs,
        dtype=dtype,
        tolerance=tolerance,
    )


def check(
    plan: Plan | str | Path,
    model: nn.Module,
    batch: Example,
    *,
    hardware: HardwareLike | None = None,
) -> Certificate:
    """Certify a plan without a solver: that it is legal, that its time and memory are as stated,
    and that it is as close to the optimum as stated.

    All claims are derived again from the profile and the model, whose weights may be on meta. The
    program of the plan is validated node by node against the captured model; `verify` runs it.

    Args:
        plan: a plan or its file. hardware: see `plan`; by default the profile that the plan names.

    Raises:
        CaptureError: if the model cannot be captured.
        HardwareError: if the profile that the plan names is not found. Pass its path.
        ConstraintError, EmissionError: if the model cannot be cut into the stages of the plan.
    """
    plan, (args, kwargs) = Plan.of(plan), as_call(batch)
    devices = of_plan(plan, hardware)
    trace = traced_for(plan, model, args, kwargs)
    reference = as_planned(trace, plan)
    staged = staged_trace(plan, model, trace, args, kwargs)
    certificate = named_so(certify(trace, plan, devices, staged), plan, type(model).__name__)
    return with_validation(certificate, reference, plan, partial(emit_traced, plan, staged))
