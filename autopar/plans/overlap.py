"""How far an emitted step's communication runs beside its compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Piece = tuple[int, int]
"""From the so-many-th node on, so many bytes."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far communication that has slack runs beside compute (`autopar.emit.overlap`).

    Attributes:
        slowdown: what a hidden second costs compute, from the hardware profile; with 1 nothing is started early.
        forward_bytes, backward_bytes: the most that started steps, and what they wait for, may hold at once in each phase.
        forward_room, backward_room: what they may hold at most from a place in the phase on, where that is less than elsewhere because
            the step holds so much there itself. Places count nodes other than such steps' (`autopar.emit.rooms`).
    """

    slowdown: float = 1.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_room: tuple[Piece, ...] = ()
    backward_room: tuple[Piece, ...] = ()

    def misfit(self) -> str:
        """What is wrong with it, ``""`` where nothing is."""
        if not 0.0 <= self.slowdown <= 1.0 or min(self.forward_bytes, self.backward_bytes) < 0:
            return f"its overlap is {self}"
        for pieces in (self.forward_room, self.backward_room):
            since = [place for place, _ in pieces]
            if since != sorted(set(since)) or min((n for piece in pieces for n in piece), default=0) < 0:
                return f"its room for early steps is {pieces}"
        return ""


def read_overlap(data: Mapping[str, Any]) -> Overlap:
    """From JSON."""
    pieces = {name: tuple(map(tuple, data[name])) for name in ("forward_room", "backward_room") if name in data}
    return Overlap(**{**data, **pieces})
