"""`validate_microbatches`: the graph of one microbatch against that of the batch, forward and
backward, on an axis in time.

Each node of a microbatch's graph is compared with the node of the batch's for which it stands
(`autopar.validation.matching`, `autopar.validation.time_placements`). The runtime joins outputs as
`Microbatches.outputs` says and adds gradients up: so outputs have to be split, whole or terms of
the stated power of the number of microbatches, and every gradient has to be a term. Nothing of the
analysis that decided how the batch is cut is used, but what it says: which inputs are cut, what is
given of the whole batch, and how outputs are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.capture.graphs import copy_graph
from autopar.capture.trace import Trace
from autopar.errors import ValidationError
from autopar.ops import random
from autopar.program.program import Count, Microbatches
from autopar.rules import Call, where_of
from autopar.validation.matching import OF_BATCH, TIMES, Match, Matching, without
from autopar.validation.states import Ref, Validation, invalid
from autopar.validation.time_placements import placements_in_time
from autopar.validation.time_trials import TERM, WHOLE, TimePlacement, split_dim
from autopar.validation.traced import Nodes, Traced

_MULTIPLY = torch.ops.aten.mul.Tensor
_REMEDY = (
    "pass num_microbatches=1 and no pipeline, or a pipeline of one microbatch; and report the model"
)
Placements = dict[Ref, TimePlacement]


def validate_microbatches(
    whole: Trace, part: Trace, how: Microbatches, *, promised: bool = False
) -> Validation:
    """Show that microbatches compute the batch's outputs and gradients.

    Args:
        whole, part: the traces of the batch and of one microbatch. how: how microbatches make up
            the batch.
        promised: whether the user promised that samples are independent. Then differences that
            cannot be excluded are reported instead of raised.

    Raises:
        ValidationError: for the node at which an output or a gradient differs from the batch's,
            with the source line.
    """
    if how.num == 1:
        return Validation()
    return _InTime(Traced(whole), Traced(part), how, promised).validation()


@dataclass
class _InTime:
    """One comparison.

    Attributes:
        placed: the placement of each value of the microbatch's graph. matching: the batch's nodes
            for its nodes.
        open: keys of nodes of which nothing is known.
    """

    whole: Traced
    part: Traced
    how: Microbatches
    promised: bool
    placed: Placements = field(default_factory=dict)
    open: dict[str, None] = field(default_factory=dict)
    matching: Matching = field(init=False)

    def validation(self) -> Validation:
        """Return the report."""
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
                self.placed[i.node, 0] = WHOLE  # `_count` shows it
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
        """Return the placement of a microbatch's tangent, as the runtime passes it
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
        """Check that a value which microbatches get from the batch is the batch's value of the node
        that it matches."""
        graph = copy_graph(count.graph.graph)  # whose placeholders get values here
        named = {b.name: (b.node, 0) for b in self.part.trace.buffers} | {
            i.path: (i.node, 0) for i in self.part.trace.inputs
        }
        placed: Placements = {}
        matching = Matching(self.whole)
        given = iter((*count.buffers, *count.inputs))
        results: Sequence[fx.Node] = ()
        for node in graph.nodes:
            if node.op == "placeholder":
                name, result = named[next(given)]
                placed[node.name, 0] = self.placed[name, result]
                matching.same[node.name] = self.matching.same.get(name, "")
                node.meta["val"] = self.part.nodes[name].meta["val"]
            elif node.op == "output":
                results = node.args[0]
        self._place(Nodes(graph), placed, matching)
        for (path, kind), node in zip(count.given.items(), results, strict=True):
            found = placed[node.name, 0]
            due = {"sum": 0, "mean": 1}[kind]
            own = self.whole.by_key.get(path.removesuffix(OF_BATCH))
            right = (
                own is not None
                and matching.same.get(node.name) == own.name
                and found
                in (
                    TimePlacement("term", power=due),
                    TimePlacement("whole", power=due - 1),
                )
            )
            if not right:
                raise self._error(
                    node,
                    f"a value of the batch that microbatches receive is a {kind} of the"
                    f" microbatches' {found}",
                )

    def _place(self, nodes: Nodes, placed: Placements, matching: Matching) -> None:
        """Place every node of a graph: of the microbatch's, or of a count's."""
        for node in nodes.graph.nodes:
            if node.op != "call_function" or nodes.ref(node) != (node.name, 0):
                continue  # no compute node, or a getitem
            reads = [
                placed.get(ref, TimePlacement("open", origin=node.meta["key"]))
                for ref in nodes.reads(node)
            ]
            found = self._place_multiplied(node, reads, nodes, matching) or self._place_node(
                node, reads, nodes, matching
            )
            placed |= {(node.name, result): f for result, f in enumerate(found)}

    def _place_node(
        self, node: fx.Node, reads: Sequence[TimePlacement], nodes: Nodes, matching: Matching
    ) -> Sequence[TimePlacement]:
        key, wrong = node.meta["key"], TimePlacement("wrong", origin=node.meta["key"])
        unknown = next((r for kind in ("wrong", "open") for r in reads if r.kind == kind), None)
        found, taken = [unknown or wrong] * len(nodes.call(node).outputs), None
        for match in matching.matches(node, nodes.reads(node)):
            made = found if unknown else self._as_match(match, node, reads, nodes)
            is_right = unknown is not None or all(f.kind != "wrong" for f in made)
            if taken is None or is_right:
                found, taken = list(made), match
            if is_right:
                break
        if taken is not None:
            matching.take(node, taken)
        return found if unknown else [self._named(f, key) for f in found]

    def _as_match(
        self, match: Match, node: fx.Node, reads: Sequence[TimePlacement], nodes: Nodes
    ) -> Sequence[TimePlacement]:
        """Return the placements of a node's results, for a match."""
        call, whole = nodes.call(node), self.whole.call(match.node)
        if match.is_one_view:
            whole = replace(whole, inputs=self.whole.call(match.missing[0][0]).inputs)
        else:
            shapes = [nodes.shape(ref) for ref in nodes.reads(node)]
            reads = [
                without(missing, self.whole, shape, read, self.how.num)
                for missing, shape, read in zip(match.missing, shapes, reads, strict=True)
            ]
            if any(read.kind == "wrong" for read in reads):
                return [TimePlacement("wrong")] * len(call.outputs)
        if match.product is not None:
            return self._place_bias(self.whole.call(match.product), whole, call, reads)
        return placements_in_time(whole, call, reads, self.how.num)

    def _place_bias(
        self, product: Call, addition: Call, call: Call, reads: Sequence[TimePlacement]
    ) -> tuple[TimePlacement, ...]:
        """Place a product with a bias, for which the batch has a product and an addition."""
        plain = replace(call, args=call.args[:3], inputs=call.inputs[:2])
        (made,) = placements_in_time(product, plain, reads[:2], self.how.num)
        if not made.is_known:
            return (made,)
        added = replace(addition, inputs=(*call.outputs, call.inputs[2]), outputs=call.outputs)
        return placements_in_time(addition, added, [made, reads[2]], self.how.num)

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
        """Place a node that only a microbatch's graph has: it multiplies its operand by the number
        of microbatches."""
        own = node.meta["key"].endswith(TIMES) and node.target is _MULTIPLY
        if not own or len(reads) != 1 or node.args[1] != self.how.num:
            return []
        (read,) = reads
        matching.same[node.name] = matching.whole_ref(nodes.reads(node)[0])[0]
        return [read if not read.is_known else replace(read, power=read.power + 1)]

    # What comes out.

    def _outputs(self) -> Iterator[str]:
        for o in self.part.trace.outputs:
            if o.path not in self.how.outputs:
                continue  # it is not asked for of several microbatches
            kind, dim = self.how.outputs[o.path]
            due: Mapping[str, tuple[TimePlacement, ...]] = {
                "split": (TimePlacement("split", dim),),
                "whole": (WHOLE,),
                "sum": (TERM, TimePlacement("whole", power=-1)),
                "mean": (TimePlacement("term", power=1), WHOLE),
            }
            own = next(w.node for w in self.whole.trace.outputs if w.path == o.path)
            yield from self._compare_returned(
                self.part.nodes[o.node],
                self.whole.nodes[own],
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
                own = self.whole.results[w.gradient]
                yield from self._compare_returned(
                    self.part.results[p.gradient], own, due, f"the gradient of {p.name!r}"
                )

    def _compare_returned(
        self, node: fx.Node, own: fx.Node, due: Sequence[TimePlacement], what: str
    ) -> Iterator[str]:
        """Compare a result of a microbatch with `own`, the batch's result."""
        ref = self.part.ref(node)
        missing = self.matching.missing_between(self.whole.ref(own), self.matching.whole_ref(ref))
        found = self.placed[ref]
        if missing is None and found.is_known:
            raise self._error(
                node,
                f"{what} of a microbatch is the value of a different node from the batch graph",
            )
        found = without(missing or (), self.whole, self.part.shape(ref), found, self.how.num)
        if found in due or found.kind == "zero":
            return
        at = self.part.by_key.get(found.origin, node)
        if self.promised:
            yield (
                f"at {at.meta['key']}, {what} over microbatches follows only from the promise that"
                " samples are independent, not from a rule"
            )
            return
        if found.kind == "open":
            raise self._error(
                at,
                f"cannot show that {what} adds up over {self.how.num} microbatches: the rules for"
                " this op are insufficient",
            )
        seen = (
            "its value for a microbatch is not a slice, a term or a copy of the value for the batch"
            if found.kind == "wrong"
            else f"it is {found}"
        )
        raise self._error(
            at,
            f"{what} does not add up over {self.how.num} microbatches: {seen}, expected {due[0]}",
        )

    def _error(self, node: fx.Node, what: str) -> ValidationError:
        return ValidationError(
            f"{node.meta.get('key', node.name)}: {what}", where=where_of(node), remedy=_REMEDY
        )
