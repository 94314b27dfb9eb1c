"""`validate_microbatches`: compare the graph of one microbatch with the graph of the batch, forward
and backward, on an axis in time.

Each node of a microbatch's graph is compared with the corresponding node of the batch's graph
(`autopar.validation.matching`), by the placements below. The runtime joins outputs as
`Microbatches.outputs` states, and adds gradients. So an output must be split, whole or a term with
the stated power of the number of microbatches, and a gradient must be a term. The analysis that cut
the batch is not trusted. Only its results are read: which inputs are cut, which values microbatches
receive from the batch, and how outputs are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import fx
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.graphs import copy_graph
from autopar.capture.trace import Trace
from autopar.core.layout import Layout, Strategy
from autopar.core.placements import PARTIAL, REPLICATE
from autopar.errors import ValidationError
from autopar.ops import random
from autopar.program.program import Count, Microbatches
from autopar.rules import AxisOption, Call, axis_options, localize, where_of
from autopar.rules.call import KeyedCall
from autopar.validation.matching import OF_BATCH, TIMES, Match, Matching, without
from autopar.validation.op_law import DRAWS, VIEWS, leading_dims
from autopar.validation.states import Ref, Validation, invalid
from autopar.validation.time_trials import TERM, WHOLE, TimePlacement, split_dim, try_on_numbers
from autopar.validation.traced import Nodes, TracedModel

# --------------------------------------------------------------------------------------------------
# Placements on an axis in time: the relation of a microbatch's tensor to the batch's tensor. They
# are derived op by op from trials on numbers, forward and backward.
#
# With M microbatches and the batch's tensor w, microbatch m has, up to a power of M:
#
#     split(d)    the m-th of M parts of w along dim d
#     whole       w
#     term        a term: the M terms add up to w
#     place(d)    positions along dim d; w counts from the batch's first sample, each microbatch
#                 from its own first sample
#
# `power` e means M^e times this value: a mean over a microbatch's samples is a term with e = 1. No
# rule of the op determines the placement of a result. The op runs on small numbers instead: once
# for the batch, and once for each of M microbatches. Their operands have the given placements, and
# their settings are those in the graph of one microbatch. A result has a placement if the M results
# relate to the batch's result in this way for M = 2 and for M = 3. Otherwise it has none, and must
# not reach an output or a gradient.


aten = torch.ops.aten
_CONSTANTS = frozenset(
    (
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.empty.memory_format,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.scalar_tensor.default,
    )
)


def placements_in_time(
    whole: Call, part: Call, reads: Sequence[TimePlacement], num: int
) -> tuple[TimePlacement, ...]:
    """Return the placements of a node's results in one of `num` microbatches. Their kind is
    ``open`` if neither trials nor a rule determine them.

    Args:
        whole: the call in the graph of the batch.
        part: the call in the graph of one microbatch.
        reads: placements of the operands.
        num: number of microbatches.
    """
    placements = _place_results(whole.keyed, part.keyed, tuple(reads), num)
    return placements if placements else tuple(TimePlacement("open") for _ in whole.outputs)


@lru_cache(maxsize=16384)
def _place_results(
    keyed: KeyedCall, of_part: KeyedCall, reads: tuple[TimePlacement, ...], num: int
) -> tuple[TimePlacement, ...]:
    of_batch, part = keyed.call, of_part.call
    if of_batch.target is not part.target or len(of_batch.outputs) != len(part.outputs):
        return ()
    if of_batch.target in DRAWS:
        return _place_draws(of_batch, part, reads, num)
    if of_batch.target in _CONSTANTS:
        return _place_constant(of_batch, part, num)
    if of_batch.key == part.key and all(r == WHOLE for r in reads):
        return tuple(WHOLE for _ in of_batch.outputs)
    if of_batch.target is aten.arange.default:
        return _positions(of_batch, part, num)
    if of_batch.target in VIEWS:
        return _place_view(of_batch, part, reads[0], num)
    tried = try_on_numbers(of_batch, part, reads, num)
    known = bool(tried) and all(found.kind != "open" for found in tried)
    return tried if known else _by_rule(of_batch, part, reads, num)


def _positions(whole: Call, part: Call, num: int) -> tuple[TimePlacement, ...]:
    """Return the placement of positions, if the batch has `num` times as many as a microbatch."""
    counts = whole.args == (part.args[0] * num,) and dict(whole.kwargs) == dict(part.kwargs)
    return (TimePlacement("place", 0),) if counts else ()


def _by_rule(
    whole: Call, part: Call, reads: Sequence[TimePlacement], num: int
) -> tuple[TimePlacement, ...]:
    """Return the placements that follow from the op's rule on an axis of `num` ranks. Microbatches
    correspond to ranks. This serves ops without small calls.

    The power of an operand is passed on only if the rule states that the op is linear in that
    operand alone.
    """
    scaled = [number for number, r in enumerate(reads) if r.power]
    if len(scaled) > 1 or any(r.kind == "place" for r in reads):
        return ()
    options = axis_options(whole)
    linear = AxisOption(
        tuple(PARTIAL if n in scaled else REPLICATE for n in range(len(reads))),
        (PARTIAL,) * len(whole.outputs),
    )
    if scaled and linear not in options:
        return ()
    for option in options:
        if all(map(_agrees_with, reads, option.inputs)) and _is_called(whole, part, option, num):
            power = reads[scaled[0]].power if scaled else 0
            return tuple(_placement_of(p, power) for p in option.outputs)
    return ()


def _placement_of(placement: Placement, power: int) -> TimePlacement:
    """Return the placement in time for a placement on an axis of ranks. Ranks correspond to
    microbatches."""
    if isinstance(placement, Shard):
        return TimePlacement("split", placement.dim, power)
    return TimePlacement("term" if placement == PARTIAL else "whole", -1, power)


def _agrees_with(read: TimePlacement, placement: Placement) -> bool:
    """Return whether a placement in time agrees with a placement on an axis of ranks."""
    if read.dim >= 0:
        return placement == Shard(read.dim)
    return placement in {"term": (PARTIAL,), "zero": (PARTIAL, REPLICATE)}.get(
        read.kind, (REPLICATE,)
    )


def _is_called(whole: Call, part: Call, option: AxisOption, num: int) -> bool:
    """Return whether a microbatch makes the call that a rank would make."""
    strategy = Strategy(
        tuple(Layout((p,)) for p in option.inputs), tuple(Layout((p,)) for p in option.outputs)
    )
    local = localize(whole, strategy, (num,))
    return (local.target, tuple(local.args), dict(local.kwargs)) == (
        part.target,
        part.args,
        dict(part.kwargs),
    )


def _place_draws(
    whole: Call, part: Call, reads: Sequence[TimePlacement], num: int
) -> tuple[TimePlacement, ...]:
    """Return the placements of random draws. Each microbatch draws new numbers, which have the same
    distribution as the batch's.

    Numbers that do not depend on the sample (dropout of a weight) count as equal to the batch's,
    although each microbatch draws its own.
    """
    if any(r != WHOLE for r in reads):
        return ()
    if whole.outputs[0].shape == part.outputs[0].shape:
        return (WHOLE,)
    dim = split_dim(whole.outputs[0].shape, part.outputs[0].shape, num)
    return (TimePlacement("split", dim),) if dim >= 0 else ()


def _place_constant(whole: Call, part: Call, num: int) -> tuple[TimePlacement, ...]:
    """Return the placement of a tensor with a single value, from its shapes, if both calls have the
    same value."""
    values = [
        [a for a in call.args if isinstance(a, int | float) and not isinstance(a, bool)]
        for call in (whole, part)
    ]
    if values[0] != values[1]:
        return ()
    dim = split_dim(whole.outputs[0].shape, part.outputs[0].shape, num)
    same = whole.outputs[0].shape == part.outputs[0].shape
    if same or dim >= 0:
        return (
            TimePlacement("zero" if _is_zero(whole) else "split" if dim >= 0 else "whole", dim),
        )
    return ()


def _is_zero(call: Call) -> bool:
    name = call.target.__name__
    filled = (
        next((a for a in reversed(call.args) if type(a) in (int, float)), 1)
        if "full" in name or "scalar" in name
        else 1
    )
    return "zeros" in name or filled == 0


def _place_view(
    whole: Call, part: Call, read: TimePlacement, num: int
) -> tuple[TimePlacement, ...]:
    source, target = whole.inputs[0].shape, whole.outputs[0].shape
    if read.dim < 0:
        return (read,) if target == part.outputs[0].shape else ()
    pairs = dict(leading_dims(source, target))
    dim = pairs.get(read.dim, -1)
    if dim < 0:
        return (TimePlacement("wrong"),)
    return (replace(read, dim=dim),) if split_dim(target, part.outputs[0].shape, num) == dim else ()


# --------------------------------------------------------------------------------------------------


_MULTIPLY = torch.ops.aten.mul.Tensor
_REMEDY = (
    "pass num_microbatches=1 and no pipeline, or a pipeline of one microbatch; and report the model"
)
Placements = dict[Ref, TimePlacement]


def validate_microbatches(
    whole: Trace, part: Trace, how: Microbatches, *, promised: bool = False
) -> Validation:
    """Check that microbatches compute the batch's outputs and gradients.

    Args:
        whole: the trace of the batch.
        part: the trace of one microbatch.
        how: how microbatches make up the batch.
        promised: whether the user promised that samples are independent. If so, possible
            differences are reported instead of raised.

    Returns:
        The report. With `promised`, it lists what was not shown.

    Raises:
        ValidationError: for the node at which an output or a gradient differs from the batch's,
            with the source line.
    """
    if how.num == 1:
        return Validation()
    return _InTime(TracedModel(whole), TracedModel(part), how, promised).validation()


@dataclass
class _InTime:
    """One comparison of a microbatch's graph with the batch's graph.

    Attributes:
        placed: placement of each value of the microbatch's graph.
        matching: matches of the microbatch's nodes.
        open: keys of nodes without a known placement.
    """

    whole: TracedModel
    part: TracedModel
    how: Microbatches
    promised: bool
    placed: Placements = field(default_factory=dict)
    open: dict[str, None] = field(default_factory=dict)
    matching: Matching = field(init=False)

    def validation(self) -> Validation:
        """Run the comparison and return the report."""
        self.matching = Matching(self.whole)
        self.matching.add_placeholders(self.part)
        self._place_inputs()
        for count in self.how.counts:
            self._count(count)
        self._place(self.part, self.placed, self.matching)
        unproven = [*self._outputs(), *self._gradients()]
        return Validation(unproven=tuple(unproven))

    def _place_inputs(self) -> None:
        trace, how = self.part.trace, self.how
        for tensor in (*trace.parameters, *trace.buffers):
            self.placed[tensor.node, 0] = WHOLE
        sizes = {i.path: i.shape for i in self.whole.trace.inputs}
        for i in trace.inputs:
            if i.given:
                self.placed[i.node, 0] = WHOLE  # `_count` checks it
            elif i.path in how.inputs:
                dim = how.inputs[i.path]
                if split_dim(sizes[i.path], i.shape, how.num) != dim:
                    of_batch = f"input {i.path!r} of shape {sizes[i.path]}"
                    raise invalid(f"{of_batch} is not {how.num} times {i.shape} along dim {dim}")
                self.placed[i.node, 0] = TimePlacement("split", dim)
            else:
                self.placed[i.node, 0] = (
                    WHOLE
                    if sizes[i.path] == i.shape
                    else TimePlacement("wrong", origin=f"{i.path}/input")
                )
        for o in trace.differentiable:
            self.placed[o.tangent, 0] = self._tangent(o.path, is_loss=o.is_loss)

    def _tangent(self, path: str, *, is_loss: bool) -> TimePlacement:
        """Return the placement of a microbatch's tangent as the runtime passes it
        (`Microbatches.weight` and `tangents`)."""
        if is_loss:
            weights = {1.0: 0, 1.0 / self.how.num: -1}
            if self.how.weight not in weights:
                weight, num = self.how.weight, self.how.num
                raise invalid(
                    f"the weight of a microbatch's loss is {weight}, with {num} microbatches"
                )
            return TimePlacement("whole", power=weights[self.how.weight])
        kind, dim = self.how.outputs.get(path, ("open", -1))
        if kind == "split":
            return TimePlacement("split", dim)
        return {"whole": TERM, "sum": WHOLE, "mean": TimePlacement("whole", power=-1)}.get(
            kind, TimePlacement("open")
        )

    def _count(self, count: Count) -> None:
        """Check a value that microbatches receive from the batch: it must equal the batch's value
        at the node that it matches."""
        graph = copy_graph(count.graph.graph)  # a copy, as placeholders get values here
        named = {b.name: (b.node, 0) for b in self.part.trace.buffers} | {
            i.path: (i.node, 0) for i in self.part.trace.inputs
        }
        placed: Placements = {}
        matching = Matching(self.whole)
        names = iter((*count.buffers, *count.inputs))
        results: Sequence[fx.Node] = ()
        for node in graph.nodes:
            batch_node = self.whole.by_captured_key.get(node.meta.get("key", ""))
            if batch_node is not None:  # the graph of terms has the keys of the captured graph
                node.meta["key"] = batch_node.meta["key"]
            if node.op == "placeholder":
                name, result = named[next(names)]
                placed[node.name, 0] = self.placed[name, result]
                matching.same[node.name] = self.matching.same.get(name, "")
                node.meta["val"] = self.part.nodes[name].meta["val"]
            elif node.op == "output":
                results = node.args[0]
        self._place(Nodes(graph), placed, matching)
        for (path, kind), node in zip(count.given.items(), results, strict=True):
            placement = placed[node.name, 0]
            due = {"sum": 0, "mean": 1}[kind]
            batch_node = self.whole.by_captured_key.get(path.removesuffix(OF_BATCH))
            right = (
                batch_node is not None
                and matching.same.get(node.name) == batch_node.name
                and placement
                in (
                    TimePlacement("term", power=due),
                    TimePlacement("whole", power=due - 1),
                )
            )
            if not right:
                raise self._error(
                    node,
                    f"a value of the batch that microbatches receive is a {kind} of the"
                    f" microbatches' {placement}",
                )

    def _place(self, nodes: Nodes, placed: Placements, matching: Matching) -> None:
        """Place every node of a graph: the microbatch's graph, or the graph of a `Count`."""
        for node in nodes.graph.nodes:
            if node.op != "call_function" or nodes.ref(node) != (node.name, 0):
                continue  # not a compute node, or a getitem
            reads = [
                placed.get(ref, TimePlacement("open", origin=node.meta["key"]))
                for ref in nodes.reads(node)
            ]
            placements = self._place_multiplied(node, reads, nodes, matching) or self._place_node(
                node, reads, nodes, matching
            )
            placed |= {(node.name, result): f for result, f in enumerate(placements)}

    def _place_node(
        self, node: fx.Node, reads: Sequence[TimePlacement], nodes: Nodes, matching: Matching
    ) -> Sequence[TimePlacement]:
        key, wrong = node.meta["key"], TimePlacement("wrong", origin=node.meta["key"])
        unknown = next((r for kind in ("wrong", "open") for r in reads if r.kind == kind), None)
        placements, chosen = [unknown or wrong] * len(nodes.call(node).outputs), None
        for match in matching.matches(node, nodes.reads(node)):
            tried = placements if unknown else self._as_match(match, node, reads, nodes)
            is_right = unknown is not None or all(f.kind != "wrong" for f in tried)
            if chosen is None or is_right:
                placements, chosen = list(tried), match
            if is_right:
                break
        if chosen is not None:
            matching.take(node, chosen)
        return placements if unknown else [self._named(f, key) for f in placements]

    def _as_match(
        self, match: Match, node: fx.Node, reads: Sequence[TimePlacement], nodes: Nodes
    ) -> Sequence[TimePlacement]:
        """Return the placements of a node's results if it corresponds to the node of a match."""
        call, of_batch = nodes.call(node), self.whole.call(match.node)
        if match.is_one_view:
            of_batch = replace(of_batch, inputs=self.whole.call(match.missing[0][0]).inputs)
        else:
            shapes = [nodes.shape(ref) for ref in nodes.reads(node)]
            reads = [
                without(missing, self.whole, shape, read, self.how.num)
                for missing, shape, read in zip(match.missing, shapes, reads, strict=True)
            ]
            if any(read.kind == "wrong" for read in reads):
                return [TimePlacement("wrong")] * len(call.outputs)
        if match.product is not None:
            return self._place_bias(self.whole.call(match.product), of_batch, call, reads)
        return placements_in_time(of_batch, call, reads, self.how.num)

    def _place_bias(
        self, product: Call, addition: Call, call: Call, reads: Sequence[TimePlacement]
    ) -> tuple[TimePlacement, ...]:
        """Return the placement of a product with a bias. The batch's graph has a product and an
        addition."""
        plain = replace(call, args=call.args[:3], inputs=call.inputs[:2])
        (placement,) = placements_in_time(product, plain, reads[:2], self.how.num)
        if not placement.is_known:
            return (placement,)
        added = replace(addition, inputs=(*call.outputs, call.inputs[2]), outputs=call.outputs)
        return placements_in_time(addition, added, [placement, reads[2]], self.how.num)

    def _named(self, found: TimePlacement, key: str) -> TimePlacement:
        if found.kind == "open":
            return self._mark_open(key)
        return TimePlacement("wrong", origin=key) if found.kind == "wrong" else found

    def _mark_open(self, key: str) -> TimePlacement:
        self.open[key] = None
        return TimePlacement("open", origin=key)

    def _place_multiplied(
        self, node: fx.Node, reads: Sequence[TimePlacement], nodes: Nodes, matching: Matching
    ) -> list[TimePlacement]:
        """Return the placement of a node that only a microbatch's graph has. It multiplies its
        operand by the number of microbatches."""
        is_multiplied = node.meta["key"].endswith(TIMES) and node.target is _MULTIPLY
        if not is_multiplied or len(reads) != 1 or node.args[1] != self.how.num:
            return []
        (read,) = reads
        matching.same[node.name] = matching.whole_ref(nodes.reads(node)[0])[0]
        return [read if not read.is_known else replace(read, power=read.power + 1)]

    # Outputs and gradients.

    def _outputs(self) -> Iterator[str]:
        for o in self.part.trace.outputs:
            if o.path not in self.how.outputs:
                continue  # the step of several microbatches does not return it
            kind, dim = self.how.outputs[o.path]
            due: Mapping[str, tuple[TimePlacement, ...]] = {
                "split": (TimePlacement("split", dim),),
                "whole": (WHOLE,),
                "sum": (TERM, TimePlacement("whole", power=-1)),
                "mean": (TimePlacement("term", power=1), WHOLE),
            }
            batch_node = next(w.node for w in self.whole.trace.outputs if w.path == o.path)
            yield from self._compare_returned(
                self.part.nodes[o.node],
                self.whole.nodes[batch_node],
                due[kind],
                f"output {o.path!r}" if o.path else "the output",
            )
        for name, position in self.part.trace.mutated.items():
            if name != random.STATE:
                raise self._error(
                    self.part.results[position],
                    f"buffer {name!r} would be written {self.how.num} times per step",
                )

    def _gradients(self) -> Iterator[str]:
        due = (TERM, TimePlacement("whole", power=-1))
        for p, w in zip(self.part.trace.parameters, self.whole.trace.parameters, strict=True):
            if p.name != w.name or (p.gradient is None) != (w.gradient is None):
                raise invalid(
                    f"the microbatch graph has parameter {p.name!r} in the position of"
                    f" {w.name!r} of the batch graph"
                )
            if p.gradient is not None and w.gradient is not None:
                batch_result = self.whole.results[w.gradient]
                yield from self._compare_returned(
                    self.part.results[p.gradient], batch_result, due, f"the gradient of {p.name!r}"
                )

    def _compare_returned(
        self, node: fx.Node, own: fx.Node, due: Sequence[TimePlacement], what: str
    ) -> Iterator[str]:
        """Compare a result of a microbatch with `own`, the corresponding result of the batch."""
        ref = self.part.ref(node)
        missing = self.matching.missing_between(self.whole.ref(own), self.matching.whole_ref(ref))
        placement = self.placed[ref]
        if missing is None and placement.is_known:
            raise self._error(
                node,
                f"{what} of a microbatch is the value of a different node from the batch graph",
            )
        placement = without(
            missing or (), self.whole, self.part.shape(ref), placement, self.how.num
        )
        if placement in due or placement.kind == "zero":
            return
        at = self.part.by_key.get(placement.origin, node)
        if self.promised:
            yield (
                f"at {at.meta['key']}, {what} over microbatches follows only from the promise that"
                " samples are independent, not from a rule"
            )
            return
        if placement.kind == "open":
            raise self._error(
                at,
                f"cannot show that {what} adds up over {self.how.num} microbatches: the rules for"
                " this op are insufficient",
            )
        text = (
            "its value for a microbatch is not a slice, a term or a copy of the value for the batch"
            if placement.kind == "wrong"
            else f"it is {placement}"
        )
        raise self._error(
            at,
            f"{what} does not add up over {self.how.num} microbatches: {text}, expected {due[0]}",
        )

    def _error(self, node: fx.Node, what: str) -> ValidationError:
        return ValidationError(
            f"{node.meta.get('key', node.name)}: {what}", where=where_of(node), remedy=_REMEDY
        )
