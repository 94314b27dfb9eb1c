"""One mesh axis over a whole graph: from how a few tensors lie on it to how all do.

Terms as of `autopar.sharding.propagate`.

The graph is walked forward, then backward, in its own order. Every node takes the option of its
rule that reads what is there as it lies. A weight lies as its first reader asks. Other constants
stay free: nothing has to be moved for them.

A whole tensor that is *made split* by a product with a split weight carries its *source*, the
product's pattern, and so do all that are split because of it, down to where they are contracted.
Where nothing reads a split tensor as it lies, its sources are what is to blame.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.capture.trace import Trace
from autopar.constraints import Parallelism
from autopar.core.placements import REPLICATE, Mirrored, Special
from autopar.errors import ConstraintError
from autopar.rules import AxisOption, Call, call_of, operands_of
from autopar.sharding.clusters import HEADS, Ref, offered_options, pattern_of

# --------------------------------------------------------------------------------------------------
# How tensors lie on one mesh axis under a named plan.
#
# Terms. A *label* says how a tensor lies on the axis: split (`Shard`) or *whole* (`Replicate`). A
# partial sum counts as whole: where it is summed is the planner's. A *row* is what is forced on a
# node: the labels of its operands and results, None where it is free.


@dataclass(frozen=True, slots=True)
class Row:
    """Labels of a node's operands and results; None is free."""

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]

    def admits(self, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> bool:
        """Whether placements have these labels."""
        pairs = zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True)
        return all(label is None or label_of(placement) == label for label, placement in pairs)


def label_of(placement: Placement) -> Placement:
    """The label of a placement: mirrored parts are parts, too."""
    if isinstance(placement, Partial):
        return REPLICATE
    return Shard(placement.dim) if isinstance(placement, Mirrored) else placement


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that reads no split tensor as it lies, and the sources of those it cannot."""

    node: str
    sources: frozenset[str]


@dataclass(slots=True)
class Spread:
    """How all tensors lie on the axis.

    Attributes:
        rows: per node that is forced. labels: per tensor that is not free.
        sources: per split tensor. contracted, scored: sources of what ended in a product, in a
            cross entropy.
        apart: nodes that read an operand otherwise than it is made.
        weights: names of weights that rest as they are read, of what else is data parallelism.
        gathering: nodes that read split tensors whole since they cannot compute on a part; along a
            sequence those that make nothing split.
        uneven: how the batch is split, in words, where it is unevenly. failure: where the walk
            stopped, if it did.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    labels: dict[Ref, Placement] = field(default_factory=dict)
    sources: dict[Ref, frozenset[str]] = field(default_factory=dict)
    contracted: set[str] = field(default_factory=set)
    scored: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    gathering: set[str] = field(default_factory=set)
    uneven: str = ""
    failure: Failure | None = None


def nothing_to_split(plan: Parallelism, why: str, wish: str = "the constraint") -> ConstraintError:
    """The error of a model that has nothing that a named plan could split.

    Args:
        wish: what of the plan asks for it.
    """
    return ConstraintError(f"{plan}: {why}", remedy=f"leave {wish} out for this model")


# --------------------------------------------------------------------------------------------------
# A trace, read once for all axes before plans are spread over it.
#
# Terms. A tensor is *constant* where it does not depend on the batch; a *weight* is a constant
# that depends on parameters.

_SAME_SHAPE = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default))


@dataclass(frozen=True, slots=True)
class Read:
    """A trace, and what depends on what in it.

    Attributes:
        nodes, calls, reads: per compute node its name, its call and the tensors that it reads.
        on_batch, on_parameters: names of the nodes that depend on inputs or the loss' tangent, and
            on parameters.
        masked: forward nodes, no products or lookups, that join weights with what depends on the
            batch alone: a bias with a mask.
        gradient_of: node that makes a parameter's gradient, or a part of the sum that it is → the
            parameter's placeholder.
    """

    trace: Trace
    nodes: Mapping[str, fx.Node]
    calls: Mapping[str, Call]
    reads: Mapping[str, tuple[Ref, ...]]
    on_batch: frozenset[str]
    on_parameters: frozenset[str]
    masked: frozenset[str]
    gradient_of: Mapping[str, str]

    def is_weight(self, name: str) -> bool:
        """Whether the node makes weights."""
        return name in self.on_parameters and name not in self.on_batch

    def pattern(self, node: fx.Node) -> str:
        """What equal nodes of repeated layers have in common."""
        return pattern_of(node.meta["key"])[0]


