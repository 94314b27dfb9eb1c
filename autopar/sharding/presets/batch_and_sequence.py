"""Context, data and expert parallelism on one mesh axis.

Context parallelism splits the sequence. The walk is that of `autopar.sharding.propagate`, along the
sequence instead of the batch. If an op has no option that reads its operands in their placements,
such as attention, the smallest split operands are gathered such that the results are still split.
The gradient of a gathered tensor is scattered in the placement that the tensor had.

Sequence parallelism (`autopar.sharding.presets.tensor`) uses the same walk, but continues at an op
that cannot compute on a part of the sequence at all, such as a view that joins it with the batch.
That op reads all operands whole, and so do later ops up to one that can compute on a part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.constraints import Parallelism
from autopar.core.layout import Layout, Strategy
from autopar.core.placements import REPLICATE
from autopar.errors import ConstraintError
from autopar.rules import AxisOption, Call, cuts_alike, where_of
from autopar.sharding.clusters import Ref, offered_options
from autopar.sharding.propagate import (
    LabelRow,
    Policy,
    Propagation,
    SpreadLabels,
    TraceIndex,
    nothing_to_split,
)


def along_sequence(graph: TraceIndex, *, gathers: bool = False) -> SpreadLabels | None:
    """Return the placements if the sequence, dim 1 of the inputs, is split.

    Args:
        graph: the trace and its dependencies.
        gathers: whether a node that cannot compute on a part of the sequence reads all operands
            whole. Otherwise it is the failure.

    Returns:
        The placements; None if no input has a sequence.
    """
    inputs = [i for i in graph.trace.inputs if len(i.shape) > 1 and i.shape[1] > 1]
    lengths = [i.shape[1] for i in inputs]
    if not lengths:
        return None
    length = max(lengths, key=lambda n: (lengths.count(n), n))
    policy = Policy({i.node: Shard(1) for i in inputs if i.shape[1] == length}, slices=True)
    return ContextWalk(graph, policy, gathers=gathers).run()


def read_otherwise(graph: TraceIndex, rows: Mapping[str, LabelRow]) -> set[str]:
    """Return the nodes that read an operand in another placement than that in which it is produced.

    Free operands count as well, if an earlier node reads them in another placement.

    Args:
        graph: the trace and its dependencies.
        rows: node → row.
    """
    names = _apart_on_free(graph, rows)
    for name, row in rows.items():
        pairs = (
            (label, rows[ref[0]].outputs[ref[1]])
            for ref, label in zip(graph.reads[name], row.inputs, strict=True)
            if ref[0] in rows
        )
        if any(None not in (label, other) and label != other for label, other in pairs):
            names.add(name)
    return names


def _apart_on_free(graph: TraceIndex, rows: Mapping[str, LabelRow]) -> set[str]:
    """Return the nodes that read a free tensor, such as a range of labels, only in placements in
    which it cannot be produced or earlier nodes cannot read it."""
    names: set[str] = set()
    read = _free_placements(graph, rows)
    for name, row in rows.items():
        free = [(i, ref) for i, ref in enumerate(graph.reads[name]) if row.inputs[i] is None]
        options = (
            [o for o in offered_options(graph.calls[name]) if row.admits(o.inputs, o.outputs)]
            if free
            else []
        )
        for i, ref in free:
            asked = {o.inputs[i] for o in options}
            together = read.get(ref, asked) & asked
            if together:
                read[ref] = together
            else:
                names.add(name)
    return names


def _free_placements(graph: TraceIndex, rows: Mapping[str, LabelRow]) -> dict[Ref, set[Placement]]:
    """Return tensor without a row → the placements in which it can be computed from its
    operands."""
    placements: dict[Ref, set[Placement]] = {}
    for name, call in graph.calls.items():
        if name in rows:
            continue
        placements_of = [placements.get(ref) for ref in graph.reads[name]]
        options = offered_options(call)
        as_made = [
            o
            for o in options
            if all(
                ways is None or p in ways for p, ways in zip(o.inputs, placements_of, strict=True)
            )
        ]
        for i in range(len(call.outputs)):
            placements[name, i] = {o.outputs[i] for o in as_made or options}
    return placements


class ContextWalk(Propagation):
    """The walk along the sequence. Arguments are those of `along_sequence`."""

    def __init__(self, graph: TraceIndex, policy: Policy, *, gathers: bool) -> None:
        super().__init__(graph, policy)
        self.gathers = gathers

    def run(self) -> SpreadLabels:
        """Walk, and add the nodes that read an operand in another placement than that in which it
        is produced."""
        labels = super().run()
        labels.separate |= read_otherwise(self.graph, labels.rows)
        return labels

    def _choose(self, node: fx.Node) -> AxisOption | None:
        option = super()._choose(node)
        if option is not None or node.name not in self.graph.on_parameters:
            return option
        options = self._options(node)
        candidates = [
            o
            for o in options
            if any(isinstance(p, Shard) for p in o.outputs) and self._stays(node, o)
        ]
        if not candidates and self.gathers:
            candidates = [
                o for o in options if all(p == REPLICATE for p in (*o.inputs, *o.outputs))
            ]
            self.result.gathering.add(node.name)
        if not candidates:
            return None
        best = min(candidates, key=lambda o: self._gathered_elements(node, o))
        self.result.separate.add(node.name)
        return best

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        operands = self._gathered_operands(node, option)
        gathered = {self.graph.shape_of(ref): self.labels[ref] for ref in operands}
        super()._take(node, option)
        for i, placement in enumerate(option.outputs):
            if (
                isinstance(placement, Partial)
                and (label := gathered.get(self.graph.shape_of((node.name, i)))) is not None
            ):
                self.labels[node.name, i] = label
                self.result.separate.update(
                    user.name for user in node.users
                )  # it is scattered before its readers

    def _stays(self, node: fx.Node, option: AxisOption) -> bool:
        """Return whether all operands are read in their placement, gathered, or sliced."""
        pairs = zip(self.graph.reads[node.name], option.inputs, strict=True)
        return not any(
            isinstance(p, Partial)
            or (
                isinstance(p, Shard) and isinstance(label := self._state(ref), Shard) and label != p
            )
            for ref, p in pairs
        )

    def _gathered_operands(self, node: fx.Node, option: AxisOption) -> list[Ref]:
        """Return the split activations that the option reads whole."""
        pairs = zip(self.graph.reads[node.name], option.inputs, strict=True)
        split = [ref for ref, p in pairs if p == REPLICATE and isinstance(self._state(ref), Shard)]
        return [ref for ref in split if self._is_activation(ref[0])]

    def _gathered_elements(self, node: fx.Node, option: AxisOption) -> tuple[int, int]:
        gathered = self._gathered_operands(node, option)
        return sum(math.prod(self.graph.shape_of(ref)) for ref in gathered), len(gathered)


# --------------------------------------------------------------------------------------------------
# Data parallelism on one mesh axis: the batch is split, and ops that couple samples gather them.
#
# The walk is that of `autopar.sharding.propagate`, along the batch. For an op that cannot compute
# on a part of the batch (a contrastive loss, a sum over the batch), as few operands as possible are
# gathered such that it still computes its own part, or all of them if it cannot. Readers slice a
# whole result that has the shape of a gathered operand.
#
# A batch that the number of devices does not divide is split unevenly: the last part is shorter. An
# op whose results do not have corresponding parts cannot compute on a part either (a view that
# joins samples with tokens: three of eight samples are not a third of all tokens, rounded up).


class SampleWalk(ContextWalk):
    """The walk along a batch of `batch` samples, split over axes of these `sizes`."""

    def __init__(self, graph: TraceIndex, policy: Policy, batch: int, sizes: Sequence[int]) -> None:
        super().__init__(graph, policy, gathers=True)
        self.sizes, num = tuple(sizes), math.prod(sizes)
        self.result.uneven = (
            f"{batch} samples in {num} shards; a multiple of {num} may need fewer gathers"
            if batch % num
            else ""
        )

    def _options(self, node: fx.Node) -> tuple[AxisOption, ...]:
        options = super()._options(node)
        return (
            options
            if not self.result.uneven
            else tuple(o for o in options if self._has_parts(self.graph.calls[node.name], o))
        )

    def _has_parts(self, call: Call, option: AxisOption) -> bool:
        """Return whether the uneven parts of operands and results fit and correspond to each
        other."""
        inputs, outputs = (
            tuple(Layout([p] * len(self.sizes)) for p in placements)
            for placements in (option.inputs, option.outputs)
        )
        pairs = zip((*inputs, *outputs), (*call.inputs, *call.outputs), strict=True)
        fits = all(layout.fits(info.shape, self.sizes) for layout, info in pairs)
        return fits and cuts_alike(call, Strategy(inputs, outputs), self.sizes)

    def _choose(self, node: fx.Node) -> AxisOption | None:
        option = Propagation._choose(self, node)
        if option is not None or node.name not in self.graph.on_parameters:
            return option
        option = super()._choose(node)
        self.result.gathering.add(node.name)
        return option

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        lay = {
            self.graph.shape_of(ref): self.labels[ref]
            for ref in self._gathered_operands(node, option)
        }
        super()._take(node, option)
        if any(isinstance(placement, Shard) for placement in option.outputs):
            return
        for i, placement in enumerate(option.outputs):
            if (
                placement == REPLICATE
                and (label := lay.get(self.graph.shape_of((node.name, i)))) is not None
            ):
                self.labels[node.name, i] = label
                self.result.separate.update(
                    user.name for user in node.users
                )  # its readers slice it


def check_batch(plan: Parallelism, batch: int, sizes: Sequence[int]) -> None:
    """Check that a batch can be split over the axes of a plan.

    Args:
        plan: the named plan.
        batch: number of samples.
        sizes: devices per axis of the plan.

    Raises:
        ConstraintError: if it cannot.
    """
    num = math.prod(sizes)
    if Layout([Shard(0)] * len(sizes)).fits((batch,), sizes):
        return
    length = -(-batch // num)
    without = num - -(-batch // length)
    why = (
        f"with at most {length} per shard, {without} of the devices would have none"
        if len(sizes) == 1
        else "shards over several axes must be equal"
    )
    message = f"{plan} cannot hold: a batch of {batch} cannot be split over {num} devices: {why}"
    raise ConstraintError(
        message, remedy=f"make the batch a multiple of {num}, or use fewer or smaller axes"
    )


def notes_on(plan: Parallelism, graph: TraceIndex, labels: SpreadLabels) -> tuple[str, ...]:
    """Describe the effects of a plan of data parallelism that its name does not show.

    Args:
        plan: the named plan.
        graph: the trace and its dependencies.
        labels: the placements under the plan.

    Returns:
        A sentence that names the ops that gather samples, with ``*`` for layer indices; empty if
        there are none.
    """
    if plan.sequence or not labels.gathering:
        return ()
    nodes = (node for name, node in graph.nodes.items() if name in labels.gathering)
    names = dict.fromkeys(
        re.sub(r"\{\d+\}", "*", graph.pattern(node)).rsplit("/", 2)[0] for node in nodes
    )
    uneven = f" ({labels.uneven})" if labels.uneven else ""
    return (
        (
            f"{plan} gathers the batch for ops that cannot compute on a shard of it:"
            f" {', '.join(names)}{uneven}"
        ),
    )


# --------------------------------------------------------------------------------------------------
# Expert parallelism on one mesh axis: tokens are split with the batch, and experts over the same
# devices. Each device computes only with its own experts.
#
# The walk is that of data parallelism, except for experts (`autopar.ops.experts`) and their
# gradients. These read weights split by experts. There are two ways. Tokens, picks and gates are
# gathered, and the results are partial sums that are scattered in the placement of the tokens. Or
# they are read in their placement and dispatched (`autopar.rules.dispatch`). If the plan does not
# determine the way, the row of the node leaves it open.

BY_EXPERTS = Shard(0)
_WEIGHTS = {
    ops.experts: 3,
    ops.experts_backward: 4,
}  # index of the up weight; the down weight is next, the tokens are three before


def by_experts(
    graph: TraceIndex, plan: Parallelism, policy: Policy, batch: int, sizes: Sequence[int]
) -> SpreadLabels:
    """Return the placements if the batch and the experts are split.

    Args:
        graph: the trace and its dependencies.
        plan: the named plan.
        policy: the labels of the inputs.
        batch: number of samples.
        sizes: devices per axis of the plan.

    Raises:
        ConstraintError: if the model has no experts that are one op; if the number of experts is
            not a multiple of the number of devices; or if tokens would be dispatched over several
            axes.
    """
    if plan.tokens == "dispatched" and len(sizes) > 1:
        message = (
            f"{plan} cannot hold: an op can dispatch tokens along one mesh axis only, not"
            f" {len(sizes)}"
        )
        raise ConstraintError(
            message,
            remedy=(
                "use one axis, or remove tokens=: one axis then dispatches, and the others gather"
            ),
        )
    nodes = [node for node in graph.nodes.values() if node.target in _WEIGHTS]
    if not nodes:
        why = (
            "the model has no experts to shard; only transformers' experts modules without biases"
            " are supported"
        )
        raise nothing_to_split(plan, why)
    for node in nodes:
        num = graph.calls[node.name].inputs[_WEIGHTS[node.target]].shape[0]
        if num % math.prod(sizes):
            message = (
                f"{plan} cannot hold: the {num} experts of {node.meta['key']} are not a multiple"
                f" of {math.prod(sizes)} devices"
            )
            raise ConstraintError(
                message,
                where=where_of(node),
                remedy="use axes whose sizes divide the number of experts",
            )
    labels = _ExpertWalk(graph, policy, batch, sizes, plan.tokens).run()
    pending = [ref for node in nodes for ref in graph.reads[node.name][_WEIGHTS[node.target] :][:2]]
    while pending:
        ref = pending.pop()
        labels.weights.add(ref[0])
        pending += [read for read in graph.reads.get(ref[0], ()) if graph.is_weight(read[0])]
    return labels


class _ExpertWalk(SampleWalk):
    """The walk of `by_experts`. `tokens` is the way in which the plan moves them, or "" to leave it
    open."""

    def __init__(
        self, graph: TraceIndex, policy: Policy, batch: int, sizes: Sequence[int], tokens: str
    ) -> None:
        super().__init__(graph, policy, batch, sizes)
        self.tokens = tokens

    def _choose(self, node: fx.Node) -> AxisOption | None:
        if node.target not in _WEIGHTS:
            return super()._choose(node)
        up = _WEIGHTS[node.target]
        candidates = [
            o for o in self._options(node) if o.inputs[up] == o.inputs[up + 1] == BY_EXPERTS
        ]
        weight_placement = BY_EXPERTS if self.tokens == "dispatched" else REPLICATE
        return next((o for o in candidates if o.inputs[up - 3] == weight_placement), None)

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        if node.target not in _WEIGHTS:
            super()._take(node, option)
            return
        up = _WEIGHTS[node.target]
        tokens = self.labels.get(self.graph.reads[node.name][up - 3], REPLICATE)
        super()._take(node, option)
        self.result.separate.add(node.name)
        row, weights = (
            self.result.rows[node.name],
            [i for i, p in enumerate(option.outputs) if isinstance(p, Shard)],
        )
        if not self.tokens and isinstance(tokens, Shard):
            opened = tuple(p if i in weights else None for i, p in enumerate(row.outputs))
            self.result.rows[node.name] = LabelRow((*(None,) * up, *row.inputs[up:]), opened)
        for i, placement in enumerate(option.outputs):
            if isinstance(placement, Partial):
                self.labels[node.name, i] = tokens
        self.result.separate.update(
            user.name for user in node.users
        )  # partial sums are scattered before their readers
