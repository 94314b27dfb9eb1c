"""The vocabulary of validation: what a node of an emitted graph holds, in terms of the traced
model.

A *state* says of a local value: it is the part, in this layout and dtype, of that traced value. A
node that holds something else than one tensor (a bucket, a step on its way, a rank's first
index) has one of the other classes as its state.
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
"""A traced value: the name of the node that makes it, and which of its results it is."""


@dataclass(frozen=True, slots=True)
class State:
    """A local tensor: the part of `ref` in `layout`, in `dtype`."""

    ref: Ref
    layout: Layout
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Several:
    """The results of a node that makes several tensors; None where one is left out."""

    parts: tuple[State | None, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """What the gradients of a parameter are added to over microbatches; `is_added` once this
    microbatch's is.
    """

    parameter: str
    ref: Ref
    layout: Layout
    dtype: torch.dtype
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step between its start and its finish: what it will make, and its settings."""

    made: Any
    settings: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A bucket: the states of its members, of which `count` of `parts` equal parts along `dims` lie
    in it, in `dtype`.
    """

    members: tuple[State, ...]
    dims: tuple[int, ...]
    parts: int
    count: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Place:
    """A number of a rank: the first index (``start``), less `before`, or the length of its part of
    a dim.
    """

    kind: str
    size: int
    splitters: tuple[tuple[int, int], ...]
    before: int = 0


def invalid(what: str, where: Where | None = None) -> ValidationError:
    """The error of an emitted program that is not what its plan says: a fault of emission, or of
    whoever changed the program.
    """
    remedy = (
        "if the program was changed by hand, validate it as `emit` makes it of the plan; "
        "if not, report the model and the plan"
    )
    return ValidationError(what, where=where, remedy=remedy)


def unjustified_error(node: fx.Node, phase: str, why: str) -> ValidationError:
    """The error that names a node of an emitted graph and says why its value does not follow."""
    name = str(node.meta.get("key") or node.name)
    return invalid(f"{name} in the {phase} graph is not justified: {why}", where_of(node))


def shown(state: object) -> str:
    """A state in words."""
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
# What validation found.

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Validation:
    """A program whose every value was justified.

    Attributes:
        how: how many nodes were justified in which way: ``proven`` by numbers or by counting,
            ``open`` by the op's rule alone, ``step`` and ``cast`` by the rule of that step.
        open: keys of the nodes of which only the op's own rule says that they are right.
        unproven: parts of the program that nothing here looks at, in words.
    """

    how: Counter[str] = field(default_factory=Counter)
    open: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """How many nodes of all graphs were justified."""
        return sum(self.how.values())

    def join(self, other: Validation) -> Validation:
        """Both together, each name once."""
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
