"""Layouts: how one tensor is distributed over the mesh, with its text form, the local part of each
device, and the layouts of an op's operands and results (`Strategy`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.placements import REPLICATE, Halo, Mirrored, Special, splits
from autopar.errors import LayoutError

# --------------------------------------------------------------------------------------------------
# Layouts as text.
#
# ``"S(0) R"`` is `Shard(0)` on the first axis, `Replicate()` on the second. Where a dim is split by
# several axes out of mesh order, each of its splitters carries its rank: ``"S(0)#1 S(0)#0"`` splits
# dim 0 first by the second axis. ``"S(2)~1~2"`` is a shard with 1 element of the part before it and
# 2 of the part after it; ``"S(2)~mirrored"`` is a shard of two halves, one from either end of the
# dim (both in `autopar.core.placements`). ``"P S(0) uncast"`` is a layout of a cast's result that
# is not computed: the cast's operand has this layout, and readers of the result read the operand.
# ``"S(0) R host"`` is a part in the memory of the device's host (offload).

_UNCAST, _HOST = " uncast", " host"
_TOKEN = re.compile(
    r"^(?:(R)|P(?:\((\w+)\))?|S\((\d+)\)(?:#(\d+)|~(\d+)~(\d+)(~lowest)?|(~mirrored))?)$"
)


def write(
    placements: Sequence[Placement], order: Sequence[int], *, uncast: bool, host: bool
) -> str:
    """Write a layout as text; the inverse of `read_layout`.

    Args:
        placements: one per mesh axis.
        order: the axes, outermost splitter first.
        uncast: as for `Layout`.
        host: as for `Layout`.
    """
    tokens = [_placement_token(placements, order, axis) for axis in range(len(placements))]
    return " ".join(tokens) + _UNCAST * uncast + _HOST * host


def _placement_token(placements: Sequence[Placement], order: Sequence[int], axis: int) -> str:
    placement = placements[axis]
    if isinstance(placement, Special):
        return str(placement)
    if isinstance(placement, Shard):
        splitters = [
            a for a in order if splits(placements[a]) and placements[a].dim == placement.dim
        ]  # type: ignore[attr-defined]
        rank = f"#{splitters.index(axis)}" if splitters != sorted(splitters) else ""
        return f"S({placement.dim}){rank}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R"


def read_layout(text: str) -> tuple[list[Placement], list[int], bool, bool]:
    """Read the text of a layout.

    Returns:
        Its placements, order, `uncast` and `host`, as `Layout` takes them.

    Raises:
        LayoutError: if a token cannot be read, or the splitters of a dim are not numbered 0, 1, …
            without gaps.
    """
    placements: list[Placement] = []
    ranks: list[int] = []
    for token in text.removesuffix(_HOST).removesuffix(_UNCAST).split():
        match = _TOKEN.match(token)
        if match is None:
            remedy = 'write one of R, S(0), P, P(max) per mesh axis, as in "S(0) R"'
            raise LayoutError(f"cannot read {token!r} in layout {text!r}", remedy=remedy)
        placements.append(_read_placement(match))
        ranks.append(int(match[4]) if match[4] is not None else -1)
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        numbered = sorted(
            rank
            for rank, p in zip(ranks, placements, strict=True)
            if isinstance(p, Shard) and p.dim == dim
        )
        if set(numbered) != {-1} and numbered != list(range(len(numbered))):
            remedy = f"number all axes that split dim {dim} from 0, the outermost, or none of them"
            raise LayoutError(
                f"layout {text!r} does not specify the order of the axes that split dim {dim}",
                remedy=remedy,
            )
    order = sorted(range(len(placements)), key=lambda axis: (ranks[axis], axis))
    return placements, order, text.removesuffix(_HOST).endswith(_UNCAST), text.endswith(_HOST)


def _read_placement(token: re.Match[str]) -> Placement:
    """The placement that a match of `_TOKEN` describes, without its rank."""
    replicate, reduce_op, dim, _, before, after, lowest, mirrored = token.groups()
    if replicate:
        return REPLICATE
    if before is not None:
        return Halo(int(dim), int(before), int(after), lowest is not None)
    if dim is not None:
        return Mirrored(int(dim)) if mirrored else Shard(int(dim))
    return Partial(reduce_op or "sum")


# --------------------------------------------------------------------------------------------------
# Layouts and strategies.
#
# A layout has one placement per mesh axis (torch's `Shard(d)`, `Replicate()`, `Partial(op)`).
# If several axes split one dim, their order matters: `order` lists all mesh axes from the
# outermost splitter to the innermost. It is canonical (mesh order) wherever the order makes no
# difference, so that equal layouts compare equal.
#
# Only the innermost splitter of a dim can be gathered without moving other data.


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """One placement per mesh axis and the order of the splitters, outermost first.

    Args:
        placements: one per mesh axis.
        order: a permutation of the axes, outermost splitter first; made canonical.
        uncast: whether the tensor is the result of a cast that is not computed, and readers read
            the cast's operand. No collective leads to or from such a layout.
        host: whether each device's part is in its host's memory. Only a copy of the same part in
            the device's own memory leads to such a layout.
    """

    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    uncast: bool
    host: bool
    _hash: int = field(compare=False, repr=False)
    _dims: tuple[int, ...] = field(
        compare=False, repr=False
    )  # per axis the dim that it splits, or −1; stored because it is read very often
    _special: tuple[Special, ...] = field(compare=False, repr=False)

    def __init__(
        self,
        placements: Iterable[Placement],
        order: Sequence[int] | None = None,
        *,
        uncast: bool = False,
        host: bool = False,
    ) -> None:
        placements = tuple(placements)
        order = _canonical(placements, order)
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "order", order)
        object.__setattr__(self, "uncast", uncast)
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "_hash", hash((placements, order, uncast, host)))
        object.__setattr__(self, "_dims", tuple([p.dim if splits(p) else -1 for p in placements]))
        object.__setattr__(
            self, "_special", tuple([p for p in placements if issubclass(type(p), Special)])
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return _text(self)

    __repr__ = __str__

    @staticmethod
    def parse(text: str) -> Layout:
        """Make a layout from its text, the inverse of ``str``.

        Raises:
            LayoutError: if a token cannot be read, or the splitters of a dim are not numbered 0, 1,
                … without gaps.
        """
        placements, order, uncast, host = read_layout(text)
        return Layout(placements, order, uncast=uncast, host=host)

    @staticmethod
    def replicated(num_axes: int) -> Layout:
        """Make the layout in which every device of `num_axes` mesh axes has the whole tensor."""
        return Layout((REPLICATE,) * num_axes)

    def over(self, axes: Sequence[int | None]) -> Layout:
        """Return the layout over other mesh axes.

        Args:
            axes: for each new axis the axis of this layout that it stands for, or None if the
                tensor is replicated over it.
        """
        outermost_first = sorted(
            range(len(axes)),
            key=lambda new: -1 if (old := axes[new]) is None else self.order.index(old),
        )
        placements = [REPLICATE if old is None else self.placements[old] for old in axes]
        return Layout(placements, outermost_first, uncast=self.uncast, host=self.host)

    def left_uncast(self) -> Layout:
        """Return the same layout with `uncast` set."""
        return Layout(self.placements, self.order, uncast=True)

    @property
    def plain(self) -> Layout:
        """The same layout with `uncast` cleared: that of the tensor itself or of the cast's
        operand."""
        return Layout(self.placements, self.order, host=self.host) if self.uncast else self

    def on_host(self) -> Layout:
        """Return the layout of the same parts in the hosts' memory."""
        return Layout(self.placements, self.order, uncast=self.uncast, host=True)

    def on_device(self) -> Layout:
        """Return the layout of the same parts in the devices' own memory."""
        return Layout(self.placements, self.order, uncast=self.uncast) if self.host else self

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole tensor."""
        return all(isinstance(p, Replicate) for p in self.placements)

    @property
    def has_partial(self) -> bool:
        """Whether an axis holds the terms of a pending reduction."""
        return any(isinstance(p, Partial) for p in self.placements)

    @property
    def has_halo(self) -> bool:
        """Whether a dim is split with a halo."""
        return any(isinstance(p, Halo) for p in self._special)

    @property
    def special(self) -> tuple[Special, ...]:
        """The placements that only the ops that require them use: `Halo` and `Mirrored`."""
        return self._special

    def splitters(self, dim: int) -> tuple[int, ...]:
        """Return the axes that split `dim`, outermost first."""
        dims = self._dims
        return tuple([axis for axis in self.order if dims[axis] == dim])

    def is_innermost(self, axis: int) -> bool:
        """Whether `axis` is the innermost splitter of the dim it shards."""
        dim = self._dims[axis]
        return dim >= 0 and self.splitters(dim)[-1] == axis

    def with_placement(self, axis: int, placement: Placement) -> Layout:
        """Return the layout with another placement on one axis; if that is a shard, the axis
        becomes the innermost splitter of its dim."""
        return _with_placement(self, axis, placement)

    def splits_like(self, other: Layout) -> bool:
        """Whether every rank's part covers the same elements as in `other`, regardless of partial
        sums."""
        same_dims = self._dims == other._dims and all(
            self.splitters(dim) == other.splitters(dim) for dim in self.split
        )
        return same_dims and self.special == other.special and not self.has_halo

    def num_shards(self, dim: int, mesh_shape: Sequence[int]) -> int:
        """Return into how many parts `dim` is split on a mesh of `mesh_shape`."""
        num = 1
        for d, n in zip(self._dims, mesh_shape, strict=True):
            if d == dim:
                num *= n
        return num

    def divides(self, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
        """Whether every dim exists and is split evenly."""
        return self._has_dims_of(shape) and not any(
            shape[dim] % self.num_shards(dim, mesh_shape) for dim in self.split
        )

    def fits(self, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
        """Whether every dim exists and is split evenly, or by a single axis such that only its last
        part is shorter.

        A dim with a halo must be split by a single axis, into parts that are not shorter than the
        halo that their neighbours read. A mirrored dim must be split by a single axis, into parts
        of an even length.
        """
        return self._has_dims_of(shape) and all(
            [self._fits_dim(dim, shape[dim], mesh_shape) for dim in self.split]
        )

    @property
    def split(self) -> set[int]:
        """The dims that some axis splits."""
        return {dim for dim in self._dims if dim >= 0}

    def _has_dims_of(self, shape: Sequence[int]) -> bool:
        return not self._dims or max(self._dims) < len(shape)

    def _fits_dim(self, dim: int, size: int, mesh_shape: Sequence[int]) -> bool:
        num_shards = self.num_shards(dim, mesh_shape)
        halo, mirrored = self.halo(dim), self.is_mirrored(dim)
        if halo is None and not mirrored and size % num_shards == 0:
            return True
        alone = num_shards in (
            1,
            max((mesh_shape[axis] for axis in self.splitters(dim)), default=1),
        )
        if mirrored:
            return alone and size % (2 * num_shards) == 0
        last = size - -(-size // num_shards) * (
            num_shards - 1
        )  # the shortest part; it must be at least as long as the halo that neighbours read
        return alone and last >= (max(halo.before, halo.after, 1) if halo else 1)

    def halo(self, dim: int) -> Halo | None:
        """Return the halo with which `dim` is split, if any."""
        return (
            next((p for p in self._special if isinstance(p, Halo) and p.dim == dim), None)
            if self._special
            else None
        )

    def is_mirrored(self, dim: int) -> bool:
        """Whether `dim` is split into mirrored parts."""
        return bool(self._special) and any(
            isinstance(p, Mirrored) and p.dim == dim for p in self._special
        )


@lru_cache(maxsize=2**16)  # few layouts are written as text many times
def _text(layout: Layout) -> str:
    return write(layout.placements, layout.order, uncast=layout.uncast, host=layout.host)


@lru_cache(maxsize=2**16)  # tensors of one rank share their layouts
def _with_placement(layout: Layout, axis: int, placement: Placement) -> Layout:
    placements = (*layout.placements[:axis], placement, *layout.placements[axis + 1 :])
    return Layout(placements, (*(a for a in layout.order if a != axis), axis))


def _canonical(placements: tuple[Placement, ...], order: Sequence[int] | None) -> tuple[int, ...]:
    """Mesh order, except that the splitters of one dim keep their order in `order`."""
    natural = tuple(range(len(placements)))
    if order is None or tuple(order) == natural:
        return natural
    if sorted(order) != list(natural):
        raise LayoutError(f"order {tuple(order)} is not a permutation of {len(natural)} axes")
    dims = [placement.dim for placement in placements if splits(placement)]
    if len(set(dims)) == len(dims):
        return natural
    by_dim: dict[int, list[int]] = {}
    for axis in order:
        placement = placements[axis]
        if isinstance(placement, Shard):
            by_dim.setdefault(placement.dim, []).append(axis)
    result = list(natural)
    for axes in by_dim.values():
        for slot, axis in zip(sorted(axes), axes, strict=True):
            result[slot] = axis
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One choice for one op: the layouts that its tensor operands must have, and the layouts that
    its results then have."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    @property
    def plain(self) -> Strategy:
        """The strategy with `Layout.plain` layouts of its results."""
        return (
            Strategy(self.inputs, tuple(at.plain for at in self.outputs))
            if any(at.uncast for at in self.outputs)
            else self
        )

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


# --------------------------------------------------------------------------------------------------
# The local part of a tensor on one device.


def part_range(size: int, counts: Sequence[int], coordinates: Sequence[int]) -> tuple[int, int]:
    """Return start and length of a part of a dim that is split several times.

    Uneven sizes follow torch's rule (`torch.chunk`): every part has ``ceil(size / n)`` elements
    until none is left.

    Args:
        size: length of the dim.
        counts: number of parts of each split, the outermost first; each splits a part of the one
            before.
        coordinates: index of the part in each split.
    """
    start, length = 0, size
    for count, coordinate in zip(counts, coordinates, strict=True):
        chunk = -(-length // count)
        begin = min(chunk * coordinate, length)
        start, length = start + begin, min(chunk, length - begin)
    return start, length


def local_range(
    size: int, layout: Layout, dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[int, int]:
    """Return start and length of a device's part of one dim (see `part_range`), without a halo. The
    start of a mirrored part is that of its first half.

    Args:
        size: length of the dim.
        layout: layout of the tensor.
        dim: the dim.
        mesh_shape: devices on each axis of the mesh.
        coordinate: the device's position on each axis.
    """
    splitters = layout.splitters(dim)
    return part_range(
        size, [mesh_shape[axis] for axis in splitters], [coordinate[axis] for axis in splitters]
    )


def local_shape(
    shape: Sequence[int],
    layout: Layout,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the shape of a device's local tensor.

    Args:
        shape: shape of the whole tensor.
        layout: its layout.
        mesh_shape: devices on each axis of the mesh.
        coordinate: the device's position on each axis; by default the origin, which has the largest
            part.
    """
    coordinate = coordinate if coordinate is not None else (0,) * len(mesh_shape)
    lengths = list(shape)
    for dim in layout.split:
        lengths[dim] = local_range(shape[dim], layout, dim, mesh_shape, coordinate)[1]
    for special in layout.special:
        lengths[special.dim] += special.length if isinstance(special, Halo) else 0
    return tuple(lengths)
