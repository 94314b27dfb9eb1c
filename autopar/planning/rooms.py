"""What early steps may hold where: the budget, less what the step holds there itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from torch import fx

from autopar.emit import places
from autopar.plans import Piece
from autopar.run.memory import NodePeak

_WINDOWS = 64  # of a phase, each with one room: its least
_LEVEL = 0.9  # rooms are rounded down to powers of this share of the largest, so that a plan says them in few pieces


def rooms_left(graphs: Mapping[str, fx.Graph], peaks: Iterable[NodePeak], beside: int, budget: int) -> dict[str, tuple[Piece, ...]]:
    """By phase.

    Args:
        graphs: by phase, with no step started early. peaks: bytes while each of their nodes runs. beside: bytes that are there as well.
        budget: bytes.
    """
    seen = {(peak.phase, peak.node): peak.peak_bytes for peak in peaks}
    found = {}
    for phase, graph in graphs.items():
        spine = [node for node, _ in places(graph) if node.op != "placeholder"]
        found[phase] = _pieces([seen[phase, node] + beside for node in spine], budget)
    return found


def _pieces(held: list[int], budget: int) -> tuple[Piece, ...]:
    """Of what is held at each place."""
    width = -(-len(held) // _WINDOWS)
    left = [max(budget - max(held[at : at + width]), 0) for at in range(0, len(held), width)]
    levels = [int(max(left) * _LEVEL**n) for n in range(_WINDOWS)]
    rounded = [next((level for level in levels if level <= size), 0) for size in left]
    return tuple((next(run)[0] * width, size) for size, run in groupby(enumerate(rounded), key=lambda each: each[1]))
