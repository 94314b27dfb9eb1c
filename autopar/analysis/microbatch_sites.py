"""Sites of microbatch analysis: pairs of calls in the graphs of batch and microbatch, refusals, and
raised operands.

A site pairs a call of the joint graph of the batch with the same call of a microbatch's graph.
Sites are visited in the order of labelling (`autopar.analysis.microbatch_axis`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.analysis.microbatch_calls import ADDITIONS, Label
from autopar.capture.graphs import is_tensor
from autopar.capture.trace import Trace
from autopar.errors import CoupledError, Where
from autopar.rules import Call, call_of, operands_of, where_of

# --------------------------------------------------------------------------------------------------
# Errors of batches that cannot be split into microbatches: the node, the reason, and the remedy.

REMEDY = (
    "pass microbatches=1 or num_microbatches=1, or no number, so that stages take the whole batch"
)


def refusal(node: fx.Node, num: int, why: str, remedy: str = REMEDY) -> CoupledError:
    """Return the error for a batch that cannot be split into microbatches.

    Args:
        node: the node that prevents it.
        num: number of microbatches.
        why: the reason; continues "at NODE".
        remedy: what the user can do.
    """
    key = node.meta.get("key", node.name)
    place = "" if node.meta.get("module") else " (in the model's own forward)"
    message = f"the batch cannot be split into {num} microbatches: at {key}{place} {why}"
    return CoupledError(message, where=_location_of(node), remedy=remedy)


def why_not(node: fx.Node, reads: Sequence[Label], unknown: Mapping[str, str]) -> tuple[str, str]:
    """Return the reason why a node has no label, and the remedy.

    Args:
        node: the node.
        reads: labels of its operands.
        unknown: nodes whose values are not known before the first microbatch runs → the value on
            which they depend.

    Returns:
        The reason and the remedy, for `refusal`.
    """
    if not reads:
        why = "its result depends on the number of samples, and a microbatch has fewer"
        return why, REMEDY
    shown = " and ".join(dict.fromkeys(map(str, reads)))
    if node.target in ADDITIONS and all(read.as_term is not None for read in reads):
        remedy = f"use one denominator for all terms, such as the number of samples, or {REMEDY}"
        return f"it joins terms with different weights: {shown}", remedy
    operands = zip(operands_of(node), reads, strict=True)
    late = [unknown[o.name] for o, r in operands if r.kind == "term" and o.name in unknown]
    why = (
        f"it reads {shown}, and the values of microbatches do not determine the value of the batch"
    )
    if late:
        why += (
            f"; the value of the batch depends on {late[-1]}, which is known only after the last"
            " microbatch"
        )
    return why, REMEDY


def _location_of(node: fx.Node) -> Where:
    """Return the place of a node, with the source line of the nearest earlier node if it has
    none."""
    near = node
    while not near.meta.get("source") and near.all_input_nodes:
        near = near.all_input_nodes[0]
    return replace(where_of(node), source=near.meta.get("source", ""))


Edge = tuple[str, int]
"""Name of a node, and index of an operand."""


@dataclass(frozen=True, slots=True)
class CallPair:
    """A node of the batch's graph.

    Attributes:
        node: the node.
        operands: the nodes that it reads.
        call: its call in the batch's graph; None for a getitem.
        part: its call in a microbatch's graph; None for a getitem.
    """

    node: fx.Node
    operands: tuple[fx.Node, ...]
    call: Call | None
    part: Call | None

    @property
    def is_forward(self) -> bool:
        """Whether the node belongs to forward."""
        return bool(self.node.meta["phase"] == "forward")


def find_sites(whole: Trace, part: Trace, num: int) -> list[CallPair]:
    """List the calls that outputs and gradients depend on: those of forward, then of backward.

    Args:
        whole: the trace of the batch.
        part: the trace of one microbatch.
        num: number of microbatches.

    Raises:
        CoupledError: if the graph of a microbatch lacks a call, or has it with other operands.
    """
    here = {n.meta["key"]: n for n in part.graph.nodes if n.op == "call_function"}
    words = _words(whole), _words(part)

    def make_site(node: fx.Node) -> CallPair:
        """Pair a node with its counterpart in the microbatch's graph."""
        operands = operands_of(node)
        if node.target is operator.getitem:
            return CallPair(node, operands, None, None)
        its = here.get(node.meta["key"])
        if its is None:
            raise refusal(node, num, "the graph of one microbatch does not have this op")
        if [words[0][o.name] for o in operands] != [words[1][o.name] for o in operands_of(its)]:
            raise refusal(node, num, "the op of one microbatch reads the results of other ops")
        return CallPair(node, operands, call_of(node), call_of(its))

    nodes = _calls_needed(whole)
    return [
        make_site(node)
        for forward in (True, False)
        for node in nodes
        if (node.meta["phase"] == "forward") == forward
    ]


def _calls_needed(trace: Trace) -> list[fx.Node]:
    """Return the calls that outputs and gradients depend on, in the order of the graph."""
    results = output_of(trace).args[0]
    stack: list[fx.Node] = list(results[: len(trace.outputs)])
    gradients = [p.gradient for p in trace.parameters if p.gradient is not None]
    stack += [results[index] for index in gradients]
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return [node for node in trace.graph.nodes if node in needed and node.op == "call_function"]


