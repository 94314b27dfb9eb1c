"""Propagation along one mesh axis: from the placements of a few tensors to those of all tensors.

`spread` visits the graph in its own order, forward and then backward. Every node takes the option
of its rule that reads its operands in their current placements. A weight gets the placement that
its first reader needs. Other constants stay free, as no tensor has to be moved for them.

If a product with a split weight has a split result, the result carries its *source*, the pattern of
the product. So do all tensors that are split because of it, up to the node that contracts them. If
a node cannot read a split tensor in its placement, the sources of the tensor are responsible.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
# Placements on one mesh axis under a named plan.
#
# Terms. A *label* is the placement of a tensor on the axis: split (`Shard`) or *whole*
# (`Replicate`). A partial sum counts as whole: the planner decides where it is reduced. A *row* is
# forced on a node: the labels of its operands and results, or None for free ones.


@dataclass(frozen=True, slots=True)
class LabelRow:
    """Labels of a node's operands and results; None for a free tensor."""

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]

    @property
    def is_split(self) -> bool:
        """Whether an operand or a result is split."""
        return any(isinstance(label, Shard) for label in (*self.inputs, *self.outputs))

    def admits(self, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> bool:
        """Return whether placements have these labels."""
        pairs = zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True)
        return all(label is None or label_of(placement) == label for label, placement in pairs)


def label_of(placement: Placement) -> Placement:
    """Return the label of a placement. Mirrored parts count as split."""
    if isinstance(placement, Partial):
        return REPLICATE
    return Shard(placement.dim) if isinstance(placement, Mirrored) else placement


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that cannot read its operands in their placements, and the sources that are
    responsible."""

    node: str
    sources: frozenset[str]


@dataclass(slots=True)
class SpreadLabels:
    """The placements of all tensors on the axis.

    Attributes:
        rows: node → row, for nodes on which one is forced.
        labels: tensor → label, for tensors that are not free.
        sources: split tensor → its sources.
        contracted: sources of tensors that a product contracts.
        scored: sources of tensors that a cross entropy reads.
        separate: nodes that read an operand in another placement than that in which it is produced.
        weights: weights that data parallelism leaves in the placement in which they are read.
        gathering: nodes that gather split operands because they cannot compute on a part; along a
            sequence, those without a split result.
        uneven: description of an uneven split of the batch, else "".
        failure: the node at which the walk stopped, if it did.
    """

    rows: dict[str, LabelRow] = field(default_factory=dict)
    labels: dict[Ref, Placement] = field(default_factory=dict)
    sources: dict[Ref, frozenset[str]] = field(default_factory=dict)
    contracted: set[str] = field(default_factory=set)
    scored: set[str] = field(default_factory=set)
    separate: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    gathering: set[str] = field(default_factory=set)
    uneven: str = ""
    failure: Failure | None = None


def nothing_to_split(
    plan: Parallelism, why: str, removed: str = "the constraint"
) -> ConstraintError:
    """Return the error for a model in which a named plan can split nothing.

    Args:
        plan: the named plan.
        why: the reason.
        removed: the argument or constraint to remove.
    """
    return ConstraintError(f"{plan}: {why}", remedy=f"remove {removed} for this model")


# --------------------------------------------------------------------------------------------------
# Dependencies in a trace, computed once for all axes.
#
# Terms. A tensor is *constant* if it does not depend on the batch. A *weight* is a constant that
# depends on parameters.

_SAME_SHAPE = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default))


@dataclass(frozen=True)
class TraceIndex:
    """A trace and its dependencies.

    Attributes:
        trace: the trace.
        nodes: name → compute node.
        calls: name → its call.
        reads: name → the tensors that it reads.
        on_batch: names of the nodes that depend on inputs or the tangent of the loss.
        on_parameters: names of the nodes that depend on parameters.
        masked: forward nodes other than products and lookups that combine weights with tensors that
            depend on the batch only, such as a bias with a mask.
        gradient_of: node that computes the gradient of a parameter, or a term of it → placeholder
            of the parameter.
    """

    trace: Trace
    nodes: Mapping[str, fx.Node]
    calls: Mapping[str, Call]
    reads: Mapping[str, tuple[Ref, ...]]
    on_batch: frozenset[str]
    on_parameters: frozenset[str]
    masked: frozenset[str]
    gradient_of: Mapping[str, str]

    @cached_property
    def _plain_options(self) -> dict[str, tuple[AxisOption, ...]]:
        return {}

    def plain_options(self, name: str) -> tuple[AxisOption, ...]:
        """Return the options of a node without halos and mirrored placements, in which a tensor
        that it reads twice has one placement. All walks share the answer."""
        options = self._plain_options.get(name)
        if options is None:
            reads = self.reads[name]
            options = self._plain_options[name] = tuple(
                o
                for o in offered_options(self.calls[name])
                if _reads_alike(reads, o)
                and not any(isinstance(p, Special) for p in (*o.inputs, *o.outputs))
            )
        return options

    @cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.trace.graph.nodes}

    def shape_of(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of a tensor; () if the result is None."""
        value = self._by_name[ref[0]].meta["val"]
        value = value[ref[1]] if isinstance(value, tuple | list) else value
        return () if value is None else tuple(value.shape)

    def is_weight(self, name: str) -> bool:
        """Return whether the results of a node are weights."""
        return name in self.on_parameters and name not in self.on_batch

    def pattern(self, node: fx.Node) -> str:
        """Return the pattern of a node's key, which equal nodes of repeated layers share."""
        return pattern_of(node.meta["key"])[0]


