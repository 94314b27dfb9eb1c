"""An expert layer as one op, which supports a part of the tokens or experts, and expert layers with
tokens dispatched between ranks.

Terms. A token *picks* p of the e experts, each with a *gate*, the weight of the expert's result. An
expert consists of an up projection, an activation and a down projection. A *gated* expert has two
up projections, and multiplies the activation of the first result by the second result.

The rows of the tokens that pick an expert are gathered and multiplied by its weights. Picks of
experts on other ranks need no work, and weights are not copied per pick. Intermediate values are
not stored: backward computes them again from the tokens. With a part of the experts, the results
are partial sums. The number of rows per expert depends on values, so these functions are opaque
custom ops of torch; the gradient of `experts` is `experts_backward`. They hold the rows of one
expert at a time, which are temporary memory of the op and not included in memory predictions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten
Act = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]

ACTS: Mapping[str, Act] = {
    "silu": (aten.silu.default, aten.silu_backward.default),
    "gelu": (aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": (
        lambda x: aten.gelu.default(x, approximate="tanh"),
        lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"),
    ),
    "relu": (aten.relu.default, lambda g, x: aten.threshold_backward.default(g, x, 0)),
    "relu2": (lambda x: aten.relu.default(x).square(), lambda g, x: 2 * g * aten.relu.default(x)),
}
"""Name → activation, and its gradient as a function of the result's gradient and the operand."""


@torch.library.custom_op("autopar::experts", mutates_args=())
def _experts(
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    act: str,
    size: int,
    start: int = 0,
) -> Tensor:
    """Return ``Σ gate · down(act(up x))`` over the picks of each token, summed in float32 or wider.

    Args:
        x: tokens, ``[t, h]``.
        ids: experts that each token picks, ``[t, p]``; other numbers contribute nothing.
        gates: weights of the picks, ``[t, p]``.
        up: up projections, ``[e, g, f, h]``, where g is 2 for gated experts, else 1.
        down: down projections, ``[e, d, f]``.
        act: name of the activation in `ACTS`.
        size: number of all experts.
        start: first expert, if `up` and `down` are a part of the experts.

    Returns:
        The results, ``[t, d]``, in the dtype of `x`; partial sums for a part of the experts.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape[0], down.shape[1], dtype=wide)
    weights = gates.reshape(-1)
    for expert, picks in _by_expert(ids, start, up.shape[0]):
        tokens = picks // ids.shape[1]
        result = forward_of(x[tokens], up[expert], down[expert], act)
        out.index_add_(0, tokens, result.to(wide) * weights[picks].to(wide).unsqueeze(-1))
    return out.to(x.dtype)


@torch.library.custom_op("autopar::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    act: str,
    size: int,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, gates, up and down, given the gradient ``[t, d]`` of the result of
    `experts`; the other arguments are as for `experts`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    d_x, d_gates = torch.zeros_like(x, dtype=wide), torch.zeros_like(gates).reshape(-1)
    d_up, d_down = up.new_zeros(up.shape), down.new_zeros(down.shape)
    weights = gates.reshape(-1)
    for expert, picks in _by_expert(ids, start, up.shape[0]):
        tokens, gate = picks // ids.shape[1], weights[picks].unsqueeze(-1)
        d_rows, d_gates[picks], d_up[expert], d_down[expert] = backward_of(
            grad[tokens], x[tokens], gate, up[expert], down[expert], act
        )
        d_x.index_add_(0, tokens, d_rows.to(wide))
    return d_x.to(x.dtype), d_gates.view(gates.shape), d_up, d_down


def forward_of(
    rows: Tensor, up: Tensor, down: Tensor, act: str, out: Tensor | None = None
) -> Tensor:
    """Compute one expert.

    Args:
        rows: rows of tokens, ``[r, h]``.
        up: up projections, ``[g, f, h]``, where g is 2 for gated experts, else 1.
        down: down projection, ``[d, f]``.
        act: name of the activation in `ACTS`.
        out: tensor for the result, or None.

    Returns:
        The results, ``[r, d]``.
    """
    return torch.mm(_activate_hidden(_project_up(rows, up), act), down.t(), out=out)


def backward_of(
    grad: Tensor,
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    act: str,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of one expert.

    Args:
        grad: gradients of the tokens' results, ``[r, d]``, not yet multiplied by gates.
        rows: rows of tokens, ``[r, h]``.
        gate: gates, ``[r, 1]``.
        up, down, act: as for `forward_of`.
        out: tensor for the gradient of `rows`, or None.

    Returns:
        The gradients of rows ``[r, h]``, gates ``[r]``, up and down.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    hidden = _project_up(rows, up)
    between = _activate_hidden(hidden, act)
    d_between = grad @ down
    d_gate = (d_between * between).sum(-1, dtype=wide).to(gate.dtype)
    d_down = (grad * gate).to(rows.dtype).t() @ between
    d_hidden = _between_backward((d_between * gate).to(rows.dtype), hidden, act).flatten(1)
    return (
        torch.mm(d_hidden, up.flatten(0, 1), out=out),
        d_gate,
        (d_hidden.t() @ rows).view(up.shape),
        d_down,
    )


def _by_expert(ids: Tensor, start: int, num: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each picked expert of the `num` experts from `start` on, counted from 0, and its picks
    as indices into the flat `ids`."""
    local, order = (ids.reshape(-1) - start).sort(stable=True)
    ends = torch.searchsorted(
        local, torch.arange(num + 1, device=ids.device, dtype=local.dtype)
    ).tolist()
    for expert in range(num):
        if ends[expert] < ends[expert + 1]:
            yield expert, order[ends[expert] : ends[expert + 1]]