def _words(trace: Trace) -> dict[str, str]:
    """Return node → description that is the same in the graphs of batch and microbatch."""
    descriptions = {p.node: f"tensor {p.name}" for p in (*trace.parameters, *trace.buffers)}
    descriptions |= {i.node: f"input {i.path}" for i in trace.inputs}
    descriptions |= {o.tangent: f"tangent {o.path}" for o in trace.differentiable}
    calls = (node for node in trace.graph.nodes if node.op == "call_function")
    return descriptions | {node.name: node.meta["key"] for node in calls}


def find_unknown(trace: Trace) -> dict[str, str]:
    """Return the nodes whose values are not known before the first microbatch runs.

    Returns:
        Node name → the value on which it depends, for error messages.
    """
    unknown = {p.node: f"parameter {p.name!r}" for p in trace.parameters}
    unknown |= {o.tangent: "the loss" for o in trace.differentiable}
    for node in trace.graph.nodes:
        reason = next((unknown[o.name] for o in node.all_input_nodes if o.name in unknown), "")
        if reason and node.op == "call_function":
            unknown[node.name] = reason
    return unknown


def output_of(trace: Trace) -> fx.Node:
    """Return the node with the graph's results."""
    return next(iter(reversed(trace.graph.nodes)))


def size_of(node: fx.Node) -> float:
    """Return the number of elements of a node's result. It is infinite for several tensors, which
    cannot be raised."""
    return float(node.meta["val"].numel()) if is_tensor(node) else math.inf


def is_floating(node: fx.Node) -> bool:
    """Return whether a node has a single result of a floating dtype."""
    return is_tensor(node) and bool(node.meta["val"].dtype.is_floating_point)


# --------------------------------------------------------------------------------------------------
# Raised operands: operands that are multiplied by powers of the number of microbatches.
#
# The result of an op is raised by raising operands in which the op is linear. So it is often enough
# to raise a scalar from which a large tensor follows, such as the tangent of one term of a loss.
# Each operand is raised where the fewest elements are multiplied, and at the nearest of equal
# places.

_Cost = tuple[float, tuple[int, ...]]
"""The operands of a node that are raised, and the number of elements that are multiplied."""
_NONE: _Cost = (math.inf, ())


class Raises:
    """The raised operands, with their powers.

    Args:
        whole: the trace of the batch.
        near: whether operands are raised only at the reader, and not at earlier nodes.

    Attributes:
        edges: edge → power.
        elsewhere: whether an operand was raised at an earlier node, which raises it for other
            readers too.
        conflict: whether an operand had to be raised a second time. If so, its readers need
            different powers, and operands must be raised at the reader.
    """

    def __init__(self, whole: Trace, *, near: bool) -> None:
        self.edges: dict[Edge, int] = {}
        self.elsewhere = self.conflict = False
        self._whole, self._near, self._output = whole, near, output_of(whole)
        self._tangents = {o.tangent for o in whole.differentiable}
        self._costs: dict[str, _Cost] = {}

    def label_read(self, label: Label, edge: Edge) -> Label:
        """Return the label of an operand as a node reads it, with the power of the edge."""
        return label.raise_by(self.edges.get(edge, 0))

    def note(
        self,
        site: CallPair,
        linear: tuple[tuple[int, ...], ...],
        label_of: Callable[[fx.Node], Label],
        given: Mapping[str, Label],
    ) -> None:
        """Record the operands in which a labelled node is linear.

        Args:
            site: the node.
            linear: sets of indices of operands (`Way.linear`).
            label_of: label of a node.
            given: nodes whose values are given and not computed.
        """

        def cost(index: int) -> float:
            """Return the number of elements that are multiplied to raise an operand. It is infinite
            if the operand cannot be raised."""
            operand = site.operands[index]
            if label_of(operand).kind == "zero":
                return 0.0
            if operand.op == "placeholder":
                return size_of(operand) if operand.name in self._tangents else math.inf
            if operand.meta["phase"] != site.node.meta["phase"] or operand.name in given:
                return math.inf
            return min(size_of(operand), self._costs.get(operand.name, _NONE)[0])

        groups = [tuple(n for n in group if cost(n)) for group in linear]
        costs = [(sum(map(cost, group)), group) for group in groups if group]
        self._costs[site.node.name] = min(costs, default=_NONE)

    def note_getitem(self, site: CallPair) -> None:
        """Record that raising one of several results raises all of them."""
        self._costs[site.node.name] = self._costs.get(site.operands[0].name, _NONE)

    def add(self, edges: Mapping[Edge, int]) -> list[str]:
        """Raise operands by further powers.

        Args:
            edges: edge → power to add.

        Returns:
            The names of the nodes whose operands are raised.
        """
        powers: dict[Edge, int] = {}
        stack = list(edges.items())
        while stack:
            (name, index), power = stack.pop()
            reader = self._output if name == self._output.name else self._whole.node(name)
            operand = operands_of(reader)[index]
            cost, group = self._costs.get(operand.name, _NONE)
            if self._near or cost >= size_of(operand):
                powers[name, index] = power
                continue
            self.elsewhere = True
            if operand.target is operator.getitem:
                (operand,) = operands_of(operand)
            stack += [((operand.name, n), power) for n in group]
        self.conflict |= any(edge in self.edges and edge not in edges for edge in powers)
        for edge, power in powers.items():
            self.edges[edge] = self.edges.get(edge, 0) + power
        return [name for name, _ in powers]
