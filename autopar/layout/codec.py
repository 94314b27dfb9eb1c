"""Layouts as text.

``"S(0) R"`` is `Shard(0)` on the first axis, `Replicate()` on the second. Where a dim is split by several axes
out of mesh order, each of its splitters carries its rank: ``"S(0)#1 S(0)#0"`` splits dim 0 first by the second axis.
``"S(2)~1~2"`` is a shard with 1 element of the part before it and 2 of the one behind it (`autopar.halo`), ``"S(2)~mirrored"`` one of two
halves from either end of the dim (`autopar.mirrored`). ``"P S(0) uncast"`` is a layout of a cast's result that is not
made: what is cast lies so, and who reads the result reads that. ``"S(0) R host"`` is a part in the memory of the device's host (offload).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import LayoutError
from autopar.halo import Halo
from autopar.layout.placements import REPLICATE, Special, splits
from autopar.mirrored import Mirrored

_UNCAST, _HOST = " uncast", " host"
_TOKEN = re.compile(r"^(?:(R)|P(?:\((\w+)\))?|S\((\d+)\)(?:#(\d+)|~(\d+)~(\d+)(~lowest)?|(~mirrored))?)$")


def write(placements: Sequence[Placement], order: Sequence[int], *, uncast: bool, host: bool) -> str:
    """The text of a layout, arguments as of `Layout`."""
    tokens = [_token(placements, order, axis) for axis in range(len(placements))]
    return " ".join(tokens) + _UNCAST * uncast + _HOST * host


def _token(placements: Sequence[Placement], order: Sequence[int], axis: int) -> str:
    placement = placements[axis]
    if isinstance(placement, Special):
        return str(placement)
    if isinstance(placement, Shard):
        splitters = [a for a in order if splits(placements[a]) and placements[a].dim == placement.dim]  # type: ignore[attr-defined]
        rank = f"#{splitters.index(axis)}" if splitters != sorted(splitters) else ""
        return f"S({placement.dim}){rank}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R"


def read(text: str) -> tuple[list[Placement], list[int], bool, bool]:
    """Placements, order, whether uncast, and whether on hosts, of the layout that `text` is of.

    Raises:
        LayoutError: where a token cannot be read, or the splitters of a dim are not numbered 0, 1, … all of them.
    """
    placements: list[Placement] = []
    ranks: list[int] = []
    for token in text.removesuffix(_HOST).removesuffix(_UNCAST).split():
        match = _TOKEN.match(token)
        if match is None:
            remedy = 'write one of R, S(0), P, P(max) per mesh axis, as in "S(0) R"'
            raise LayoutError(f"cannot read {token!r} in layout {text!r}", remedy=remedy)
        replicate, reduce_op, dim, rank, before, after, lowest, mirrored = match.groups()
        if replicate:
            placements.append(REPLICATE)
        elif before is not None:
            placements.append(Halo(int(dim), int(before), int(after), lowest is not None))
        elif dim is not None:
            placements.append(Mirrored(int(dim)) if mirrored else Shard(int(dim)))
        else:
            placements.append(Partial(reduce_op or "sum"))
        ranks.append(int(rank) if rank is not None else -1)
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        numbered = sorted(rank for rank, p in zip(ranks, placements, strict=True) if isinstance(p, Shard) and p.dim == dim)
        if set(numbered) != {-1} and numbered != list(range(len(numbered))):
            remedy = f"number all splitters of dim {dim} from 0, the outermost, or none of them"
            raise LayoutError(f"layout {text!r} does not say in which order axes split dim {dim}", remedy=remedy)
    order = sorted(range(len(placements)), key=lambda axis: (ranks[axis], axis))
    return placements, order, text.removesuffix(_HOST).endswith(_UNCAST), text.endswith(_HOST)