def read_trace(trace: Trace) -> Read:
    """Read a trace."""
    nodes = {node.name: node for node in trace.graph.nodes if node.op == "call_function"}
    calls: dict[str, Call] = {}
    reads: dict[str, tuple[Ref, ...]] = {}
    on_batch = {i.node for i in trace.inputs} | {o.tangent for o in trace.differentiable}
    on_parameters = {p.node for p in trace.parameters}
    for name, node in nodes.items():
        operands = operands_of(node)
        calls[name] = call_of(node)
        index = int(node.args[1]) if node.target is operator.getitem else 0  # type: ignore[arg-type]
        reads[name] = tuple((operand.name, index) for operand in operands)
        for depending in (on_batch, on_parameters):
            if any(operand.name in depending for operand in operands):
                depending.add(name)
    masked: set[str] = set()
    for name, node in nodes.items():
        names = {operand.name for operand in operands_of(node)}
        joins = (
            name in on_batch
            and name in on_parameters
            and node.meta["phase"] == "forward"
            and node.target not in HEADS
        )
        if joins and not any(
            other in on_batch and other in on_parameters and other not in masked for other in names
        ):
            masked.add(name)
    return Read(
        trace,
        nodes,
        calls,
        reads,
        frozenset(on_batch),
        frozenset(on_parameters),
        frozenset(masked),
        _gradients(trace),
    )


def _gradients(trace: Trace) -> dict[str, str]:
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    found: dict[str, str] = {}
    for p in trace.parameters:
        left = [] if p.gradient is None else [results[p.gradient]]  # type: ignore[index]
        while left:
            node = left.pop()
            if (
                isinstance(node, fx.Node)
                and node.op == "call_function"
                and node.meta["phase"] == "backward"
            ):
                found[node.name] = p.node
                left += node.all_input_nodes if node.target in _SAME_SHAPE else ()
    return found


def product_of(graph: Read, node: fx.Node) -> tuple[Ref, Ref] | None:
    """(activation, weight) of a forward product of the two, or None."""
    if node.target is not ops.dot or node.meta["phase"] != "forward":
        return None
    first, second = graph.reads[node.name][:2]
    if graph.is_weight(first[0]):
        first, second = second, first
    return (first, second) if graph.is_weight(second[0]) and first[0] in graph.on_batch else None


LOSS_SUMS = frozenset(
    (ops.sum_exp, ops.pick, torch.ops.aten.amax.default)
)  # what a cross entropy takes of its logits


@dataclass(frozen=True, slots=True)
class Policy:
    """What the walk starts from, and what it may do.

    Attributes:
        inputs: batch tensor → label; those that are not here stay free, and what depends on them
            alone.
        weights: tensor → label of weights that are settled beforehand.
        columns: product node → label of its weight, taken where the product's other operand is
            whole.
        slices: a whole tensor may be read split.
    """

    inputs: Mapping[str, Placement]
    weights: Mapping[Ref, Placement] = field(default_factory=dict)
    columns: Mapping[str, Placement] = field(default_factory=dict)
    slices: bool = False


def spread(graph: Read, policy: Policy) -> Spread:
    """Walk the graph: see the module docstring."""
    return Walk(graph, policy).run()


