"""The call that each kind of collective is emitted as, and what a step says that it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.collective import Collective
from autopar.halo import Halo
from autopar.kernels import collectives as steps
from autopar.layout import Layout


@dataclass(frozen=True, slots=True)
class Moved:
    """What the node of a communication of the plan moves.

    Attributes:
        node, result: the tensor. shape: global. source, target: its layouts before and after.
    """

    phase: str
    node: str
    result: int
    shape: tuple[int, ...]
    source: Layout
    target: Layout

    @property
    def name(self) -> tuple[str, str, int, Layout]:
        """Of all communications of a plan it is the only one of this name."""
        return self.phase, self.node, self.result, self.target


def _halo_arguments(c: Collective, target: Layout) -> tuple[Any, ...]:
    halo = target.placements[c.axis]
    assert isinstance(halo, Halo), "only a halo step leads to a halo"
    return c.dim, halo.before, halo.after, halo.lowest, c.axis


CALLS: dict[str, Callable[[Collective, Layout], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "all_gather": lambda c, _: (steps.all_gather, (c.dim, c.axis)),
    "all_reduce": lambda c, _: (steps.all_reduce, (c.reduce_op, c.axis)),
    "reduce_scatter": lambda c, _: (steps.reduce_scatter, (c.dim, c.reduce_op, c.axis)),
    "all_to_all": lambda c, _: (steps.all_to_all, (c.dim, c.to_dim, c.axis)),
    "swap": lambda c, _: (steps.swap, (c.dim, c.axis)),
    "halo": lambda c, target: (steps.halo, _halo_arguments(c, target)),
    "slice": lambda c, _: (steps.shard, (c.dim, c.axis)),
    "fetch": lambda c, _: (steps.fetch, ()),
    "store": lambda c, _: (steps.store, ()),
}