def _project_up(rows: Tensor, weight: Tensor) -> Tensor:
    """Apply the up projections: ``[r, h]`` and ``[g, f, h]`` → ``[r, g, f]``."""
    return (rows @ weight.flatten(0, 1).t()).view(-1, *weight.shape[:2])


def _activate_hidden(hidden: Tensor, act: str) -> Tensor:
    """Apply the activation: ``[r, g, f]`` → ``[r, f]``."""
    activated = ACTS[act][0](hidden[:, 0])
    return activated * hidden[:, 1] if hidden.shape[1] == 2 else activated


def _between_backward(grad: Tensor, hidden: Tensor, act: str) -> Tensor:
    """Return the gradient of `hidden` ``[r, g, f]`` from that of `_activate_hidden` ``[r, f]``."""
    forward, backward = ACTS[act]
    if hidden.shape[1] == 1:
        return backward(grad, hidden[:, 0]).unsqueeze(1)
    return torch.stack(
        (backward(grad * hidden[:, 1], hidden[:, 0]), grad * forward(hidden[:, 0])), 1
    )


@_experts.register_fake
def _(x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1])


@_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(t.new_empty(t.shape) for t in (x, gates, up, down))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_gates, d_up, d_down = experts_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return d_x, None, d_gates, d_up, d_down, None, None, None


_experts.register_autograd(_differentiate, setup_context=_save_for_backward)
experts = torch.ops.autopar.experts.default
experts_backward = torch.ops.autopar.experts_backward.default


# --------------------------------------------------------------------------------------------------
# An expert layer whose tokens and experts are sharded over the same ranks (expert parallelism).
#
# Terms. A rank has a part of the tokens, with their picks and gates, and the experts from its
# *start* on; all ranks have the same number of experts. A *pair* is one pick of one token; its
# *home* is the rank with the expert. A pick that is not an expert has no home and no effect.
#
# - Dispatch: the row of each pair is sent to its home, sorted by home, expert and token.
# - Experts: the home computes the results of the rows that it receives.
# - Combine: the results are sent back, multiplied by their gates, and summed per token.
#
# No pair is dropped. The results of a token are summed in the order of experts, and the rows of an
# expert are in the order of tokens, as without sharding. Thus results are equal up to the rounding
# of matrix products of other sizes.
#
# Both functions take a list of ranks, between which an `Exchange` moves rows: the rank of this
# process, or all ranks in one process. Ranks first exchange the numbers of rows, so that only
# existing rows are sent. The projections and sums are opaque ops: the rows of one expert and the
# terms of a sum are temporary memory of an op.

Operands = tuple[Any, ...]
"""The operands of `experts` or of its gradient on one rank, with the starts of all ranks, in order,
instead of its own start."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers of rows that a rank sends and receives.

    Attributes:
        leaving: number of rows sent to each home.
        coming: number of rows received from each sender for each expert.
    """

    leaving: tuple[int, ...]
    coming: tuple[tuple[int, ...], ...]

    @property
    def by_sender(self) -> tuple[int, ...]:
        """Number of rows received from each sender."""
        return tuple(sum(counts) for counts in self.coming)


What = Literal["rows", "gates"]
"""Kinds of data; after each `count`, each kind is sent once and sent back once."""


