"""`validate`: check the program of a plan against the trace of the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from autopar.capture.trace import Trace
from autopar.core.garbage import collected_seldom
from autopar.errors import ValidationError
from autopar.plans import Plan
from autopar.program.program import Program
from autopar.rules import where_of
from autopar.stages import cut_trace
from autopar.validation.in_order import check_order
from autopar.validation.microbatch_graphs import validate_microbatches
from autopar.validation.program_states import validate_program
from autopar.validation.states import Validation, invalid

# --------------------------------------------------------------------------------------------------
# `check_stages`: check that the traces of a pipeline's stages together are the trace of one
# microbatch.
#
# Every node of a stage's trace must be the node of that name in the whole trace, or the sum of a
# stage's terms of the gradient of a parameter that several stages hold. The previous stage must
# send every value that a stage reads and does not compute, and the gradient must return the same
# way. Some stage must return every output and every gradient. The stages' terms of a gradient must
# be those of the whole trace.


_ADD = torch.ops.aten.add.Tensor


def check_stages(part: Trace, stages: Sequence[Trace]) -> None:
    """Compare the traces of all stages with the trace of one microbatch.

    Args:
        part: the trace of one microbatch.
        stages: the traces of the stages.

    Raises:
        ValidationError: for the first node, output or gradient of a stage that differs.
    """
    stage_nodes = {node.name: node for node in part.graph.nodes}
    for number, stage in enumerate(stages):
        _check_nodes(stage_nodes, stage, number)
        _check_arrivals(part, stages, number)
    _check_returns(part, stages)


def _check_nodes(own: dict[str, fx.Node], stage: Trace, number: int) -> None:
    """Check that each node of a stage makes the same call as the node of that name in the whole
    trace."""
    for node in stage.graph.nodes:
        if node.op != "call_function":
            continue
        origin = own.get(node.name)
        if (
            origin is None or origin.meta.get("key") != node.meta["key"]
        ):  # a node that only a stage has may have the name of another node
            if not _is_sum(node):
                raise _error(node, number, "the trace of one microbatch has no such node")
            continue
        if node.target is not origin.target or _named(node) != _named(origin):
            raise _error(node, number, "its call differs from the trace of one microbatch")


def _named(node: fx.Node) -> object:
    """Return the arguments of a call, with nodes replaced by their names."""
    return fx.map_arg((node.args, dict(node.kwargs)), lambda operand: ("node", operand.name))


def _is_sum(node: fx.Node) -> bool:
    return node.target is _ADD and len(node.args) == len(node.all_input_nodes) and not node.kwargs


def _check_arrivals(part: Trace, stages: Sequence[Trace], number: int) -> None:
    """Check a stage's placeholders: tensors of the model and of the batch, and values that other
    stages send under the same name."""
    stage = stages[number]
    sent = _gradients_of_sent(stages[number - 1]) if number else {}
    crossing = {i.node: i.gradient for i in stage.inputs if i.crosses}
    for name, gradient in crossing.items():
        _check_received(stage, number, name, gradient, sent)
    known = {p.node for p in (*part.parameters, *part.buffers)} | {i.node for i in part.inputs}
    known |= {o.tangent for o in part.differentiable}
    known |= crossing.keys() | set(_gradients_of_sent(stage).values())
    for node in stage.graph.nodes:
        if node.op == "placeholder" and node.name not in known:
            raise _error(
                node,
                number,
                "it is not a tensor of the model or the batch, and no other stage sends it",
            )
    if unreceived := sorted(sent.keys() - crossing.keys()):
        message = "the previous stage sends it, but this stage does not receive it"
        raise _missing_error(stage, number, unreceived[0], message)


def _check_received(
    stage: Trace, number: int, name: str, gradient: int | None, sent: dict[str, str]
) -> None:
    """Check that the previous stage sends a value under its name, and waits for its gradient.

    Args:
        stage: the stage that receives the value.
        number: index of the stage.
        name: placeholder of the value.
        gradient: index of the value's gradient in the stage's results; None if it has none.
        sent: values that the previous stage sends → the gradients that it waits for.
    """
    if name not in sent:
        raise _missing_error(stage, number, name, "the previous stage does not send it")
    returned = _results(stage)[gradient].name if gradient is not None else ""
    if returned != sent[name]:
        message = (
            f"its gradient returns as {returned or 'nothing'}, but the previous stage expects"
            f" {sent[name] or 'none'}"
        )
        raise _missing_error(stage, number, name, message)


def _gradients_of_sent(stage: Trace) -> dict[str, str]:
    """Return the values that a stage sends to the next one → the gradients that come back; ``""``
    if there is none."""
    return {o.node: o.tangent for o in stage.outputs if o.crosses}


def _check_returns(part: Trace, stages: Sequence[Trace]) -> None:
    """Check that the stages together return all outputs, new buffers and gradients of the model."""
    returned = {(o.path, o.node) for stage in stages for o in stage.outputs if not o.crosses}
    for o in part.outputs:
        if (o.path, o.node) not in returned:
            raise invalid(f"no stage returns output {o.path!r}")
    for stage in (part, *stages):  # a stage that changes a buffer returns the new value
        for name, position in stage.mutated.items():
            if _results(stage)[position].name != _results(part)[part.mutated[name]].name:
                raise invalid(f"a stage writes a different value to buffer {name!r} than the model")
    written = {name for stage in stages for name in stage.mutated}
    if missing := sorted(part.mutated.keys() - written):
        raise invalid(f"no stage writes buffer {missing[0]!r}")
    for p in part.parameters:
        due = Counter(_terms(_results(part)[p.gradient])) if p.gradient is not None else Counter()
        terms = Counter(term for stage in stages for term in _stage_terms(stage, p.name))
        if terms != due:
            message = (
                f"the stages' gradients of {p.name!r} are {_list_terms(terms)},"
                f" expected {_list_terms(due)}"
            )
            raise invalid(message)


def _stage_terms(stage: Trace, parameter: str) -> Iterator[str]:
    for p in stage.parameters:
        if p.name == parameter and p.gradient is not None:
            yield from _terms(_results(stage)[p.gradient])


def _terms(node: fx.Node) -> Iterator[str]:
    """Iterate over the names of the terms of a node that is a sum."""
    if node.op == "call_function" and _is_sum(node):
        for operand in node.args:
            yield from _terms(operand)
    else:
        yield node.name


def _list_terms(terms: Counter[str]) -> str:
    return " + ".join(sorted(terms.elements())) or "nothing"


def _results(trace: Trace) -> Sequence[fx.Node]:
    results: Sequence[fx.Node] = next(iter(reversed(trace.graph.nodes))).args[0]
    return results


def _error(node: fx.Node, number: int, why: str) -> ValidationError:
    message = (
        f"{node.meta.get('key', node.name)} in the trace of stage {number} is not justified: {why}"
    )
    return invalid(message, where_of(node))


def _missing_error(stage: Trace, number: int, name: str, why: str) -> ValidationError:
    node = next((n for n in stage.graph.nodes if n.name == name), None)
    if node is None:
        return invalid(f"{name} at the boundary of stage {number} is not justified: {why}")
    return _error(node, number, why)


# --------------------------------------------------------------------------------------------------


@collected_seldom()
def validate(trace: Trace, plan: Plan, program: Program) -> Validation:
    """Check that a program computes the traced model, before it runs.

    Args:
        trace: trace of the whole batch, for which the plan was made.
        plan: the plan.
        program: the program emitted from the plan.

    Returns:
        How the nodes of the program were justified.

    Raises:
        ValidationError: for the first node, output or gradient that does not follow from the trace.
    """
    pipeline, how = plan.as_pipeline, program.microbatches
    if how.num != pipeline.num_microbatches:
        message = (
            f"the program has {how.num} microbatches, but the plan has {pipeline.num_microbatches}"
        )
        raise invalid(message)
    part = trace if how.num == 1 else program.trace
    report = validate_microbatches(trace, part, how, promised=pipeline.independent)
    stages = cut_trace(part, pipeline.positions).stages
    check_stages(part, stages)
    for stage, staged, stage_program in zip(stages, pipeline.stages, program.stages, strict=True):
        report = report.join(validate_program(stage, staged, stage_program))
    _check_sums(program)
    _check_crossings(program)
    _check_shared(stages, program)
    if program.schedule != pipeline.schedule:
        message = (
            f"the schedule of the program is {program.schedule!r}, but the plan has"
            f" {pipeline.schedule!r}"
        )
        raise invalid(message)
    check_order(program, pipeline.schedule, pipeline.num_ranks)
    return report


def _check_sums(program: Program) -> None:
    """Check that gradients of several microbatches are added to sums. Without sums, each backward
    would replace the gradients of the previous microbatch."""
    for number, stage in enumerate(program.stages):
        trained = [t.name for t in stage.parameters if t.has_gradient]
        if trained and program.microbatches.num > 1 and not stage.accumulates:
            message = (
                f"stage {number} does not sum gradients over {program.microbatches.num}"
                f" microbatches, although it trains {trained[0]!r}"
            )
            raise invalid(message)


def _check_crossings(program: Program) -> None:
    """Check that values arrive at a stage in the layout and dtype in which the previous stage sends
    them."""
    for number, (before, after) in enumerate(zip(program.stages, program.stages[1:], strict=False)):
        leaving = {t.name: (t.layout, t.dtype, t.has_gradient) for t in before.outputs if t.crosses}
        arriving = {t.name: (t.layout, t.dtype, t.has_gradient) for t in after.inputs if t.crosses}
        if leaving != arriving:
            name = next(n for n in (*leaving, *arriving) if leaving.get(n) != arriving.get(n))
            message = (
                f"{name} is sent by stage {number} as {leaving.get(name)}, but the next stage"
                f" expects {arriving.get(name)}"
            )
            raise invalid(message)


def _check_shared(stages: tuple[Trace, ...], program: Program) -> None:
    """Check that gradients of a parameter that several stages hold are summed over these stages,
    and that its copies are stored in the same layout."""
    holders: dict[str, tuple[int, ...]] = {}
    for number, stage in enumerate(stages):
        for p in stage.parameters:
            holders[p.name] = (*holders.get(p.name, ()), number)
    due = {name: numbers for name, numbers in holders.items() if len(numbers) > 1}
    if dict(program.shared) != due:
        name = next(n for n in (*due, *program.shared) if due.get(n) != program.shared.get(n))
        message = (
            f"the gradient of {name!r} is summed over stages {program.shared.get(name, ())}, but"
            f" stages {due.get(name, ())} hold the parameter"
        )
        raise invalid(message)
    for name, numbers in due.items():
        rests = {t.layout for s in numbers for t in program.stages[s].parameters if t.name == name}
        if len(rests) > 1:
            raise invalid(
                f"the copies of {name!r} in stages {numbers} are stored in different layouts"
            )
