"""The protocols of dispatch and combine, and of rows of experts that are used where they come to lie, as phases.

They are at the tops of `autopar_csrc/moe_route.cu` and `autopar_csrc/expert_rows.cu`; words as in `autopar.kernels.routed`. All that ranks
share is `Routes.regions`, kept for the next use of the same name and routes, so that a model's layers share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.kernels import library
from autopar.kernels.lanes import COMPUTE, Lane, Phase
from autopar.kernels.peers import Peers, Regions, addresses
from autopar.kernels.sums import sum_dtype

MOST_RANKS = 64  # kMaxRanks of include/routes.h
_LINE = 128
COUNTS, ROWS, GATES, BACK = "counts", "rows", "gates", "back "
SHARED = COUNTS, ROWS, GATES, BACK + ROWS, BACK + GATES
"""Names of what a step of experts shares: counts, and for each that travels what is received and what comes back."""
_UNSEEN = 0, 1  # tokens and choices, where a step in C does not look at them


@dataclass(frozen=True, slots=True)
class Routes:
    """What all ranks know alike: bytes of a row, experts, ranks, and the most pairs of any rank."""

    row_bytes: int
    num_experts: int
    size: int
    most: int

    def regions(self, peers: Peers, name: str) -> Regions:
        """What the ranks share for ``dispatch``, ``combine`` or `SHARED`."""
        return peers.regions((name, self), *self._sizes(name))

    def num_bytes(self, name: str) -> int:
        """Of a rank's part of the regions, flags included."""
        data, words = self._sizes(name)
        return data + 8 * words

    def _sizes(self, name: str) -> tuple[int, int]:
        """A rank's bytes, and words of flags: a line for each peer, for dispatch and combine two."""
        table, lines_of = _lines(self.size * self.num_experts * 8), self.size * _LINE // 8
        received, returned = _lines(self.size * self.most * self.row_bytes), _lines(self.most * self.row_bytes)
        if name in ("dispatch", "combine"):
            return table + received if name == "dispatch" else 2 * returned, 2 * lines_of
        return {COUNTS: table, ROWS: received, GATES: received, BACK + ROWS: returned, BACK + GATES: returned}[name], lines_of

    def arguments(self, regions: Regions, pairs: Sequence[int], rank: int, epoch: int) -> tuple[object, ...]:
        """The last arguments of every step in C, for pairs [tokens, choices]."""
        native = library.NativeRoutes(*pairs, self.row_bytes, self.num_experts, self.size, rank, self.most)
        return addresses(regions.data), addresses(regions.flags), native, epoch


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A rank's part in `dispatch`: contiguous operands, and room for the results and for what is counted."""

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
        x, experts = x.contiguous(), experts.contiguous()
        made = [experts.new_empty(shape) for shape in ((size, num_experts), experts.shape, num_experts, experts.shape, 2 * num_experts + 1)]
        return Dispatch(x, experts, x.new_empty(size * most, x.shape[1]), *made)