class Exchange(Protocol):
    """The exchange of rows between ranks. Each list has one item per rank that this process runs:
    one rank, or all ranks."""

    @property
    def by_expert(self) -> bool:
        """Whether received rows are sorted by expert, then by sender; else by sender, then by
        expert."""

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        """Exchange the numbers of pairs of each rank, `counts` ``[homes, experts per home]``.
        Without real tensors, estimate the traffic from `num_pairs`, the total per rank."""

    def send(
        self, what: What, tensors: list[Tensor], index: Sequence[Tensor], traffic: Sequence[Traffic]
    ) -> list[Tensor]:
        """Send rows of each rank's tensor to their homes, and return the received rows.

        The memory of the result, and of that of `send_back`, may be overwritten after the next
        `count`.

        Args:
            what: kind of the data.
            tensors: rows ``[tokens, width]`` or gates; the list is emptied.
            index: the rows to send: those of the rank's pairs, sorted by home and expert.
            traffic: the result of `count`.
        """

    def send_back(self, what: What, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        """Send the results of received rows back, and return those of the rows that each rank sent,
        in the order in which it sent them.

        Args:
            what: kind of the data.
            rows: the results ``[received rows, width]``; the list is emptied.
            traffic: the result of `count`.
        """


@dataclass(frozen=True, slots=True)
class Together:
    """An `Exchange` of all ranks in one process."""

    by_expert: bool = False

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        """See `Exchange.count`."""
        table = [c.tolist() for c in counts]
        return [
            Traffic(
                tuple(map(sum, table[rank])),
                tuple(tuple(table[sender][rank]) for sender in range(len(table))),
            )
            for rank in range(len(table))
        ]

    def send(
        self, what: What, tensors: list[Tensor], index: Sequence[Tensor], traffic: Sequence[Traffic]
    ) -> list[Tensor]:
        """See `Exchange.send`."""
        return self._rows(
            [tensors.pop(0)[rows] for rows in index], [each.leaving for each in traffic]
        )

    def send_back(self, what: What, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        """See `Exchange.send_back`."""
        return self._rows(rows, [each.by_sender for each in traffic])

    def _rows(self, rows: list[Tensor], leaving: Sequence[Sequence[int]]) -> list[Tensor]:
        pieces = [mine.split(list(counts)) for mine, counts in zip(rows, leaving, strict=True)]
        rows.clear()
        return [torch.cat([sent[rank] for sent in pieces]) for rank in range(len(pieces))]


@dataclass(frozen=True, slots=True)
class _Route:
    """The pairs of one rank ``[r]`` in the order in which they are sent, the token of each, and the
    traffic."""

    order: Tensor
    tokens: Tensor
    traffic: Traffic


def dispatched_experts(ranks: Sequence[Operands], exchange: Exchange) -> list[Tensor]:
    """Compute an expert layer on several ranks with dispatched tokens.

    Args:
        ranks: operands of each rank: x, ids, gates, up, down, act, size, starts (see `Operands`).
        exchange: the exchange of rows between the ranks.

    Returns:
        The result of each rank's tokens, ``[t, d]``.
    """
    routes = _routes([(ids, up, starts) for _, ids, _, up, _, _, _, starts in ranks], exchange)
    traffic = [route.traffic for route in routes]
    received = exchange.send(
        "rows", [x for x, *_ in ranks], [route.tokens for route in routes], traffic
    )
    results = [
        experts_of_rows(received.pop(0), _places_of(route, exchange), up, down, act)
        for (_, _, _, up, down, act, *_), route in zip(ranks, routes, strict=True)
    ]
    back = exchange.send_back("rows", results, traffic)
    return [
        add_up(back.pop(0), route.order, *ids.shape, gates)
        for (_, ids, gates, *_), route in zip(ranks, routes, strict=True)
    ]


def dispatched_experts_backward(
    ranks: Sequence[Operands], exchange: Exchange
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Compute the gradients of `dispatched_experts`. Those of a rank's experts are complete, since
    the rank receives the rows of all tokens that pick them.

    Args:
        ranks: operands of each rank: grad, x, ids, gates, up, down, act, size, starts.
        exchange: the exchange of rows between the ranks.

    Returns:
        The gradients of each rank's x, gates, up and down.
    """
    routes = _routes([(ids, up, starts) for _, _, ids, _, up, _, _, _, starts in ranks], exchange)
    pairs = list(zip(ranks, routes, strict=True))
    traffic = [route.traffic for route in routes]
    received = exchange.send(
        "rows",
        [torch.cat((grad, x), 1) for grad, x, *_ in ranks],
        [route.tokens for route in routes],
        traffic,
    )
    weights = exchange.send(
        "gates",
        [gates.reshape(-1, 1) for _, _, _, gates, *_ in ranks],
        [route.order for route in routes],
        traffic,
    )
    row_gradients = [
        experts_of_rows_backward(
            received.pop(0), weights.pop(0), _places_of(route, exchange), up, down, act
        )
        for (_, _, _, _, up, down, act, *_), route in pairs
    ]
    d_rows, d_weights, d_ups, d_downs = (
        list(results) for results in zip(*row_gradients, strict=True)
    )
    row_gradients.clear()
    rows, gates_back = (
        exchange.send_back("rows", d_rows, traffic),
        exchange.send_back("gates", d_weights, traffic),
    )
    gradients = []
    for (_, _, ids, gates, *_), route in pairs:
        d_gates = torch.zeros_like(gates).reshape(-1)
        d_gates[route.order] = gates_back.pop(0).squeeze(1)
        d_x = add_up(rows.pop(0), route.order, *ids.shape, None)
        gradients.append((d_x, d_gates.view(gates.shape), d_ups.pop(0), d_downs.pop(0)))
    return gradients


DISPATCHED: tuple[Callable[..., list[Any]], ...] = (dispatched_experts, dispatched_experts_backward)
"""The functions that ranks call together. Local calls of them have three additional arguments: the
largest number of pairs of a rank, the mesh axis of the ranks, and whether rows are written into the
memory of peers, which does not affect results."""


def _routes(
    ranks: Sequence[tuple[Tensor, Tensor, Sequence[int]]], exchange: Exchange
) -> list[_Route]:
    """Return the pairs of each rank from its picks, its up projections and the starts."""
    sorts = [_sorted_pairs(ids, starts, up.shape[0]) for ids, up, starts in ranks]
    traffic = exchange.count([counts for _, counts in sorts], [ids.numel() for ids, _, _ in ranks])
    orders = [order[: sum(each.leaving)] for (order, _), each in zip(sorts, traffic, strict=True)]
    return [
        _Route(o, o // ids.shape[1], each)
        for o, (ids, *_), each in zip(orders, ranks, traffic, strict=True)
    ]


def _sorted_pairs(ids: Tensor, starts: Sequence[int], num: int) -> tuple[Tensor, Tensor]:
    """Return the pairs sorted by home, expert and token, with those without a home last, and their
    numbers ``[homes, num]``."""
    begins = torch.tensor(starts, device=ids.device, dtype=ids.dtype)
    home = torch.bucketize(ids, begins, right=True) - 1
    within = ids - begins[home.clamp(min=0)]
    has_home = (home >= 0) & (within < num)
    label, order = (
        torch.where(has_home, home * num + within, len(starts) * num).reshape(-1).sort(stable=True)
    )
    ends = torch.searchsorted(
        label, torch.arange(len(starts) * num + 1, device=ids.device, dtype=label.dtype)
    )
    return order, ends.diff().view(len(starts), num)


def _places_of(route: _Route, exchange: Exchange) -> list[int]:
    """Return the position of the rows of each sender and expert among the received rows, followed
    by the number of rows of each."""
    counts = list(itertools.chain.from_iterable(route.traffic.coming))
    num = len(route.traffic.coming[0])
    order = (
        sorted(range(len(counts)), key=lambda i: (i % num, i))
        if exchange.by_expert
        else range(len(counts))
    )
    begins, at = [0] * len(counts), 0
    for i in order:
        begins[i], at = at, at + counts[i]
    return [*begins, *counts]


@torch.library.custom_op("autopar::experts_of_rows", mutates_args=())
def _experts_of_rows(rows: Tensor, places: list[int], up: Tensor, down: Tensor, act: str) -> Tensor:
    """Return the results ``[r, d]`` of experts for rows ``[r, h]``; `places` has the position of
    the rows of each sender and expert, then their numbers."""
    results = rows.new_empty(rows.shape[0], down.shape[1])
    for expert, here in _dispatched_by_expert(places, up.shape[0]):
        out = _aligned_view(results, here)
        output = forward_of(_take_rows(rows, here), up[expert], down[expert], act, out)
        if out is None:
            _put_rows(results, here, output)
    return results


@torch.library.custom_op("autopar::experts_of_rows_backward", mutates_args=())
def _experts_of_rows_backward(
    rows: Tensor, gates: Tensor, places: list[int], up: Tensor, down: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of rows ``[r, h]``, gates ``[r, 1]``, up and down; `rows` ``[r, d + h]``
    contain the gradients of the results and the tokens."""
    d_rows, d_gates = rows.new_empty(rows.shape[0], up.shape[-1]), gates.new_empty(gates.shape)
    d_up, d_down = up.new_zeros(up.shape), down.new_zeros(down.shape)
    for expert, here in _dispatched_by_expert(places, up.shape[0]):
        grad, x = _take_rows(rows, here).split((down.shape[1], up.shape[-1]), 1)
        weights, out = (up[expert], down[expert]), _aligned_view(d_rows, here)
        d_x, d_gate, d_up[expert], d_down[expert] = backward_of(
            grad, x, _take_rows(gates, here), *weights, act, out
        )
        if out is None:
            _put_rows(d_rows, here, d_x)
        _put_rows(d_gates, here, d_gate.unsqueeze(1))
    return d_rows, d_gates, d_up, d_down


@torch.library.custom_op("autopar::add_up", mutates_args=())
def _add_up(rows: Tensor, order: Tensor, tokens: int, picks: int, gates: Tensor | None) -> Tensor:
    """Sum the rows ``[r, w]`` of the pairs `order` ``[r]``, multiplied by their gates if given, per
    token in this order: ``[tokens, w]``.

    Sums use at least float32; the result has the dtype of the rows.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    out = rows.new_zeros(tokens, rows.shape[1], dtype=wide)
    if len(order):
        place = torch.full((tokens * picks,), len(order), device=order.device)
        place[order] = torch.arange(len(order), device=order.device)
        places, pick_order = place.view(tokens, picks).sort(1)
        for at, pick in zip(places.unbind(1), pick_order.unbind(1), strict=True):
            term = rows[at.clamp(max=len(order) - 1)].to(wide)
            if gates is not None:
                term = term * gates.gather(1, pick.unsqueeze(1)).to(wide)
            out += torch.where((at < len(order)).unsqueeze(1), term, 0)
    return out.to(rows.dtype)


Places = list[tuple[int, int]]  # position and number of consecutive rows
_ALIGNMENT = 64  # bytes; alignment of torch's CPU allocations, and a divisor of that on devices


def _dispatched_by_expert(places: Sequence[int], num: int) -> Iterator[tuple[int, Places]]:
    """Yield each expert with rows, and the positions of its rows in the order of senders; adjacent
    ranges are merged."""
    size = len(places) // 2
    for expert in range(num):
        positions: Places = []
        for begin, count in (
            (places[i], places[size + i]) for i in range(expert, size, num) if places[size + i]
        ):
            if positions and sum(positions[-1]) == begin:
                begin, count = positions[-1][0], positions.pop()[1] + count
            positions.append((begin, count))
        if positions:
            yield expert, positions


def _take_rows(rows: Tensor, places: Places) -> Tensor:
    view = _aligned_view(rows, places)
    return (
        torch.cat([rows[begin : begin + count] for begin, count in places])
        if view is None
        else view
    )


def _aligned_view(rows: Tensor, places: Places) -> Tensor | None:
    """Return a view of the rows if they are contiguous and aligned like allocated memory, else
    None; the rounding of a matrix product may depend on the alignment of its operands."""
    (begin, count), *others = places
    view = rows[begin : begin + count]
    return None if others or view.data_ptr() % _ALIGNMENT else view


def _put_rows(rows: Tensor, places: Places, made: Tensor) -> None:
    for (begin, count), piece in zip(
        places, made.split([count for _, count in places]), strict=True
    ):
        rows[begin : begin + count] = piece


@_experts_of_rows.register_fake
def _(rows: Tensor, places: list[int], up: Tensor, down: Tensor, act: str) -> Tensor:
    return rows.new_empty(rows.shape[0], down.shape[1])


@_experts_of_rows_backward.register_fake
def _(
    rows: Tensor, gates: Tensor, places: list[int], up: Tensor, down: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        rows.new_empty(rows.shape[0], up.shape[-1]),
        gates.new_empty(gates.shape),
        up.new_empty(up.shape),
        down.new_empty(down.shape),
    )


@_add_up.register_fake
def _(rows: Tensor, order: Tensor, tokens: int, picks: int, gates: Tensor | None) -> Tensor:
    return rows.new_empty(tokens, rows.shape[1])


experts_of_rows = torch.ops.autopar.experts_of_rows.default
experts_of_rows_backward = torch.ops.autopar.experts_of_rows_backward.default
add_up = torch.ops.autopar.add_up.default
