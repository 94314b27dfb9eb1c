"""Experts whose tokens are dispatched along a mesh axis (`autopar.ops.expert_layers`), as steps of
emitted graphs.

Like the steps of `autopar.kernels.collectives`, they refer to the mesh axis by index, and `bind`
replaces it by a process group. Rows are sent by all-to-alls of exactly the required numbers of
rows, which ranks exchange first, so the host waits for the device once. In a *routed* step (the
last argument), ranks write rows directly into each other's memory if it is accessible: tokens to
the memory that experts read, and results of experts to the memory from which they are summed. If
the memory of other ranks is not accessible, all-to-alls are used, which is logged once.

Memory in addition to operands and results, for the rows that are sent and received. In a fake
group, these are equally many, as if all experts were chosen equally often:
    all-to-alls     in forward, the sent rows until they are sent, the received rows until experts
                    have computed results of them, the returned rows, and the position of each pair;
                    in backward the same, where rows of tokens and of result gradients are sent
                    together
    routed          in forward, the results of experts until they are returned, and the position of
                    each pair; in backward also the tokens with the gradients of their results until
                    they are sent. Received rows are in shared memory with room for all pairs of all
                    ranks, which is kept for the next use (`autopar.kernels.routed.shared_regions`)
Temporaries of the linear layers and of sums do not count. In a fake group, a routed step runs both
variants, so that the larger one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import bound_ops
from autopar.kernels.collectives import AxisGroup, Groups, current_groups, range_of
from autopar.kernels.peers import Peers, counts_memory, peers_of, say_once
from autopar.kernels.routed import BACK, MOST_RANKS, SendJob, count, send
from autopar.ops.expert_layers import (
    Exchange,
    Operands,
    Traffic,
    What,
    dispatched_experts,
    dispatched_experts_backward,
)

Split = tuple[int, tuple[tuple[int, int], ...]]
"""The number of experts, and pairs (axis, axis size) of the axes that shard them, outermost
first."""


def experts(
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    act: str,
    size: int,
    split: Split,
    most: int,
    axis: int,
    routed: bool,
) -> Tensor:
    """Return the results [t, d] of the experts of all ranks of the axis for this rank's tokens
    [t, h].

    Args:
        x, ids, gates, up, down, act: this rank's operands; see `ops.experts`.
        size: the number of experts.
        split: the dim of the experts and the axes that shard it.
        most: the largest number of pairs of any rank.
        axis: the mesh axis.
        routed: whether ranks write into each other's memory.
    """
    groups = current_groups()
    return experts_bound(
        x,
        ids,
        gates,
        up,
        down,
        act,
        size,
        starts_of(split, axis, groups),
        most,
        *settings_of(groups[axis], routed),
    )


def experts_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    act: str,
    size: int,
    split: Split,
    most: int,
    axis: int,
    routed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's x and gates, and those of up and down of its experts.

    Args:
        grad: the gradient of the result of `experts`.
        x, ids, gates, up, down, act, size, split, most, axis, routed: see `experts`.
    """
    groups = current_groups()
    settings = starts_of(split, axis, groups), most, *settings_of(groups[axis], routed)
    return experts_backward_bound(grad, x, ids, gates, up, down, act, size, *settings)


def starts_of(split: Split, axis: int, groups: Groups) -> list[int]:
    """Return the first expert of each rank of this rank's group along an axis.

    Args:
        split: the number of experts and the axes that shard them.
        axis: the mesh axis.
        groups: this rank's groups.
    """
    num, splitters = split
    coordinates = {of: groups[of].coordinate for of, _ in splitters}
    places = ({**coordinates, axis: place} for place in range(groups[axis].size))
    return [range_of(num, splitters, [there[of] for of, _ in splitters])[0] for there in places]


def settings_of(group: AxisGroup, routed: bool) -> tuple[int, str, int, bool]:
    """Return the last arguments of a bound step: the group that replaces the axis, and `routed`."""
    return group.size, group.name, group.coordinate, routed


def with_routes(args: tuple[Any, ...], routed: bool) -> tuple[Any, ...]:
    """Return the arguments of a step with another value of `routed`."""
    return *args[:-1], routed


def experts_bound(*operands: Any) -> Tensor:
    """Run `experts` in a process group. Under a compiler, it is one op.

    Args:
        operands: the operands, the first expert of each rank, `most`, and the `settings_of` the
            group.
    """
    if torch.compiler.is_compiling():
        return torch.ops.autopar.dispatch_experts(*operands)
    return _run(dispatched_experts, *operands)


