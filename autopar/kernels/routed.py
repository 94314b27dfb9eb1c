"""Sending of token rows to the ranks of their experts and back, with a permutation.

A token has `choices` experts. A *pair* is one (token, choice); pairs are in the order of tokens.
Expert e is on rank ``e // (num_experts / size)``. `most` is the largest number of pairs of any
rank, so no rank receives more than ``size · most`` rows.

    moe_dispatch   x [tokens, width], experts [tokens, choices] → rows [size · most, width]: the
                   rows of this rank's experts, sorted by expert, sender and pair, followed by
                   zeros; table [size, num_experts]: the number of pairs that each rank sends to
                   each expert; position [tokens, choices]: the position of each pair of this rank
                   in a stable sort by expert
    moe_combine    rows [size · most, width] in the order of dispatch → returned [tokens · choices,
                   width]: the rows of this rank's pairs, sorted; y [tokens, width] =
                   Σ_c weights[t, c] · returned[position[t, c]], summed in the order of choices, in
                   at least fp32

The functions that end in ``_reference`` define the ops, given the operands of all ranks. The
gradient of each op is the other op. If ranks cannot access each other's memory
(`autopar.kernels.peers`), an all_to_all sends ``most`` rows between every two ranks, with the same
results.

Memory in addition to operands and results: ``size · most`` rows for dispatch and twice ``most``
rows for combine, in shared memory, which is kept for the next use of the same shapes. The
all_to_all instead needs twice ``size · most`` rows until its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import bound_ops, library
from autopar.kernels.collectives import AxisGroup, sum_dtype
from autopar.kernels.peers import (
    COMPUTE,
    Lane,
    Peers,
    Regions,
    TransferPhase,
    addresses,
    peers_of,
    say_once,
)

# --------------------------------------------------------------------------------------------------
# The protocols as phases. They are described at the top of `autopar_csrc/moe_route.cu` and
# `autopar_csrc/expert_rows.cu`. Ranks share only `Routes.regions`, which are kept for the next use
# of the same name and routes, so that all layers of a model use the same regions.

MOST_RANKS = 64  # kMaxRanks of include/routes.h
_LINE = 128
COUNTS, ROWS, GATES, BACK = "counts", "rows", "gates", "back "
SHARED = COUNTS, ROWS, GATES, BACK + ROWS, BACK + GATES
"""Names of the shared memory of a step of experts: for counts, and for received and returned rows
and gates."""
_UNSEEN = 0, 1  # tokens and choices for C functions that do not use them


@dataclass(frozen=True, slots=True)
class Routes:
    """The sizes of a route, which all ranks know.

    Attributes:
        row_bytes: the size of a row in bytes.
        num_experts, size: the number of experts, and the number of ranks.
        most: the largest number of pairs of any rank.
    """

    row_bytes: int
    num_experts: int
    size: int
    most: int

    def regions(self, peers: Peers, name: str) -> Regions:
        """Return the shared memory for ``dispatch``, ``combine`` or a name of `SHARED`."""
        return peers.regions((name, self), *self._sizes(name))

    def num_bytes(self, name: str) -> int:
        """Return the bytes of these regions per rank, including flags."""
        data, words = self._sizes(name)
        return data + 8 * words

    def _sizes(self, name: str) -> tuple[int, int]:
        """Return the number of bytes and of words of flags per rank. Flags take one line per peer,
        or two lines for dispatch and combine."""
        table, lines_of = _lines(self.size * self.num_experts * 8), self.size * _LINE // 8
        received, returned = (
            _lines(self.size * self.most * self.row_bytes),
            _lines(self.most * self.row_bytes),
        )
        if name in ("dispatch", "combine"):
            return table + received if name == "dispatch" else 2 * returned, 2 * lines_of
        return {
            COUNTS: table,
            ROWS: received,
            GATES: received,
            BACK + ROWS: returned,
            BACK + GATES: returned,
        }[name], lines_of

    def arguments(
        self, regions: Regions, pairs: Sequence[int], rank: int, epoch: int
    ) -> tuple[object, ...]:
        """Return the last arguments of every C function. `pairs` is [tokens, choices]."""
        native = library.NativeRoutes(
            *pairs, self.row_bytes, self.num_experts, self.size, rank, self.most
        )
        return addresses(regions.data), addresses(regions.flags), native, epoch


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The job of a rank in `dispatch`: contiguous operands, and memory for results and counts."""

    x: Tensor
    experts: Tensor
    rows: Tensor
    table: Tensor
    position: Tensor
    counts: Tensor
    within: Tensor
    offsets: Tensor

    @staticmethod
    def of(x: Tensor, experts: Tensor, num_experts: int, most: int, size: int) -> Dispatch:
        """Allocate the results of a rank's dispatch."""
        x, experts = x.contiguous(), experts.contiguous()
        tables = [
            experts.new_empty(shape)
            for shape in (
                (size, num_experts),
                experts.shape,
                num_experts,
                experts.shape,
                2 * num_experts + 1,
            )
        ]
        return Dispatch(x, experts, x.new_empty(size * most, x.shape[1]), *tables)