class Walk:
    def __init__(self, graph: Read, policy: Policy) -> None:
        self.graph, self.policy, self.found = graph, policy, Spread()
        self.labels = self.found.labels
        self.free = {i.node for i in graph.trace.inputs if i.node not in policy.inputs}
        self.wholly: dict[Ref, set[str]] = {}  # tensor → nodes that read it whole

    def run(self) -> Spread:
        self.labels.update({(name, 0): label for name, label in self.policy.inputs.items()})
        for ref, label in self.policy.weights.items():
            self.demand(ref, label)
        phase = "forward"
        for node in self.graph.nodes.values():
            if node.meta["phase"] != phase:
                phase = self._turn_back()
            if node.name not in self.graph.on_batch or self._is_weight(node.name):
                continue
            if self._is_free(node):
                self.free.add(node.name)
                continue
            self._settle_column(node)
            option = self._choose(node)
            if option is not None:
                self._take(node, option)
            elif (
                node.name not in self.graph.on_parameters
            ):  # a mask or an index that is not split: readers take their part
                self.free.add(node.name)
                self._release(node.name)
            else:
                self.found.failure = Failure(node.name, self._blamed(node))
                break
        return self.found

    def _is_weight(self, name: str) -> bool:
        """Where the batch is whole, weights that it only masks are made as they are asked for,
        too."""
        return self.graph.is_weight(name) or (not self.policy.inputs and name in self.graph.masked)

    def _is_activation(self, name: str) -> bool:
        """Whether it depends on the batch and lies as the walk found."""
        return name in self.graph.on_batch and name not in self.free and not self._is_weight(name)

    def _is_free(self, node: fx.Node) -> bool:
        """Whether all that it reads of the batch is free."""
        graph = self.graph
        return node.name not in graph.on_parameters and all(
            n in self.free for n, _ in graph.reads[node.name] if n in graph.on_batch
        )

    def _release(self, name: str) -> None:
        """What a free node is made of may be made in any way: a mask comes whole more cheaply
        than it is gathered."""
        for ref in self.graph.reads[name]:
            if ref[0] in self.graph.on_batch and self.found.rows.pop(ref[0], None) is not None:
                self._release(ref[0])

    def _turn_back(self) -> str:
        """Tangents are read as what they are of was made, whole where that is a partial sum or
        the loss; the phase that begins."""
        for o in self.graph.trace.differentiable:
            made = self.labels.get((o.node, 0), REPLICATE)
            self.labels[o.tangent, 0] = (
                made if isinstance(made, Shard) and o.is_answered else REPLICATE
            )
        return "backward"

    def _settle_column(self, node: fx.Node) -> None:
        wanted, product = self.policy.columns.get(node.name), product_of(self.graph, node)
        if wanted is not None and product is not None and self._is_whole(product[0]):
            self.demand(product[1], wanted)

    def _state(self, ref: Ref) -> Placement | None:
        """The label with which it is there; None where it is free or open."""
        return None if ref[0] in self.free else self.labels.get(ref)

    def _is_whole(self, ref: Ref) -> bool:
        return self._state(ref) in (None, REPLICATE)

    def _choose(self, node: fx.Node) -> AxisOption | None:
        scored = [
            (score, i, o)
            for i, o in enumerate(self._options(node))
            if (score := self._score(node, o)) is not None
        ]
        return min(scored, key=lambda s: s[:2])[2] if scored else None

    def _options(self, node: fx.Node) -> tuple[AxisOption, ...]:
        reads = self.graph.reads[node.name]
        offered = (
            o for o in offered_options(self.graph.calls[node.name]) if _reads_alike(reads, o)
        )
        options = tuple(
            o for o in offered if not any(isinstance(p, Special) for p in (*o.inputs, *o.outputs))
        )
        if (
            self.policy.columns and node.target is ops.square_sum
        ):  # summed over ranks, between two linears, it ends no chain of theirs
            options = tuple(o for o in options if not isinstance(o.outputs[0], Partial))
        product = None if self.policy.slices else product_of(self.graph, node)
        if product is None or node.name in self.policy.columns or not self._is_whole(product[0]):
            return options
        return tuple(o for o in options if not any(isinstance(p, Shard) for p in o.outputs))

    def _score(self, node: fx.Node, option: AxisOption) -> tuple[int, ...] | None:
        """What the option costs: weights gathered, gradients that lie otherwise than their
        parameter, whole tensors sliced, free
        ones split. None where it does not read what is there."""
        gathers = slices = spreads = 0
        for ref, placement in zip(self.graph.reads[node.name], option.inputs, strict=True):
            label, split = self._state(ref), isinstance(placement, Shard)
            if self._is_activation(ref[0]):
                if isinstance(label, Shard) and placement != label:
                    return None
                if not isinstance(label, Shard) and split and not self.policy.slices:
                    return None
                slices += split and not isinstance(label, Shard)
            elif isinstance(placement, Partial):
                return None
            elif label is None:
                spreads += split
            else:
                gathers += isinstance(label, Shard) and placement != label
                slices += not isinstance(label, Shard) and split
        wanted = self.labels.get((self.graph.gradient_of.get(node.name, ""), 0))
        wrong = wanted is not None and label_of(option.outputs[0]) != wanted
        made = sum(isinstance(p, Shard) for p in option.outputs)
        return gathers, wrong, slices, spreads + made

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        carried: set[str] = set()
        for ref, placement in zip(self.graph.reads[node.name], option.inputs, strict=True):
            label = label_of(placement)
            if self._is_weight(ref[0]):
                self.demand(ref, label)
            elif isinstance(label, Shard) and self._state(ref) == REPLICATE:
                for name, other in (self._made_split(ref, label, node.name) or {}).items():
                    self._settle(name, other)
            carried |= (
                self.found.sources.get(ref, frozenset()) if isinstance(label, Shard) else set()
            )
        self._settle(node.name, option)
        outputs = tuple(map(label_of, option.outputs))
        split = any(isinstance(label, Shard) for label in outputs)
        if split and not carried:
            carried = {self.graph.pattern(node)}
        for i, label in enumerate(outputs):
            if isinstance(label, Shard):
                self.found.sources[node.name, i] = frozenset(carried)
        if not split and node.meta["phase"] == "forward":
            (self.found.scored if node.target in LOSS_SUMS else self.found.contracted).update(
                carried
            )

    def _settle(self, name: str, option: AxisOption) -> None:
        """Write down an option as the node's row."""
        reads = self.graph.reads[name]
        labels = [
            (
                label_of(placement)
                if ref[0] in self.graph.on_parameters or self._state(ref) is not None
                else None
            )
            for ref, placement in zip(reads, option.inputs, strict=True)
        ]
        outputs = tuple(map(label_of, option.outputs))
        self.found.rows[name] = Row(tuple(labels), outputs)
        self.labels.update({(name, i): label for i, label in enumerate(outputs)})
        for ref, label in zip(reads, labels, strict=True):
            readers = self.wholly.setdefault(ref, set())
            (readers.add if label == REPLICATE else readers.discard)(name)

    def _made_split(self, ref: Ref, label: Placement, reader: str) -> dict[str, AxisOption] | None:
        """Options with which a tensor that was to be made whole, and is read by nothing else so, is
        made split instead, and those with which the tensors that it is made of are; None where it
        can only be sliced where it is read."""
        name = ref[0]
        made_here = (
            name in self.found.rows and self._is_activation(name) and self.labels[ref] == REPLICATE
        )
        if not made_here or not isinstance(label, Shard) or self.wholly.get(ref, set()) - {reader}:
            return None
        for option in self._options(self.graph.nodes[name]):
            if option.outputs[ref[1]] == label and not any(
                isinstance(p, Partial) for p in option.inputs
            ):
                operands = list(zip(self.graph.reads[name], option.inputs, strict=True))
                if all(
                    self._state(other) in (None, placement, REPLICATE)
                    for other, placement in operands
                ):
                    further = [
                        self._made_split(o, p, name) or {}
                        for o, p in operands
                        if self._state(o) not in (None, p)
                    ]
                    return {node: made for changes in further for node, made in changes.items()} | {
                        name: option
                    }
        return None

    def demand(self, ref: Ref, label: Placement) -> None:
        """Settle how a weight lies, and what it is made of; one that cannot be made so is made
        whole."""
        if ref in self.labels:
            return
        self.labels[ref] = label
        call = self.graph.calls.get(ref[0])
        if call is None:
            return
        options = [
            o
            for o in offered_options(call)
            if not any(isinstance(p, Partial | Special) for p in (*o.inputs, *o.outputs))
        ]
        fitting = [o for o in options if o.outputs[ref[1]] == label]
        option = min(fitting, key=lambda o: self._strain(ref[0], o)) if fitting else options[0]
        for other, placement in zip(self.graph.reads[ref[0]], option.inputs, strict=True):
            if self._is_weight(other[0]):
                self.demand(other, placement)
        self.labels.update({(ref[0], i): placement for i, placement in enumerate(option.outputs)})
        inputs = tuple(
            p if self._is_weight(r[0]) else None
            for r, p in zip(self.graph.reads[ref[0]], option.inputs, strict=True)
        )
        self.found.rows[ref[0]] = Row(inputs, option.outputs)

    def _strain(self, name: str, option: AxisOption) -> tuple[int, int]:
        """Weights that lie otherwise, and constants of other kinds that would have to be split."""
        pairs = list(zip(self.graph.reads[name], option.inputs, strict=True))
        otherwise = sum(
            self.labels.get(ref, placement) != placement
            for ref, placement in pairs
            if self._is_weight(ref[0])
        )
        return otherwise, sum(
            isinstance(p, Shard) for ref, p in pairs if not self._is_weight(ref[0])
        )

    def _blamed(self, node: fx.Node) -> frozenset[str]:
        """The sources of those split operands that the best option does not read as they lie."""
        best: frozenset[str] | None = None
        for option in self._options(node):
            sources: set[str] = set()
            for ref, placement in zip(self.graph.reads[node.name], option.inputs, strict=True):
                label = self._state(ref)
                if isinstance(label, Shard) and placement != label:
                    sources |= self.found.sources.get(ref, frozenset())
                if (
                    label == REPLICATE
                    and isinstance(placement, Shard)
                    and self._is_activation(ref[0])
                ):
                    break
            else:
                best = frozenset(sources) if best is None or len(sources) < len(best) else best
        return best or frozenset()


def _reads_alike(reads: Sequence[Ref], option: AxisOption) -> bool:
    """Whether a tensor that is read twice, as a distance of samples from each other does, is
    read in one way."""
    return len(set(zip(reads, option.inputs, strict=True))) == len(set(reads))
