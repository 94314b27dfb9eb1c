"""Expert parallelism on one mesh axis: tokens are split with the batch, experts over the same devices, which each compute only with theirs.

The walk is that of data parallelism (`autopar.strategies.spreading`), but for experts (`autopar.ops.experts`) and their gradients. These
read weights split by experts. Either their tokens, picks and gates are gathered, and what they make of tokens are partial sums, which are
scattered as the tokens lie; or these are read as they lie, and dispatched (`autopar.rules.dispatch`). Where the plan does not say which,
the node's row leaves it open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx
from torch.distributed.tensor import Partial, Shard

from autopar import ops
from autopar.constraints import Parallelism
from autopar.errors import ConstraintError
from autopar.layout import REPLICATE
from autopar.rules import AxisOption, where_of
from autopar.strategies.labels import Row, Spread, nothing_to_split
from autopar.strategies.reading import Read
from autopar.strategies.samples import SampleWalk
from autopar.strategies.spreading import Policy

BY_EXPERTS = Shard(0)
_WEIGHTS = {ops.experts: 3, ops.experts_backward: 4}  # the operand that is up's weight; down's is next, tokens are three before


def by_experts(graph: Read, plan: Parallelism, policy: Policy, batch: int, sizes: Sequence[int]) -> Spread:
    """How tensors lie where the batch, of so many samples, and the experts are split over axes of these sizes.

    Raises:
        ConstraintError: where the model has no experts that are one op, their number does not divide, or tokens are to be dispatched over
            several axes.
    """
    if plan.tokens == "dispatched" and len(sizes) > 1:
        what = f"{plan} cannot hold: tokens are dispatched along one mesh axis of an op, not {len(sizes)}"
        raise ConstraintError(what, remedy="name one axis, or leave out tokens=: beside the one that dispatches, others gather")
    nodes = [node for node in graph.nodes.values() if node.target in _WEIGHTS]
    if not nodes:
        why = "the model has no experts to split; they would be those of transformers' experts modules without biases"
        raise nothing_to_split(plan, why)
    for node in nodes:
        num = graph.calls[node.name].inputs[_WEIGHTS[node.target]].shape[0]
        if num % math.prod(sizes):
            what = f"{plan} cannot hold: {node.meta['key']} refuses, its {num} experts are no multiple of {math.prod(sizes)} devices"
            raise ConstraintError(what, where=where_of(node), remedy="name axes whose sizes divide the number of experts")
    found = _ExpertWalk(graph, policy, batch, sizes, plan.tokens).run()
    left = [ref for node in nodes for ref in graph.reads[node.name][_WEIGHTS[node.target] :][:2]]
    while left:
        ref = left.pop()
        found.weights.add(ref[0])
        left += [read for read in graph.reads.get(ref[0], ()) if graph.is_weight(read[0])]
    return found


class _ExpertWalk(SampleWalk):
    def __init__(self, graph: Read, policy: Policy, batch: int, sizes: Sequence[int], tokens: str) -> None:
        super().__init__(graph, policy, batch, sizes)
        self.tokens = tokens

    def _choose(self, node: fx.Node) -> AxisOption | None:
        if node.target not in _WEIGHTS:
            return super()._choose(node)
        up = _WEIGHTS[node.target]
        found = [o for o in self._options(node) if o.inputs[up] == o.inputs[up + 1] == BY_EXPERTS]
        wanted = BY_EXPERTS if self.tokens == "dispatched" else REPLICATE
        return next((o for o in found if o.inputs[up - 3] == wanted), None)

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        if node.target not in _WEIGHTS:
            super()._take(node, option)
            return
        up = _WEIGHTS[node.target]
        tokens = self.labels.get(self.graph.reads[node.name][up - 3], REPLICATE)
        super()._take(node, option)
        self.found.apart.add(node.name)
        row, weights = self.found.rows[node.name], [i for i, p in enumerate(option.outputs) if isinstance(p, Shard)]
        if not self.tokens and isinstance(tokens, Shard):
            opened = tuple(p if i in weights else None for i, p in enumerate(row.outputs))
            self.found.rows[node.name] = Row((*(None,) * up, *row.inputs[up:]), opened)
        for i, placement in enumerate(option.outputs):
            if isinstance(placement, Partial):
                self.labels[node.name, i] = tokens
        self.found.apart.update(user.name for user in node.users)  # partial sums are scattered before anything reads them
