"""Context parallelism on one mesh axis: the sequence is split, and whatever reads all of it, attention, gets the other tensors whole.

The walk is that of data parallelism (`autopar.strategies.spreading`), along the sequence instead of the batch. Where an op reads no
option's operands as they lie, the smallest of the split ones are gathered such that the op still makes split what it makes, and the
gradient of what was gathered is scattered as that lay.

Sequence parallelism (`autopar.strategies.sequence`) walks in the same way, and goes on where an op cannot compute on a part of the sequence
at all, such as a view that joins it with the batch: that op reads all whole, and so do those behind it up to one that can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.layout import REPLICATE
from autopar.rules import AxisOption
from autopar.strategies.clusters import Ref, offered_options
from autopar.strategies.labels import Row, Spread
from autopar.strategies.reading import Read
from autopar.strategies.spreading import Policy, Walk


def along_sequence(graph: Read, *, gathers: bool = False) -> Spread | None:
    """How tensors lie when the sequence, dim 1 of the inputs, is split; None where no input has one. `gathers`: what cannot compute on a
    part of it reads all whole, else it is the failure."""
    inputs = [i for i in graph.trace.inputs if len(i.shape) > 1 and i.shape[1] > 1]
    lengths = [i.shape[1] for i in inputs]
    if not lengths:
        return None
    length = max(lengths, key=lambda n: (lengths.count(n), n))
    policy = Policy({i.node: Shard(1) for i in inputs if i.shape[1] == length}, slices=True)
    return ContextWalk(graph, policy, gathers=gathers).run()


def read_otherwise(graph: Read, rows: Mapping[str, Row]) -> set[str]:
    """The nodes that read an operand otherwise than it is made, or otherwise than a node before them reads it."""
    found = _apart_on_free(graph, rows)
    for name, row in rows.items():
        made = ((label, rows[ref[0]].outputs[ref[1]]) for ref, label in zip(graph.reads[name], row.inputs, strict=True) if ref[0] in rows)
        if any(None not in (label, other) and label != other for label, other in made):
            found.add(name)
    return found


def _apart_on_free(graph: Read, rows: Mapping[str, Row]) -> set[str]:
    """The nodes that can read a free tensor, such as a range of labels, in no way in which it can be made and those before them can."""
    found: set[str] = set()
    read = _made_free(graph, rows)
    for name, row in rows.items():
        free = [(i, ref) for i, ref in enumerate(graph.reads[name]) if row.inputs[i] is None]
        options = [o for o in offered_options(graph.calls[name]) if row.admits(o.inputs, o.outputs)] if free else []
        for i, ref in free:
            asked = {o.inputs[i] for o in options}
            together = read.get(ref, asked) & asked
            if together:
                read[ref] = together
            else:
                found.add(name)
    return found


def _made_free(graph: Read, rows: Mapping[str, Row]) -> dict[Ref, set[Placement]]:
    """In which ways the tensors that no row speaks of can be made of operands as those are made."""
    made: dict[Ref, set[Placement]] = {}
    for name, call in graph.calls.items():
        if name in rows:
            continue
        given = [made.get(ref) for ref in graph.reads[name]]
        options = offered_options(call)
        as_made = [o for o in options if all(ways is None or p in ways for p, ways in zip(o.inputs, given, strict=True))]
        for i in range(len(call.outputs)):
            made[name, i] = {o.outputs[i] for o in as_made or options}
    return made


class ContextWalk(Walk):
    def __init__(self, graph: Read, policy: Policy, *, gathers: bool) -> None:
        super().__init__(graph, policy)
        self.gathers = gathers

    def run(self) -> Spread:
        found = super().run()
        found.apart |= read_otherwise(self.graph, found.rows)
        return found

    def _choose(self, node: fx.Node) -> AxisOption | None:
        option = super()._choose(node)
        if option is not None or node.name not in self.graph.on_parameters:
            return option
        options = self._options(node)
        found = [o for o in options if any(isinstance(p, Shard) for p in o.outputs) and self._stays(node, o)]
        if not found and self.gathers:
            found = [o for o in options if all(p == REPLICATE for p in (*o.inputs, *o.outputs))]
            self.found.gathering.add(node.name)
        if not found:
            return None
        best = min(found, key=lambda o: self._gathered_elements(node, o))
        self.found.apart.add(node.name)
        return best

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        gathered = {self._shape(ref): self.labels[ref] for ref in self._gathered(node, option)}
        super()._take(node, option)
        for i, placement in enumerate(option.outputs):
            if isinstance(placement, Partial) and (like := gathered.get(self._shape((node.name, i)))) is not None:
                self.labels[node.name, i] = like
                self.found.apart.update(user.name for user in node.users)  # it is scattered before anything reads it

    def _stays(self, node: fx.Node, option: AxisOption) -> bool:
        """Whether operands are read as they lie, whole, or as their part of what is whole."""
        pairs = zip(self.graph.reads[node.name], option.inputs, strict=True)
        return not any(
            isinstance(p, Partial) or (isinstance(p, Shard) and isinstance(label := self._state(ref), Shard) and label != p)
            for ref, p in pairs
        )

    def _gathered(self, node: fx.Node, option: AxisOption) -> list[Ref]:
        """Split activations that the option reads whole."""
        pairs = zip(self.graph.reads[node.name], option.inputs, strict=True)
        split = [ref for ref, p in pairs if p == REPLICATE and isinstance(self._state(ref), Shard)]
        return [ref for ref in split if self._is_activation(ref[0])]

    def _gathered_elements(self, node: fx.Node, option: AxisOption) -> tuple[int, int]:
        gathered = self._gathered(node, option)
        return sum(math.prod(self._shape(ref)) for ref in gathered), len(gathered)

    def _shape(self, ref: Ref) -> tuple[int, ...]:
        """() of a result that is None."""
        value = self.graph.trace.node(ref[0]).meta["val"]
        value = value[ref[1]] if isinstance(value, tuple | list) else value
        return () if value is None else tuple(value.shape)
