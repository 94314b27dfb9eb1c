"""Expert parallelism on one mesh axis: tokens are split with the batch, experts over the same devices, which each compute only with theirs.

The walk is that of data parallelism (`autopar.strategies.spreading`), but for experts (`autopar.ops.experts`) and their gradients. These
read their tokens, picks and gates whole, which are gathered, and weights split by experts; what they make of tokens are partial sums,
which are scattered as the tokens lie.
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
from autopar.strategies.reading import Read
from autopar.strategies.spreading import Policy, Spread, Walk

BY_EXPERTS = Shard(0)
_WEIGHTS = {ops.experts: 3, ops.experts_backward: 4}  # the operand that is up's weight; down's is next, tokens are three before


def by_experts(graph: Read, plan: Parallelism, policy: Policy, sizes: Sequence[int]) -> Spread:
    """How tensors lie where the batch and the experts are split over axes of these sizes.

    Raises:
        ConstraintError: where the model has no experts that are one op, or their number does not divide.
    """
    nodes = [node for node in graph.nodes.values() if node.target in _WEIGHTS]
    if not nodes:
        what = f"{plan}: the model has no experts to split; they would be those of transformers' experts modules without biases"
        raise ConstraintError(what, remedy="leave the constraint out for this model")
    for node in nodes:
        num = graph.calls[node.name].inputs[_WEIGHTS[node.target]].shape[0]
        if num % math.prod(sizes):
            what = f"{plan} cannot hold: {node.meta['key']} refuses, its {num} experts are no multiple of {math.prod(sizes)} devices"
            raise ConstraintError(what, where=where_of(node), remedy="name axes whose sizes divide the number of experts")
    found = _ExpertWalk(graph, policy).run()
    left = [ref for node in nodes for ref in graph.reads[node.name][_WEIGHTS[node.target] :][:2]]
    while left:
        ref = left.pop()
        found.weights.add(ref[0])
        left += [read for read in graph.reads.get(ref[0], ()) if graph.is_weight(read[0])]
    return found


class _ExpertWalk(Walk):
    def _choose(self, node: fx.Node) -> AxisOption | None:
        if node.target not in _WEIGHTS:
            return super()._choose(node)
        up = _WEIGHTS[node.target]
        return next((o for o in self._options(node) if o.inputs[up] == o.inputs[up + 1] == BY_EXPERTS), None)

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        tokens = self.labels.get(self.graph.reads[node.name][_WEIGHTS[node.target] - 3], REPLICATE) if node.target in _WEIGHTS else None
        super()._take(node, option)
        if tokens is None:
            return
        self.found.apart.add(node.name)
        for i, placement in enumerate(option.outputs):
            if isinstance(placement, Partial):
                self.labels[node.name, i] = tokens
        self.found.apart.update(user.name for user in node.users)  # partial sums are scattered before anything reads them
