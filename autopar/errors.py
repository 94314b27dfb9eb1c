"""The errors that autopar raises on purpose. All are subclasses of `AutoparError`.

A message has three parts: what happened; where (the op, its module path, and the line of the user's
code, as far as they are known); and what the user can do about it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, except tabs and line ends, and characters that change how a terminal shows
the text around them."""


def printable(text: str) -> str:
    """Return the text with its control characters escaped as in Python. An error may quote a file
    from an unknown source."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the user's model. Parts that are not known are empty.

    Attributes:
        op: the operator as torch prints it, for example ``aten.mm.default``.
        module: the path of the module that calls it, for example ``model.layers.0.mlp.up_proj``.
        source: the line of the user's code, ``file.py:12: code``.
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
    """Return a number of bytes in the largest binary unit in which it is at least one."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


class AutoparError(Exception):
    """Base class of all errors that autopar raises on purpose.

    Args:
        what: what happened.
        where: the place in the user's model or file.
        remedy: what the user can do.
    """

    def __init__(self, what: str, *, where: Where | str | None = None, remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        lines = [what]
        if where is not None and str(where):
            lines.append(f"  where: {where}")
        if remedy:
            lines.append(f"  what to do: {remedy}")
        super().__init__(printable("\n".join(lines)))


class ArgumentError(AutoparError, TypeError):
    """A call of one of autopar's functions has an unknown argument, or lacks a required one."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph."""


class CallError(CaptureError):
    """The model's own forward raises an error for these arguments or shapes."""


class LayoutError(AutoparError):
    """A layout is malformed, or not legal for its tensor."""


class MeshError(AutoparError):
    """A mesh is malformed, or does not fit the processes that were started."""


class HardwareError(AutoparError):
    """A hardware profile is missing, malformed, or lacks a figure."""


class RuleError(AutoparError):
    """An op's rule is malformed or contradicts what the op computes."""


class ConstraintError(AutoparError):
    """The user's constraints cannot be satisfied."""


class CoupledError(ConstraintError):
    """The batch cannot be divided into microbatches, because samples depend on each other."""


class InfeasibleError(AutoparError):
    """No plan fits into the memory.

    Attributes:
        needed_bytes: bytes per device with which a plan exists; 0 if unknown.
    """

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
    """A plan file is malformed, has another version, or belongs to another model, mesh or hardware
    profile."""


class EmissionError(AutoparError):
    """A plan cannot be turned into a program."""


class ChangedPlanError(PlanError, EmissionError):
    """A plan contradicts itself or the model."""

    def __init__(self, what: str, *, where: Where | str | None = None) -> None:
        super().__init__(
            what,
            where=where,
            remedy=(
                "plan again; the file was changed by hand, or belongs to another model or version"
            ),
        )


class ValidationError(AutoparError):
    """A value of an emitted graph differs from the traced model, or cannot be shown to follow from
    it."""


class VerificationError(AutoparError):
    """A distributed program does not compute what the plain model computes."""


class RuntimeStateError(AutoparError):
    """A compiled module, an optimizer or a checkpoint was used in an order that is not
    supported."""


class RankError(RuntimeStateError):
    """Ranks execute different operations, or a rank has ended.

    Attributes:
        ranks: the ranks that differ; empty if unknown.
    """

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
    """A native kernel cannot be compiled or loaded, or does not support its arguments."""
