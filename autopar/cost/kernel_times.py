"""What a collective-overlap kernel saves.

A kernel does a matrix product together with the collective at its border, chunk by chunk
(`autopar.kernels.fused`):

    all_gather_matmul       the product of what is gathered: a chunk is multiplied while the next is
                            on its way, a rank's own ones first
    matmul_reduce_scatter   the product whose partial sums are scattered: chunks for the others come
                            first, and leave while the next is made
    matmul_reduce_add_rmsnorm   the same, and what came is added up together with a residual and
                                normed (`reduce_add_rmsnorm`)

Where what is scattered is a sum of products, as a gradient of what several read, the last of them
adds the others' to each of its chunks. With n ranks and q chunks of each part that moves, m = (n −
1)·q of them, w seconds for the product of one, v for that of a rank's own part, which is not cut, c
to move one, r to add up what came and o to launch one thing more:

    all_gather_matmul       max(v + m·w, m·c + w)                     c = collective's time / m + o
    matmul_reduce_scatter   max(m·w + v, m·w + c, w + m·c) + r

What it saves is that against product and collective one after the other, times the share of it that
the profile says kernels reach; q is the one of 1, 2 and 4 that saves the most. Smaller products are
less efficient, which w, priced like any product, knows.

A norm in the same pass saves, beside what matmul_reduce_scatter does, r and the sum, the squares
and the norm after it, less one pass over n + 3 such parts: those that came, the residual, the sum
and the norm. The profile says which share of a copy's bandwidth that reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autopar.analysis.work import Work, computes_in, works
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Strategy
from autopar.cost.op_times import call_time, compute_time, local_info
from autopar.kernels import chunked
from autopar.kernels.chunked import Shards
from autopar.ops.products import bias_term
from autopar.rules import Call, TensorInfo

NAMES = {"all_gather": "all_gather_matmul", "reduce_scatter": "matmul_reduce_scatter"}
"""Kind of the collective → the kernel's name."""
TAIL = "reduce_add_rmsnorm"
"""What a kernel that norms does after its product."""
_CHUNKS = (1, 2, 4)
ADDITION = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a kernel shares with its peers along an axis, and keeps: all uses of equal shards
    there have it together (`autopar.kernels.chunked`)."""

    name: str
    shards: Shards

    @property
    def num_bytes(self) -> int:
        """On one rank."""
        return (
            self.shards.gather_bytes
            if self.name == NAMES["all_gather"]
            else self.shards.scatter_bytes
        )


@dataclass(frozen=True, slots=True)
class Site:
    """A product and a collective at its border, on one rank.

    Attributes:
        call, strategy: the product, and how it runs. kind, size: of the collective, over so many
            ranks.
        result_dim: of the product's result, the rows or columns that are gathered or scattered.
        adds: whether something like the result is added to it first. normed: the sum, the squares
            and the norm after it, if it does them.
    """

    call: Call
    strategy: Strategy
    mesh_shape: tuple[int, ...]
    kind: str
    size: int
    result_dim: int
    adds: bool = False
    normed: tuple[tuple[Call, Strategy], ...] = ()

    def infos(self, num: int = 1) -> tuple[list[TensorInfo], list[TensorInfo]]:
        """What one of `num` chunks of the product reads and makes."""
        *terms, result = terms_of(self.call)
        letter = result[self.result_dim]
        terms += [
            bias_term(str(self.call.args[0]), len(info.shape)) for info in self.call.inputs[2:]
        ]
        tensors = zip(
            (*self.call.inputs, *self.call.outputs),
            (*self.strategy.inputs, *self.strategy.outputs),
            (*terms, result),
            strict=True,
        )
        local = [
            (local_info(info, layout, self.mesh_shape), term) for info, layout, term in tensors
        ]
        cut = [
            TensorInfo(
                tuple(
                    -(-n // num) if at == letter else n for at, n in zip(t, i.shape, strict=True)
                ),
                i.dtype,
            )
            for i, t in local
        ]
        return cut[:-1], cut[-1:]

    def region(self, operand: int, dim: int, num_chunks: int) -> Region:
        """What it shares with its peers, on some axis, for a tensor whose `dim` moves.

        Args:
            operand: which factor is gathered; 2 for the result, which is scattered.
        """
        reads, makes = self.infos()
        info = (*reads[:2], *makes)[operand]
        return Region(
            NAMES[self.kind], Shards.of(info.shape, dim, info.dtype, self.size, num_chunks)
        )

    def seconds(self, profile: HardwareProfile, num: int = 1) -> float:
        """Of one of `num` chunks of the product, or of the sum."""
        reads, makes = self.infos(num)
        done = list(works(self.call.target, self.call.args, self.call.kwargs, reads, makes))
        if self.adds:
            done += works(ADDITION, (), {}, makes * 2, makes)
        return sum(times * compute_time(each, computes_in(reads), profile) for each, times in done)


def terms_of(call: Call) -> tuple[str, str, str]:
    """The terms of a product's equation."""
    return chunked.terms_of(str(call.args[0]))


def seconds_saved(site: Site, moved_s: float, profile: HardwareProfile) -> tuple[float, int]:
    """Seconds that the kernel saves, and in how many chunks a rank's part goes; nothing, where that
    costs more than it hides.

    Args:
        moved_s: the collective alone; no more is saved.
    """
    reached = profile.kernels.get(NAMES[site.kind], 0.0)
    product_s, most, best = site.seconds(profile), 0.0, 1
    for chunks in _CHUNKS if reached else ():
        if _length(site) % (site.size * chunks) == 0:
            hidden_s = min(
                product_s + moved_s - _together(site, moved_s, chunks, profile), product_s, moved_s
            )
            if hidden_s > most:
                most, best = hidden_s, chunks
    if not site.normed:
        return reached * most, best
    tail_s = _tail_s(site, profile) if most else 0.0
    return min(reached * most + tail_s, moved_s) if tail_s > 0.0 else 0.0, best


def _tail_s(site: Site, profile: HardwareProfile) -> float:
    """Seconds that the norm saves in the pass that adds up; nothing, where no profile says what
    that reaches."""
    reached = profile.kernels.get(TAIL, 0.0)
    if not reached:
        return 0.0
    apart_s = sum(
        call_time(call, strategy, site.mesh_shape, profile) for call, strategy in site.normed
    )
    return (
        _pass_s(site, site.size + 1, profile)
        + apart_s
        - _pass_s(site, site.size + 3, profile) / reached
    )


def _length(site: Site) -> int:
    """Of the rows or columns that are cut into chunks, on one rank."""
    return site.infos()[1][0].shape[site.result_dim]


def _together(site: Site, moved_s: float, chunks: int, profile: HardwareProfile) -> float:
    """Seconds of product and collective in chunks: see the module."""
    others = (site.size - 1) * chunks
    product_s, own_s = site.seconds(profile, site.size * chunks), site.seconds(profile, site.size)
    made_s, chunk_s = others * product_s + own_s, moved_s / others + profile.launch_overhead_s
    if site.kind == "all_gather":
        return max(made_s, others * chunk_s + product_s)
    return max(made_s, others * product_s + chunk_s, product_s + others * chunk_s) + _pass_s(
        site, site.size + 1, profile
    )


def _pass_s(site: Site, num: int, profile: HardwareProfile) -> float:
    """Seconds in which a rank reads and writes so many parts of what is scattered, once."""
    made = site.infos()[1][0]
    part_bytes = made.dtype.itemsize * math.prod(made.shape) // site.size
    return compute_time(Work(0, num * part_bytes, "elementwise"), made.dtype, profile)
