"""What certainly lives at a point of the step, under every plan: the rows of the bound that speak of memory.

    start of backward   what rests, and everything kept, of every microbatch in flight
    end of backward     what rests, and every gradient, or the sums that they were added to
    while a node of backward runs: what rests, what its op makes there, and what is kept and nothing has asked for yet

What forward made is asked for by its readers in backward; by a view of it in forward when that is; and by an op that may run
again when its own results are, since it then reads its operands. With several microbatches the others in flight are held in full at
every point, and so are the sums of gradients; a gradient itself goes when it is added.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.analysis.work import is_view
from autopar.capture.trace import Trace
from autopar.certificate.bound import MemoryRow
from autopar.certificate.decisions import keys_of
from autopar.certificate.facts import Facts
from autopar.certificate.shards import held_bytes
from autopar.cost.priced import Priced


@dataclass
class Moments:
    """The rows of one priced model."""

    trace: Trace
    facts: Facts
    priced: Priced
    mesh_shape: tuple[int, ...]
    _position: dict[str, int] = field(default_factory=dict)
    _asked: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.priced.problem
        self._position = {node.name: place for place, node in enumerate(self.trace.graph.nodes)}
        self._owner = {key: n for n in range(len(problem.ops)) for keys in keys_of(self.priced, n) for key in keys}
        for node in reversed(self.trace.graph.nodes):
            self._asked[node.name] = self._first_asked(node)

    def _first_asked(self, node: fx.Node) -> float:
        """Position of the first node of backward that could ask for what forward made; infinite where there is none."""
        found = [math.inf]
        for user in node.users:
            if user.op != "call_function":
                continue
            again = self.priced.problem.ops[self._owner[user.meta["key"]]].recomputable
            if user.meta["phase"] == "backward":
                found.append(self._position[user.name])
            elif again or _shares_memory(user):
                found.append(self._asked[user.name])
        return min(found)

    def row(self, place: str, worth_s: float) -> MemoryRow | None:
        """The row of a point of the step, or None where there is no such point."""
        problem = self.priced.problem
        gradients = {n: [op.count * s.gradient_bytes for s in op.strategies] for n, op in enumerate(problem.ops)}
        sums = gradients if problem.accumulates else {}
        if place == "start of backward":
            return MemoryRow({v: variant.count * problem.num_in_flight for v, variant in enumerate(problem.variants)}, sums, worth_s)
        if place == "end of backward":
            return MemoryRow({}, gradients, worth_s)
        node = self.facts.nodes.get(place)
        if node is None or node.meta["phase"] != "backward":
            return None
        row = self._while(node, worth_s)
        others = problem.num_in_flight - 1
        held = {v: row.held.get(v, 0) + others * variant.count for v, variant in enumerate(problem.variants)} if others else row.held
        return MemoryRow(held, _both(row.live, sums), worth_s)

    def _while(self, node: fx.Node, worth_s: float) -> MemoryRow:
        problem, now = self.priced.problem, self._position[node.name]
        held: dict[int, int] = {}
        live: dict[int, list[int]] = {}
        for v, (variant, refs) in enumerate(zip(problem.variants, self.priced.refs, strict=True)):
            value = problem.values[variant.value]
            if value.phase == "forward":
                waiting = sum(now <= self._asked[name] < math.inf for name, _ in refs)
                held |= {v: waiting} if waiting else {}
            elif not _shares_memory(node):
                for name, result in refs:
                    if name == node.name:
                        tensor = self.facts.tensors[node.meta["key"], result]
                        strategies = problem.ops[value.op].strategies
                        layouts = [s.layouts.outputs[value.result] for s in strategies]
                        sizes = [held_bytes(tensor.shape, tensor.dtype, at, self.mesh_shape) for at in layouts]
                        live[value.op] = [a + b for a, b in zip(live.get(value.op, [0] * len(sizes)), sizes, strict=True)]
        return MemoryRow(held, live, worth_s)


def _both(a: Mapping[int, Sequence[int]], b: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
    """Bytes per strategy of either."""
    both = {n: [x + y for x, y in zip(a[n], b[n], strict=True)] for n in a.keys() & b.keys()}
    return {**a, **b, **both}


def _shares_memory(node: fx.Node) -> bool:
    """Whether what a node makes lies in the memory of its operand."""
    return node.target is not operator.getitem and is_view(node.target)  # type: ignore[arg-type]
