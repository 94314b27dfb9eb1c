"""Trace the call of a plan: the batch, one microbatch of it, and how microbatches form the batch.
Validate programs against these traces.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from autopar.analysis.microbatches import (
    Microbatching,
    find_microbatching,
    for_single_samples,
    ready,
)
from autopar.api.cached_captures import capture_or_load
from autopar.capture import Trace
from autopar.capture.chunked_loss import loss_by_rows, outputs_whole, with_loss_only
from autopar.capture.trees import paths_in
from autopar.certificate import Certificate, Finding, StagedTrace
from autopar.emit import emit
from autopar.emit.program_builder import microbatches_of
from autopar.errors import (
    AutoparError,
    CaptureError,
    ChangedPlanError,
    ConstraintError,
    CoupledError,
    ValidationError,
    Where,
)
from autopar.plans import Plan
from autopar.program.program import Program
from autopar.request import Outputs, PlanOptions
from autopar.stages import cut_trace
from autopar.stages.placing import CutError
from autopar.validation import Validation, validate, validate_microbatches

# --------------------------------------------------------------------------------------------------
# Validate emitted programs before they run, and for certificates.

log = logging.getLogger("autopar")


def validate_before_run(reference: Trace, plan: Plan, program: Program) -> None:
    """Show that a program computes the traced model. Warn about values that only a promise of the
    user covers.

    Args:
        reference: the trace of the call that the plan is for.

    Raises:
        ValidationError: with the first value that does not follow from the trace.
    """
    validated = validate(reference, plan, program)
    log.info("validated: %s", validated)
    for unproven in validated.unproven:
        log.warning("not validated: %s", unproven)


def refuse_unproven(
    whole: Trace, part: Trace, microbatching: Microbatching, *, promised: bool
) -> None:
    """Reject microbatches for which validation cannot show that they form the batch, before
    planning.

    Args:
        whole, part, microbatching, promised: see `validate_microbatches`.

    Raises:
        CoupledError: with the first value of a microbatch that does not follow.
    """
    how = microbatches_of(part, microbatching)
    try:
        validate_microbatches(whole, part, how, promised=promised)
    except ValidationError as error:
        remedy = "pass num_microbatches=1, or fewer microbatches with more samples each"
        raise CoupledError(error.what, where=error.where, remedy=remedy) from error


def with_validation(
    certificate: Certificate,
    reference: Trace,
    plan: Plan,
    emitting: Callable[[], Program],
) -> Certificate:
    """Return a certificate with the findings of validating the emitted program.

    Args:
        certificate: certificate of the plan.
        reference: the trace of the call that the plan is for.
        plan: the certified plan.
        emitting: emits the program; an error that it or validation raises becomes a finding.
    """
    try:
        validation: Validation = validate(reference, plan, emitting())
    except AutoparError as error:
        finding = Finding("program", error.what, "" if error.where is None else str(error.where))
        return replace(certificate, findings=(*certificate.findings, finding))
    return replace(certificate, validation=validation)


_WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
Call = tuple[tuple[Any, ...], dict[str, Any]]


def trace_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    precision: str | None,
    *,
    inference: bool = False,
) -> Trace:
    """Capture a call.

    Args:
        model: the plain model.
        args, kwargs: the call; values are not read.
        precision: precision of the plan; see `PlanOptions`.
        inference: whether to capture forward only.

    Raises:
        CaptureError: if the call cannot be captured, or the model is already parallel or compiled.
    """
    refuse_wrapped(model)
    dtype = _PRECISIONS.get(precision or "")
    return capture_or_load(model, args, kwargs, dtype, inference=inference)


def traced_for(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Trace:
    """Capture a call in the precision and mode of a plan.

    Args:
        plan: its options are read.
        model: the plain model.
        args, kwargs: the call.

    Raises:
        CaptureError: see `trace_call`.
    """
    return trace_call(
        model,
        args,
        kwargs,
        plan.options.get("precision"),
        inference=plan.options.get("inference", False),
    )


def trace_unplanned(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: PlanOptions
) -> Trace:
    """Capture a call as planning with these options needs it: forward only if nothing has a
    gradient.

    Args:
        model: the plain model.
        args, kwargs: the call.
        options: options of the plan.

    Raises:
        CaptureError: see `trace_call`.
    """
    trace = trace_call(model, args, kwargs, options.precision, inference=options.inference)
    if trace.differentiable or options.inference:
        return trace
    return trace_call(model, args, kwargs, options.precision, inference=True)


def is_trace_for(plan: Plan, trace: Trace) -> bool:
    """Return whether a call was captured in the precision and mode of a plan; if so, `traced_for`
    would return an equal trace.
    """
    precision = plan.options.get("precision")
    return trace.precision == (None if precision is None else _PRECISIONS[precision]) and bool(
        trace.differentiable
    ) != plan.options.get("inference", False)


def refuse_wrapped(model: nn.Module) -> None:
    """Check that a model is neither parallel nor compiled.

    Raises:
        CaptureError: if it is already parallel or compiled.
    """
    if hasattr(model, "_orig_mod"):
        raise _wrapper_error(
            model,
            "",
            "the result of torch.compile",
            "pass the plain module that was given to torch.compile (`model._orig_mod`)",
        )
    modules = (
        [("", model)] if _is_compiled(model) else model.named_modules()
    )  # before its first call, the class does not show that it is compiled
    for name, module in modules:
        if _is_compiled(module):
            raise _wrapper_error(
                module,
                name,
                "already compiled by autopar",
                "pass the plain module that was given to autopar.compile",
            )
        if isinstance(module, _WRAPPERS):
            raise _wrapper_error(
                module,
                name,
                "already wrapped by torch for parallelism",
                "pass the plain module that was wrapped (`model.module`)",
            )
        if isinstance(module, FSDPModule):
            raise _wrapper_error(
                module,
                name,
                "already sharded by torch",
                "pass the plain module without fully_shard",
            )


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__module__.startswith("autopar.")


def _wrapper_error(module: nn.Module, name: str, what: str, remedy: str) -> CaptureError:
    return CaptureError(
        f"the model is {what}: {type(module).__name__}", where=Where(module=name), remedy=remedy
    )


def settle_outputs(outputs: Outputs, has_loss: bool, inference: bool) -> Outputs:
    """Return the value of `outputs` for "auto".

    Outputs stay sharded in training with a loss. They are returned in full if they are the purpose
    of the call.

    Args:
        outputs: the option; only ``"auto"`` is replaced.
        has_loss: whether the call returns a loss.
        inference: whether there is no backward.
    """
    return ("dtensor" if has_loss and not inference else "full") if outputs == "auto" else outputs


def refuse_parts(trace: Trace, batch: str) -> None:
    """Check that ranks may pass parts of the batch.

    Raises:
        ConstraintError: if each rank would compute the loss of its own part, or forward reads
            values of the whole batch.
    """
    if batch == "local" and (known := _known_inputs(trace)):
        message = (
            'batch="local" is not possible: forward reads the values of '
            f"{' and '.join(map(repr, known))}, of which each rank has only a part"
        )
        raise ConstraintError(message, where=_first_read(known), remedy='pass batch="global"')
    if batch == "local" and trace.loss is None and trace.differentiable:
        message = (
            'batch="local" is not possible: the model returns no loss, so the weight of each '
            "rank's loss in the total is unknown"
        )
        raise ConstraintError(
            message, remedy='pass batch="global", or compute and return the loss in forward'
        )


def _known_inputs(trace: Trace) -> dict[str, Where | None]:
    """Return the path of each input whose values forward reads → the place that reads them."""
    args, kwargs = tree_unflatten(list(range(trace.in_spec.num_leaves)), trace.in_spec)
    paths = [path.split(".", 1)[1] for path in paths_in((args, kwargs))]
    return {
        paths[position]: trace.value_reads.get(position)
        for position, made_for in trace.settings.items()
        if isinstance(made_for, Tensor)
    }


def _first_read(known: Mapping[str, Where | None]) -> Where | None:
    return next((place for place in known.values() if place is not None), None)


def as_wanted(trace: Trace, outputs: Outputs) -> Trace:
    """Return the captured call with the requested outputs: only the loss, or all outputs, full or
    sharded.
    """
    return (
        with_loss_only(trace)
        if outputs == "loss"
        else outputs_whole(trace)
        if outputs == "full"
        else trace
    )


def as_planned(trace: Trace, plan: Plan) -> Trace:
    """Return the captured call with the requested outputs, and with the loss by rows if the plan
    has one.
    """
    return by_rows(as_wanted(trace, plan.options.get("outputs", "dtensor")), plan.loss_rows)


def by_rows(trace: Trace, rows: int) -> Trace:
    """Return the trace with its loss computed for a number of rows at a time; 0 for all at once."""
    return loss_by_rows(trace, rows) if rows else trace


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of samples in the batch of a call: the most frequent first dim of its
    tensors; on a tie, that of the first tensor.

    Raises:
        ConstraintError: if no tensor has a dim.
    """
    sizes = Counter(
        leaf.shape[0]
        for leaf in tree_leaves((args, dict(kwargs)))
        if isinstance(leaf, Tensor) and leaf.ndim
    )
    if not sizes:
        raise ConstraintError(
            "no input has a batch dim to split into microbatches", remedy="pass num_microbatches=1"
        )
    return max(sizes, key=lambda size: sizes[size])  # on a tie, the one counted first


