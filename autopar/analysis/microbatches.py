"""Whether a batch may be worked through in microbatches, and how their losses make the batch's.

A model may be run on parts of its batch one after another where the batch reaches every output by concatenation, and the loss by one sum,
where it has one. That is inferred from the graph: microbatches are like ranks of a data-parallel axis that run one after another, and so
the rules of ops say what each makes of parts, and each tensor gets a label (`autopar.analysis.microbatch_labels`). Where an op wants the
batch's sum or average, and that follows from the call and from buffers alone, each microbatch is given it (`autopar.analysis.given`).
With w = 1 of a sum, 1/M of an average, loss = Σ w·loss_m, and by linearity each gradient is Σ w·gradient_m: the tangent of microbatch m is
w times that of the loss. Without a loss, the tangents of the batch's outputs are cut, or shared, as the outputs are put together.

Where the rules cannot see that samples do not depend on each other (tokens sorted by expert), the user may promise it: then a tensor
whose graph of one microbatch has a dim M times shorter is taken for a part, and every op where that was needed is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar import random_ops
from autopar.analysis.given import (
    Counting,
    Given,
    ReadOtherwiseError,
    add_equal_values,
    counting,
    divides,
    find_unexplained_sum,
    scaled,
    with_given,
)
from autopar.analysis.microbatch_labels import MEAN_OF, WHOLE, Label, node_labels, part_label, refusal
from autopar.capture.trace import Trace
from autopar.errors import ConstraintError, CoupledError
from autopar.rules import call_of, operands_of


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a batch is worked through.

    Attributes:
        num: how many microbatches. inputs: path of each input that is cut → the dim it is cut along.
        outputs: path → its label, of all that can be put together; the loss among them, where there is one.
        promised: keys of the ops at which only the user's promise says that samples are independent.
        given: what each microbatch is given of the batch. averages: names of the quotients by it that are averages, and no sums.
        counting: how that is computed, once `ready` has made the graph of one that takes it.
    """

    num: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, Label]
    promised: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    averages: tuple[str, ...] = ()
    counting: tuple[Counting, ...] = ()


def microbatching(whole: Trace, part: Trace, num: int, *, independent: bool = False) -> Microbatching:
    """How `num` microbatches make a batch, from the traces of the whole and of one.

    Args:
        independent: the user promises that samples do not depend on each other.

    Raises:
        CoupledError: where the model couples samples (batch normalization, contrastive losses), naming the op.
    """
    if num == 1:
        return Microbatching(1, {}, {o.path: WHOLE for o in whole.outputs})
    refusals: list[CoupledError] = []
    for averages in (False, True):
        labelling = _Labelling(whole, part, num, independent, averages=averages)
        try:
            return labelling.run()
        except CoupledError as error:
            refusals.append(error)
        if not labelling.given:  # nothing is divided by what is given
            break
    raise refusals[0]


def ready(part: Trace, how: Microbatching) -> tuple[Trace, Microbatching]:
    """The trace of one microbatch that takes what it is given of the batch, and how that is computed."""
    if not how.given:
        return part, how
    given = add_equal_values(part, how.given)
    try:
        taking = with_given(part, given, how.averages, how.num)
        return taking, replace(how, given=given, counting=counting(part, given))
    except ReadOtherwiseError as error:  # the graph of one sample is another one than that of two
        raise refusal(error.args[0], how.num, _READ_OTHERWISE) from error


_READ_OTHERWISE = "the batch's sum is read by more than what divides sums by it"


