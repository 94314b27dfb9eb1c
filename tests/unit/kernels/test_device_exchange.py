"""The device code of overlapped products and expert routing, emulated on the CPU with virtual ranks
and streams, gives the results of the references."""

from __future__ import annotations

import logging
import math

import pytest
import row_cases
import torch
from native import needs_host
from norm_cases import EPS, NORMED, ranks_of, same
from overlap_cases import whole_numbers
from route_cases import random_tokens

from autopar.errors import KernelError
from autopar.kernels import library, normed, overlapped, routed
from autopar.kernels.chunked import Gather, Shards, gather
from autopar.kernels.fused import (
    combine_all,
    dispatch_all,
    gather_all,
    scatter_all,
    scatter_norm_all,
    shards_of,
)
from autopar.kernels.normed import FLOATS
from autopar.kernels.peers import Blocks, VirtualRanks
from autopar.ops.expert_layers import Together

pytestmark = needs_host


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_KERNELS", "emulated")
    assert library.host() is not None, library.why_not()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("equation", ["mk,kn->mn", "bmk,kn->bmn"])
@pytest.mark.parametrize("width", [3, 40])  # outer dims are copied together or one by one
@pytest.mark.parametrize("blocks", [None, Blocks(1), Blocks(3)])
def test_overlapped_products_equal_their_references(
    equation: str, size: int, width: int, blocks: Blocks | None
) -> None:
    peers, dim = VirtualRanks(size, blocks=blocks), equation.index("m")
    shape = [{"b": 2, "m": 7, "k": width}[letter] for letter in equation.partition(",")[0]]
    for epoch in range(1, 4):
        x, w = whole_numbers(shape, epoch), whole_numbers((width, 6), 7)
        shards, others = shards_of(x, dim, size), [w + rank for rank in range(size)]
        results = gather_all(peers, equation, shards, others, 0, dim, 2)
        expected = overlapped.all_gather_matmul_reference(equation, shards, others, 0, dim)
        assert all(
            torch.equal(a, b)
            for pair in zip(results, expected, strict=True)
            for a, b in zip(*pair, strict=True)
        )
        pairs = [(x + rank, other) for rank, other in enumerate(others)]
        parts = scatter_all(peers, equation, pairs, dim, 2)
        expected_parts = overlapped.matmul_reduce_scatter_reference(equation, pairs, dim)
        assert all(torch.equal(a, b) for a, b in zip(parts, expected_parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(601, 513), (2, 301, 516), (3, 7, 5)])
