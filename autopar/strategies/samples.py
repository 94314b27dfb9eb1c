"""Data parallelism on one mesh axis: the batch is split, and what couples samples gets the samples of others.

The walk is that of `autopar.strategies.spreading`, along the batch. An op that cannot compute on a part of the batch (a contrastive loss, a
row that a whole batch adds up to) has gathered as little of what it reads as lets it still make its own part, all of it where it can make
none. What it then makes whole, of the shape of what was gathered, its readers take their part of.
"""

from __future__ import annotations

import re

from torch import fx
from torch.distributed.tensor import Shard

from autopar.constraints import Parallelism
from autopar.layout import REPLICATE
from autopar.rules import AxisOption
from autopar.strategies.context import ContextWalk, read_otherwise
from autopar.strategies.reading import Read
from autopar.strategies.spreading import Policy, Spread, Walk


class SampleWalk(ContextWalk):
    def __init__(self, graph: Read, policy: Policy) -> None:
        super().__init__(graph, policy, gathers=True)

    def run(self) -> Spread:
        found = super().run()
        found.apart |= read_otherwise(self.graph, found.rows)
        return found

    def _choose(self, node: fx.Node) -> AxisOption | None:
        option = Walk._choose(self, node)
        if option is not None or node.name not in self.graph.on_parameters:
            return option
        option = super()._choose(node)
        self.found.gathering.add(node.name)
        return option

    def _take(self, node: fx.Node, option: AxisOption) -> None:
        lay = {self._shape(ref): self.labels[ref] for ref in self._gathered(node, option)}
        super()._take(node, option)
        if any(isinstance(placement, Shard) for placement in option.outputs):
            return
        for i, placement in enumerate(option.outputs):
            if placement == REPLICATE and (like := lay.get(self._shape((node.name, i)))) is not None:
                self.labels[node.name, i] = like
                self.found.apart.update(user.name for user in node.users)  # they take their part before they read it


def notes_on(plan: Parallelism, graph: Read, found: Spread) -> tuple[str, ...]:
    """What a plan of data parallelism does that its name does not say: the ops, with ``*`` for layers, that read samples of others."""
    if plan.sequence or not found.gathering:
        return ()
    nodes = (node for name, node in graph.nodes.items() if name in found.gathering)
    names = dict.fromkeys(re.sub(r"\{\d+\}", "*", graph.pattern(node)).rsplit("/", 2)[0] for node in nodes)
    return (f"{plan} gathers samples for what cannot compute on a part of the batch: {', '.join(names)}",)
