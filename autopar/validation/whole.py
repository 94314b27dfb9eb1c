"""`validate`: check the program of a plan against the trace of the whole batch."""

from __future__ import annotations

from autopar.capture.trace import Trace
from autopar.core.garbage import collected_seldom
from autopar.plans import Plan
from autopar.program.program import Program
from autopar.stages import cut_trace
from autopar.validation.in_order import check_order
from autopar.validation.microbatch_graphs import validate_microbatches
from autopar.validation.program_states import validate_program
from autopar.validation.stages import check_stages
from autopar.validation.states import Validation, invalid


@collected_seldom()
def validate(trace: Trace, plan: Plan, program: Program) -> Validation:
    """Show that a program computes the traced model, before it runs.

    Args:
        trace: of the whole batch, for which the plan was made. plan: the plan. program: what the
            plan was emitted into.

    Returns:
        What was justified, and how.

    Raises:
        ValidationError: for the first node, output or gradient that does not follow from the trace.
    """
    pipeline, how = plan.as_pipeline, program.microbatches
    if how.num != pipeline.num_microbatches:
        what = (
            f"the program has {how.num} microbatches, but the plan has {pipeline.num_microbatches}"
        )
        raise invalid(what)
    part = trace if how.num == 1 else program.trace
    found = validate_microbatches(trace, part, how, promised=pipeline.independent)
    stages = cut_trace(part, pipeline.positions).stages
    check_stages(part, stages)
    for stage, staged, made in zip(stages, pipeline.stages, program.stages, strict=True):
        found = found.join(validate_program(stage, staged, made))
    _check_sums(program)
    _check_crossings(program)
    _check_shared(stages, program)
    if program.schedule != pipeline.schedule:
        what = (
            f"the schedule of the program is {program.schedule!r}, but the plan has"
            f" {pipeline.schedule!r}"
        )
        raise invalid(what)
    check_order(program, pipeline.schedule, pipeline.num_ranks)
    return found


def _check_sums(program: Program) -> None:
    """Check that gradients of several microbatches are added to sums. Else each backward would
    replace those of the microbatch before."""
    for number, stage in enumerate(program.stages):
        trained = [t.name for t in stage.parameters if t.has_gradient]
        if trained and program.microbatches.num > 1 and not stage.accumulates:
            what = (
                f"stage {number} does not sum gradients over {program.microbatches.num}"
                f" microbatches, although it trains {trained[0]!r}"
            )
            raise invalid(what)


def _check_crossings(program: Program) -> None:
    """Check that what leaves a stage arrives at the next in the same layout and dtype."""
    for number, (before, after) in enumerate(zip(program.stages, program.stages[1:], strict=False)):
        leaving = {t.name: (t.layout, t.dtype, t.has_gradient) for t in before.outputs if t.crosses}
        arriving = {t.name: (t.layout, t.dtype, t.has_gradient) for t in after.inputs if t.crosses}
        if leaving != arriving:
            name = next(n for n in (*leaving, *arriving) if leaving.get(n) != arriving.get(n))
            what = (
                f"{name} is sent by stage {number} as {leaving.get(name)}, but the next stage"
                f" expects {arriving.get(name)}"
            )
            raise invalid(what)


def _check_shared(stages: tuple[Trace, ...], program: Program) -> None:
    """Check that gradients of a parameter that several stages hold are added over these stages, and
    that its copies rest in one layout."""
    holders: dict[str, tuple[int, ...]] = {}
    for number, stage in enumerate(stages):
        for p in stage.parameters:
            holders[p.name] = (*holders.get(p.name, ()), number)
    due = {name: held for name, held in holders.items() if len(held) > 1}
    if dict(program.shared) != due:
        name = next(n for n in (*due, *program.shared) if due.get(n) != program.shared.get(n))
        what = (
            f"the gradient of {name!r} is summed over stages {program.shared.get(name, ())}, but"
            f" stages {due.get(name, ())} hold the parameter"
        )
        raise invalid(what)
    for name, held in due.items():
        rests = {t.layout for s in held for t in program.stages[s].parameters if t.name == name}
        if len(rests) > 1:
            raise invalid(
                f"the copies of {name!r} in stages {held} are stored in different layouts"
            )
