"""Experts whose tokens are dispatched along a mesh axis (`autopar.ops.dispatched`), as steps of emitted graphs.

As the steps of `autopar.kernels.collectives` they name the mesh axis by index, and `bind` puts a process group in its place. Rows go by
all-to-alls of as many as there are, which processes first tell each other; so the host waits once for the device, to know the sizes.
A step that is *routed*, as its last argument says, has moe_dispatch and moe_combine take the all-to-alls' place where the group's ranks
reach each other's memory; where they do not, the log says once that rows go by all-to-alls.

Memory. Beside operands and results live, of the r rows that go and those that come, which are as many in a fake group, as where all experts
are picked alike: in forward the rows that go, until they are sent, those that come, until experts made as many of them, those that come
back, and for each pair its place; in backward likewise, rows of tokens and of results' gradients at once. Not counted is what the linears
and the sums hold meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import bound
from autopar.kernels.collectives import AxisGroup, Groups, current_groups, range_of
from autopar.kernels.providers import peers_of, say_once
from autopar.kernels.routed import moe_combine, moe_dispatch
from autopar.ops.dispatched import Exchange, Operands, Traffic, dispatched_experts, dispatched_experts_backward

Split = tuple[int, tuple[tuple[int, int], ...]]
"""The number of experts, and (axis, axis size) of those that split them, outermost first."""


def experts(
    x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, size: int, split: Split, most: int, axis: int, routed: bool
) -> Tensor:
    """What tokens [t, h] of this rank get from the experts of all ranks of the axis: [t, d]. Operands as of `ops.experts`, of this rank."""
    groups = current_groups()
    return experts_bound(x, ids, gates, up, down, act, size, starts_of(split, axis, groups), most, *settings_of(groups[axis], routed))


def experts_backward(
    grad: Tensor, x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, size: int, split: Split, most: int, axis: int,
    routed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's x and gates, and of its experts' up and down, whole."""
    groups = current_groups()
    settings = starts_of(split, axis, groups), most, *settings_of(groups[axis], routed)
    return experts_backward_bound(grad, x, ids, gates, up, down, act, size, *settings)


def starts_of(split: Split, axis: int, groups: Groups) -> list[int]:
    """The first expert of each rank of this rank's group along `axis`."""
    num, splitters = split
    own = {of: groups[of].coordinate for of, _ in splitters}
    places = ({**own, axis: place} for place in range(groups[axis].size))
    return [range_of(num, splitters, [there[of] for of, _ in splitters])[0] for there in places]


def settings_of(group: AxisGroup, routed: bool) -> tuple[int, str, int, bool]:
    """What stands in the place of the axis in a process group; the last arguments."""
    return group.size, group.name, group.coordinate, routed


def with_routes(args: tuple[Any, ...], routed: bool) -> tuple[Any, ...]:
    """A step's arguments, with `routed` instead of what they say."""
    return *args[:-1], routed


def experts_bound(*operands: Any) -> Tensor:
    """As `experts`, in a process group: operands, its starts, `most` pairs, `settings_of` the group. A compiler sees one operator."""
    if torch.compiler.is_compiling():
        return torch.ops.autopar.dispatch_experts(*operands)
    *args, most, size, name, coordinate, routed = operands
    return dispatched_experts([tuple(args)], exchange_of(args[0], most, size, name, coordinate, routed))[0]