def microbatch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], num: int) -> Call:
    """Return the call on the first of `num` microbatches.

    Args:
        args, kwargs: the call on the whole batch.
        num: number of microbatches.

    Raises:
        ConstraintError: if the number of samples is not divisible by `num`.
    """
    size = batch_size(args, kwargs)
    if size % num:
        raise ConstraintError(
            f"a batch of {size} samples cannot be split into {num} equal microbatches",
            remedy=f"pass a divisor of {size}, or another batch",
        )

    def first(leaf: Any) -> Any:
        return (
            leaf[: size // num]
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size
            else leaf
        )

    return tree_map(first, args), tree_map(first, dict(kwargs))


def trace_part(
    model: nn.Module,
    whole: Trace,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num: int,
    *,
    precision: str | None = None,
    inference: bool = False,
    independent: bool = False,
    known: dict[int, Trace] | None = None,
    validated: bool = True,
) -> tuple[Trace, Microbatching]:
    """Return the trace of one microbatch, and how `num` microbatches form the batch.

    Args:
        model: the plain model.
        whole: the trace of the batch, with the requested outputs, which apply to the microbatch as
            well.
        args, kwargs: the call on the whole batch.
        num: number of microbatches.
        precision, inference: see `trace_call`.
        independent: whether the user promises that samples are independent.
        known: traces by number of samples; new ones are added.
        validated: whether to show that the microbatches form the batch; otherwise the caller does
            (`refuse_unproven`).

    Raises:
        ConstraintError: if the batch cannot be split, or an input has a gradient.
        CoupledError: if samples depend on each other.
    """
    for i in whole.given_back:
        message = (
            f"input {i.path!r} requires a gradient, which is not supported with stages or "
            "microbatches"
        )
        raise ConstraintError(
            message,
            remedy="pass it without requires_grad, or use no pipeline and num_microbatches=1",
        )
    if num > 1 and (read := _known_inputs(whole)):
        message = (
            f"forward reads the values of {' and '.join(map(repr, read))}, which belong to the "
            "whole batch"
        )
        raise CoupledError(message, where=_first_read(read), remedy="pass num_microbatches=1")
    known = {} if known is None else known
    known[batch_size(args, kwargs)] = whole

    def capture_part(call: Call) -> Trace:
        samples = batch_size(*call)
        if samples not in known:
            known[samples] = _of_parts(model, *call, precision, inference)
        alone, everywhere = (
            all(o.is_loss for o in whole.outputs),
            all(o.whole for o in whole.outputs),
        )
        return as_wanted(known[samples], "full" if everywhere else "loss" if alone else "dtensor")

    if num > 1 and batch_size(args, kwargs) == num:
        four, two = (capture_part(_of_samples(args, kwargs, samples)) for samples in (4, 2))
        like = find_microbatching(
            four, two, 2, independent=independent
        )  # before one sample is captured: coupled samples may need others
        part = capture_part(microbatch_of(args, kwargs, num))
        part, microbatching = ready(part, for_single_samples(like, two, part, num))
    else:
        part = capture_part(microbatch_of(args, kwargs, num))
        part, microbatching = ready(
            part, find_microbatching(whole, part, num, independent=independent)
        )
    if validated:
        refuse_unproven(whole, part, microbatching, promised=independent)
    return part, microbatching


def _of_parts(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    precision: str | None,
    inference: bool,
) -> Trace:
    """Capture a part of a batch that was captured before as a whole."""
    try:
        return trace_call(model, args, kwargs, precision, inference=inference)
    except CaptureError as error:
        message = (
            f"the model accepts the whole batch, but not a part with {batch_size(args, kwargs)} "
            f"samples: {error.what}"
        )
        raise CoupledError(
            message,
            where=error.where,
            remedy="make forward accept any number of samples, or pass num_microbatches=1",
        ) from error


def _of_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any], num: int) -> Call:
    """Return the call on `num` copies of the first sample."""
    size = batch_size(args, kwargs)

    def copies(leaf: Any) -> Any:
        return (
            torch.cat([leaf[:1]] * num)
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size
            else leaf
        )

    return tree_map(copies, args), tree_map(copies, dict(kwargs))


