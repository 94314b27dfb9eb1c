"""States: the relation of a node of an emitted graph to the traced model.

The *state* of a local tensor names a traced value, and the layout and dtype in which the tensor is
a part of it. A node that holds something other than one tensor (a bucket, a started collective, a
rank's first index) has one of the other classes as its state. `Validation` is the result of a
validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.core.layout import Layout
from autopar.errors import ValidationError, Where
from autopar.rules import where_of

Ref = tuple[str, int]
"""A traced value: the name of the node that computes it, and its number among the node's
results."""


@dataclass(frozen=True, slots=True)
class State:
    """A local tensor: the part of `ref` in `layout`, with dtype `dtype`."""

    ref: Ref
    layout: Layout
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Several:
    """The results of a node with several results; None for an omitted result."""

    parts: tuple[State | None, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum over microbatches of a parameter's gradients.

    Attributes:
        is_added: whether this microbatch's gradient was added.
    """

    parameter: str
    ref: Ref
    layout: Layout
    dtype: torch.dtype
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class InFlight:
    """A collective between its start and its finish.

    Attributes:
        result: state of its result.
        settings: settings of the collective.
    """

    result: Any
    settings: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PackedState:
    """A bucket.

    Attributes:
        members: states of its tensors.
        dims: for each tensor, the dim along which its parts are split.
        parts: number of equal parts of each tensor.
        count: number of these parts that the bucket holds.
        dtype: dtype of the bucket.
    """

    members: tuple[State, ...]
    dims: tuple[int, ...]
    parts: int
    count: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Place:
    """An index that depends on the rank.

    Attributes:
        kind: ``start`` for the first index of the rank's part of a dim, less `before`; ``length``
            for the length of the part.
        size: size of the dim.
        splitters: (axis, axis size) of the axes that split the dim.
        before: number that is subtracted from the first index.
    """

    kind: str
    size: int
    splitters: tuple[tuple[int, int], ...]
    before: int = 0


def invalid(what: str, where: Where | None = None) -> ValidationError:
    """Return the error for a program that does not follow from its plan.

    The cause is a fault of emission or a change of the program.
    """
    remedy = (
        "if the program was changed by hand, validate it as `emit` creates it from the plan; "
        "otherwise report the model and the plan"
    )
    return ValidationError(what, where=where, remedy=remedy)


def unjustified_error(node: fx.Node, phase: str, why: str) -> ValidationError:
    """Return the error for a node whose value does not follow from the trace.

    Args:
        node: a node of the emitted graph.
        phase: name of the graph.
        why: the reason.
    """
    name = str(node.meta.get("key") or node.name)
    return invalid(f"{name} in the {phase} graph is not justified: {why}", where_of(node))


def shown(state: object) -> str:
    """Return a state as text."""
    if isinstance(state, State):
        name, result = state.ref
        return (
            f"{name}{f' result {result}' if result else ''} as {state.layout} in"
            f" {str(state.dtype).removeprefix('torch.')}"
        )
    if isinstance(state, Sum):
        added = "with" if state.is_added else "without"
        return (
            f"the sum of {state.parameter!r} in {state.layout}, {added} this microbatch's gradient"
        )
    return type(state).__name__ if state is not None else "nothing"


Env = Mapping[fx.Node, Any]


# --------------------------------------------------------------------------------------------------
# The result of a validation.

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Validation:
    """The result for a program in which every value was justified.

    Attributes:
        how: number of nodes by kind of justification: ``proven`` by numbers or by counting,
            ``open`` by the op's rule alone, ``step`` and ``cast`` by the rule of the communication
            step or cast.
        open: keys of the nodes that only the op's own rule justifies.
        unproven: parts of the program that were not checked, as text.
    """

    how: Counter[str] = field(default_factory=Counter)
    open: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """The number of justified nodes in all graphs."""
        return sum(self.how.values())

    def join(self, other: Validation) -> Validation:
        """Return the union of both results."""
        return Validation(
            self.how + other.how,
            tuple(dict.fromkeys((*self.open, *other.open))),
            tuple(dict.fromkeys((*self.unproven, *other.unproven))),
        )

    def __str__(self) -> str:
        lines = [
            f"{self.num_nodes} nodes justified, {self.how['open']} of them by their op's rule alone"
        ]
        if self.open:
            more = f" and {len(self.open) - _SHOWN} more" if len(self.open) > _SHOWN else ""
            lines.append(f"by rule alone: {', '.join(self.open[:_SHOWN])}{more}")
        return "\n".join((*lines, *(f"not justified: {each}" for each in self.unproven)))
