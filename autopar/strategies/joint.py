"""Options of several nodes together on one mesh axis, with no redistribution between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.tensor.placement_types import Placement

from autopar.rules import AxisOption
from autopar.strategies.storages import Ref

Assignment = dict[Ref, Placement]  # on one axis
Node = tuple[Sequence[Ref], Sequence[Ref], Iterable[AxisOption]]  # what it reads, what it makes, how it may


def joint_options(nodes: Iterable[Node]) -> list[Assignment]:
    """Every consistent choice of one option per node, in topological order, as tensor → placement."""
    found: list[Assignment] = [{}]
    for reads, makes, options in nodes:
        options = tuple(options)
        found = [joined for state in found for option in options if (joined := _joined(state, reads, makes, option)) is not None]
    return found


def _joined(state: Assignment, reads: Sequence[Ref], makes: Sequence[Ref], option: AxisOption) -> Assignment | None:
    """None where the option reads a tensor otherwise than it lies."""
    joined = dict(state)
    if any(joined.setdefault(ref, placement) != placement for ref, placement in zip(reads, option.inputs, strict=True)):
        return None
    joined.update(zip(makes, option.outputs, strict=True))
    return joined
