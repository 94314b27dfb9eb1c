"""A layer of experts as one op, on a part of the tokens or of the experts, and with tokens
dispatched between ranks.

Terms. A token *picks* p of the e experts, each with a *gate*, the weight of the expert's result. An
expert is a linear up, an activation and a linear down. A *gated* expert has two linears up, and
multiplies the activation of the first's result with the result of the second.

The rows of an expert's picks are gathered and go through its linears. Picks of experts that are not
on the rank cost nothing, and weights are not copied per pick. Values between the linears are not
kept: backward computes them again from the tokens. A part of the experts adds its part to every
token's result, so that the parts add up, although the activation is not linear. The number of rows
of an expert depends on the values, so these are opaque custom ops of torch, not calls of ATen;
torch differentiates `experts` by `experts_backward`. They hold the rows of one expert at a time.
These are scratch memory of a kernel, which no prediction of memory counts.
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
"""Name → activation, and its gradient given that of its result and its operand."""


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
    """``Σ gate · down(act(up x))`` over each token's picks, summed in at least float32.

    Args:
        x: tokens [t, h].
        ids: the experts that each picks [t, p]; a number that is none adds nothing.
        gates: [t, p].
        up: [e, g, f, h], where g is 2 for gated experts, else 1.
        down: [e, d, f].
        act: a name of `ACTS`.
        size: the number of all experts.
        start: where `up` and `down` are a part of the experts, the first one.

    Returns:
        [t, d], in the dtype of `x`; a part's results add up to the whole's.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(x.shape[0], down.shape[1], dtype=wide)
    weights = gates.reshape(-1)
    for expert, picks in _by_expert(ids, start, up.shape[0]):
        tokens = picks // ids.shape[1]
        made = forward_of(x[tokens], up[expert], down[expert], act)
        out.index_add_(0, tokens, made.to(wide) * weights[picks].to(wide).unsqueeze(-1))
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
    """Gradients of x, gates, up and down, given that of `experts`' result, `grad` [t, d]; the
    rest as there."""
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
        rows: [r, h].
        up: [g, f, h], where g is 2 for gated experts, else 1.
        down: [d, f].
        act: a name of `ACTS`.
        out: tensor for the result, or None.

    Returns:
        [r, d].
    """
    return torch.mm(_activate_hidden(_up(rows, up), act), down.t(), out=out)


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
        grad: gradients of the tokens' results [r, d], not yet multiplied by gates.
        rows: [r, h].
        gate: [r, 1].
        up, down, act: as for `forward_of`.
        out: tensor for the gradient of `rows`, or None.

    Returns:
        The gradients of rows [r, h], gates [r], up and down.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    hidden = _up(rows, up)
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
    """Each of `num` experts from `start` that is picked, counted from 0, with its picks,
    numbered in the flat order of `ids`."""
    local, order = (ids.reshape(-1) - start).sort(stable=True)
    ends = torch.searchsorted(
        local, torch.arange(num + 1, device=ids.device, dtype=local.dtype)
    ).tolist()
    for expert in range(num):
        if ends[expert] < ends[expert + 1]:
            yield expert, order[ends[expert] : ends[expert + 1]]


def _up(rows: Tensor, weight: Tensor) -> Tensor:
    """[r, h] and [g, f, h] → [r, g, f]."""
    return (rows @ weight.flatten(0, 1).t()).view(-1, *weight.shape[:2])


def _activate_hidden(hidden: Tensor, act: str) -> Tensor:
    """[r, g, f] → [r, f]."""
    made = ACTS[act][0](hidden[:, 0])
    return made * hidden[:, 1] if hidden.shape[1] == 2 else made


def _between_backward(grad: Tensor, hidden: Tensor, act: str) -> Tensor:
    """The gradient of `hidden` [r, g, f], given that of what `_between` makes of it, [r, f]."""
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


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_gates, d_up, d_down = experts_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return d_x, None, d_gates, d_up, d_down, None, None, None


_experts.register_autograd(_differentiate, setup_context=_remember)
experts = torch.ops.autopar.experts.default
experts_backward = torch.ops.autopar.experts_backward.default


# --------------------------------------------------------------------------------------------------
# A layer of experts (`autopar.ops.expert_layers`) whose tokens and experts are split over the same
# ranks: rows go to their experts and back.
#
# Terms. A rank has some of the tokens, with their picks and gates, and as many experts as each
# other, the ones from its *start* on. A *pair* is one pick of one token; its *home* is the rank
# that has the expert. A pick of no expert here has none, and adds nothing.
#
# dispatch each pair's row goes to its home, sorted by home, then by expert, then by token experts
# a home's rows go through its linears combine what they make comes back as it went, and is added
# up per token, times its gates
#
# None is dropped. What a token gets is added up expert by expert, and what a weight's gradient is
# made of lies token by token, as where nothing is split, so that numbers are the same but for the
# rounding of products of other sizes.
#
# Both functions work for a list of ranks, which an `Exchange` joins: one rank of a process, or
# all of them at once. Ranks first count how many rows go where, so that no more move than there
# are. The linears, and the sums, are opaque: the rows of one expert at a time, and a sum's terms,
# are a kernel's scratch.

Operands = tuple[Any, ...]
"""The operands of `experts` or of its gradient on one rank, with the starts of all ranks, in their
order, in place of its own start."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers of rows that a rank sends and receives.

    Attributes:
        leaving: rows sent to each home.
        coming: rows received from each sender, for each expert.
    """

    leaving: tuple[int, ...]
    coming: tuple[tuple[int, ...], ...]

    @property
    def by_sender(self) -> tuple[int, ...]:
        """Number of rows that come from each sender."""
        return tuple(sum(counts) for counts in self.coming)


What = Literal["rows", "gates"]
"""Kinds of data; after each count, each is sent once and sent back once."""


class Exchange(Protocol):
    """The exchange of rows between ranks. Each list has one item per rank that this process runs:
    one, or all."""

    @property
    def by_expert(self) -> bool:
        """Whether received rows are sorted by expert, then by sender; else by sender, then by
        expert."""

    def count(self, counts: list[Tensor], num_pairs: list[int]) -> list[Traffic]:
        """Exchange the numbers of each rank's pairs, `counts` [homes, experts of each].
        Implementations without real tensors estimate the traffic from `num_pairs`, all of them."""

    def send(
        self, what: What, tensors: list[Tensor], index: Sequence[Tensor], traffic: Sequence[Traffic]
    ) -> list[Tensor]:
        """Send rows of each rank's tensor to their homes, and return the received rows.

        The result may be in memory that is overwritten after the next count; so may that of
        `send_back`.

        Args:
            what: what is sent.
            tensors: rows [tokens, width] or gates; the list is emptied.
            index: the rows to send: those of the rank's pairs, sorted by home and expert.
            traffic: what `count` returned.
        """

    def send_back(self, what: What, rows: list[Tensor], traffic: Sequence[Traffic]) -> list[Tensor]:
        """Send the results of received rows back, and return those of the rows that each rank sent,
        in the order in which it sent them.

        Args:
            what: what was sent.
            rows: the results [received rows, width]; the list is emptied.
            traffic: what `count` returned.
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
class _Way:
    """The pairs of one rank [r] in the order in which they are sent, the token of each, and the
    traffic."""

    order: Tensor
    tokens: Tensor
    traffic: Traffic


