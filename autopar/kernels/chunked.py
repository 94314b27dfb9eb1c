"""The protocols of the overlapped products, and products in chunks.

The protocols are lists of phases that any provider of `autopar.kernels.peers` can run. They view a
tensor as [outer, rows, row] along the sharded dim, like `autopar_csrc/include/shards.h`. They are
described at the top of `autopar_csrc/all_gather_matmul.cu` and
`autopar_csrc/matmul_reduce_scatter.cu`. The caller defines the computation for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.core.layout import part_range
from autopar.kernels import library
from autopar.kernels.peers import COMPUTE, COPY, Lane, Peers, Regions, TransferPhase, addresses
from autopar.ops.products import bias_term, dot

_SLOT_ALIGNMENT = 128  # kSlotAlignment
_FLAG_WORDS = 16  # kFlagWords
_WORD_BYTES = 8
REDUCIBLE = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64}
)
"""Dtypes that `scatter` can sum."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The division of a tensor [outer, rows, row] along its rows, over ranks and chunks.

    Attributes:
        outer, rows: the lengths of the first two dims.
        row_bytes: the size of a row in bytes.
        size: the number of ranks.
        num_chunks: the number of chunks of each rank's rows.
    """

    outer: int
    rows: int
    row_bytes: int
    size: int
    num_chunks: int

    @staticmethod
    def of(
        shape: Sequence[int], dim: int, dtype: torch.dtype, size: int, num_chunks: int
    ) -> Shards:
        """Return the shards of a tensor.

        Args:
            shape, dtype: the shape and dtype of the full tensor.
            dim: the sharded dim.
            size: the number of ranks.
            num_chunks: the number of chunks of each rank's rows.
        """
        return Shards(
            prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]) * dtype.itemsize, size, num_chunks
        )

    def struct_for(self, rank: int) -> library.NativeShards:
        """Return the C struct for a rank."""
        return library.NativeShards(
            self.outer, self.rows, self.row_bytes, self.size, rank, self.num_chunks
        )

    def gathered_order(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over the chunks in the order in which `gather` multiplies them. Yield the
        position, the chunk, the first row and the number of rows. The shard of the rank is first,
        followed by those of the next ranks."""
        return self._order(rank)

    def scattered_order(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over the chunks like `gathered_order`, but begin with the rows of the next rank
        and end with those of the rank."""
        return self._order(rank + 1)

    def _order(self, first: int) -> Iterator[tuple[int, int, int, int]]:
        for position in range(self.size):
            owner = (first + position) % self.size
            for chunk in range(self.num_chunks):
                yield (
                    position,
                    chunk,
                    *part_range(self.rows, (self.size, self.num_chunks), (owner, chunk)),
                )

    @property
    def slot_bytes(self) -> int:
        """The size of a slot in bytes. A slot has room for the shard of any rank."""
        return _rounded_up(self.outer * -(-self.rows // self.size) * self.row_bytes)

    @property
    def num_flag_words(self) -> int:
        """The number of 64-bit words of a rank's flags."""
        return (1 + self.size + self.size * self.num_chunks) * _FLAG_WORDS

    @property
    def gather_bytes(self) -> int:
        """The bytes of a rank's shared memory for `gather`: two slots for its shard, and flags."""
        return 2 * self.slot_bytes + _WORD_BYTES * self.num_flag_words

    @property
    def scatter_bytes(self) -> int:
        """The bytes of a rank's shared memory for `scatter`: two slots for each rank's partial
        product of its rows, and flags."""
        return 2 * self.size * self.slot_bytes + _WORD_BYTES * self.num_flag_words

    def inbox_offset(self, epoch: int, rank: int) -> int:
        """Return the offset, in bytes, of the partial product from `rank` in an inbox."""
        return (epoch % 2 * self.size + rank) * self.slot_bytes


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Gather:
    """The job of a rank in `gather`.

    Attributes:
        shard: the contiguous shard of the rank.
        gathered: the contiguous full tensor, which is filled.
        consume: called with the first row and the number of rows as soon as these rows are in
            `gathered`.
    """

    shard: Tensor
    gathered: Tensor
    consume: Callable[[int, int], None]


def gather(peers: Peers, shards: Shards, jobs: Mapping[int, Gather]) -> None:
    """Run all_gather_matmul for some ranks.

    Args:
        peers: the provider.
        shards: the division of the tensor.
        jobs: the job of each rank: of all ranks with `VirtualRanks`, otherwise of one rank in its
            thread or process.
    """
    regions = gather_regions(peers, shards)
    epochs = {rank: regions.begin(rank) for rank in jobs}

    def publish(lane: Lane, rank: int) -> None:
        """Copy the shard of the rank to memory that its peers read."""
        job = jobs[rank]
        rank_addresses = (
            regions.data[rank].data_ptr(),
            job.gathered.data_ptr(),
            regions.flags[rank].data_ptr(),
        )
        lane.call(
            "all_gather_matmul_publish",
            job.shard.data_ptr(),
            *rank_addresses,
            shards.struct_for(rank),
            epochs[rank],
        )

    def pull(lane: Lane, rank: int) -> None:
        """Copy the shards of the peers into the gathered tensor."""
        all_ranks = addresses(regions.data), addresses(regions.flags)
        peers.move(
            lane,
            "all_gather_matmul_pull",
            jobs[rank].gathered.data_ptr(),
            *all_ranks,
            shards.struct_for(rank),
            epochs[rank],
        )

    def consume(lane: Lane, rank: int) -> None:
        """Multiply the rows of the rank, then each chunk when it arrives."""
        rank_addresses = regions.flags[rank].data_ptr(), shards.struct_for(rank)
        # the rows of the rank are available, and one product is faster than several
        _multiply_at_once(shards, rank, jobs[rank].consume)
        for position, chunk, begin, length in shards.gathered_order(rank):
            if position > 0:
                lane.call("all_gather_matmul_wait", *rank_addresses, position, chunk, epochs[rank])
                if length > 0:
                    jobs[rank].consume(begin, length)

    peers.run(
        tuple(jobs),
        (
            TransferPhase(COMPUTE, publish),
            TransferPhase(COPY, pull),
            TransferPhase(COMPUTE, consume),
        ),
    )


def gather_regions(peers: Peers, shards: Shards) -> Regions:
    """Return the shared memory of `gather`: two slots per rank for its shard."""
    return peers.regions(
        ("all_gather_matmul", shards), 2 * shards.slot_bytes, shards.num_flag_words
    )


@dataclass(frozen=True, slots=True)
class Scatter:
    """The job of a rank in `scatter`.

    Attributes:
        partial: contiguous memory for the full partial product. The rows of this rank are not used.
        out: the contiguous rows of the sum that belong to this rank. They are filled.
        produce: called with the first row, the number of rows, and the tensor for their partial
            product.
        add_up: called when all partial products of this rank's rows have arrived, with these
            partial products in rank order, each with the shape of `out`. It fills `out`, and may
            compute other results in the same pass. The partial products are valid until it returns
            or, on a GPU, until its enqueued work has run. If it is None, they are summed.
    """

    partial: Tensor
    out: Tensor
    produce: Callable[[int, int, Tensor], None]
    add_up: Callable[[Sequence[Tensor]], None] | None = None


def scatter(peers: Peers, shards: Shards, dim: int, jobs: Mapping[int, Scatter]) -> None:
    """Run matmul_reduce_scatter for some ranks.

    Args:
        peers: the provider.
        shards: the division of the product.
        dim: the dim that is scattered.
        jobs: the job of each rank; see `gather`.
    """
    regions = scatter_regions(peers, shards)
    epochs = {rank: regions.begin(rank) for rank in jobs}

    def produce(lane: Lane, rank: int) -> None:
        """Compute the partial products of the other ranks' rows, then that of the rank's rows."""
        job, rank_addresses = jobs[rank], (regions.flags[rank].data_ptr(), shards.struct_for(rank))
        mine = _slot(shards, regions, rank, epochs[rank], job.out, rank)
        for position, chunk, begin, length in shards.scattered_order(rank):
            if position < shards.size - 1:
                if length > 0:
                    job.produce(begin, length, job.partial.narrow(dim, begin, length))
                lane.call(
                    "matmul_reduce_scatter_produced", *rank_addresses, position, chunk, epochs[rank]
                )
        # no other rank waits for chunks of these rows
        _multiply_at_once(shards, rank, lambda begin, length: job.produce(begin, length, mine))

    def push(lane: Lane, rank: int) -> None:
        """Copy each chunk to the rank that owns it as soon as it is computed."""
        all_ranks = addresses(regions.data), addresses(regions.flags)
        peers.move(
            lane,
            "matmul_reduce_scatter_push",
            jobs[rank].partial.data_ptr(),
            *all_ranks,
            shards.struct_for(rank),
            epochs[rank],
        )

    def add_up(lane: Lane, rank: int) -> None:
        """Sum the partial products of the rank's rows."""
        out, flags, then = jobs[rank].out, regions.flags[rank].data_ptr(), jobs[rank].add_up
        lane.call("matmul_reduce_scatter_arrive", flags, shards.struct_for(rank), epochs[rank])
        if then is not None:
            then(
                [
                    _slot(shards, regions, rank, epochs[rank], out, sender)
                    for sender in range(shards.size)
                ]
            )
            return
        rank_addresses = (
            regions.data[rank].data_ptr(),
            out.data_ptr(),
            out.numel(),
            library.code_of(out.dtype),
        )
        lane.call(
            "matmul_reduce_scatter_reduce", *rank_addresses, shards.struct_for(rank), epochs[rank]
        )

    peers.run(
        tuple(jobs),
        (
            TransferPhase(COMPUTE, produce),
            TransferPhase(COPY, push),
            TransferPhase(COMPUTE, add_up),
        ),
    )


def scatter_regions(peers: Peers, shards: Shards) -> Regions:
    """Return the shared memory of `scatter`: two slots per rank for each rank's partial product of
    its rows."""
    return peers.regions(
        ("matmul_reduce_scatter", shards),
        2 * shards.size * shards.slot_bytes,
        shards.num_flag_words,
    )


def _slot(
    shards: Shards, regions: Regions, rank: int, epoch: int, out: Tensor, sender: int
) -> Tensor:
    """Return the partial product from `sender` in the rank's inbox, with the shape and dtype of
    `out`."""
    begin = shards.inbox_offset(epoch, sender)
    return (
        regions.data[rank][begin : begin + out.numel() * out.element_size()]
        .view(out.dtype)
        .view(out.shape)
    )


def _multiply_at_once(shards: Shards, rank: int, multiply: Callable[[int, int], None]) -> None:
    """Multiply the rows of the rank in one product."""
    begin, length = part_range(shards.rows, (shards.size,), (rank,))
    if length > 0:
        multiply(begin, length)


# --------------------------------------------------------------------------------------------------
# Products of two tensors in chunks along one letter of an Einstein summation
# (`autopar.kernels.overlapped`).

T = TypeVar("T")


def terms_of(equation: str) -> tuple[str, str, str]:
    """Split an equation into its left operand, right operand and result.

    Raises:
        ValueError: if there are not three terms.
    """
    terms = tuple(term.strip() for side in equation.split("->") for term in side.split(","))
    if len(terms) != 3:
        raise ValueError(f"not a product of two operands: {equation!r}")
    return terms[0], terms[1], terms[2]


def check_chunked(equation: str, letter: str, num_chunks: int) -> None:
    """Check that a product can be computed in chunks along a letter.

    Args:
        equation: the equation of the product.
        letter: the letter of the dim that is divided.
        num_chunks: the number of chunks of a shard.

    Raises:
        ValueError: if the letter is not in the result and an operand, or the number of chunks is
            less than 1.
    """
    left_term, right, result = terms_of(equation)
    if letter not in result or letter not in left_term + right:
        raise ValueError(
            f"{equation!r} cannot be computed in chunks along {letter!r}: it must be in the"
            " result and in an operand"
        )
    if num_chunks < 1:
        raise ValueError(f"a shard cannot be split into {num_chunks} chunks")


@lru_cache(maxsize=4096)
def _as_mm(equation: str) -> tuple[bool, int, bool] | None:
    """Return how an equation can be computed by one `mm` of views of contiguous tensors; None if it
    cannot.

    Returns:
        Whether the right operand is the first factor, the number of dims of the first factor that
        form its rows, and whether the second factor is transposed.
    """
    left_term, right, result = terms_of(equation)
    inner = "".join(letter for letter in left_term if letter not in result)
    for swapped, first, second in ((False, left_term, right), (True, right, left_term)):
        rows, columns = first.removesuffix(inner), second.removeprefix(inner)
        if first == rows + inner and second == inner + columns and result == rows + columns:
            return swapped, len(rows), False
        columns = second.removesuffix(inner)
        if first == rows + inner and second == columns + inner and result == rows + columns:
            return swapped, len(rows), True
    return None


def multiply(equation: str, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``a · b``, plus a bias as in `autopar.ops.dot`.

    Args:
        equation: the equation of the product.
        a, b: the factors.
        bias: the bias, or None.
    """
    return torch.einsum(equation, a, b) if bias is None else dot(equation, a, b, bias)


def multiply_into(
    equation: str, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None
) -> None:
    """Compute ``out = a · b``, plus a bias. If possible, torch's matmul writes into `out`;
    otherwise the result is copied.

    Args:
        equation: the equation of the product.
        a, b: the factors.
        out: the tensor that is filled with the result.
        bias: the bias, or None.
    """
    form = _as_mm(equation)
    if form is None or not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
        out.copy_(multiply(equation, a, b, bias))
        return
    swapped, num_rows, transposed = form
    first, second = (b, a) if swapped else (a, b)
    num_inner = first.dim() - num_rows
    rows, inner = first.shape[:num_rows].numel(), first.shape[num_rows:].numel()
    column_shape = (
        second.shape[: second.dim() - num_inner] if transposed else second.shape[num_inner:]
    )
    columns = column_shape.numel()
    factor = second.view(columns, inner).t() if transposed else second.view(inner, columns)
    if bias is None:
        torch.mm(first.view(rows, inner), factor, out=out.view(rows, columns))
    elif bias.shape == column_shape:
        torch.addmm(
            bias.reshape(columns), first.view(rows, inner), factor, out=out.view(rows, columns)
        )
    else:
        out.copy_(dot(equation, a, b, bias))


def result_shape(equation: str, a: Tensor, b: Tensor) -> list[Any]:
    """Return the shape of a product. Its lengths may be symbolic.

    Args:
        equation: the equation of the product.
        a, b: the factors.
    """
    left_term, right, result = terms_of(equation)
    sizes = {**dict(zip(left_term, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    return [sizes[letter] for letter in result]


def in_order(which: int, mine: T, other: T) -> tuple[T, T]:
    """Return two values in the order of the equation's operands.

    Args:
        which: the position of `mine`, 0 or 1.
        mine, other: the values.
    """
    return (mine, other) if which == 0 else (other, mine)


def cut_bias(
    bias: Tensor | None, equation: str, letter: str, begin: int, length: int
) -> Tensor | None:
    """Return the part of a bias for some rows of the result, like `cut_rows` for operands.

    Args:
        bias: the bias, or None.
        equation: the equation of the product.
        letter: the letter of the rows.
        begin, length: the first row and the number of rows.
    """
    return (
        None
        if bias is None
        else cut_rows([bias_term(equation, bias.dim())], [bias], letter, begin, length)[0]
    )


def cut_rows(
    terms: Sequence[str], tensors: Sequence[Tensor], letter: str, begin: int, length: int
) -> list[Tensor]:
    """Return the given rows of each tensor that has the letter. Other tensors are unchanged.

    Args:
        terms: the letters of each tensor.
        tensors: the tensors.
        letter: the letter of the rows.
        begin, length: the first row and the number of rows.
    """
    return [
        x.narrow(term.index(letter), begin, length) if letter in term else x
        for term, x in zip(terms, tensors, strict=True)
    ]
