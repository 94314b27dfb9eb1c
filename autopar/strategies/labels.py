"""How tensors lie on one mesh axis under a named plan.

Terms. A *label* says how a tensor lies on the axis: split (`Shard`) or *whole* (`Replicate`). A partial sum counts as whole: where it
is summed is the planner's. A *row* is what is forced on a node: the labels of its operands and results, None where it is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.constraints import Parallelism
from autopar.errors import ConstraintError
from autopar.layout import REPLICATE
from autopar.mirrored import Mirrored
from autopar.strategies.clusters import Ref


@dataclass(frozen=True, slots=True)
class Row:
    """Labels of a node's operands and results; None is free."""

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]

    def admits(self, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> bool:
        """Whether placements have these labels."""
        pairs = zip((*self.inputs, *self.outputs), (*inputs, *outputs), strict=True)
        return all(label is None or label_of(placement) == label for label, placement in pairs)


def label_of(placement: Placement) -> Placement:
    """The label of a placement: mirrored parts are parts, too."""
    if isinstance(placement, Partial):
        return REPLICATE
    return Shard(placement.dim) if isinstance(placement, Mirrored) else placement


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that reads no split tensor as it lies, and the sources of those it cannot."""

    node: str
    sources: frozenset[str]


@dataclass(slots=True)
class Spread:
    """How all tensors lie on the axis.

    Attributes:
        rows: per node that is forced. labels: per tensor that is not free.
        sources: per split tensor. contracted, scored: sources of what ended in a product, in a cross entropy.
        apart: nodes that read an operand otherwise than it is made.
        weights: names of weights that rest as they are read, of what else is data parallelism.
        gathering: nodes that read split tensors whole since they cannot compute on a part; along a sequence those that make nothing split.
        uneven: how the batch is split, in words, where it is unevenly. failure: where the walk stopped, if it did.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    labels: dict[Ref, Placement] = field(default_factory=dict)
    sources: dict[Ref, frozenset[str]] = field(default_factory=dict)
    contracted: set[str] = field(default_factory=set)
    scored: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    gathering: set[str] = field(default_factory=set)
    uneven: str = ""
    failure: Failure | None = None


def nothing_to_split(plan: Parallelism, why: str, wish: str = "the constraint") -> ConstraintError:
    """The error of a model that has nothing that a named plan could split.

    Args:
        wish: what of the plan asks for it.
    """
    return ConstraintError(f"{plan}: {why}", remedy=f"leave {wish} out for this model")