def experts_backward_bound(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `experts_backward` in a process group; see `experts_bound`."""
    if torch.compiler.is_compiling():
        return torch.ops.autopar.dispatch_experts_backward(*operands)
    return _run(dispatched_experts_backward, *operands)


def _run(together: Callable[[Sequence[Operands], Exchange], list[Any]], *operands: Any) -> Any:
    """Run an op that is defined for all ranks of an exchange, for this rank only."""
    *args, most, size, name, coordinate, routed = operands
    if routed and counts_memory(AxisGroup(name, size, coordinate)):
        together([tuple(args)], FakePeers(size, tuple(x for x in args if isinstance(x, Tensor))))
    return together([tuple(args)], exchange_of(args[0], most, size, name, coordinate, routed))[0]


STEPS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    dispatched_experts: experts,
    dispatched_experts_backward: experts_backward,
}
"""The step of an emitted graph for each op."""
BOUND: Mapping[Callable[..., Any], Callable[..., Any]] = {
    experts: experts_bound,
    experts_backward: experts_backward_bound,
}
TOGETHER: Mapping[Callable[..., Any], Callable[[Sequence[Operands], Exchange], list[Any]]] = {
    step: op for op, step in STEPS.items()
}


def exchange_of(
    x: Tensor, most: int, size: int, name: str, coordinate: int, routed: bool
) -> Exchange:
    """Return the exchange of rows between the ranks of a process group or a fake group.

    Args:
        x: a tensor on the device of the rows.
        most: the largest number of pairs of any rank.
        size, name, coordinate: the group.
        routed: whether ranks write into each other's memory if it is accessible.
    """
    if not name:
        return Fake(size)
    if not routed:
        return InGroup(size, name)
    group = AxisGroup(name, size, coordinate)
    peers, reason = peers_of(group, x.device)
    if peers is not None and size > MOST_RANKS:
        peers, reason = None, f"the kernels support at most {MOST_RANKS} ranks, not {size}"
    if peers is not None:
        return BetweenPeers(peers, (coordinate,), most)
    say_once(
        group, ("rows are sent to their experts with an all-to-all of the process group"), reason
    )
    return InGroup(size, name)


@dataclass(frozen=True, slots=True)
class InGroup:
    """The exchange of one rank of a process group by all-to-alls of exactly the required rows."""

    size: int
    name: str
    by_expert: bool = False

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        """Exchange the numbers of rows; see `autopar.ops.expert_layers.Exchange.count`."""
        (mine,) = counts
        theirs = bound_ops.exchange_rows(mine, [1] * self.size, [1] * self.size, self.name)
        leaving, coming = torch.stack((mine, theirs)).tolist()
        return [Traffic(tuple(map(sum, leaving)), tuple(map(tuple, coming)))]

    def send(
        self, what: What, tensors: list[Tensor], index: Sequence[Tensor], traffic: Sequence[Traffic]
    ) -> list[Tensor]:
        """Send rows to the ranks of their experts.

        Args:
            what, tensors, index, traffic: see `autopar.ops.expert_layers.Exchange.send`.
        """
        return [
            bound_ops.exchange_rows(
                tensors.pop()[index[0]],
                list(traffic[0].leaving),
                list(traffic[0].by_sender),
                self.name,
            )
        ]

    def send_back(self, what: What, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        """Send the results of experts back.

        Args:
            what, rows, traffic: see `autopar.ops.expert_layers.Exchange.send_back`.
        """
        return [
            bound_ops.exchange_rows(
                rows.pop(), list(traffic[0].by_sender), list(traffic[0].leaving), self.name
            )
        ]


@dataclass(slots=True)
class BetweenPeers:
    """The exchange of ranks that can access each other's memory (`autopar.kernels.routed`). They
    write rows directly to the memory in which experts and senders use them.

    Attributes:
        peers: the provider.
        ranks: the ranks whose work this process does.
        most: the largest number of pairs of any rank.
        by_expert: see `autopar.ops.expert_layers.Exchange`.
        tables: the number of pairs that each rank has for each expert, by rank of this process.
    """

    peers: Peers
    ranks: tuple[int, ...]
    most: int
    by_expert: bool = True
    tables: Mapping[int, Tensor] = field(default_factory=dict)

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        """Exchange the numbers of rows; see `autopar.ops.expert_layers.Exchange.count`."""
        shape = self.peers.size, *counts[0].shape
        flat = {rank: mine.flatten() for rank, mine in zip(self.ranks, counts, strict=True)}
        self.tables = count(self.peers, counts[0].numel(), self.most, flat)
        rank_counts = []
        for rank in self.ranks:
            table = self.tables[rank].view(shape).tolist()  # [sender, home, expert]
            rank_counts.append(
                Traffic(tuple(map(sum, table[rank])), tuple(tuple(sent[rank]) for sent in table))
            )
        return rank_counts

    def send(
        self, what: What, tensors: list[Tensor], index: Sequence[Tensor], traffic: Sequence[Traffic]
    ) -> list[Tensor]:
        """Send rows to the ranks of their experts.

        Args:
            what, tensors, index, traffic: see `autopar.ops.expert_layers.Exchange.send`.
        """
        return self._send_rows(what, tensors, index, [sum(each.by_sender) for each in traffic])

    def send_back(self, what: What, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        """Send the results of experts back.

        Args:
            what, rows, traffic: see `autopar.ops.expert_layers.Exchange.send_back`.
        """
        return self._send_rows(
            BACK + what, rows, [None for _ in traffic], [sum(each.leaving) for each in traffic]
        )

    def _send_rows(
        self, name: str, rows: list[Tensor], index: Sequence[Tensor | None], lengths: Sequence[int]
    ) -> list[Tensor]:
        """Send rows, and return views of the received rows."""
        width, dtype = rows[0].shape[1], rows[0].dtype
        every = zip(self.ranks, rows, index, strict=True)
        jobs = {
            rank: SendJob(mine.contiguous(), places, self.tables[rank])
            for rank, mine, places in every
        }
        rows.clear()
        come = send(self.peers, name, self.tables[self.ranks[0]].shape[1], self.most, jobs)
        ends = [length * width * dtype.itemsize for length in lengths]
        return [
            come[rank][:end].view(dtype).view(-1, width)
            for rank, end in zip(self.ranks, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Fake:
    """The exchange of one rank of a fake group. It receives as many rows as it sends, equally many
    for each expert, without communication."""

    size: int
    by_expert: bool = False

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        """Exchange the numbers of rows; see `autopar.ops.expert_layers.Exchange.count`."""
        evenly = _evenly(num_pairs[0], self.size)
        return [Traffic(evenly, tuple(_evenly(num, counts[0].shape[1]) for num in evenly))]

    def send(
        self, what: What, tensors: list[Tensor], index: Sequence[Tensor], traffic: Sequence[Traffic]
    ) -> list[Tensor]:
        """Send rows to the ranks of their experts.

        Args:
            what, tensors, index, traffic: see `autopar.ops.expert_layers.Exchange.send`.
        """
        sent = tensors.pop()[index[0]]
        return [sent.new_empty(sum(traffic[0].by_sender), *sent.shape[1:])]

    def send_back(self, what: What, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        """Send the results of experts back.

        Args:
            what, rows, traffic: see `autopar.ops.expert_layers.Exchange.send_back`.
        """
        sent = rows.pop()
        return [sent.new_empty(sum(traffic[0].leaving), *sent.shape[1:])]


@dataclass(frozen=True, slots=True)
class FakePeers:
    """The exchange of a fake group whose ranks can access each other's memory. Received rows are in
    shared memory, so they take no additional memory.

    Attributes:
        size: the number of ranks.
        held: tensors that are alive during the whole step, with the dtypes of all rows.
        tables: the table of this rank; see `BetweenPeers`.
        by_expert: see `autopar.ops.expert_layers.Exchange`.
    """

    size: int
    held: tuple[Tensor, ...]
    tables: list[Tensor] = field(default_factory=list)
    by_expert: bool = True

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        """Exchange the numbers of rows; see `autopar.ops.expert_layers.Exchange.count`."""
        self.tables.append(counts[0].new_empty(self.size, counts[0].numel()))
        return Fake(self.size).count(counts, num_pairs)

    def send(
        self, what: What, tensors: list[Tensor], index: Sequence[Tensor], traffic: Sequence[Traffic]
    ) -> list[Tensor]:
        """Send rows to the ranks of their experts.

        Args:
            what, tensors, index, traffic: see `autopar.ops.expert_layers.Exchange.send`.
        """
        return [self._alias_held(tensors.pop(), sum(traffic[0].by_sender))]

    def send_back(self, what: What, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        """Send the results of experts back.

        Args:
            what, rows, traffic: see `autopar.ops.expert_layers.Exchange.send_back`.
        """
        return [self._alias_held(rows.pop(), sum(traffic[0].leaving))]

    def _alias_held(self, sent: Tensor, length: int) -> Tensor:
        """Return `length` rows in the memory of a tensor that is alive during the whole step."""
        return next(x for x in self.held if x.dtype == sent.dtype).as_strided(
            (length, sent.shape[1]), (0, 0)
        )


def _evenly(num: int, parts: int) -> tuple[int, ...]:
    return tuple(num * (i + 1) // parts - num * i // parts for i in range(parts))


@torch.library.custom_op("autopar::dispatch_experts", mutates_args=())
def _dispatch_experts(
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    act: str,
    num: int,
    starts: list[int],
    most: int,
    size: int,
    name: str,
    coordinate: int,
    routed: bool,
) -> Tensor:
    return _run(
        dispatched_experts,
        x,
        ids,
        gates,
        up,
        down,
        act,
        num,
        starts,
        most,
        size,
        name,
        coordinate,
        routed,
    )


@torch.library.custom_op("autopar::dispatch_experts_backward", mutates_args=())
def _dispatch_experts_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    act: str,
    num: int,
    starts: list[int],
    most: int,
    size: int,
    name: str,
    coordinate: int,
    routed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands = grad, x, ids, gates, up, down, act, num, starts, most, size, name, coordinate, routed
    return _run(dispatched_experts_backward, *operands)


@_dispatch_experts.register_fake
def _(x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, *settings: Any) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1])


@_dispatch_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, gates, up, down))