def dispatch(peers: Peers, routes: Routes, jobs: Mapping[int, Dispatch]) -> None:
    """Run moe_dispatch for the ranks of `jobs`: all ranks with `VirtualRanks`, otherwise one."""
    regions = routes.regions(peers, "dispatch")
    last = {
        rank: routes.arguments(regions, job.experts.shape, rank, regions.begin(rank))
        for rank, job in jobs.items()
    }

    def _announce(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        lane.call(
            "moe_dispatch_announce", *_pointers(job.experts, job.counts, job.within), *last[rank]
        )

    def _push(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        pointers = _pointers(job.x, job.experts, job.within, job.table, job.offsets, job.position)
        lane.call("moe_dispatch_push", *pointers, *last[rank])

    def _collect(lane: Lane, rank: int) -> None:
        lane.call(
            "moe_dispatch_collect", *_pointers(jobs[rank].offsets, jobs[rank].rows), *last[rank]
        )

    peers.run(
        tuple(jobs),
        (
            TransferPhase(COMPUTE, _announce),
            TransferPhase(COMPUTE, _push),
            TransferPhase(COMPUTE, _collect),
        ),
    )


@dataclass(frozen=True, slots=True)
class Combine:
    """The job of a rank in `combine`: contiguous operands, and memory for the results."""

    rows: Tensor
    table: Tensor
    position: Tensor
    weights: Tensor
    returned: Tensor
    y: Tensor

    @staticmethod
    def of(rows: Tensor, table: Tensor, position: Tensor, weights: Tensor) -> Combine:
        """Allocate the results of a rank's combine."""
        width = rows.shape[1]
        buffers = rows.new_empty(position.numel(), width), rows.new_empty(position.shape[0], width)
        return Combine(
            rows.contiguous(),
            table.contiguous(),
            position.contiguous(),
            weights.to(sum_dtype(rows.dtype)).contiguous(),
            *buffers,
        )


def combine(peers: Peers, routes: Routes, jobs: Mapping[int, Combine]) -> None:
    """Run moe_combine for the ranks of `jobs`; see `dispatch`."""
    regions = routes.regions(peers, "combine")
    last = {
        rank: routes.arguments(regions, job.position.shape, rank, regions.begin(rank))
        for rank, job in jobs.items()
    }

    def _push(lane: Lane, rank: int) -> None:
        lane.call("moe_combine_push", *_pointers(jobs[rank].rows, jobs[rank].table), *last[rank])

    def _add_up(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        pointers = _pointers(job.position, job.weights, job.returned, job.y)
        lane.call("moe_combine_sum", *pointers, library.code_of(job.y.dtype), *last[rank])

    peers.run(tuple(jobs), (TransferPhase(COMPUTE, _push), TransferPhase(COMPUTE, _add_up)))


def count(
    peers: Peers, num_experts: int, most: int, counts: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Exchange the counts [num_experts] of ranks, and return the table of each rank. This is the
    begin of a step of experts."""
    routes = Routes(0, num_experts, peers.size, most)
    regions = routes.regions(peers, COUNTS)
    local = {rank: mine.contiguous() for rank, mine in counts.items()}
    tables = {rank: mine.new_empty(peers.size, num_experts) for rank, mine in local.items()}
    last = {rank: routes.arguments(regions, _UNSEEN, rank, regions.begin(rank)) for rank in local}

    def _announce(lane: Lane, rank: int) -> None:
        lane.call("expert_rows_announce", local[rank].data_ptr(), *last[rank])

    def _copy(lane: Lane, rank: int) -> None:
        lane.call("expert_rows_table", tables[rank].data_ptr(), *last[rank])

    peers.run(tuple(local), (TransferPhase(COMPUTE, _announce), TransferPhase(COMPUTE, _copy)))
    return tables


@dataclass(frozen=True, slots=True)
class SendJob:
    """The job of a rank in `send`: contiguous rows, the row of each sorted pair (None for rows that
    were received), and the table."""

    rows: Tensor
    index: Tensor | None
    table: Tensor


def send(
    peers: Peers, name: str, num_experts: int, most: int, jobs: Mapping[int, SendJob]
) -> dict[int, Tensor]:
    """Send rows. Return the received bytes of each rank as views of shared memory.

    These are the rows of pairs, or returned rows, sorted. They are valid until the rank calls
    `count` again. Each name may be used once per step.
    """
    some = next(iter(jobs.values())).rows
    routes = Routes(some.shape[1] * some.element_size(), num_experts, peers.size, most)
    regions = routes.regions(peers, name)
    last = {rank: routes.arguments(regions, _UNSEEN, rank, regions.begin(rank)) for rank in jobs}

    def _push(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        if job.index is None:
            lane.call("expert_rows_return", *_pointers(job.rows, job.table), *last[rank])
        else:
            lane.call("expert_rows_push", *_pointers(job.rows, job.index, job.table), *last[rank])

    def _wait(lane: Lane, rank: int) -> None:
        lane.call("expert_rows_await", *last[rank])

    peers.run(tuple(jobs), (TransferPhase(COMPUTE, _push), TransferPhase(COMPUTE, _wait)))
    return {rank: regions.data[rank] for rank in jobs}


def shared_regions(
    features: int,
    made: int,
    num_here: int,
    size: int,
    most: int,
    itemsize: int,
    gate_itemsize: int,
    *,
    backward: bool,
) -> dict[tuple[str, Routes], int]:
    """Return the bytes of the shared memory of a rank for a routed step of experts, including
    flags, by name and routes.

    Args:
        features, made: the number of elements of a token, and of an expert's result.
        num_here, size: the number of experts of a rank, and the number of ranks.
        most: the largest number of pairs of any rank.
        itemsize, gate_itemsize: the bytes of an element of tokens and results, and of a gate.
        backward: whether the step is the backward.
    """

    def _routes(row_bytes: int) -> Routes:
        return Routes(row_bytes, num_here * size, size, most)

    if backward:
        rows = {
            ROWS: (made + features) * itemsize,
            GATES: gate_itemsize,
            BACK + ROWS: features * itemsize,
            BACK + GATES: gate_itemsize,
        }
    else:
        rows = {ROWS: features * itemsize, BACK + ROWS: made * itemsize}
    keys = [(COUNTS, _routes(0)), *((name, _routes(row_bytes)) for name, row_bytes in rows.items())]
    return {(name, of): of.num_bytes(name) for name, of in keys}


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


_APART = "rows are sent to their experts with an all_to_all"


# --- definitions
# --------------------------------------------------------------------------------------------------


def sorted_position(experts: Tensor) -> Tensor:
    """Return the position of each pair in a stable sort by expert, a tensor [tokens, choices]."""
    order = torch.argsort(experts.reshape(-1), stable=True)
    return (
        torch.empty_like(order)
        .scatter_(0, order, torch.arange(len(order), device=order.device))
        .view(experts.shape)
    )


def moe_dispatch_reference(
    xs: Sequence[Tensor], experts: Sequence[Tensor], num_experts: int, most: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Compute moe_dispatch for all ranks. Return rows, table and position of each rank."""
    size, width = len(xs), xs[0].shape[1]
    table = torch.stack(
        [torch.bincount(chosen.reshape(-1), minlength=num_experts) for chosen in experts]
    )
    pairs = [x.repeat_interleave(chosen.shape[1], 0) for x, chosen in zip(xs, experts, strict=True)]
    results = []
    for home in range(size):
        own_experts = range(home * num_experts // size, (home + 1) * num_experts // size)
        rows = torch.cat(
            [
                pair[chosen.reshape(-1) == expert]
                for expert in own_experts
                for pair, chosen in zip(pairs, experts, strict=True)
            ]
        )
        padding = rows.new_zeros(size * most - len(rows), width)
        results.append((torch.cat([rows, padding]), table, sorted_position(experts[home])))
    return results


def moe_combine_reference(
    rows: Sequence[Tensor], table: Tensor, positions: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Compute moe_combine for all ranks, which have the same `table`. Return y and returned of each
    rank."""
    size, num_experts = table.shape
    blocks: list[list[Tensor]] = [[] for _ in range(size)]
    for expert in range(num_experts):  # in the order of the experts' ranks
        home = expert * size // num_experts
        first = table[:, home * num_experts // size : expert].sum()
        for sender in range(size):
            begin = int(first + table[:sender, expert].sum())
            blocks[sender].append(rows[home][begin : begin + int(table[sender, expert])])
    returned = [torch.cat(mine) for mine in blocks]
    return [
        (weighted_sum(mine, position, w), mine)
        for mine, position, w in zip(returned, positions, weights, strict=True)
    ]


def weighted_sum(returned: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_c weights[t, c] · returned[position[t, c]] in the dtype of `returned`, summed in the
    order of choices in at least fp32."""
    dtype = sum_dtype(returned.dtype)
    terms = [
        weights[:, c : c + 1].to(dtype) * returned[position[:, c]].to(dtype)
        for c in range(position.shape[1])
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.to(returned.dtype)


# --- operators
# --------------------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::moe_dispatch", mutates_args=())
def moe_dispatch(
    x: Tensor, experts: Tensor, num_experts: int, most: int, size: int, name: str, coordinate: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, table and position of this rank.

    Raises:
        ValueError: if the ranks do not have equally many experts, the expert of a pair does not
            exist, or there are more pairs than `most`.
    """
    if num_experts % size or experts.numel() > most:
        raise ValueError(
            f"{num_experts} experts must be a multiple of {size} ranks, and {experts.numel()} pairs"
            f" must be at most {most}"
        )
    group = AxisGroup(name, size, coordinate)
    if size > 1:
        peers, reason = peers_of(group, x.device)
        if peers is not None:
            job = Dispatch.of(x, experts, num_experts, most, size)
            dispatch(
                peers,
                Routes(x.shape[1] * x.element_size(), num_experts, size, most),
                {coordinate: job},
            )
            return job.rows, job.table, job.position
        say_once(group, _APART, reason)
    return _dispatch_by_all_to_all(x, experts, num_experts, most, group)


@torch.library.custom_op("autopar::moe_combine", mutates_args=())
def moe_combine(
    rows: Tensor,
    table: Tensor,
    position: Tensor,
    weights: Tensor,
    size: int,
    name: str,
    coordinate: int,
) -> tuple[Tensor, Tensor]:
    """Return y and returned of this rank. table and position are results of the dispatch."""
    group = AxisGroup(name, size, coordinate)
    if size > 1:
        peers, reason = peers_of(group, rows.device)
        if peers is not None:
            job = Combine.of(rows, table, position, weights)
            routes = Routes(
                rows.shape[1] * rows.element_size(), table.shape[1], size, rows.shape[0] // size
            )
            combine(peers, routes, {coordinate: job})
            return job.y, job.returned
        say_once(group, _APART, reason)
    returned = _return_by_all_to_all(rows, table, group)
    return weighted_sum(returned, position, weights), returned


def _dispatch_by_all_to_all(
    x: Tensor, experts: Tensor, num_experts: int, most: int, group: AxisGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Dispatch by an all_to_all. Each rank sends `most` rows to every rank, padded with zeros."""
    chosen = experts.reshape(-1)
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < num_experts:
        raise ValueError(
            f"experts are numbered from 0 to {num_experts - 1}, not {int(chosen.min())} to"
            f" {int(chosen.max())}"
        )
    table = bound_ops.all_gather(
        torch.bincount(chosen, minlength=num_experts)[None], 0, group.size, group.name
    )
    order = torch.argsort(chosen, stable=True)
    leaving = (x[order // experts.shape[1]]).split(
        _by_home(table[group.coordinate], group.size).tolist()
    )
    sent = torch.stack([_fill_rows(mine, most) for mine in leaving])
    come = bound_ops.all_to_all(sent, 1, 0, group.size, group.name, group.coordinate).view(
        sent.shape
    )
    places = _places(table, group)
    return (
        _fill_rows(
            torch.cat([come[sender, begin : begin + count] for sender, begin, count in places]),
            group.size * most,
        ),
        table,
        (sorted_position(experts)),
    )


def _return_by_all_to_all(rows: Tensor, table: Tensor, group: AxisGroup) -> Tensor:
    """Send rows back by an all_to_all, the reverse of `_dispatch_by_all_to_all`."""
    most = rows.shape[0] // group.size
    sent, row = rows.new_zeros(group.size, most, rows.shape[1]), 0
    for sender, begin, count in _places(table, group):
        sent[sender, begin : begin + count] = rows[row : row + count]
        row += count
    come = bound_ops.all_to_all(sent, 1, 0, group.size, group.name, group.coordinate).view(
        sent.shape
    )
    counts = _by_home(table[group.coordinate], group.size).tolist()
    return torch.cat([come[home, :count] for home, count in enumerate(counts)])


def _by_home(counts: Tensor, size: int) -> Tensor:
    """Return the number of pairs for each rank, given that for each expert."""
    return counts.view(size, -1).sum(1)


def _places(table: Tensor, group: AxisGroup) -> list[tuple[int, int, int]]:
    """Return the sender, the position in the sender's rows for this rank, and the number of rows,
    in the order of the rows that this rank receives."""
    received = table.view(group.size, group.size, -1)[:, group.coordinate]  # [sender, expert here]
    begins = received.cumsum(1) - received
    return [
        (s, int(begins[s, e]), int(received[s, e]))
        for e in range(received.shape[1])
        for s in range(group.size)
    ]


def _fill_rows(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - rows.shape[0], rows.shape[1])])


# --- fake implementations and gradients
# --------------------------------------------------------------------------------------------------


@moe_dispatch.register_fake
def _(
    x: Tensor, experts: Tensor, num_experts: int, most: int, size: int, name: str, coordinate: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(size * most, x.shape[1]),
        experts.new_empty(size, num_experts),
        experts.new_empty(experts.shape),
    )


@moe_combine.register_fake
def _(
    rows: Tensor,
    table: Tensor,
    position: Tensor,
    weights: Tensor,
    size: int,
    name: str,
    coordinate: int,
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(position.shape[0], rows.shape[1]), rows.new_empty(
        position.numel(), rows.shape[1]
    )


def _keep_ways(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.group = inputs[-3:]
    ctx.save_for_backward(output[1], output[2])


def _dispatch_backward(ctx: Any, d_rows: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    """Return the gradients of pairs to their ranks, and sum those of each token."""
    table, position = ctx.saved_tensors
    ones = torch.ones(position.shape, dtype=sum_dtype(d_rows.dtype), device=d_rows.device)
    return torch.ops.autopar.moe_combine(d_rows, table, position, ones, *ctx.group)[0], *(None,) * 6


def _keep_returned(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, table, position, weights, *ctx.group = inputs
    ctx.most = rows.shape[0] // ctx.group[0]
    ctx.save_for_backward(table, position, weights, output[1])


def _combine_backward(ctx: Any, dy: Tensor, d_returned: Tensor) -> tuple[Tensor | None, ...]:
    """Compute d_rows, the dispatched gradients of pairs, and d_weights[t, c] = dy[t] ·
    returned[position[t, c]]."""
    table, position, weights, returned = ctx.saved_tensors
    dtype = sum_dtype(dy.dtype)
    ends = table[ctx.group[2]].cumsum(0)
    experts = torch.searchsorted(ends, position.view(-1), right=True).view(-1, 1)  # of each pair
    pairs = (weights.to(dtype)[:, :, None] * dy.to(dtype)[:, None]).flatten(0, 1).to(
        dy.dtype
    ) + d_returned[position.view(-1)]
    d_rows = torch.ops.autopar.moe_dispatch(pairs, experts, table.shape[1], ctx.most, *ctx.group)[0]
    d_weights = (
        (
            returned.to(dtype)[position.view(-1)].view(*position.shape, dy.shape[1])
            * dy.to(dtype)[:, None]
        )
        .sum(-1)
        .to(weights.dtype)
    )
    return d_rows, None, None, d_weights, None, None, None


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_ways)
moe_combine.register_autograd(_combine_backward, setup_context=_keep_returned)
