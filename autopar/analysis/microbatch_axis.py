"""Labels of the joint graph on the axis of microbatches, and the repairs that they need.

Nodes are labelled in the order of the graph (`autopar.analysis.microbatch_calls`), forward first.
The label of the loss determines the tangent, and backward is labelled by the same rules. There are
two repairs for a call without a label:

- A value of the batch is *given*. It follows from inputs and buffers only, so it is known before
  the first microbatch runs. Each microbatch reads it instead of its own value.
- An operand is *raised*: multiplied by a power of the number of microbatches M. This helps if its
  power is too low for a sum, or for a function that is not linear in it
  (`autopar.analysis.microbatch_sites`).

Gradients are summed over microbatches, so each must be a term. If no repair helps, the batch is
refused with an error that names the node. If the user promises that samples do not depend on each
other, a node without a label is labelled by its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.analysis.microbatch_calls import (
    MEAN,
    OPEN,
    TERM,
    WHOLE,
    Label,
    Way,
    find_way,
    label_by_shape,
)
from autopar.analysis.microbatch_sites import (
    CallPair,
    Edge,
    Raises,
    find_sites,
    find_unknown,
    is_floating,
    output_of,
    refusal,
    why_not,
)
from autopar.capture.graphs import is_tensor
from autopar.capture.trace import Output, Trace
from autopar.errors import CoupledError
from autopar.ops import random
from autopar.rules import Call


@dataclass(frozen=True, slots=True)
class Labelled:
    """The labels and repairs of a joint graph, by names of nodes of the batch's graph.

    Attributes:
        inputs: path of each input that is cut → its label.
        outputs: path → its label.
        given: node whose value is given by the batch → label of the microbatch's own value.
        raised: edge → power of M by which the operand is raised.
        promised: keys of nodes that are labelled only because of the user's promise.
    """

    inputs: Mapping[str, Label]
    outputs: Mapping[str, Label]
    given: Mapping[str, Label]
    raised: Mapping[Edge, int]
    promised: tuple[str, ...]


def label_joint_graph(whole: Trace, part: Trace, num: int, *, independent: bool) -> Labelled:
    """Label every node that outputs or gradients depend on.

    Args:
        whole: the trace of the batch.
        part: the trace of one microbatch.
        num: number of microbatches.
        independent: whether the user promises that samples do not depend on each other.

    Raises:
        CoupledError: if a node has no label and no repair gives it one.
    """
    first = _Pass(whole, part, num, independent, near=False)
    try:
        return first.run()
    except CoupledError as refusal:
        if not first.raises.elsewhere:
            raise
        try:  # raising a node raises all its readers, some of them perhaps too far
            return _Pass(whole, part, num, independent, near=True).run()
        except CoupledError as second:
            raise refusal from second


class _Pass:
    """One pass of labelling over the joint graph. Other arguments are those of `label_joint_graph`.

    Args:
        near: see `Raises`.
    """

    def __init__(
        self, whole: Trace, part: Trace, num: int, independent: bool, *, near: bool
    ) -> None:
        self.whole, self.part, self.num, self.independent = whole, part, num, independent
        self.raises = Raises(whole, near=near)
        self.given: dict[str, Label] = {}
        self.promised: dict[str, None] = {}
        self.labels: dict[tuple[str, int], Label] = {}
        self.outputs: dict[str, Label] = {}
        self._unknown = find_unknown(whole)

    @property
    def _output(self) -> fx.Node:
        return output_of(self.whole)

    @property
    def _results(self) -> tuple[fx.Node, ...]:
        """The nodes that the graph returns."""
        return tuple(self._output.args[0])

    def run(self) -> Labelled:
        """Label all nodes. After a repair, continue at the first node whose operands changed."""
        self._place_inputs()
        sites = find_sites(self.whole, self.part, self.num)
        begin = sum(site.is_forward for site in sites)  # of backward
        places = {site.node.name: place for place, site in enumerate(sites)}
        place = 0
        while place <= len(sites):
            again, end = (self._end_forward(), begin) if place == begin else ([], len(sites))
            if not again:
                again = self._label(sites[place]) if place < len(sites) else self._end()
            place = min((places.get(name, end) for name in again), default=place + 1)
            if any(name in self.given for name in again):
                place = 0
            if self.raises.conflict:
                node = sites[min(place, len(sites) - 1)].node
                raise refusal(node, self.num, "joined terms cannot be given equal weights")
        self._refuse_updates()
        inputs = {i.path: self.labels[i.node, 0] for i in self.whole.inputs}
        cut = {path: label for path, label in inputs.items() if label.kind == "split"}
        return Labelled(cut, self.outputs, self.given, self.raises.edges, tuple(self.promised))

    def _place_inputs(self) -> None:
        batch_trace = self.whole
        self.labels |= {(p.node, 0): WHOLE for p in (*batch_trace.parameters, *batch_trace.buffers)}
        for x, y in zip(batch_trace.inputs, self.part.inputs, strict=True):
            label = label_by_shape(x.shape, y.shape, self.num)
            assert label is not None, (
                f"input {x.path!r} of shape {x.shape} is not {self.num} times {y.shape}"
            )
            self.labels[x.node, 0] = label

    def _refuse_updates(self) -> None:
        for name, position in self.whole.mutated.items():
            if name != random.STATE:
                why = f"buffer {name!r} would be updated {self.num} times per step"
                raise refusal(self._results[position], self.num, why)

    # Nodes.

    def _label(self, site: CallPair) -> list[str]:
        """Label a node, or repair its operands and return the nodes to label again."""
        node = site.node
        if node.name in self.given:
            self.labels[node.name, 0] = WHOLE
            return []
        if site.call is None or site.part is None:  # a getitem
            source = site.operands[0].name, int(node.args[1])
            self.labels[node.name, 0] = self.labels[source]
            self.raises.note_getitem(site)
            return []
        reads = self._reads(site)
        is_open = any(read.kind == "open" for read in reads)
        way = None if is_open else find_way(site.call, site.part, reads, self.num)
        if way is None or not way.is_free:
            again = self._repair(site, way, reads)
            if again:
                return again
            way = self._label_by_promise(site, site.call, site.part)
        self.labels |= {(node.name, n): label for n, label in enumerate(way.results)}
        self.raises.note(site, way.linear, self._label_of, self.given)
        return []

    def _label_of(self, node: fx.Node) -> Label:
        return self.labels[node.name, 0]

    def _reads(self, site: CallPair) -> list[Label]:
        return [
            self.raises.label_read(self._label_of(operand), (site.node.name, index))
            for index, operand in enumerate(site.operands)
        ]

    def _repair(self, site: CallPair, way: Way | None, reads: list[Label]) -> list[str]:
        """Give or raise operands of a node, and return the nodes to label again. The result is
        empty if only the user's promise can help."""
        raises = way.raises if way is not None else (1,) * len(reads)
        due = [
            (n, o) for n, (o, power) in enumerate(zip(site.operands, raises, strict=True)) if power
        ]
        known = [operand.name for _, operand in due if self._can_be_given(operand)]
        if known:
            self.given |= {name: self.labels[name, 0] for name in known}
            self.raises.edges.clear()  # they are determined again
            return known
        if way is not None and all(is_floating(operand) for _, operand in due):
            return self.raises.add({(site.node.name, n): raises[n] for n, _ in due})
        cut = {(site.node.name, n): -r.power for n, r in enumerate(reads) if r.kind == "split"}
        if not self.independent or any(power < 0 for power in cut.values()):
            raise refusal(site.node, self.num, *why_not(site.node, reads, self._unknown))
        low = {edge: power for edge, power in cut.items() if power}
        return self.raises.add(low) if low else []

    def _can_be_given(self, node: fx.Node) -> bool:
        """Return whether the batch's value can be computed before the first microbatch runs."""
        if node.op != "call_function" or node.name in self._unknown or not is_tensor(node):
            return False
        return node.name not in self.given and self._label_of(node).is_count

    def _label_by_promise(self, site: CallPair, call: Call, part: Call) -> Way:
        """Return labels by shapes. In backward, a result of the batch's shape may be a term or a
        copy."""
        reads, labels = self._reads(site), []
        for x, y in zip(call.outputs, part.outputs, strict=True):
            label = label_by_shape(x.shape, y.shape, self.num)
            if label is None:
                raise refusal(site.node, self.num, *why_not(site.node, reads, self._unknown))
            labels.append(label if site.is_forward or label != WHOLE else OPEN)
        if all(read.kind != "open" for read in reads):
            self.promised[site.node.meta["key"]] = None
        return Way(tuple(labels))

    # Outputs and gradients.

    def _result(self, index: int) -> Label:
        return self.raises.label_read(
            self._label_of(self._results[index]), (self._output.name, index)
        )

    def _end_forward(self) -> list[str]:
        """Check the outputs and label their tangents, or raise outputs."""
        self.outputs.clear()
        for index, o in enumerate(self.whole.outputs):
            node, label = self._results[index], self._result(index)
            output_text = f"output {o.path!r}" if o.path else "the model's output"
            if label.kind == "place":
                self._check_places(o, node, output_text)
                continue  # such an output is not returned with several microbatches
            power, most = (label.power, 0) if label.kind == "split" else (label.as_term, 1)
            if power is not None and power < 0 and is_floating(node):
                return self.raises.add({(self._output.name, index): -power})
            if power is not None and not 0 <= power <= most:
                raise refusal(node, self.num, f"{output_text} is {label}")
            self.outputs[o.path] = _normalize_label(label)
            if o.tangent:
                self.labels[o.tangent, 0] = _tangent(self.outputs[o.path], is_loss=o.is_loss)
        return []

    def _check_places(self, output: Output, node: fx.Node, what: str) -> None:
        """Raise an error for an output with positions in the batch that a call must return."""
        if output.whole or output.is_loss:
            raise refusal(node, self.num, f"{what} has positions in the batch")

    def _end(self) -> list[str]:
        """Check the gradients, or raise them."""
        low: dict[Edge, int] = {}
        for p in self.whole.parameters:
            label = WHOLE.raise_by(-1) if p.gradient is None else self._result(p.gradient)
            power = label.as_term
            if p.gradient is None or label.kind in ("zero", "open") or power == 0:
                continue
            if power is None or power > 0:
                why = f"the gradient of parameter {p.name!r} is {label}, not a sum over samples"
                raise refusal(self._results[p.gradient], self.num, why)
            low[self._output.name, p.gradient] = -power
        return self.raises.add(low) if low else []


def _normalize_label(label: Label) -> Label:
    """Convert the label of an output to one of: split, whole, a sum or an average."""
    if label.kind == "zero":
        return Label("split", label.dim) if label.dim >= 0 else WHOLE
    return TERM if label.as_term == 0 else label


def _tangent(output: Label, *, is_loss: bool) -> Label:
    """Return the label of the tangent that the runtime passes to the backward of a microbatch."""
    if output.kind == "split":
        return output
    if is_loss:
        return WHOLE if output == TERM else WHOLE.raise_by(-1)
    return {TERM: WHOLE, MEAN: WHOLE.raise_by(-1)}.get(
        output, TERM
    )  # a copy is that of the last microbatch