def read_trace(trace: Trace) -> TraceIndex:
    """Compute the dependencies in a trace."""
    nodes = {node.name: node for node in trace.graph.nodes if node.op == "call_function"}
    calls: dict[str, Call] = {}
    reads: dict[str, tuple[Ref, ...]] = {}
    on_batch = {i.node for i in trace.inputs} | {o.tangent for o in trace.differentiable}
    on_parameters = {p.node for p in trace.parameters}
    for name, node in nodes.items():
        operands = operands_of(node)
        calls[name] = call_of(node)
        index = int(node.args[1]) if node.target is operator.getitem else 0
        reads[name] = tuple((operand.name, index) for operand in operands)
        for depending in (on_batch, on_parameters):
            if any(operand.name in depending for operand in operands):
                depending.add(name)
    return TraceIndex(
        trace,
        nodes,
        calls,
        reads,
        frozenset(on_batch),
        frozenset(on_parameters),
        _masked_weights(nodes, on_batch & on_parameters),
        _gradients(trace),
    )


def _masked_weights(nodes: Mapping[str, fx.Node], on_both: Collection[str]) -> frozenset[str]:
    """Return the nodes that combine weights with tensors that depend on the batch only.

    Args:
        nodes: name → compute node.
        on_both: names of the nodes that depend on the batch and on parameters.
    """
    masked: set[str] = set()
    for name, node in nodes.items():
        combines = name in on_both and node.meta["phase"] == "forward" and node.target not in HEADS
        if combines and not any(
            operand.name in on_both and operand.name not in masked for operand in operands_of(node)
        ):
            masked.add(name)
    return frozenset(masked)


def _gradients(trace: Trace) -> dict[str, str]:
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    parameter_of: dict[str, str] = {}
    for p in trace.parameters:
        pending = [] if p.gradient is None else [results[p.gradient]]
        while pending:
            node = pending.pop()
            if (
                isinstance(node, fx.Node)
                and node.op == "call_function"
                and node.meta["phase"] == "backward"
            ):
                parameter_of[node.name] = p.node
                pending += node.all_input_nodes if node.target in _SAME_SHAPE else ()
    return parameter_of


def product_of(graph: TraceIndex, node: fx.Node) -> tuple[Ref, Ref] | None:
    """Return (activation, weight) of a forward product of the two; None for any other node."""
    if node.target is not ops.dot or node.meta["phase"] != "forward":
        return None
    first, second = graph.reads[node.name][:2]
    if graph.is_weight(first[0]):
        first, second = second, first
    return (first, second) if graph.is_weight(second[0]) and first[0] in graph.on_batch else None


LOSS_SUMS = frozenset(
    (ops.sum_exp, ops.pick, torch.ops.aten.amax.default)
)  # the sums that a cross entropy computes from its logits


@dataclass(frozen=True, slots=True)
class Policy:
    """The start of a walk, and its limits.

    Attributes:
        inputs: batch tensor → label. Other inputs stay free, together with the tensors that depend
            only on them.
        weights: weight → label that is decided beforehand.
        columns: product node → label of its weight, used if the other operand of the product is
            whole.
        slices: whether a whole tensor may be read split.
    """

    inputs: Mapping[str, Placement]
    weights: Mapping[Ref, Placement] = field(default_factory=dict)
    columns: Mapping[str, Placement] = field(default_factory=dict)
    slices: bool = False


def spread(graph: TraceIndex, policy: Policy) -> SpreadLabels:
    """Propagate placements from the start of a policy over the graph (see the module docstring)."""
    return Propagation(graph, policy).run()


