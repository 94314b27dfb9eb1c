"""Overlapped products on one device, with buffers and streams as virtual ranks, match their
references for all delays."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import row_cases
import torch
from native import WORLDS, needs_gpu, needs_nvcc
from norm_cases import EPS, ranks_of, same, scaled_ranks
from overlap_cases import whole_numbers
from route_cases import random_tokens
from torch import Tensor

from autopar.kernels import chunked, library, normed, overlapped, routed
from autopar.kernels.fused import (
    combine_all,
    dispatch_all,
    gather_all,
    scatter_all,
    scatter_norm_all,
    shards_of,
)
from autopar.kernels.peers import Blocks, VirtualRanks
from autopar.ops.expert_layers import Together

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nvcc]
COPIES = (None, Blocks(1), Blocks(4))
CYCLES = 200_000  # cycles of the device clock, about 0.1 ms


def random_delays(seed: int, share: float = 0.3) -> Callable[[int, int], None]:
    """Return a function that delays some ranks before a phase."""
    draw = random.Random(seed)

    def pause(rank: int, phase: int) -> None:
        if draw.random() < share:
            torch.cuda._sleep(draw.randrange(CYCLES))

    return pause


def to_cuda(tensors: list[Tensor]) -> list[Tensor]:
    return [x.cuda() for x in tensors]


@pytest.mark.parametrize("blocks", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize(
    ("equation", "left", "right", "which", "dim"),
    [
        ("mk,kn->mn", (131, 24), (24, 40), 0, 0),
        ("bsk,nk->bsn", (2, 67, 24), (40, 24), 0, 1),
        ("mk,nk->mn", (24, 8), (99, 8), 1, 0),
    ],
)
def test_overlapped_products_of_whole_numbers_are_exact(
    equation: str,
    left: tuple[int, ...],
    right: tuple[int, ...],
    which: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    blocks: Blocks | None,
) -> None:
    peers = VirtualRanks(size, "cuda", random_delays(size), blocks)
    operands = whole_numbers(left, 1, dtype) % 2, whole_numbers(right, 2, dtype) % 2
    pairs = [
        (whole_numbers(left, 2 * rank, dtype) % 2, whole_numbers(right, 2 * rank + 1, dtype) % 2)
        for rank in range(size)
    ]
    result_dim = equation.partition("->")[2].index(
        equation.partition("->")[0].split(",")[which][dim]
    )
    for num_chunks in (1, 2, 3):
        shards, others = (
            shards_of(operands[which], dim, size),
            [operands[1 - which] + rank % 2 for rank in range(size)],
        )
        results = gather_all(
            peers,
            equation,
            to_cuda(shards),
            to_cuda(others),
            which,
            dim,
            num_chunks,
        )
        for (whole, y), (expected, product) in zip(
            results,
            overlapped.all_gather_matmul_reference(equation, shards, others, which, dim),
            strict=True,
        ):
            assert torch.equal(whole.cpu(), expected)
            assert torch.equal(y.cpu(), product)
        parts = scatter_all(
            peers, equation, [(a.cuda(), b.cuda()) for a, b in pairs], result_dim, num_chunks
        )
        expected_parts = overlapped.matmul_reduce_scatter_reference(equation, pairs, result_dim)
        assert all(
            torch.equal(part.cpu(), expected)
            for part, expected in zip(parts, expected_parts, strict=True)
        )


@pytest.mark.parametrize("blocks", COPIES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_thousand_epochs_with_random_delays_need_no_reset(
    size: int, blocks: Blocks | None
) -> None:
    peers = VirtualRanks(size, "cuda", random_delays(7, 0.05), blocks)
    x, w = whole_numbers((67, 16), 1).cuda(), whole_numbers((16, 24), 2).cuda()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for epoch in range(1000):
        mine, other = x + epoch % 13, w - epoch % 5
        for whole, y in gather_all(
            peers, "mk,kn->mn", shards_of(mine, 0, size), [other] * size, 0, 0, 2
        ):
            wrong += (whole != mine).sum() + (y != mine @ other).sum()
        pairs = [(mine + rank, other) for rank in range(size)]
        wrong += (
            torch.cat(scatter_all(peers, "mk,kn->mn", pairs, 0, 2)) != sum(a @ b for a, b in pairs)
        ).sum()
    assert wrong.item() == 0
    assert all(regions.epochs == [1000] * size for regions in peers._regions.values())


@pytest.mark.parametrize("blocks", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", WORLDS)
def test_scattered_sums_always_equal_the_reference_bit_by_bit(
    size: int, dtype: torch.dtype, blocks: Blocks | None
) -> None:
    """The factor of each rank is the identity, so that results differ only if the order of the sum
    does."""
    generator = torch.Generator().manual_seed(3)
    values = [
        (torch.randn(1037, 40, generator=generator) * 4.0 ** (rank % 5)).to(dtype)
        for rank in range(size)
    ]
    pairs = [(value, torch.eye(40, dtype=dtype)) for value in values]
    expected = torch.cat(overlapped.matmul_reduce_scatter_reference("mk,kn->mn", pairs, 0))
    peers = VirtualRanks(size, "cuda", random_delays(size), blocks)
    for _ in range(20):
        total = torch.cat(
            scatter_all(peers, "mk,kn->mn", [(a.cuda(), b.cuda()) for a, b in pairs], 0, 2)
        )
        assert torch.equal(total.cpu(), expected)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", WORLDS)
def test_sums_with_residuals_and_norms_always_equal_the_reference_bit_by_bit(
    size: int, dtype: torch.dtype, rounded: bool
) -> None:
    equation, peers = "mk,kn->mn", VirtualRanks(size, "cuda", random_delays(size))
    for here in (
        scaled_ranks((1037, 40), size, dtype),
        ranks_of(equation, (131, 24), (24, 264), 0, size, dtype),
    ):
        there = here.moved("cuda")
        expected = normed.matmul_reduce_add_rmsnorm_reference(
            equation, here.pairs, here.residuals, here.weights, 0, EPS, rounded
        )
        for _ in range(20):
            results = scatter_norm_all(
                peers, equation, there.pairs, there.norms(rounded=rounded), 0, 2
            )
            assert same([[x.cpu() for x in parts] for parts in results], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", WORLDS)
def test_expert_dispatch_and_combine_match_the_reference(size: int, dtype: torch.dtype) -> None:
    peers = VirtualRanks(size, "cuda", random_delays(size))
    for choices, per_rank, seed in ((1, 1, 0), (2, 3, 1), (3, 2, 2), (2, 3, 3)):
        xs, experts, weights, most = random_tokens(size, choices, per_rank, seed)
        xs = [x.to(dtype) for x in xs]
        expected = routed.moe_dispatch_reference(xs, experts, size * per_rank, most)
        jobs = dispatch_all(peers, to_cuda(xs), to_cuda(experts), size * per_rank, most)
        assert all(
            torch.equal(job.rows.cpu(), parts[0]) for job, parts in zip(jobs, expected, strict=True)
        )
        assert all(
            torch.equal(job.position.cpu(), parts[2])
            for job, parts in zip(jobs, expected, strict=True)
        )
        wide = [w.to(torch.float64 if dtype == torch.float64 else torch.float32) for w in weights]
        expected_outputs = routed.moe_combine_reference(
            [part[0] for part in expected], expected[0][1], [part[2] for part in expected], wide
        )
        combined = combine_all(
            peers, [(job.rows, job.table, job.position) for job in jobs], to_cuda(wide)
        )
        assert all(
            torch.equal(job.y.cpu(), y)
            for job, (y, _) in zip(combined, expected_outputs, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", WORLDS)
def test_expert_layer_on_dispatched_rows_equals_the_local_layer(
    size: int, dtype: torch.dtype
) -> None:
    peers = VirtualRanks(size, "cuda", random_delays(size))
    for seed in range(6):
        here = row_cases.random_operands(size, 2, dtype, seed, h=(row_cases.H, 32)[seed % 2])
        ranks = [tuple(x.cuda() if isinstance(x, Tensor) else x for x in rank) for rank in here]
        assert row_cases.same(
            row_cases.both(ranks, row_cases.between(peers)), row_cases.both(ranks, Together)
        )


@pytest.mark.parametrize("blocks", COPIES)
def test_large_chunks_are_complete_when_they_are_signalled(blocks: Blocks | None) -> None:
    """Each chunk is read as soon as it is signalled, so that an incomplete copy of a block would be
    detected."""
    x = torch.arange(1 << 22, dtype=torch.int64, device="cuda").view(1 << 13, -1)
    peers = VirtualRanks(2, "cuda", None, blocks)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def job(rank: int, part: Tensor, epoch: int) -> chunked.Gather:
        whole = torch.full_like(x, -1)

        def check(begin: int, length: int) -> None:
            wrong.add_((whole[begin : begin + length] != x[begin : begin + length] + epoch).sum())

        return chunked.Gather(part + epoch, whole, check)

    shards = chunked.Shards.of(x.shape, 0, x.dtype, 2, 4)
    for epoch in range(20):
        chunked.gather(
            peers,
            shards,
            {rank: job(rank, part, epoch) for rank, part in enumerate(shards_of(x, 0, 2))},
        )
    assert wrong.item() == 0


def test_signal_before_its_data_gives_wrong_results() -> None:
    """Rank 1 signals long before it writes its shard, so that rank 0 reads the previous
    contents."""
    x, w = whole_numbers((64, 16), 1).cuda() + 4, whole_numbers((16, 8), 2).cuda()

    def gathered_by_rank_0(early: bool) -> Tensor:
        peers = VirtualRanks(
            2,
            "cuda",
            lambda rank, phase: (
                torch.cuda._sleep(400_000_000) if early and (rank, phase) == (1, 0) else None
            ),
        )
        regions = chunked.gather_regions(peers, chunked.Shards.of(x.shape, 0, x.dtype, 2, 1))
        regions.data[1].zero_()
        if early:
            regions.flags[1][0] = 1
        torch.cuda.synchronize()
        return gather_all(peers, "mk,kn->mn", shards_of(x, 0, 2), [w, w], 0, 0, 1)[0][0]

    assert torch.equal(gathered_by_rank_0(early=False), x)
    assert not torch.equal(gathered_by_rank_0(early=True), x)


def test_library_is_available() -> None:
    assert library.cuda() is not None, library.why_not("cuda")
