"""What happened, where, and what to do.

Every error autopar raises on purpose is an `AutoparError`. It names three things: what happened,
where (the op, its module path and the user's own source line, as far as they are known) and what
the user can do about it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""A character that is none, or that changes what a terminal shows beside it; tabs and ends of
lines are not."""


def printable(text: str) -> str:
    """The text with its control characters as Python writes them: an error may quote a file that
    anyone wrote."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the user's model.

    Attributes:
        op: the operator as torch prints it, for example ``aten.mm.default``.
        module: the path of the module that ran it, for example ``model.layers.0.mlp.up_proj``.
        source: the user's own line, ``file.py:12: code``.
    """

    op: str = ""
    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        parts = [
            f"op {self.op}" if self.op else "",
            f"in module {self.module}" if self.module else "",
        ]
        place = " ".join(part for part in parts if part)
        return "\n    ".join(
            part for part in (place, f"at {self.source}" if self.source else "") if part
        )


def size_text(num_bytes: float) -> str:
    """Bytes for people: the largest binary unit that leaves at least one whole."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


class AutoparError(Exception):
    """Base of all errors raised on purpose: `what` happened, `where`, and what to do (`remedy`)."""

    def __init__(self, what: str, *, where: Where | str | None = None, remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        lines = [what]
        if where is not None and str(where):
            lines.append(f"  where: {where}")
        if remedy:
            lines.append(f"  what to do: {remedy}")
        super().__init__(printable("\n".join(lines)))


class ArgumentError(AutoparError, TypeError):
    """A call of autopar's own names an argument that it does not take, or leaves out one that it
    needs."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph."""


class CallError(CaptureError):
    """The model itself does not take the call: arguments, or shapes, that its forward refuses."""


class LayoutError(AutoparError):
    """A layout is malformed, or illegal for the tensor it is asked of."""


class MeshError(AutoparError):
    """A mesh is malformed, or does not fit the processes that are there."""


class HardwareError(AutoparError):
    """A hardware profile is missing, malformed, or lacks a figure."""


class RuleError(AutoparError):
    """An op's rule is malformed or contradicts what the op computes."""


class ConstraintError(AutoparError):
    """What the user forces cannot hold."""


class CoupledError(ConstraintError):
    """The batch cannot be cut: samples of the model depend on each other."""


class InfeasibleError(AutoparError):
    """No plan fits; the message says what would: `needed_bytes` per device, 0 where that is not
    known."""

    def __init__(
        self,
        what: str,
        *,
        where: Where | str | None = None,
        remedy: str = "",
        needed_bytes: int = 0,
    ) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.needed_bytes = needed_bytes


class PlanError(AutoparError):
    """A plan file is malformed, of another version, or made for another model, mesh or profile."""


class EmissionError(AutoparError):
    """A plan cannot be turned into a program."""


class ChangedPlanError(PlanError, EmissionError):
    """A plan says what no plan can say, or what does not go with the model."""

    def __init__(self, what: str, *, where: Where | str | None = None) -> None:
        super().__init__(
            what,
            where=where,
            remedy=(
                "plan again; the file was changed by hand, or belongs to another model or version"
            ),
        )


class ValidationError(AutoparError):
    """An emitted graph holds a value that does not follow from the traced model, or nothing
    shows that it does."""


class VerificationError(AutoparError):
    """A distributed program computes something else than the plain model."""


class RuntimeStateError(AutoparError):
    """A distributed module was used in an order that it cannot serve."""


class RankError(RuntimeStateError):
    """Ranks do different things, or one of them has ended: `ranks` are those that differ, empty
    if it is not known which do."""

    def __init__(
        self,
        what: str,
        *,
        where: Where | str | None = None,
        remedy: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.ranks = tuple(ranks)


class KernelError(AutoparError):
    """A native kernel cannot be compiled or loaded, or refuses what it is given."""
