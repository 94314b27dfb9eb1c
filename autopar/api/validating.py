"""Validation of what a plan is emitted into: before it runs, and as a part of its certificate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from autopar.capture import Trace
from autopar.certificate import Certificate, Finding
from autopar.errors import AutoparError, CoupledError, ValidationError
from autopar.plans import Plan
from autopar.run.program import Microbatches, Program, StagedProgram
from autopar.validation import Validation, validate, validate_microbatches

log = logging.getLogger("autopar")


def validate_before_run(reference: Trace, plan: Plan, program: Program | StagedProgram) -> None:
    """Show that a program computes the traced model, and warn of what only the user's promise says.

    Args:
        reference: the trace of the call, as the plan is for it.

    Raises:
        ValidationError: naming the first value that does not follow from the trace.
    """
    found = validate(reference, plan, program)
    log.info("validated: %s", found)
    for what in found.unproven:
        log.warning("not validated: %s", what)


def refuse_unproven(whole: Trace, part: Trace, how: Microbatches, *, promised: bool) -> None:
    """Refuse microbatches that validation cannot show to make the batch, while there is a choice.

    Args:
        whole, part, how, promised: as of `validate_microbatches`.

    Raises:
        CoupledError: naming the first value of a microbatch that does not follow.
    """
    try:
        validate_microbatches(whole, part, how, promised=promised)
    except ValidationError as error:
        remedy = "pass num_microbatches=1, or fewer microbatches of more samples each"
        raise CoupledError(error.what, where=error.where, remedy=remedy) from error


def with_validation(
    certificate: Certificate,
    reference: Trace,
    plan: Plan,
    emitting: Callable[[], Program | StagedProgram],
) -> Certificate:
    """The certificate with what validation of the emitted program found."""
    try:
        validation: Validation = validate(reference, plan, emitting())
    except AutoparError as error:
        finding = Finding("program", error.what, "" if error.where is None else str(error.where))
        return replace(certificate, findings=(*certificate.findings, finding))
    return replace(certificate, validation=validation)
