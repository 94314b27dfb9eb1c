"""Local arguments of calls: a call with its strategy and mesh, and tokens for numbers that differ
between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.core.layout import Layout, Strategy, local_range, local_shape
from autopar.rules.call import Call, argument, replace_arguments


@dataclass(frozen=True, slots=True)
class Start:
    """Token for the first global index of a rank's part along a dim, minus the `before` elements of
    its halo.

    Attributes:
        dim_size: global size of the dim.
        layout: layout of the tensor.
        dim: the dim.
        before: number of halo elements before the part.
    """

    dim_size: int
    layout: Layout
    dim: int
    before: int = 0

    def at(self, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> int:
        """Return the index for a rank's coordinate."""
        return (
            local_range(self.dim_size, self.layout, self.dim, mesh_shape, coordinate)[0]
            - self.before
        )


@dataclass(frozen=True, slots=True)
class Length:
    """Token for the length of a rank's part of a dim that is split unevenly.

    Attributes:
        dim_size: global size of the dim.
        layout: layout of the tensor.
        dim: the dim.
    """

    dim_size: int
    layout: Layout
    dim: int

    def at(self, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> int:
        """Return the length for a rank's coordinate."""
        return local_range(self.dim_size, self.layout, self.dim, mesh_shape, coordinate)[1]


@dataclass(frozen=True, slots=True)
class Starts:
    """Token for the first global indices of the parts of a dim on all ranks of a rank's group along
    `axis`, in the order of these ranks; the axis splits the dim."""

    dim_size: int
    layout: Layout
    dim: int
    axis: int

    def at(self, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the indices for a rank's coordinate."""
        around = (
            (*coordinate[: self.axis], place, *coordinate[self.axis + 1 :])
            for place in range(mesh_shape[self.axis])
        )
        return tuple(
            local_range(self.dim_size, self.layout, self.dim, mesh_shape, there)[0]
            for there in around
        )


@dataclass(frozen=True, slots=True)
class Local:
    """The local call of a rank; tensors are `Operand` objects as in the full call."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Site:
    """A call with a strategy on a mesh.

    Args:
        call: the full call.
        strategy: layouts of its operands and results.
        mesh_shape: number of devices on each axis of the mesh.
    """

    def __init__(self, call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> None:
        self.call, self.strategy, self.mesh_shape = call, strategy, mesh_shape

    def input_shape(self, number: int) -> tuple[int | Length, ...]:
        """Return the local shape of operand `number`."""
        return self._shape(self.call.inputs[number].shape, self.strategy.inputs[number])

    def output_shape(self, number: int = 0) -> tuple[int | Length, ...]:
        """Return the local shape of result `number`."""
        return self._shape(self.call.outputs[number].shape, self.strategy.outputs[number])

    def _shape(self, shape: Sequence[int], layout: Layout) -> tuple[int | Length, ...]:
        """Return a number for each size that is equal on all ranks, else a token."""
        largest = local_shape(shape, layout, self.mesh_shape)
        even = [
            size % layout.num_shards(dim, self.mesh_shape) == 0 for dim, size in enumerate(shape)
        ]
        return tuple(
            n if e else Length(shape[dim], layout, dim)
            for dim, (n, e) in enumerate(zip(largest, even, strict=True))
        )

    def change(self, **changes: Any) -> Local:
        """Return the call with new values for the named parameters of the op."""
        return Local(self.call.target, *replace_arguments(self.call, changes))

    def heads_read(self, query: int = 0) -> dict[str, Any]:
        """Return the argument ``heads`` of an attention op, by name: the first query head, the
        first key head, and the query heads per key head. It is empty if both are split alike.

        Args:
            query: number of the operand with the queries, which the keys follow.
        """
        q, k = self.strategy.inputs[query : query + 2]
        heads, shared = (self.call.inputs[i].shape[1] for i in (query, query + 1))
        if q.splitters(1) == k.splitters(1):
            return {}
        return {"heads": (self.start(q, heads, 1), self.start(k, shared, 1), heads // shared)}

    def start(self, layout: Layout, size: int, dim: int) -> Start | int:
        """Return the token for the first index of a rank's part along a dim; 0 if the dim is not
        split.

        Args:
            layout: layout of the tensor.
            size: global size of the dim.
            dim: the dim.
        """
        return Start(size, layout, dim) if layout.splitters(dim) else 0


def groups_of(site: Site, operand: int, name: str = "groups") -> int | Length:
    """Return the local number of groups of a grouped op. Groups are split together with their
    channels; they are split unevenly only if each group has one channel.

    Args:
        site: the call.
        operand: the operand whose dim 1 is the channels.
        name: name of the parameter with the number of groups.
    """
    groups, channels = argument(site.call, name), site.call.inputs[operand].shape[1]
    here = site.input_shape(operand)[1]
    if groups in (1, channels):
        return here if groups == channels > 1 else groups
    assert isinstance(here, int), "groups with several channels are split evenly"
    return groups * here // channels


def same(site: Site) -> Local:
    """Return the call unchanged."""
    return Local(site.call.target, site.call.args, site.call.kwargs)
