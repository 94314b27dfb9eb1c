"""`validate_microbatches`: the graph of one microbatch against that of the batch, forward and
backward, on an axis in time.

Each node of a microbatch's graph is compared with the node of the same key in the batch's
(`autopar.validation.time_placements`). The runtime joins outputs as `Microbatches.outputs` says and
adds gradients up: so outputs have to be split, whole or terms of the stated power of the number of
microbatches, and every gradient has to be a term. Nothing of the analysis that decided how the
batch is cut is used, but what it
says: which inputs are cut, what is given of the whole batch, and how outputs are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar import random_ops
from autopar.capture.graphs import copied
from autopar.capture.trace import Trace
from autopar.errors import ValidationError
from autopar.rules import call_of, operands_of, where_of
from autopar.run.program import Count, Microbatches
from autopar.validation.in_time import TERM, WHOLE, TimePlacement, split_dim
from autopar.validation.report import Validation
from autopar.validation.states import REMEDY, Ref
from autopar.validation.time_placements import placements_in_time
from autopar.validation.traced import Traced

OF_BATCH, _TIMES = " of the batch", "/of the batch"
_MULTIPLY, _EXPAND = torch.ops.aten.mul.Tensor, torch.ops.aten.expand.default
_REMEDY = (
    "pass num_microbatches=1 and no pipeline, or a pipeline of one microbatch; and report the model"
)
Placements = dict[Ref, TimePlacement]


def validate_microbatches(
    whole: Trace, part: Trace, how: Microbatches, *, promised: bool = False
) -> Validation:
    """Show that microbatches make the batch's outputs and gradients.

    Args:
        whole, part: the traces of the batch and of one microbatch. how: how a batch is worked
            through.
        promised: whether the user promised that samples are independent. What cannot be shown is
            reported then, and not refused.

    Raises:
        ValidationError: naming the node at which an output or a gradient departs from the batch's,
            with the source line.
    """
    if how.num == 1:
        return Validation()
    return _InTime(Traced(whole), Traced(part), how, promised).validation()


@dataclass
class _InTime:
    """One comparison.

    Attributes:
        placed: of each value of the microbatch's graph. open: keys of nodes of which nothing is
            known.
    """

    whole: Traced
    part: Traced
    how: Microbatches
    promised: bool
    placed: Placements = field(default_factory=dict)
    open: dict[str, None] = field(default_factory=dict)
    _origins: list[dict[str, str]] = field(default_factory=list)

    def validation(self) -> Validation:
        """The report."""
        self._origins = [_origins(self.whole), _origins(self.part)]
        self._place_inputs()
        for count in self.how.counts:
            self._count(count)
        self.place(self.part.trace.graph, self.placed, self.part)
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
                    raise ValidationError(
                        f"input {i.path!r} of shape {sizes[i.path]} is not {how.num} times {i.shape} along dim {dim}",
                        remedy=REMEDY,
                    )
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
        """What backward of a microbatch begins with, as the runtime has it (`Microbatches.weight`
        and `tangents`).
        """
        if is_loss:
            weights = {1.0: 0, 1.0 / self.how.num: -1}
            if self.how.weight not in weights:
                raise ValidationError(
                    f"the loss of a microbatch weighs {self.how.weight}, of {self.how.num}",
                    remedy=REMEDY,
                )
            return TimePlacement("whole", power=weights[self.how.weight])
        kind, dim = self.how.outputs.get(path, ("open", -1))
        if kind == "split":
            return TimePlacement("split", dim)
        return {"whole": TERM, "sum": WHOLE, "mean": TimePlacement("whole", power=-1)}.get(
            kind, TimePlacement("open")
        )

    def _count(self, count: Count) -> None:
        """What is given of the batch has to be the batch's value of the node that it stands for."""
        graph = copied(count.graph.graph)  # whose placeholders get values here
        named = {b.name: (b.node, 0) for b in self.part.trace.buffers} | {
            i.path: (i.node, 0) for i in self.part.trace.inputs
        }
        placed: Placements = {}
        given = iter((*count.buffers, *count.inputs))
        results: Sequence[fx.Node] = ()
        for node in graph.nodes:
            if node.op == "placeholder":
                name, result = named[next(given)]
                placed[node.name, 0] = self.placed[name, result]
                node.meta["val"] = self.part.nodes[name].meta["val"]
            elif node.op == "output":
                results = node.args[0]
        self.place(graph, placed, None)
        for (path, kind), node in zip(count.given.items(), results, strict=True):
            found = placed[node.name, 0]
            due = {"sum": 0, "mean": 1}[kind]
            key = path.removesuffix(OF_BATCH)
            right = node.meta["key"] == key and (
                found in (TimePlacement("term", power=due), TimePlacement("whole", power=due - 1))
            )
            if not right:
                raise self._error(
                    node,
                    f"what microbatches are given of the batch is a {kind} of what each has as {found}",
                )

    def place(self, graph: fx.Graph, placed: Placements, traced: Traced | None) -> None:
        """Place every node of a graph; `traced` looks calls up, where the graph is a trace's."""
        for node in graph.nodes:
            if node.op != "call_function" or (node.name, 0) in placed:
                continue
            if traced is not None and traced.ref(node) != (node.name, 0):  # a getitem
                continue
            reads = [
                placed.get(self._ref(operand), TimePlacement("open", origin=node.meta["key"]))
                for operand in operands_of(node)
            ]
            for result, found in enumerate(self._placed(node, reads, traced)):
                placed[node.name, result] = found

    def _ref(self, node: fx.Node) -> Ref:
        return self.part.ref(node)

    def _placed(
        self, node: fx.Node, reads: Sequence[TimePlacement], traced: Traced | None
    ) -> Sequence[TimePlacement]:
        key = node.meta["key"]
        call = traced.call(node) if traced is not None else call_of(node)
        unknown = next((r for kind in ("wrong", "open") for r in reads if r.kind == kind), None)
        if unknown is not None:
            return [unknown] * len(call.outputs)
        origin = self.whole.by_key.get(key)
        if origin is None:
            return self._multiplied(node, reads) or [self._open(key)] * len(call.outputs)
        if traced is not None:
            pairs = zip(self.whole.reads(origin), self.part.reads(node), reads, strict=False)
            known = [r for pair in pairs if (r := self._read_as(*pair)) is not None]
            if not len(self.whole.reads(origin)) == len(reads) == len(known):
                return [TimePlacement("wrong", origin=key)] * len(call.outputs)
            reads = known
        found = placements_in_time(self.whole.call(origin), call, reads, self.how.num)
        return [self._named(f, key) for f in found]

    def _read_as(self, whole: Ref, part: Ref, read: TimePlacement) -> TimePlacement | None:
        """The placement of an operand, which the batch's graph reads as `whole` and the
        microbatch's as `part`.

        The graph of a microbatch of one sample has no ``expand`` to one sample where the batch's
        has one to all samples.

        Returns:
            None if the two are different values.
        """
        if self._name(0, whole) == self._name(1, part):
            return read
        node = self.whole.nodes[whole[0]]
        if node.target is not _EXPAND or self._name(0, self.whole.ref(node.args[0])) != self._name(
            1, part
        ):  # type: ignore[arg-type]
            return None
        dim = split_dim(self.whole.shape(whole), self.part.shape(part), self.how.num)
        return (
            TimePlacement("split", dim, read.power) if dim >= 0 and read.kind == "whole" else None
        )

    def _name(self, which: int, ref: Ref) -> Ref:
        """A value of the batch's (0) or the microbatch's (1) graph, in terms that both graphs
        share.
        """
        return self._origins[which][ref[0]], ref[1]

    def _named(self, found: TimePlacement, key: str) -> TimePlacement:
        if found.kind == "open":
            return self._open(key)
        return TimePlacement("wrong", origin=key) if found.kind == "wrong" else found

    def _open(self, key: str) -> TimePlacement:
        self.open[key] = None
        return TimePlacement("open", origin=key)

    def _multiplied(self, node: fx.Node, reads: Sequence[TimePlacement]) -> list[TimePlacement]:
        """A node that only a microbatch's graph has: it makes as many times as much of what it
        reads as there are microbatches.
        """
        if node.target is not _MULTIPLY or len(reads) != 1 or node.args[1] != self.how.num:
            return []
        (read,) = reads
        return [TimePlacement(read.kind, read.dim, read.power + 1)]

    # What comes out.

    def _outputs(self) -> Iterator[str]:
        for o in self.part.trace.outputs:
            if o.path not in self.how.outputs:
                continue  # it is not asked for of several microbatches
            kind, dim = self.how.outputs[o.path]
            due: Mapping[str, tuple[TimePlacement, ...]] = {
                "split": (TimePlacement("split", dim),), "whole": (WHOLE,), "sum": (TERM, TimePlacement("whole", power=-1)),
                "mean": (TimePlacement("term", power=1), WHOLE),
            }  # fmt: skip
            own = next(w.node for w in self.whole.trace.outputs if w.path == o.path)
            yield from self._judged(
                self.part.nodes[o.node],
                self.whole.nodes[own],
                due[kind],
                f"output {o.path!r}" if o.path else "the output",
            )
        for name, position in self.part.trace.mutated.items():
            if name != random_ops.STATE:
                raise self._error(
                    self.part.results[position],
                    f"buffer {name!r} would be written {self.how.num} times a step",
                )

    def _gradients(self) -> Iterator[str]:
        due = (TERM, TimePlacement("whole", power=-1))
        for p, w in zip(self.part.trace.parameters, self.whole.trace.parameters, strict=True):
            if p.name != w.name or (p.gradient is None) != (w.gradient is None):
                raise ValidationError(
                    f"the microbatch's graph has parameter {p.name!r} where the batch's has {w.name!r}",
                    remedy=REMEDY,
                )
            if p.gradient is not None and w.gradient is not None:
                own = self.whole.results[w.gradient]
                yield from self._judged(
                    self.part.results[p.gradient], own, due, f"the gradient of {p.name!r}"
                )

    def _judged(
        self, node: fx.Node, own: fx.Node, due: Sequence[TimePlacement], what: str
    ) -> Iterator[str]:
        """Compare what is returned of a microbatch with `own`, which is returned of the batch."""
        found = self.placed[self.part.ref(node)]
        if self._name(1, self.part.ref(node)) != self._name(0, self.whole.ref(own)):
            raise self._error(
                node,
                f"{what} of a microbatch is another node's value than in the graph of the batch",
            )
        if found in due or found.kind == "zero":
            return
        at = self.part.by_key.get(found.origin, node)
        if self.promised:
            yield f"{what} over microbatches follows from the promise that samples are independent, and from no rule, at {at.meta['key']}"
            return
        if found.kind == "open":
            raise self._error(
                at,
                f"nothing shows that {what} adds up over {self.how.num} microbatches: this op is not known well enough",
            )
        seen = (
            "what it makes of a microbatch is no part, no term and no copy of the batch's"
            if found.kind == "wrong"
            else f"it is {found}"
        )
        raise self._error(
            at,
            f"{what} does not add up over {self.how.num} microbatches: {seen}, where {due[0]} is due",
        )

    def _error(self, node: fx.Node, what: str) -> ValidationError:
        return ValidationError(
            f"{node.meta.get('key', node.name)}: {what}", where=where_of(node), remedy=_REMEDY
        )


def _origins(traced: Traced) -> dict[str, str]:
    """By name of each node, what it is called in the graphs of the batch and of a microbatch alike.

    What a microbatch is given of the batch has the key of the node for which it stands; a product
    with the number of microbatches, the key of its operand.
    """
    trace, found = traced.trace, dict[str, str]()
    found |= {p.node: f"tensor {p.name}" for p in (*trace.parameters, *trace.buffers)}
    found |= {
        i.node: i.path.removesuffix(OF_BATCH) if i.given else f"input {i.path}"
        for i in trace.inputs
    }
    found |= {o.tangent: f"tangent {o.path}" for o in trace.differentiable}
    for node in trace.graph.nodes:
        if node.op == "call_function":
            key = str(node.meta["key"])
            is_product = key.endswith(_TIMES) and node.target is _MULTIPLY
            found[node.name] = found[node.args[0].name] if is_product else key
    return found
