"""Whether a batch may be worked through in microbatches, and how their losses make the batch's.

A model may be run on parts of its batch one after another where the batch reaches every output by concatenation, and the loss by one sum,
where it has one. That is inferred from the graph: microbatches are like ranks of a data-parallel axis that run one after another, and so
the rules of ops say what each makes of parts, and each tensor gets a label (`autopar.analysis.microbatch_labels`). With w the weight of a
microbatch (1; 1/M; c/Σc; f(c)/f(Σc), where a sum is divided by f(c), as by ``count.clamp(min=1)``), loss = Σ w·loss_m, and by linearity
each gradient is Σ w·gradient_m: the tangent of microbatch m is w times that of the loss. Without a loss, the tangents of the batch's
outputs are cut, or shared, as the outputs are put together.

Where the rules cannot see that samples do not depend on each other (tokens sorted by expert), the user may promise it: then a tensor
whose graph of one microbatch has a dim M times shorter is taken for a part, and every op where that was needed is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar import random_ops
from autopar.analysis.microbatch_labels import DIVISOR, SUM_OF, WHOLE, Label, node_labels, part_label, refusal
from autopar.analysis.vanishing import equal, vanishes
from autopar.capture.trace import Trace
from autopar.errors import ConstraintError
from autopar.rules import call_of


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is worked through.

    Attributes:
        num: how many microbatches. inputs: path of each input that is cut → the dim it is cut along.
        outputs: path → its label, of all that can be put together; the loss among them, where there is one.
        count: name of the node of the microbatch's graph that weighs the loss, ``""`` where all weigh alike.
        sums: names of the sums that `count` is made of, where it is none itself: of them, not of it, the batch's are the total.
        only_counted: whether a microbatch that has nothing to count has nothing in the sum that is divided by it, either, and adds nothing.
        promised: keys of the ops at which only the user's promise says that samples are independent.
    """

    num: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, Label]
    count: str = ""
    promised: tuple[str, ...] = ()
    only_counted: bool = True
    sums: tuple[str, ...] = ()


def microbatching(whole: Trace, part: Trace, num: int, *, independent: bool = False) -> Microbatching:
    """How `num` microbatches make a batch, from the traces of the whole and of one.

    Args:
        independent: the user promises that samples do not depend on each other.

    Raises:
        CoupledError: where the model couples samples (batch normalization, contrastive losses), naming the op.
    """
    if num == 1:
        return Microbatching(1, {}, {o.path: WHOLE for o in whole.outputs})
    here = {n.meta["key"]: n for n in part.graph.nodes if n.op == "call_function"}
    labels: dict[tuple[str, int], Label] = {}
    promised: list[str] = []
    for x, y in zip(whole.inputs, part.inputs, strict=True):
        labels[x.node, 0] = _input_label(x.path, x.shape, y.shape, num)
    labels.update({(p.node, 0): WHOLE for p in (*whole.parameters, *whole.buffers)})
    nodes = [n for n in whole.graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]
    wanted = _wanted(whole)
    for node in nodes:
        if node.name not in wanted:
            continue
        if node.meta["key"] not in here:
            raise refusal(node, num, "the graph of one microbatch has no such op")
        try:
            made = node_labels(node, here[node.meta["key"]], labels, num)
        except ConstraintError:
            made = _promised(node, here[node.meta["key"]], num) if independent else ()
            if not made:
                raise
            promised.append(node.meta["key"])
        labels.update({(node.name, result): label for result, label in enumerate(made)})
    results = next(iter(reversed(whole.graph.nodes))).args[0]
    for name, position in whole.mutated.items():
        if name != random_ops.STATE:
            raise refusal(results[position], num, f"buffer {name!r} would be updated {num} times a step")
    outputs = {o.path: labels[results[i].name, 0] for i, o in enumerate(whole.outputs)}
    loss = next((outputs[o.path] for o in whole.outputs if o.is_loss), WHOLE)
    for i, o in enumerate(whole.outputs):
        why = _unjoined(whole, outputs[o.path], loss)
        if why and (o.whole or o.is_loss):
            raise refusal(results[i], num, f"{f'output {o.path!r}' if o.path else 'what the model returns'} {why}")
        if why:  # it is not asked for of several microbatches
            del outputs[o.path]
    keys = {n.name: n.meta["key"] for n in nodes}
    only_counted, sums = True, ()
    if loss.count:
        _check_weighed_by_inputs(whole, loss.count, num)
        only_counted = _only_counted(whole, labels, loss)
        sums = tuple(here[keys[name]].name for name in _sums_of(whole, labels, loss.count))
    cut = {i.path: labels[i.node, 0].dim for i in whole.inputs if labels[i.node, 0].kind == "split"}
    count = here[keys[loss.count]].name if loss.count else ""
    return Microbatching(num, cut, outputs, count, tuple(promised), only_counted, sums)