def test_block_copies_with_many_iterations_are_complete(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The copies use units of 16 bytes, 4 bytes and 1 byte, and contiguous and strided runs."""
    x, dim = (torch.arange(math.prod(shape)) % 251).reshape(shape).to(dtype), len(shape) - 2
    peers = VirtualRanks(3, blocks=Blocks(2))
    parts, shards = shards_of(x, dim, 3), Shards.of(x.shape, dim, dtype, 3, 2)
    for epoch in range(2):
        expected = x + epoch
        jobs = {
            rank: Gather(part + epoch, torch.zeros_like(x), lambda begin, length: None)
            for rank, part in enumerate(parts)
        }
        gather(peers, shards, jobs)
        assert all(torch.equal(job.gathered, expected) for job in jobs.values())


def test_rate_limited_block_copies_are_complete() -> None:
    x = torch.arange(3 << 15, dtype=torch.uint8).reshape(-1, 1)
    jobs = {
        rank: Gather(part, torch.zeros_like(x), lambda begin, length: None)
        for rank, part in enumerate(shards_of(x, 0, 3))
    }
    gather(VirtualRanks(3, blocks=Blocks(2, 1e9)), Shards.of(x.shape, 0, x.dtype, 3, 1), jobs)
    assert all(torch.equal(job.gathered, x) for job in jobs.values())


def test_block_copies_are_only_available_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_KERNELS")
    with pytest.raises(KernelError, match="block copies"):
        VirtualRanks(2, blocks=Blocks())


@pytest.mark.parametrize("blocks", [Blocks(0), Blocks(1 << 16), Blocks(1, -1.0)])
def test_invalid_block_settings_are_refused(blocks: Blocks) -> None:
    with pytest.raises(KernelError, match="all_gather_matmul_pull"):
        gather_all(
            VirtualRanks(1, blocks=blocks),
            "mk,kn->mn",
            [torch.ones(4, 3)],
            [torch.ones(3, 2)],
            0,
            0,
            1,
        )


def test_signals_that_run_as_kernels_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """In the emulation, no driver accepts the signals, so that they run as kernels."""
    peers, pairs = (
        VirtualRanks(2),
        [(whole_numbers((4, 3), rank), whole_numbers((3, 2), rank)) for rank in range(2)],
    )
    before = library.num_refused("host")
    with caplog.at_level(logging.WARNING, "autopar.kernels"):
        for _ in range(2):
            scatter_all(peers, "mk,kn->mn", pairs, 0, 1)
    assert library.num_refused("host") > before
    assert ["run as kernels" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64])
def test_parts_are_added_in_rank_order_in_each_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [
        (torch.randn(700, 5, generator=generator) * 100.0 ** (rank % 2)).to(dtype)
        for rank in range(3)
    ]
    pairs = [(value, torch.eye(5, dtype=dtype)) for value in values]
    total = torch.cat(scatter_all(VirtualRanks(3), "mk,kn->mn", pairs, 0, 1))
    assert torch.equal(
        total, torch.cat(overlapped.matmul_reduce_scatter_reference("mk,kn->mn", pairs, 0))
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 3])
def test_scattered_sums_with_residual_and_norm_equal_the_reference(
    size: int, dtype: torch.dtype
) -> None:
    peers = VirtualRanks(size)
    for epoch, (equation, left, right, dim) in enumerate(NORMED[::2]):
        ranks = ranks_of(equation, left, right, dim, size, dtype, seed=epoch)
        for rounded in (False, True):
            settings = ranks.pairs, ranks.residuals, ranks.weights, dim
            norms = ranks.norms(rounded=rounded)
            results = scatter_norm_all(peers, equation, ranks.pairs, norms, dim, 2)
            assert same(
                results,
                normed.matmul_reduce_add_rmsnorm_reference(equation, *settings, EPS, rounded),
            )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 3])
def test_expert_dispatch_and_combine_equal_their_references(size: int, dtype: torch.dtype) -> None:
    peers = VirtualRanks(size)
    for choices, per_rank, seed in ((1, 1, 0), (2, 3, 1), (2, 3, 2)):
        xs, experts, weights, most = random_tokens(size, choices, per_rank, seed)
        xs, weights = (
            [x.to(dtype) for x in xs],
            [w.to(torch.float64 if dtype == torch.float64 else torch.float32) for w in weights],
        )
        expected = routed.moe_dispatch_reference(xs, experts, size * per_rank, most)
        jobs = dispatch_all(peers, xs, experts, size * per_rank, most)
        for job, parts in zip(jobs, expected, strict=True):
            assert all(
                torch.equal(a, b)
                for a, b in zip((job.rows, job.table, job.position), parts, strict=True)
            )
        expected_outputs = routed.moe_combine_reference(
            [part[0] for part in expected], expected[0][1], [part[2] for part in expected], weights
        )
        combined = combine_all(peers, expected, weights)
        assert all(
            torch.equal(job.y, y) and torch.equal(job.returned, back)
            for job, (y, back) in zip(combined, expected_outputs, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3])
def test_expert_layer_on_dispatched_rows_equals_the_local_layer(
    size: int, dtype: torch.dtype
) -> None:
    peers = VirtualRanks(size)
    for seed in range(2):
        for width in (row_cases.H, 24):
            ranks = row_cases.random_operands(size, 2, dtype, seed, torch.float32, width)
            assert row_cases.same(
                row_cases.both(ranks, row_cases.between(peers)), row_cases.both(ranks, Together)
            )


def test_dispatch_of_many_wide_rows_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x, experts = (
        torch.randn(700, 516, generator=generator),
        torch.randint(0, 3, (700, 1), generator=generator),
    )
    job = dispatch_all(VirtualRanks(1), [x], [experts], 3, 701)[0]
    rows, table, position = routed.moe_dispatch_reference([x], [experts], 3, 701)[0]
    assert torch.equal(job.rows, rows)
    assert torch.equal(job.table, table)
    assert torch.equal(job.position, position)
