"""Data parallelism on one mesh axis: the batch is split, and what couples samples gets the samples of others.

The walk is that of `autopar.strategies.spreading`, along the batch. An op that cannot compute on a part of the batch (a contrastive loss, a
row that a whole batch adds up to) has gathered as little of what it reads as lets it still make its own part, all of it where it can make
none. What it then makes whole, of the shape of what was gathered, its readers take their part of.

A batch that the devices do not divide is split unevenly, the last part being shorter. An op in which such parts are none of what it makes
(a view that joins samples with tokens: three of eight samples are not a third of all tokens, rounded up) cannot compute on them either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import fx
from torch.distributed.tensor import Shard

from autopar.constraints import Parallelism
from autopar.errors import ConstraintError
from autopar.layout import REPLICATE, Layout, Strategy
from autopar.rules import AxisOption, Call, cuts_alike
from autopar.strategies.context import ContextWalk
from autopar.strategies.labels import Spread
from autopar.strategies.reading import Read
from autopar.strategies.spreading import Policy, Walk


class SampleWalk(ContextWalk):
    """`batch` samples over axes of these `sizes`."""

    def __init__(self, graph: Read, policy: Policy, batch: int, sizes: Sequence[int]) -> None:
        super().__init__(graph, policy, gathers=True)
        self.sizes, num = tuple(sizes), math.prod(sizes)
        self.found.uneven = f"{batch} samples in {num} parts; of a multiple of {num} fewer may be gathered" if batch % num else ""

    def _options(self, node: fx.Node) -> tuple[AxisOption, ...]:
        options = super()._options(node)
        return options if not self.found.uneven else tuple(o for o in options if self._has_parts(self.graph.calls[node.name], o))

    def _has_parts(self, call: Call, option: AxisOption) -> bool:
        """Whether the uneven parts of the operands and results are there and belong together."""
        inputs, outputs = (tuple(Layout([p] * len(self.sizes)) for p in placements) for placements in (option.inputs, option.outputs))
        pairs = zip((*inputs, *outputs), (*call.inputs, *call.outputs), strict=True)
        fits = all(layout.fits(info.shape, self.sizes) for layout, info in pairs)
        return fits and cuts_alike(call, Strategy(inputs, outputs), self.sizes)

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


def check_batch(plan: Parallelism, batch: int, sizes: Sequence[int]) -> None:
    """Raises:
    ConstraintError: where a batch of so many samples cannot be split over axes of these sizes.
    """
    num = math.prod(sizes)
    if Layout([Shard(0)] * len(sizes)).fits((batch,), sizes):
        return
    length = -(-batch // num)
    without = num - -(-batch // length)
    why = f"parts of {length} leave {without} of them without any" if len(sizes) == 1 else "over several axes parts are even"
    what = f"{plan} cannot hold: a batch of {batch} cannot be split over {num} devices: {why}"
    raise ConstraintError(what, remedy=f"make the batch a multiple of {num}, or name fewer or smaller axes")


def notes_on(plan: Parallelism, graph: Read, found: Spread) -> tuple[str, ...]:
    """What a plan of data parallelism does that its name does not say: the ops, with ``*`` for layers, that read samples of others."""
    if plan.sequence or not found.gathering:
        return ()
    nodes = (node for name, node in graph.nodes.items() if name in found.gathering)
    names = dict.fromkeys(re.sub(r"\{\d+\}", "*", graph.pattern(node)).rsplit("/", 2)[0] for node in nodes)
    uneven = f" ({found.uneven})" if found.uneven else ""
    return (f"{plan} gathers samples for what cannot compute on a part of the batch: {', '.join(names)}{uneven}",)
