"""The protocols of dispatch and combine (top of `autopar_csrc/moe_route.cu`), as phases; words as in `autopar.kernels.routed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.kernels import library
from autopar.kernels.peers import COMPUTE, Lane, Peers, Phase, Regions, addresses
from autopar.kernels.sums import sum_dtype

_LINE = 128


@dataclass(frozen=True, slots=True)
class Routes:
    """What all ranks know alike: bytes of a row, experts, ranks, and the most pairs of any rank."""

    row_bytes: int
    num_experts: int
    size: int
    most: int

    def regions(self, peers: Peers, name: str) -> Regions:
        """What the ranks share for ``dispatch`` or ``combine``."""
        rows = self.size * self.most if name == "dispatch" else self.most
        table = _lines(self.size * self.num_experts * 8)
        num_bytes = table + _lines(rows * self.row_bytes) if name == "dispatch" else 2 * _lines(rows * self.row_bytes)
        return peers.regions((name, self), num_bytes, 2 * self.size * _LINE // 8)

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


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