def dispatch(peers: Peers, routes: Routes, jobs: Mapping[int, Dispatch]) -> None:
    """moe_dispatch for the ranks of `jobs`: with `VirtualRanks` all of them, in a rank's own thread or process that one."""
    regions = routes.regions(peers, "dispatch")
    last = {rank: routes.arguments(regions, job.experts.shape, rank, regions.begin(rank)) for rank, job in jobs.items()}

    def announce(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        lane.call("moe_dispatch_announce", *_pointers(job.experts, job.counts, job.within), *last[rank])

    def push(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        made = _pointers(job.x, job.experts, job.within, job.table, job.offsets, job.position)
        lane.call("moe_dispatch_push", *made, *last[rank])

    def collect(lane: Lane, rank: int) -> None:
        lane.call("moe_dispatch_collect", *_pointers(jobs[rank].offsets, jobs[rank].rows), *last[rank])

    peers.run(tuple(jobs), (Phase(COMPUTE, announce), Phase(COMPUTE, push), Phase(COMPUTE, collect)))


@dataclass(frozen=True, slots=True)
class Combine:
    """A rank's part in `combine`: contiguous operands, and room for the results."""

    rows: Tensor
    table: Tensor
    position: Tensor
    weights: Tensor
    returned: Tensor
    y: Tensor

    @staticmethod
    def of(rows: Tensor, table: Tensor, position: Tensor, weights: Tensor) -> Combine:
        width = rows.shape[1]
        made = rows.new_empty(position.numel(), width), rows.new_empty(position.shape[0], width)
        return Combine(rows.contiguous(), table.contiguous(), position.contiguous(), weights.to(sum_dtype(rows.dtype)).contiguous(), *made)


def combine(peers: Peers, routes: Routes, jobs: Mapping[int, Combine]) -> None:
    """moe_combine for the ranks of `jobs`, as in `dispatch`."""
    regions = routes.regions(peers, "combine")
    last = {rank: routes.arguments(regions, job.position.shape, rank, regions.begin(rank)) for rank, job in jobs.items()}

    def push(lane: Lane, rank: int) -> None:
        lane.call("moe_combine_push", *_pointers(jobs[rank].rows, jobs[rank].table), *last[rank])

    def add_up(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        made = _pointers(job.position, job.weights, job.returned, job.y)
        lane.call("moe_combine_sum", *made, library.code_of(job.y.dtype), *last[rank])

    peers.run(tuple(jobs), (Phase(COMPUTE, push), Phase(COMPUTE, add_up)))


def count(peers: Peers, num_experts: int, most: int, counts: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Of each rank the table of all ranks' counts, whose own are [num_experts]: with these a step of experts begins."""
    routes = Routes(0, num_experts, peers.size, most)
    regions = routes.regions(peers, COUNTS)
    own = {rank: mine.contiguous() for rank, mine in counts.items()}
    tables = {rank: mine.new_empty(peers.size, num_experts) for rank, mine in own.items()}
    last = {rank: routes.arguments(regions, _UNSEEN, rank, regions.begin(rank)) for rank in own}

    def announce(lane: Lane, rank: int) -> None:
        lane.call("expert_rows_announce", own[rank].data_ptr(), *last[rank])

    def copy_table(lane: Lane, rank: int) -> None:
        lane.call("expert_rows_table", tables[rank].data_ptr(), *last[rank])

    peers.run(tuple(own), (Phase(COMPUTE, announce), Phase(COMPUTE, copy_table)))
    return tables


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank's part in `send`: contiguous rows, where among them each sorted pair's is, or None for rows received, and the table."""

    rows: Tensor
    index: Tensor | None
    table: Tensor


def send(peers: Peers, name: str, num_experts: int, most: int, jobs: Mapping[int, Sent]) -> dict[int, Tensor]:
    """Of each rank what came, as bytes where it lies: rows of pairs that are received, or rows received that are back, sorted.

    They are valid until the rank counts again, and each name is used once in a step.
    """
    some = next(iter(jobs.values())).rows
    routes = Routes(some.shape[1] * some.element_size(), num_experts, peers.size, most)
    regions = routes.regions(peers, name)
    last = {rank: routes.arguments(regions, _UNSEEN, rank, regions.begin(rank)) for rank in jobs}

    def push(lane: Lane, rank: int) -> None:
        job = jobs[rank]
        if job.index is None:
            lane.call("expert_rows_return", *_pointers(job.rows, job.table), *last[rank])
        else:
            lane.call("expert_rows_push", *_pointers(job.rows, job.index, job.table), *last[rank])

    def wait(lane: Lane, rank: int) -> None:
        lane.call("expert_rows_await", *last[rank])

    peers.run(tuple(jobs), (Phase(COMPUTE, push), Phase(COMPUTE, wait)))
    return {rank: regions.data[rank] for rank in jobs}


def shared_regions(
    features: int, made: int, num_here: int, size: int, most: int, itemsize: int, gate_itemsize: int, *, backward: bool
) -> dict[tuple[str, Routes], int]:
    """What a rank of a step of experts whose rows are routed shares with its peers, and keeps: bytes by name and routes, flags included.

    Args:
        features: of a token. made: of what experts make. num_here: experts of a rank. most: pairs of a rank.
        itemsize: bytes of an element of tokens and of what experts make. gate_itemsize: of a gate.
    """

    def routes(row_bytes: int) -> Routes:
        return Routes(row_bytes, num_here * size, size, most)

    if backward:
        rows = {ROWS: (made + features) * itemsize, GATES: gate_itemsize, BACK + ROWS: features * itemsize, BACK + GATES: gate_itemsize}
    else:
        rows = {ROWS: features * itemsize, BACK + ROWS: made * itemsize}
    keys = [(COUNTS, routes(0)), *((name, routes(row_bytes)) for name, row_bytes in rows.items())]
    return {(name, of): of.num_bytes(name) for name, of in keys}


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
