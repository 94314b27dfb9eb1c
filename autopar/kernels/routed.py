"""Rows of tokens to the ranks of their experts and back, each permuted on its way.

Terms. A token has `choices` experts; a *pair* is one (token, choice), in order of the tokens. Expert e lives on rank
``e // (num_experts / size)``. `most` is the largest number of pairs that any rank has, so no rank receives more than ``size · most`` rows.

    moe_dispatch   x [tokens, width], experts [tokens, choices] → rows [size · most, width]: those of this rank's experts, by expert, then
                   by sender, then by pair, and behind them zeros; table [size, num_experts]: how many pairs each rank sends to each
                   expert; position [tokens, choices]: where the pair stands when this rank's pairs are sorted by expert, stably
    moe_combine    rows [size · most, width], as dispatched → returned [tokens · choices, width]: of this rank's pairs, sorted;
                   y [tokens, width] = Σ_c weights[t, c] · returned[position[t, c]], in order of the choices and in at least fp32

The functions that end in ``_reference`` define them, over the lists of all ranks' operands. Each op's gradient is the other op. Where ranks
do not reach each other's memory (`autopar.kernels.providers`), rows go by an all_to_all of ``most`` rows for every pair of ranks, with the
same results.

Memory. Besides operands and results live, where peers write and kept for the next use of the same shapes: for dispatch ``size · most``
rows, for combine twice ``most`` rows. The all_to_all instead holds twice ``size · most`` rows until its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import bound
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.providers import peers_of, say_once
from autopar.kernels.routes import Combine, Dispatch, Routes, combine, dispatch
from autopar.kernels.sums import sum_dtype

_APART = "rows go to their experts by an all_to_all"


# --- definitions ----------------------------------------------------------------------------------------------------------------


def sorted_position(experts: Tensor) -> Tensor:
    """[tokens, choices] → the pair's place among the pairs sorted by expert, stably."""
    order = torch.argsort(experts.reshape(-1), stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view(experts.shape)


def moe_dispatch_reference(
    xs: Sequence[Tensor], experts: Sequence[Tensor], num_experts: int, most: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The definition: of every rank, rows, table and position."""
    size, width = len(xs), xs[0].shape[1]
    table = torch.stack([torch.bincount(chosen.reshape(-1), minlength=num_experts) for chosen in experts])
    pairs = [x.repeat_interleave(chosen.shape[1], 0) for x, chosen in zip(xs, experts, strict=True)]
    results = []
    for home in range(size):
        own = range(home * num_experts // size, (home + 1) * num_experts // size)
        rows = torch.cat([pair[chosen.reshape(-1) == expert] for expert in own for pair, chosen in zip(pairs, experts, strict=True)])
        padding = rows.new_zeros(size * most - len(rows), width)
        results.append((torch.cat([rows, padding]), table, sorted_position(experts[home])))
    return results


def moe_combine_reference(
    rows: Sequence[Tensor], table: Tensor, positions: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The definition: of every rank, y and returned. `table` is the same on all of them."""
    size, num_experts = table.shape
    blocks: list[list[Tensor]] = [[] for _ in range(size)]
    for expert in range(num_experts):  # homes follow one another, and so do their experts
        home = expert * size // num_experts
        first = table[:, home * num_experts // size : expert].sum()
        for sender in range(size):
            begin = int(first + table[:sender, expert].sum())
            blocks[sender].append(rows[home][begin : begin + int(table[sender, expert])])
    returned = [torch.cat(mine) for mine in blocks]
    return [(weighted_sum(mine, position, w), mine) for mine, position, w in zip(returned, positions, weights, strict=True)]


def weighted_sum(returned: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    """Σ_c weights[t, c] · returned[position[t, c]], one choice after another, in at least fp32; in the dtype of `returned`."""
    dtype = sum_dtype(returned.dtype)
    terms = [weights[:, c : c + 1].to(dtype) * returned[position[:, c]].to(dtype) for c in range(position.shape[1])]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.to(returned.dtype)


# --- operators ------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("autopar::moe_dispatch", mutates_args=())
def moe_dispatch(
    x: Tensor, experts: Tensor, num_experts: int, most: int, size: int, name: str, coordinate: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, table and position of this rank.

    Raises:
        ValueError: where the ranks do not have equally many experts, a pair's expert does not exist, or there are more pairs than `most`.
    """
    if num_experts % size or experts.numel() > most:
        raise ValueError(f"{num_experts} experts on {size} ranks, {experts.numel()} pairs of at most {most}: not evenly, or too many")
    group = AxisGroup(name, size, coordinate)
    if size > 1:
        peers, reason = peers_of(group, x.device)
        if peers is not None:
            job = Dispatch.of(x, experts, num_experts, most, size)
            dispatch(peers, Routes(x.shape[1] * x.element_size(), num_experts, size, most), {coordinate: job})
            return job.rows, job.table, job.position
        say_once(group, _APART, reason)
    return _dispatched(x, experts, num_experts, most, group)


@torch.library.custom_op("autopar::moe_combine", mutates_args=())
def moe_combine(
    rows: Tensor, table: Tensor, position: Tensor, weights: Tensor, size: int, name: str, coordinate: int
) -> tuple[Tensor, Tensor]:
    """y and returned of this rank; table and position are those of the dispatch."""
    group = AxisGroup(name, size, coordinate)
    if size > 1:
        peers, reason = peers_of(group, rows.device)
        if peers is not None:
            job = Combine.of(rows, table, position, weights)
            routes = Routes(rows.shape[1] * rows.element_size(), table.shape[1], size, rows.shape[0] // size)
            combine(peers, routes, {coordinate: job})
            return job.y, job.returned
        say_once(group, _APART, reason)
    returned = _returned(rows, table, group)
    return weighted_sum(returned, position, weights), returned


def _dispatched(x: Tensor, experts: Tensor, num_experts: int, most: int, group: AxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    """By an all_to_all: for every home the same room, its rows first."""
    chosen = experts.reshape(-1)
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < num_experts:
        raise ValueError(f"experts are numbered from 0 to {num_experts - 1}, not {int(chosen.min())} to {int(chosen.max())}")
    table = bound.all_gather(torch.bincount(chosen, minlength=num_experts)[None], 0, group.size, group.name)
    order = torch.argsort(chosen, stable=True)
    leaving = (x[order // experts.shape[1]]).split(_by_home(table[group.coordinate], group.size).tolist())
    sent = torch.stack([_filled(mine, most) for mine in leaving])
    come = bound.all_to_all(sent, 1, 0, group.size, group.name, group.coordinate).view(sent.shape)
    places = _places(table, group)
    return _filled(torch.cat([come[sender, begin : begin + count] for sender, begin, count in places]), group.size * most), table, (
        sorted_position(experts)
    )


def _returned(rows: Tensor, table: Tensor, group: AxisGroup) -> Tensor:
    """By an all_to_all, as `_dispatched`, the other way round."""
    most = rows.shape[0] // group.size
    sent, row = rows.new_zeros(group.size, most, rows.shape[1]), 0
    for sender, begin, count in _places(table, group):
        sent[sender, begin : begin + count] = rows[row : row + count]
        row += count
    come = bound.all_to_all(sent, 1, 0, group.size, group.name, group.coordinate).view(sent.shape)
    counts = _by_home(table[group.coordinate], group.size).tolist()
    return torch.cat([come[home, :count] for home, count in enumerate(counts)])


def _by_home(counts: Tensor, size: int) -> Tensor:
    """[num_experts] → [size]."""
    return counts.view(size, -1).sum(1)


def _places(table: Tensor, group: AxisGroup) -> list[tuple[int, int, int]]:
    """In the order in which this rank keeps what it receives: sender, where in the sender's rows for this rank, and how many."""
    own = table.view(group.size, group.size, -1)[:, group.coordinate]  # [sender, expert here]
    begins = own.cumsum(1) - own
    return [(s, int(begins[s, e]), int(own[s, e])) for e in range(own.shape[1]) for s in range(group.size)]


def _filled(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - rows.shape[0], rows.shape[1])])


# --- on fake tensors, and backward ----------------------------------------------------------------------------------------------


@moe_dispatch.register_fake
def _(
    x: Tensor, experts: Tensor, num_experts: int, most: int, size: int, name: str, coordinate: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(size * most, x.shape[1]), experts.new_empty(size, num_experts), experts.new_empty(experts.shape)


@moe_combine.register_fake
def _(
    rows: Tensor, table: Tensor, position: Tensor, weights: Tensor, size: int, name: str, coordinate: int
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(position.shape[0], rows.shape[1]), rows.new_empty(position.numel(), rows.shape[1])


def _keep_ways(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.group = inputs[-3:]
    ctx.save_for_backward(output[1], output[2])


def _dispatch_backward(ctx: Any, d_rows: Tensor, *_: object) -> tuple[Tensor | None, ...]:
    """Each pair's gradient comes back; a token's are added up."""
    table, position = ctx.saved_tensors
    ones = torch.ones(position.shape, dtype=sum_dtype(d_rows.dtype), device=d_rows.device)
    return torch.ops.autopar.moe_combine(d_rows, table, position, ones, *ctx.group)[0], *(None,) * 6


def _keep_returned(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, table, position, weights, *ctx.group = inputs
    ctx.most = rows.shape[0] // ctx.group[0]
    ctx.save_for_backward(table, position, weights, output[1])


def _combine_backward(ctx: Any, dy: Tensor, d_returned: Tensor) -> tuple[Tensor | None, ...]:
    """d_rows: what each pair had in y, dispatched again; d_weights[t, c] = dy[t] · returned[position[t, c]]."""
    table, position, weights, returned = ctx.saved_tensors
    dtype = sum_dtype(dy.dtype)
    ends = table[ctx.group[2]].cumsum(0)
    experts = torch.searchsorted(ends, position.view(-1), right=True).view(-1, 1)  # of each pair
    pairs = (weights.to(dtype)[:, :, None] * dy.to(dtype)[:, None]).flatten(0, 1).to(dy.dtype) + d_returned[position.view(-1)]
    d_rows = torch.ops.autopar.moe_dispatch(pairs, experts, table.shape[1], ctx.most, *ctx.group)[0]
    d_weights = (returned.to(dtype)[position.view(-1)].view(*position.shape, dy.shape[1]) * dy.to(dtype)[:, None]).sum(-1).to(weights.dtype)
    return d_rows, None, None, d_weights, None, None, None


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_ways)
moe_combine.register_autograd(_combine_backward, setup_context=_keep_returned)