class Propagation:
    """The walk over the graph. Subclasses choose options by other criteria."""

    def __init__(self, graph: TraceIndex, policy: Policy) -> None:
        self.graph, self.policy, self.result = graph, policy, SpreadLabels()
        self.labels = self.result.labels
        self.free = {i.node for i in graph.trace.inputs if i.node not in policy.inputs}
        self.wholly: dict[Ref, set[str]] = {}  # tensor → nodes that read it whole

    def run(self) -> SpreadLabels:
        """Visit all nodes. Stop at the first node that cannot read its operands
        (`SpreadLabels.failure`)."""
        self.labels.update({(name, 0): label for name, label in self.policy.inputs.items()})
        for ref, label in self.policy.weights.items():
            self.demand(ref, label)
        phase = "forward"
        for node in self.graph.nodes.values():
            if node.meta["phase"] != phase:
                phase = self._begin_backward()
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
            ):  # a mask or an index that is not split; its readers slice it
                self.free.add(node.name)
                self._release(node.name)
            else:
                self.result.failure = Failure(node.name, self._find_blamed_sources(node))
                break
        return self.result

    def _is_weight(self, name: str) -> bool:
        """Return whether the results of a node are weights. If the batch is whole, weights with a
        mask of the batch count as well."""
        return self.graph.is_weight(name) or (not self.policy.inputs and name in self.graph.masked)

    def _is_activation(self, name: str) -> bool:
        """Return whether a node depends on the batch and the walk determines its placement."""
        return name in self.graph.on_batch and name not in self.free and not self._is_weight(name)

    def _is_free(self, node: fx.Node) -> bool:
        """Return whether all operands that depend on the batch are free."""
        graph = self.graph
        return node.name not in graph.on_parameters and all(
            n in self.free for n, _ in graph.reads[node.name] if n in graph.on_batch
        )

    def _release(self, name: str) -> None:
        """Free the operands of a free node. Computing a mask whole is cheaper than gathering it."""
        for ref in self.graph.reads[name]:
            if ref[0] in self.graph.on_batch and self.result.rows.pop(ref[0], None) is not None:
                self._release(ref[0])

    def _begin_backward(self) -> str:
        """Label the tangents, and return the phase that begins. A tangent has the label of its
        output. It is whole for a partial sum or the loss."""
        for o in self.graph.trace.differentiable:
            label = self.labels.get((o.node, 0), REPLICATE)
            self.labels[o.tangent, 0] = (
                label if isinstance(label, Shard) and o.is_answered else REPLICATE
            )
        return "backward"

    def _settle_column(self, node: fx.Node) -> None:
        label, product = self.policy.columns.get(node.name), product_of(self.graph, node)
        if label is not None and product is not None and self._is_whole(product[0]):
            self.demand(product[1], label)

    def _state(self, ref: Ref) -> Placement | None:
        """Return the label of a tensor; None if it is free or undecided."""
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
        options = self.graph.plain_options(node.name)
        if (
            self.policy.columns and node.target is ops.square_sum
        ):  # the reduction of a partial sum between two linears would not end their chain
            options = tuple(o for o in options if not isinstance(o.outputs[0], Partial))
        product = None if self.policy.slices else product_of(self.graph, node)
        if product is None or node.name in self.policy.columns or not self._is_whole(product[0]):
            return options
        return tuple(o for o in options if not any(isinstance(p, Shard) for p in o.outputs))

    def _can_read(self, ref: Ref, placement: Placement) -> bool:
        """Return whether a tensor can be read in a placement. Split activations are not moved, and
        whole ones are sliced only if the policy allows it."""
        if not self._is_activation(ref[0]):
            return not isinstance(placement, Partial)
        label = self._state(ref)
        if isinstance(label, Shard):
            return placement == label
        return self.policy.slices or not isinstance(placement, Shard)

    def _score(self, node: fx.Node, option: AxisOption) -> tuple[int, ...] | None:
        """Return the cost of an option; None if it does not read the operands in their placements.

        The numbers count, in order: gathered weights, a gradient in another placement than its
        parameter, sliced whole tensors, and split free tensors.
        """
        gathers = slices = spreads = 0
        for ref, placement in zip(self.graph.reads[node.name], option.inputs, strict=True):
            if not self._can_read(ref, placement):
                return None
            label, split = self._state(ref), isinstance(placement, Shard)
            if isinstance(label, Shard):
                gathers += placement != label
            elif label is None and not self._is_activation(ref[0]):
                spreads += split
            else:
                slices += split
        parameter_label = self.labels.get((self.graph.gradient_of.get(node.name, ""), 0))
        wrong = parameter_label is not None and label_of(option.outputs[0]) != parameter_label
        num_split = sum(isinstance(p, Shard) for p in option.outputs)
        return gathers, wrong, slices, spreads + num_split

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        """Apply an option to a node: decide weights, split operands, and pass on sources."""
        self._place_operands(node, option)
        self._settle(node.name, option)
        self._pass_on_sources(node, option)

    def _place_operands(self, node: fx.Node, option: AxisOption) -> None:
        """Decide the weights that a node reads, and split whole operands that it reads split where
        they are produced."""
        for ref, placement in zip(self.graph.reads[node.name], option.inputs, strict=True):
            label = label_of(placement)
            if self._is_weight(ref[0]):
                self.demand(ref, label)
            elif isinstance(label, Shard) and self._state(ref) == REPLICATE:
                for name, other in (self._split_at_producer(ref, label, node.name) or {}).items():
                    self._settle(name, other)

    def _pass_on_sources(self, node: fx.Node, option: AxisOption) -> None:
        """Give the split results of a node the sources of its split operands, or record that it
        contracts them."""
        operands = zip(self.graph.reads[node.name], option.inputs, strict=True)
        carried = frozenset[str]().union(
            *(
                self.result.sources.get(ref, ())
                for ref, placement in operands
                if isinstance(label_of(placement), Shard)
            )
        )
        split = [i for i, p in enumerate(option.outputs) if isinstance(label_of(p), Shard)]
        for i in split:
            self.result.sources[node.name, i] = carried or frozenset((self.graph.pattern(node),))
        if not split and node.meta["phase"] == "forward":
            ends = self.result.scored if node.target in LOSS_SUMS else self.result.contracted
            ends |= carried

    def _settle(self, name: str, option: AxisOption) -> None:
        """Record an option as the row of a node."""
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
        self.result.rows[name] = LabelRow(tuple(labels), outputs)
        self.labels.update({(name, i): label for i, label in enumerate(outputs)})
        for ref, label in zip(reads, labels, strict=True):
            readers = self.wholly.setdefault(ref, set())
            (readers.add if label == REPLICATE else readers.discard)(name)

    def _split_at_producer(
        self, ref: Ref, label: Placement, reader: str
    ) -> dict[str, AxisOption] | None:
        """Return options with which a tensor is produced split instead of whole.

        This is possible if no other node reads it whole. Its operands may have to be split as well.

        Returns:
            Node → option; None if the reader has to slice the tensor.
        """
        name = ref[0]
        made_here = (
            name in self.result.rows and self._is_activation(name) and self.labels[ref] == REPLICATE
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
                        self._split_at_producer(o, p, name) or {}
                        for o, p in operands
                        if self._state(o) not in (None, p)
                    ]
                    return {
                        node: node_option
                        for changes in further
                        for node, node_option in changes.items()
                    } | {name: option}
        return None

    def demand(self, ref: Ref, label: Placement) -> None:
        """Decide the label of a weight and of the weights from which it is computed.

        A weight that cannot be computed in this placement is computed whole.
        """
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
        option = min(fitting, key=lambda o: self._conflicts(ref[0], o)) if fitting else options[0]
        for other, placement in zip(self.graph.reads[ref[0]], option.inputs, strict=True):
            if self._is_weight(other[0]):
                self.demand(other, placement)
        self.labels.update({(ref[0], i): placement for i, placement in enumerate(option.outputs)})
        inputs = tuple(
            p if self._is_weight(r[0]) else None
            for r, p in zip(self.graph.reads[ref[0]], option.inputs, strict=True)
        )
        self.result.rows[ref[0]] = LabelRow(inputs, option.outputs)

    def _conflicts(self, name: str, option: AxisOption) -> tuple[int, int]:
        """Return the numbers of weights with another label, and of other constants that would be
        split."""
        pairs = list(zip(self.graph.reads[name], option.inputs, strict=True))
        otherwise = sum(
            self.labels.get(ref, placement) != placement
            for ref, placement in pairs
            if self._is_weight(ref[0])
        )
        return otherwise, sum(
            isinstance(p, Shard) for ref, p in pairs if not self._is_weight(ref[0])
        )

    def _find_blamed_sources(self, node: fx.Node) -> frozenset[str]:
        """Return the sources of the split operands that the best option cannot read."""
        best: frozenset[str] | None = None
        for option in self._options(node):
            sources: set[str] = set()
            for ref, placement in zip(self.graph.reads[node.name], option.inputs, strict=True):
                label = self._state(ref)
                if isinstance(label, Shard) and placement != label:
                    sources |= self.result.sources.get(ref, frozenset())
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
    """Return whether a tensor that a node reads twice, such as for distances between samples, has
    one placement."""
    return len(set(zip(reads, option.inputs, strict=True))) == len(set(reads))