def experts_backward_bound(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `experts_backward`, in a process group."""
    if torch.compiler.is_compiling():
        return torch.ops.autopar.dispatch_experts_backward(*operands)
    *args, most, size, name, coordinate, routed = operands
    return dispatched_experts_backward([tuple(args)], exchange_of(args[0], most, size, name, coordinate, routed))[0]


STEPS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    dispatched_experts: experts, dispatched_experts_backward: experts_backward,
}  # fmt: skip
"""What local arguments name → the step that an emitted graph has."""
BOUND: Mapping[Callable[..., Any], Callable[..., Any]] = {experts: experts_bound, experts_backward: experts_backward_bound}
TOGETHER: Mapping[Callable[..., Any], Callable[[Sequence[Operands], Exchange], list[Any]]] = {step: op for op, step in STEPS.items()}


def exchange_of(x: Tensor, most: int, size: int, name: str, coordinate: int, routed: bool) -> Exchange:
    """Of a process group, or of a fake one, for ranks of no more than `most` pairs, whose tensors are where `x` is."""
    if not name:
        return Fake(size)
    if not routed:
        return InGroup(size, name)
    group = AxisGroup(name, size, coordinate)
    peers, reason = peers_of(group, x.device)
    if peers is not None:
        return BetweenPeers(most, group)
    say_once(group, "rows go to their experts by an all-to-all of the process group", reason)
    return InGroup(size, name)


@dataclass(frozen=True, slots=True)
class InGroup:
    """One rank of a process group, whose all-to-alls have as many rows as there are."""

    size: int
    name: str
    by_expert: bool = False

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        (mine,) = counts
        theirs = bound.exchanged(mine, [1] * self.size, [1] * self.size, self.name)
        leaving, coming = torch.stack((mine, theirs)).tolist()
        return [Traffic(tuple(map(sum, leaving)), tuple(map(tuple, coming)))]

    def there(self, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        return [bound.exchanged(rows.pop(), list(traffic[0].leaving), list(traffic[0].by_sender), self.name)]

    def back(self, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        return [bound.exchanged(rows.pop(), list(traffic[0].by_sender), list(traffic[0].leaving), self.name)]


@dataclass(slots=True)
class BetweenPeers:
    """One rank of those that reach each other's memory, by moe_dispatch and moe_combine (`autopar.kernels.routed`) of its sorted pairs.

    They write rows where experts want them, and hold room for all pairs of all ranks at once, which nothing else does. What tells the ranks
    how many rows come is a dispatch of the pairs' labels.
    """

    most: int
    group: AxisGroup
    by_expert: bool = True
    num_experts: int = 0
    labels: Tensor | None = None
    table: Tensor | None = None

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        (mine,) = counts
        self.num_experts = mine.numel()
        each = torch.arange(self.num_experts, device=mine.device)
        self.labels = torch.repeat_interleave(each, mine.reshape(-1)).unsqueeze(1)
        _, self.table, _ = self._dispatched(self.labels)
        all_counts = self.table.view(self.group.size, *mine.shape).tolist()  # [sender, home, expert]
        leaving = tuple(map(sum, all_counts[self.group.coordinate]))
        return [Traffic(leaving, tuple(tuple(sent[self.group.coordinate]) for sent in all_counts))]

    def there(self, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        return [self._dispatched(rows.pop())[0][: sum(traffic[0].by_sender)]]

    def back(self, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        made, group = rows.pop(), self.group
        assert self.labels is not None and self.table is not None, "rows are counted first"
        room = made.new_zeros(group.size * self.most, made.shape[1])
        room[: len(made)] = made
        places = torch.arange(len(self.labels), device=made.device).unsqueeze(1)
        weights = made.new_ones(len(self.labels), 1)
        return [moe_combine(room, self.table, places, weights, group.size, group.name, group.coordinate)[1]]

    def _dispatched(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.labels is not None, "rows are counted first"
        return moe_dispatch(rows, self.labels, self.num_experts, self.most, self.group.size, self.group.name, self.group.coordinate)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Fake:
    """One rank of a fake group: it gets as many rows as it sends, of all experts alike, and nothing moves."""

    size: int
    by_expert: bool = False

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        evenly = _evenly(num_pairs[0], self.size)
        return [Traffic(evenly, tuple(_evenly(num, counts[0].shape[1]) for num in evenly))]

    def there(self, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        sent = rows.pop()
        return [sent.new_empty(sum(traffic[0].by_sender), *sent.shape[1:])]

    def back(self, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        sent = rows.pop()
        return [sent.new_empty(sum(traffic[0].leaving), *sent.shape[1:])]


def _evenly(num: int, parts: int) -> tuple[int, ...]:
    return tuple(num * (i + 1) // parts - num * i // parts for i in range(parts))


@torch.library.custom_op("autopar::dispatch_experts", mutates_args=())
def _dispatch_experts(
    x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, num: int, starts: list[int], most: int, size: int,
    name: str, coordinate: int, routed: bool,
) -> Tensor:  # fmt: skip
    return dispatched_experts([(x, ids, gates, up, down, act, num, starts)], exchange_of(x, most, size, name, coordinate, routed))[0]


@torch.library.custom_op("autopar::dispatch_experts_backward", mutates_args=())
def _dispatch_experts_backward(
    grad: Tensor, x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str, num: int, starts: list[int], most: int,
    size: int, name: str, coordinate: int, routed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    exchange = exchange_of(x, most, size, name, coordinate, routed)
    return dispatched_experts_backward([(grad, x, ids, gates, up, down, act, num, starts)], exchange)[0]


@_dispatch_experts.register_fake
def _(x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, *settings: Any) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1])


@_dispatch_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, gates, up, down))  # type: ignore[return-value]