def dispatched_experts(ranks: Sequence[Operands], exchange: Exchange) -> list[Tensor]:
    """Compute a layer of experts on several ranks with dispatched tokens.

    Args:
        ranks: operands of each rank: x, ids, gates, up, down, act, size, starts (see `Operands`).
        exchange: the exchange of rows between the ranks.

    Returns:
        The result of each rank's tokens [t, d].
    """
    ways = _ways([(ids, up, starts) for _, ids, _, up, _, _, _, starts in ranks], exchange)
    traffic = [way.traffic for way in ways]
    come = exchange.send("rows", [x for x, *_ in ranks], [way.tokens for way in ways], traffic)
    made = [
        experts_of_rows(come.pop(0), _places_of(way, exchange), up, down, act)
        for (_, _, _, up, down, act, *_), way in zip(ranks, ways, strict=True)
    ]
    back = exchange.send_back("rows", made, traffic)
    return [
        add_up(back.pop(0), way.order, *ids.shape, gates)
        for (_, ids, gates, *_), way in zip(ranks, ways, strict=True)
    ]


def dispatched_experts_backward(
    ranks: Sequence[Operands], exchange: Exchange
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Compute the gradients of `dispatched_experts`. Those of a rank's experts are complete: all
    ranks whose tokens picked them sent their rows.

    Args:
        ranks: operands of each rank: grad, x, ids, gates, up, down, act, size, starts.
        exchange: the exchange of rows between the ranks.

    Returns:
        The gradients of each rank's x, gates, up and down.
    """
    ways = _ways([(ids, up, starts) for _, _, ids, _, up, _, _, _, starts in ranks], exchange)
    pairs = list(zip(ranks, ways, strict=True))
    traffic = [way.traffic for way in ways]
    come = exchange.send(
        "rows",
        [torch.cat((grad, x), 1) for grad, x, *_ in ranks],
        [way.tokens for way in ways],
        traffic,
    )
    weights = exchange.send(
        "gates",
        [gates.reshape(-1, 1) for _, _, _, gates, *_ in ranks],
        [way.order for way in ways],
        traffic,
    )
    made = [
        experts_of_rows_backward(
            come.pop(0), weights.pop(0), _places_of(way, exchange), up, down, act
        )
        for (_, _, _, _, up, down, act, *_), way in pairs
    ]
    d_rows, d_weights, d_ups, d_downs = (list(results) for results in zip(*made, strict=True))
    made.clear()
    rows, gates_back = (
        exchange.send_back("rows", d_rows, traffic),
        exchange.send_back("gates", d_weights, traffic),
    )
    found = []
    for (_, _, ids, gates, *_), way in pairs:
        d_gates = torch.zeros_like(gates).reshape(-1)
        d_gates[way.order] = gates_back.pop(0).squeeze(1)
        d_x = add_up(rows.pop(0), way.order, *ids.shape, None)
        found.append((d_x, d_gates.view(gates.shape), d_ups.pop(0), d_downs.pop(0)))
    return found


DISPATCHED: tuple[Callable[..., list[Any]], ...] = (dispatched_experts, dispatched_experts_backward)
"""The functions that ranks call together. Local calls of them have three further arguments: the
most pairs of any rank, the mesh axis of the ranks, and whether rows are written into the memory of
peers, which does not change any number."""


def _ways(ranks: Sequence[tuple[Tensor, Tensor, Sequence[int]]], exchange: Exchange) -> list[_Way]:
    """From picks, up's weight and starts."""
    sorts = [_sorted_pairs(ids, starts, up.shape[0]) for ids, up, starts in ranks]
    traffic = exchange.count([counts for _, counts in sorts], [ids.numel() for ids, _, _ in ranks])
    orders = [order[: sum(each.leaving)] for (order, _), each in zip(sorts, traffic, strict=True)]
    return [
        _Way(o, o // ids.shape[1], each)
        for o, (ids, *_), each in zip(orders, ranks, traffic, strict=True)
    ]


def _sorted_pairs(ids: Tensor, starts: Sequence[int], num: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by home, expert and token, those without a home last; and how many there are
    [homes, num]."""
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


def _places_of(way: _Way, exchange: Exchange) -> list[int]:
    """Where rows of each sender and expert begin among those that come, as far as there are any,
    and behind them how many there are."""
    counts = list(itertools.chain.from_iterable(way.traffic.coming))
    num = len(way.traffic.coming[0])
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
    """What experts make of rows [r, h]: [r, d]; `places` says where those of each sender and expert
    begin, then how many they are."""
    made = rows.new_empty(rows.shape[0], down.shape[1])
    for expert, here in _dispatched_by_expert(places, up.shape[0]):
        room = _room(made, here)
        done = forward_of(_take_rows(rows, here), up[expert], down[expert], act, room)
        if room is None:
            _put_rows(made, here, done)
    return made


@torch.library.custom_op("autopar::experts_of_rows_backward", mutates_args=())
def _experts_of_rows_backward(
    rows: Tensor, gates: Tensor, places: list[int], up: Tensor, down: Tensor, act: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows [r, h], gates [r, 1], up and down; `rows` [r, d + h] are those of the
    results' gradients, and of the tokens."""
    d_rows, d_gates = rows.new_empty(rows.shape[0], up.shape[-1]), gates.new_empty(gates.shape)
    d_up, d_down = up.new_zeros(up.shape), down.new_zeros(down.shape)
    for expert, here in _dispatched_by_expert(places, up.shape[0]):
        grad, x = _take_rows(rows, here).split((down.shape[1], up.shape[-1]), 1)
        weights, room = (up[expert], down[expert]), _room(d_rows, here)
        d_x, d_gate, d_up[expert], d_down[expert] = backward_of(
            grad, x, _take_rows(gates, here), *weights, act, room
        )
        if room is None:
            _put_rows(d_rows, here, d_x)
        _put_rows(d_gates, here, d_gate.unsqueeze(1))
    return d_rows, d_gates, d_up, d_down


@torch.library.custom_op("autopar::add_up", mutates_args=())
def _add_up(rows: Tensor, order: Tensor, tokens: int, picks: int, gates: Tensor | None) -> Tensor:
    """Rows [r, w] of pairs `order` [r], times their gates where these are given, added up per token
    in that order: [tokens, w].

    In at least float32; the result is in the dtype of the rows.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    out = rows.new_zeros(tokens, rows.shape[1], dtype=wide)
    if len(order):
        place = torch.full((tokens * picks,), len(order), device=order.device)
        place[order] = torch.arange(len(order), device=order.device)
        places, which = place.view(tokens, picks).sort(1)
        for at, pick in zip(places.unbind(1), which.unbind(1), strict=True):
            term = rows[at.clamp(max=len(order) - 1)].to(wide)
            if gates is not None:
                term = term * gates.gather(1, pick.unsqueeze(1)).to(wide)
            out += torch.where((at < len(order)).unsqueeze(1), term, 0)
    return out.to(rows.dtype)


Places = list[tuple[int, int]]  # where rows begin, and how many there are
_ALIGNMENT = 64  # bytes, of what torch allocates on the CPU; on a device it is a multiple


def _dispatched_by_expert(places: Sequence[int], num: int) -> Iterator[tuple[int, Places]]:
    """Each expert that got rows, with where these are, in the senders' order; those that lie
    together are one."""
    size = len(places) // 2
    for expert in range(num):
        found: Places = []
        for begin, count in (
            (places[i], places[size + i]) for i in range(expert, size, num) if places[size + i]
        ):
            if found and sum(found[-1]) == begin:
                begin, count = found[-1][0], found.pop()[1] + count
            found.append((begin, count))
        if found:
            yield expert, found


def _take_rows(rows: Tensor, places: Places) -> Tensor:
    lying = _room(rows, places)
    return (
        torch.cat([rows[begin : begin + count] for begin, count in places])
        if lying is None
        else lying
    )


def _room(rows: Tensor, places: Places) -> Tensor | None:
    """Where they lie, if together and as an allocator would put them: a product may round
    otherwise where its operands begin elsewhere."""
    (begin, count), *others = places
    lying = rows[begin : begin + count]
    return None if others or lying.data_ptr() % _ALIGNMENT else lying


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