def program_of(
    plan: Plan,
    model: nn.Module,
    whole: Trace,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    known: dict[int, Trace] | None = None,
) -> Program:
    """Emit a plan and validate the program.

    Args:
        plan: the plan.
        model: the plain model.
        whole: the trace of the call, as it was captured.
        args, kwargs: the call.
        known: traces by number of samples, as for `trace_part`.

    Raises:
        PlanError, EmissionError: if the plan does not fit the model.
        ValidationError: if a value of the program does not follow from the trace.
    """
    program = emit_traced(plan, staged_trace(plan, model, whole, args, kwargs, known))
    validate_before_run(as_planned(whole, plan), plan, program)
    return program


def emit_traced(plan: Plan, staged: StagedTrace) -> Program:
    """Emit a plan from the captured call.

    Raises:
        PlanError, EmissionError: if the plan does not fit the model.
    """
    part, microbatching, cut = staged
    return emit(part, plan, microbatching, cut)


def staged_trace(
    plan: Plan,
    model: nn.Module,
    whole: Trace,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    known: dict[int, Trace] | None = None,
) -> StagedTrace:
    """Return the captured call in the microbatches and stages of a plan.

    Args:
        plan: the plan.
        model: the plain model.
        whole: the trace of the batch.
        args, kwargs: the call on the whole batch.
        known: traces by number of samples, as for `trace_part`.

    Raises:
        ConstraintError, EmissionError: if the model cannot be cut into the stages of the plan.
    """
    part, microbatching = planned_part(plan, model, whole, args, kwargs, known)
    try:
        return StagedTrace(part, microbatching, cut_trace(part, plan.as_pipeline.positions))
    except CutError as error:
        raise ChangedPlanError(
            f"the model cannot be cut into the stages of the plan: {error.what}", where=error.where
        ) from error


def planned_part(
    plan: Plan,
    model: nn.Module,
    whole: Trace,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    known: dict[int, Trace] | None = None,
) -> tuple[Trace, Microbatching]:
    """Return the trace of one microbatch of a plan, and how microbatches form the batch.

    Args:
        plan: the plan. Without a pipeline, its only microbatch is the batch.
        model: the plain model.
        whole: the trace of the batch.
        args, kwargs: the call on the whole batch.
        known: traces by number of samples, as for `trace_part`.
    """
    pipeline = plan.pipeline
    if pipeline is None:  # without stages, inputs may have gradients
        batch = as_planned(whole, plan)
        return batch, find_microbatching(batch, batch, 1)
    alone = as_wanted(whole, plan.options.get("outputs", "dtensor"))
    part, microbatching = trace_part(
        model,
        alone,
        args,
        kwargs,
        pipeline.num_microbatches,
        precision=plan.options.get("precision"),
        inference=plan.options.get("inference", False),
        independent=pipeline.independent,
        known=known,
    )
    return by_rows(part, plan.loss_rows), microbatching