def _unjoined(whole: Trace, label: Label, loss: Label) -> str:
    """Why the batch's output cannot be put together from those of microbatches, of which the loss alone has weights."""
    if label.kind == "place":
        return "has positions in the batch"
    if label == DIVISOR:
        return "is a sum over samples with something done to it once for the whole batch, and microbatches would do it once each"
    if label.count and not (loss.count and equal(whole.node(label.count), whole.node(loss.count))):
        return "is an average that weighs otherwise than the loss"
    return ""


def _only_counted(whole: Trace, labels: Mapping[tuple[str, int], Label], label: Label) -> bool:
    """Whether all sums that are divided by a count are 0 where it is."""
    count = whole.node(label.count)
    quotients = (n for n in whole.graph.nodes if labels.get((n.name, 0)) == label and n.args[1:2] == (count,))
    return all(vanishes(n.args[0], count) for n in quotients)


def _sums_of(whole: Trace, labels: Mapping[tuple[str, int], Label], count: str) -> tuple[str, ...]:
    """The sums that a divisor is made of; none of a count, which is one."""
    if labels[count, 0] != DIVISOR:
        return ()
    found: dict[str, None] = {}
    stack = [whole.node(count)]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if labels[operand.name, 0] == DIVISOR:
                stack.append(operand)
            elif labels[operand.name, 0] == SUM_OF:
                found[operand.name] = None
    return tuple(found)


def _check_weighed_by_inputs(whole: Trace, count: str, num: int) -> None:
    """That what weighs a microbatch's loss follows from its inputs and buffers, before any of it has run, and has no gradient."""
    parameters = {p.node: p.name for p in whole.parameters}
    stack, seen = [whole.node(count)], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node.name in parameters:
            name = parameters[node.name]
            why = f"microbatches' losses weigh by what also follows from parameter {name!r}, and may follow from inputs and buffers alone"
            raise refusal(whole.node(count), num, why)
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes


def _promised(node: fx.Node, here: fx.Node, num: int) -> tuple[Label, ...]:
    """What its results are by their shapes; nothing where these do not say it."""
    pairs = zip(call_of(node).outputs, call_of(here).outputs, strict=True)
    found = [part_label(x.shape, y.shape, num) for x, y in pairs]
    return tuple(label for label in found if label is not None) if None not in found else ()


def _wanted(trace: Trace) -> set[str]:
    """The nodes that outputs depend on."""
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    stack = list(results[: len(trace.outputs)])
    found: set[str] = set()
    while stack:
        node = stack.pop()
        if node.name not in found:
            found.add(node.name)
            stack += node.all_input_nodes
    return found


def _input_label(path: str, shape: tuple[int, ...], part: tuple[int, ...], num: int) -> Label:
    label = part_label(shape, part, num)
    if label is None:
        raise ConstraintError(f"input {path!r} of shape {shape} is not {num} times {part}", remedy="pass a batch that microbatches divide")
    return label


def for_single_samples(like: Microbatching, made_from: Trace, part: Trace, num: int) -> Microbatching:
    """How `num` microbatches of one sample make a batch.

    A graph of one sample lacks ops that do nothing to it, and cannot be compared with that of the batch. Labels do not depend on how many
    samples there are, so they are those of two microbatches of two samples; only the node that weighs the loss has to be found anew.

    Args:
        like: of batches of two samples, whose trace is `made_from`. part: the trace of one sample.
    """
    sums = tuple(_counterpart(made_from, name, part) for name in like.sums)
    return replace(like, num=num, count=_counterpart(made_from, like.count, part) if like.count else "", sums=sums)


def _counterpart(trace: Trace, name: str, other: Trace) -> str:
    """The node of another trace that is reached from its loss as `name` is from this one's."""
    stack: list[tuple[fx.Node, tuple[int, ...]]] = [(_loss(trace), ())]
    seen: set[fx.Node] = set()
    while stack:
        node, path = stack.pop()
        if node.name == name:
            found = _loss(other)
            for step in path:
                found = found.all_input_nodes[step]
            if found.target is not node.target:
                break
            return found.name
        if node not in seen:
            seen.add(node)
            stack += [(operand, (*path, step)) for step, operand in enumerate(node.all_input_nodes)]
    raise ConstraintError("the loss of one sample is computed otherwise than that of two", remedy="use microbatches of two samples or more")


def _loss(trace: Trace) -> fx.Node:
    return trace.node(next(o.node for o in trace.outputs if o.is_loss))