class _Labelling:
    """One pass over the graph of the whole batch.

    Args:
        averages: sums that are divided by what is given are averages.
    """

    def __init__(self, whole: Trace, part: Trace, num: int, independent: bool, *, averages: bool = False) -> None:
        self.whole, self.part, self.num, self.independent, self.averages = whole, part, num, independent, averages
        self.here = {n.meta["key"]: n for n in part.graph.nodes if n.op == "call_function"}
        self.given: dict[str, Label] = {}
        self._labels: dict[tuple[str, int], Label] = {}
        self._promised: dict[str, None] = {}
        self._quotients: dict[str, None] = {}
        self._made_of_given: set[str] = set()
        self._unknown = {p.node: f"parameter {p.name!r}" for p in whole.parameters}  # node → what it follows from
        for x, y in zip(whole.inputs, part.inputs, strict=True):
            self._labels[x.node, 0] = _input_label(x.path, x.shape, y.shape, num)
        self._labels |= {(p.node, 0): WHOLE for p in (*whole.parameters, *whole.buffers)}

    def run(self) -> Microbatching:
        wanted = _wanted(self.whole)
        nodes = [n for n in self.whole.graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward" and n.name in wanted]
        places = {node.name: place for place, node in enumerate(nodes)}
        for node in nodes:
            reason = next((self._unknown[o.name] for o in node.all_input_nodes if o.name in self._unknown), "")
            if reason:
                self._unknown[node.name] = reason
        place = 0
        while place < len(nodes):
            again = self._label(nodes[place])
            place = min((places[name] for name in again), default=place) + 1
        return self._found()

    def _label(self, node: fx.Node) -> list[str]:
        """Label a node; or give the batch's value of what it reads, of which these names have to be labelled anew."""
        if node.name in self.given:
            return []
        if node.meta["key"] not in self.here:
            raise refusal(node, self.num, "the graph of one microbatch has no such op")
        operands = operands_of(node)
        try:
            made = self._quotient(node) or node_labels(node, self.here[node.meta["key"]], self._labels, self.num, self._unknown)
        except ConstraintError:
            known = [o.name for o in operands if self._labels[o.name, 0].is_term and o.name not in self._unknown]
            if known:
                self._give(known)
                return known
            made = _promised(node, self.here[node.meta["key"]], self.num) if self.independent else ()
            if not made:
                raise
            self._promised[node.meta["key"]] = None
        self._labels.update({(node.name, result): label for result, label in enumerate(made)})
        if any(o.name in self._made_of_given for o in operands) and node.name not in self._unknown and made == (WHOLE,):
            self._made_of_given.add(node.name)
        return []

    def _give(self, names: list[str]) -> None:
        for name in names:
            self.given[name] = self._labels[name, 0]
            self._labels[name, 0] = WHOLE
            self._made_of_given.add(name)

    def _quotient(self, node: fx.Node) -> tuple[Label, ...]:
        """Of a sum that is divided by what is given, where that is to be an average."""
        reads = [self._labels[o.name, 0] for o in operands_of(node)]
        if not (self.averages and sorted(r.kind for r in reads) == ["sum", "whole"] and divides(node, self._made_of_given)):
            return ()
        self._quotients[node.name] = None
        return (MEAN_OF,)

    def _found(self) -> Microbatching:
        whole, labels, num = self.whole, self._labels, self.num
        results = next(iter(reversed(whole.graph.nodes))).args[0]
        for name, position in whole.mutated.items():
            if name != random_ops.STATE:
                raise refusal(results[position], num, f"buffer {name!r} would be updated {num} times a step")
        outputs = {o.path: labels[results[i].name, 0] for i, o in enumerate(whole.outputs)}
        for i, o in enumerate(whole.outputs):
            if outputs[o.path].kind == "place":
                if o.whole or o.is_loss:
                    what = f"output {o.path!r}" if o.path else "what the model returns"
                    raise refusal(results[i], num, f"{what} has positions in the batch")
                del outputs[o.path]  # it is not asked for of several microbatches
        keys = {n.name: n.meta["key"] for n in whole.graph.nodes}
        given = tuple(Given(self.here[keys[n]].name, f"{keys[n]} of the batch", label.kind) for n, label in self.given.items())  # type: ignore[arg-type]
        averages = tuple(self.here[keys[n]].name for n in self._quotients)
        if averages:
            self._check_averages(add_equal_values(self.part, given), averages)
        if given:
            self._check_backward(given)
        cut = {i.path: labels[i.node, 0].dim for i in whole.inputs if labels[i.node, 0].kind == "split"}
        return Microbatching(num, cut, outputs, tuple(self._promised), given, averages)

    def _check_backward(self, given: tuple[Given, ...]) -> None:
        cut = {i.node for i, w in zip(self.part.inputs, self.whole.inputs, strict=True) if i.shape != w.shape}
        node = find_unexplained_sum(self.whole, self.part, given, cut)
        if node is not None:
            why = "backward reads a sum over the samples of one microbatch that is not a value of forward"
            raise refusal(node, self.num, why)

    def _check_averages(self, given: tuple[Given, ...], averages: tuple[str, ...]) -> None:
        try:
            scaled(self.part, given, averages)
        except ReadOtherwiseError as error:
            raise refusal(error.args[0], self.num, _READ_OTHERWISE) from error


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
    samples there are, so they are those of two microbatches of two samples; only what is given of the batch has to be found anew.

    Args:
        like: of batches of two samples, whose trace is `made_from`. part: the trace of one sample.
    """
    given = tuple(replace(g, node=_counterpart(made_from, g.node, part)) for g in like.given)
    averages = tuple(_counterpart(made_from, name, part) for name in like.averages)
    return replace(like, num=num, given=given, averages=averages)


def _counterpart(trace: Trace, name: str, other: Trace) -> str:
    """The node of another trace that is reached from its outputs as `name` is from this one's."""
    stack: list[tuple[fx.Node, fx.Node | None]] = [(a, b) for a, b in zip(_results(trace), _results(other), strict=True)]
    seen: set[fx.Node] = set()
    while stack:
        node, its = stack.pop()
        if node.name == name and its is not None and its.target is node.target:
            return its.name
        if node not in seen:
            seen.add(node)
            reads = () if its is None else its.all_input_nodes
            stack += [(operand, reads[step] if step < len(reads) else None) for step, operand in enumerate(node.all_input_nodes)]
    raise ConstraintError("the loss of one sample is computed otherwise than that of two", remedy="use microbatches of two samples or more")


def _results(trace: Trace) -> tuple[fx.Node, ...]:
    """The nodes of the outputs."""
    return tuple(trace.node(o.node) for o in trace.outputs)
