"""The placements of tensors on the axis in time, as `autopar.validation.time_placements` finds
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["split", "whole", "term", "place", "zero", "wrong", "open"]


@dataclass(frozen=True, slots=True)
class TimePlacement:
    """What a microbatch's tensor is of the batch's (see `autopar.validation.time_placements`).

    Attributes:
        origin: key of the node from which a ``wrong`` or an ``open`` one follows.
    """

    kind: Kind
    dim: int = -1
    power: int = 0
    origin: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it is one of the four."""
        return self.kind not in ("wrong", "open")

    def __str__(self) -> str:
        times = f" · M^{self.power}" if self.power else ""
        return f"{self.kind}{f'({self.dim})' if self.dim >= 0 else ''}{times}"


WHOLE, TERM = TimePlacement("whole"), TimePlacement("term")


def split_dim(whole: Sequence[int], part: Sequence[int], num: int) -> int:
    """The one dim along which a shape is `num` times shorter, else −1."""
    differs = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    cut = (
        len(whole) == len(part)
        and len(differs) == 1
        and whole[differs[0]] == num * part[differs[0]]
    )
    return differs[0] if cut else -1
