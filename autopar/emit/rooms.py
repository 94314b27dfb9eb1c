"""Room for early steps: how many bytes they may hold, by place in a phase.

A place is that of a node of the spine (`autopar.emit.overlap`), counted from 0; placeholders are at the first node's.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.plans import Piece


@dataclass(frozen=True, slots=True)
class Room:
    """Of one phase.

    Attributes:
        most_bytes: everywhere. pieces: from a place on, so many bytes, where that is less; sorted by place.
    """

    most_bytes: int
    pieces: tuple[Piece, ...] = ()

    def at(self, place: int) -> int:
        """Bytes at a place."""
        return self.least(place, place)

    def least(self, first: int, last: int) -> int:
        """Bytes at each of these places."""
        begin = max(bisect_right(self.pieces, first, key=lambda piece: piece[0]) - 1, 0)
        pieces = itertools.takewhile(lambda piece: piece[0] <= last, self.pieces[begin:])
        return min([self.most_bytes, *(size for _, size in pieces)])


def follows(node: fx.Node) -> bool:
    """Whether it belongs to steps that have slack alone, which may run elsewhere; all other nodes are the spine."""
    return node.op == "call_function" and node.meta.get("slack", "critical") != "critical"


def places(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """The nodes of the spine, in order, each with its place."""
    place = -1
    for node in graph.nodes:
        if not follows(node):
            place += node.op != "placeholder"
            yield node, max(place, 0)
