"""`check_stages`: the traces of a pipeline's stages are together the trace of one microbatch.

Every node of a stage's trace has to be the node of that name in the whole trace, or the sum of a
stage's terms of the gradient of a parameter that several stages hold. A value that a stage reads
and does not make has to leave the stage before it, and a gradient has to come back the same way.
Every output and every gradient has to be returned by some stage; the stages' terms of a gradient
are those of the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from autopar.capture.trace import Trace
from autopar.errors import ValidationError
from autopar.rules import where_of
from autopar.validation.states import invalid

_ADD = torch.ops.aten.add.Tensor


def check_stages(part: Trace, stages: Sequence[Trace]) -> None:
    """Compare the traces of all stages with the trace of one microbatch.

    Raises:
        ValidationError: naming the first node, output or gradient of a stage that is not the
            microbatch's.
    """
    own = {node.name: node for node in part.graph.nodes}
    for number, stage in enumerate(stages):
        _check_nodes(own, stage, number)
        _check_arrivals(part, stages, number)
    _check_returns(part, stages)


def _check_nodes(own: dict[str, fx.Node], stage: Trace, number: int) -> None:
    """Check that each node of a stage makes the same call as the node of its name in the whole
    trace."""
    for node in stage.graph.nodes:
        if node.op != "call_function":
            continue
        origin = own.get(node.name)
        if (
            origin is None or origin.meta.get("key") != node.meta["key"]
        ):  # names of a stage's own nodes may be those of others
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
    """Check a stage's placeholders: tensors of the model and of the batch, and what its neighbours
    pass under the same name."""
    stage = stages[number]
    handed = _gradients_handed(stages[number - 1]) if number else {}
    crossing = {i.node: i.gradient for i in stage.inputs if i.crosses}
    for name, gradient in crossing.items():
        _check_handed(stage, number, name, gradient, handed)
    known = {p.node for p in (*part.parameters, *part.buffers)} | {i.node for i in part.inputs}
    known |= {o.tangent for o in part.differentiable}
    known |= crossing.keys() | set(_gradients_handed(stage).values())
    for node in stage.graph.nodes:
        if node.op == "placeholder" and node.name not in known:
            raise _error(
                node,
                number,
                "it is not a tensor of the model or the batch, and no other stage sends it",
            )
    if left := sorted(handed.keys() - crossing.keys()):
        what = "the previous stage sends it, but this stage does not receive it"
        raise _missing_error(stage, number, left[0], what)


def _check_handed(
    stage: Trace, number: int, name: str, gradient: int | None, handed: dict[str, str]
) -> None:
    """Check that the stage before passes a value under its name, and waits for its gradient.

    Args:
        stage: the stage that takes the value.
        number: the stage's index.
        name: the value's placeholder.
        gradient: index of the value's gradient in the stage's results; None if it has none.
        handed: values that the stage before passes → the gradients that it waits for.
    """
    if name not in handed:
        raise _missing_error(stage, number, name, "the previous stage does not send it")
    returned = _results(stage)[gradient].name if gradient is not None else ""
    if returned != handed[name]:
        what = (
            f"its gradient returns as {returned or 'nothing'}, but the previous stage expects"
            f" {handed[name] or 'none'}"
        )
        raise _missing_error(stage, number, name, what)


def _gradients_handed(stage: Trace) -> dict[str, str]:
    """Return the values that a stage passes to the next → the gradients that come back, ``""`` for
    none."""
    return {o.node: o.tangent for o in stage.outputs if o.crosses}


def _check_returns(part: Trace, stages: Sequence[Trace]) -> None:
    """Check that the stages together return all of the model's outputs, new buffers and
    gradients."""
    returned = {(o.path, o.node) for stage in stages for o in stage.outputs if not o.crosses}
    for o in part.outputs:
        if (o.path, o.node) not in returned:
            raise invalid(f"no stage returns output {o.path!r}")
    for stage in (part, *stages):  # of a buffer that a stage changes it returns the new value
        for name, position in stage.mutated.items():
            if _results(stage)[position].name != _results(part)[part.mutated[name]].name:
                raise invalid(f"a stage writes a different value to buffer {name!r} than the model")
    written = {name for stage in stages for name in stage.mutated}
    if missing := sorted(part.mutated.keys() - written):
        raise invalid(f"no stage writes buffer {missing[0]!r}")
    for p in part.parameters:
        due = Counter(_terms(_results(part)[p.gradient])) if p.gradient is not None else Counter()
        found = Counter(term for stage in stages for term in _stage_terms(stage, p.name))
        if found != due:
            what = (
                f"the stages' gradients of {p.name!r} are {_list_terms(found)},"
                f" expected {_list_terms(due)}"
            )
            raise invalid(what)


def _stage_terms(stage: Trace, parameter: str) -> Iterator[str]:
    for p in stage.parameters:
        if p.name == parameter and p.gradient is not None:
            yield from _terms(_results(stage)[p.gradient])


def _terms(node: fx.Node) -> Iterator[str]:
    """Iterate over the names of the values that a node is the sum of."""
    if node.op == "call_function" and _is_sum(node):
        for operand in node.args:
            yield from _terms(operand)
    else:
        yield node.name


def _list_terms(terms: Counter[str]) -> str:
    return " + ".join(sorted(terms.elements())) or "nothing"


def _results(trace: Trace) -> Sequence[fx.Node]:
    found: Sequence[fx.Node] = next(iter(reversed(trace.graph.nodes))).args[0]
    return found


def _error(node: fx.Node, number: int, why: str) -> ValidationError:
    what = (
        f"{node.meta.get('key', node.name)} in the trace of stage {number} is not justified: {why}"
    )
    return invalid(what, where_of(node))


def _missing_error(stage: Trace, number: int, name: str, why: str) -> ValidationError:
    node = next((n for n in stage.graph.nodes if n.name == name), None)
    if node is None:
        return invalid(f"{name} at the boundary of stage {number} is not justified: {why}")
    return _error(node, number, why)
