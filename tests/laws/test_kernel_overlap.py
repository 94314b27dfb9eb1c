"""Overlapped products equal their references for all worlds, shardings and numbers of chunks, with
sequential and concurrent ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from overlap_cases import WORLDS, whole_numbers
from torch import Tensor

from autopar.kernels import library
from autopar.kernels.fused import gather_all, scatter_all, shards_of
from autopar.kernels.overlapped import all_gather_matmul_reference, matmul_reduce_scatter_reference
from autopar.kernels.peers import HostThreads, Peers, VirtualRanks

PROVIDERS = ("virtual", "threads")
# equation, full shapes of both operands, sharded operand and dim
GATHERED = (
    ("mk,kn->mn", (11, 3), (3, 4), 0, 0),
    ("mk,kn->mn", (16, 3), (3, 4), 0, 0),
    ("bsk,nk->bsn", (2, 11, 3), (4, 3), 0, 1),
    ("mk,nk->mn", (3, 5), (9, 5), 1, 0),
    ("bmk,bkn->bmn", (7, 2, 3), (7, 3, 2), 0, 0),
)
# equation, shapes of both operands, dim of the result
SCATTERED = (
    ("mk,kn->mn", (11, 3), (3, 4), 0),
    ("mk,kn->mn", (16, 3), (3, 4), 0),
    ("bsk,nk->bsn", (2, 11, 3), (4, 3), 1),
    ("mk,nk->mn", (3, 5), (9, 5), 1),
    ("bmk,bkn->bmn", (7, 2, 3), (7, 3, 2), 0),
)


@pytest.fixture(autouse=True)
def kernels() -> None:
    if library.host() is None:
        pytest.skip(f"no kernels for the host: {library.why_not()}")


@contextmanager
def peers_of(provider: str, size: int) -> Iterator[Peers]:
    if provider == "virtual":
        yield VirtualRanks(size)
    else:
        with HostThreads(size) as peers:
            yield peers


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_all_gather_matmul_is_bitwise_equal_to_its_reference(provider: str, size: int) -> None:
    with peers_of(provider, size) as peers:
        for equation, left, right, which, dim in GATHERED:
            for num_chunks in (1, 2, 3):
                operands = whole_numbers(left, 1), whole_numbers(right, 2)
                shards = shards_of(operands[which], dim, size)
                others = [operands[1 - which] + rank for rank in range(size)]
                biases = biases_of(equation, left, right, size) if num_chunks == 2 else []
                found = gather_all(
                    peers,
                    equation,
                    shards,
                    others,
                    which,
                    dim,
                    num_chunks,
                    biases=biases,
                )
                for (whole, y), (expected, product) in zip(
                    found,
                    all_gather_matmul_reference(equation, shards, others, which, dim, biases),
                    strict=True,
                ):
                    assert torch.equal(whole, expected)
                    assert torch.equal(y, product)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_matmul_reduce_scatter_is_bitwise_equal_to_its_reference(provider: str, size: int) -> None:
    with peers_of(provider, size) as peers:
        for equation, left, right, dim in SCATTERED:
            for num_chunks in (1, 2, 3):
                pairs = [
                    (whole_numbers(left, 2 * rank), whole_numbers(right, 2 * rank + 1))
                    for rank in range(size)
                ]
                biases = biases_of(equation, left, right, size) if num_chunks == 2 else []
                found = scatter_all(peers, equation, pairs, dim, num_chunks, (), biases)
                for part, expected in zip(
                    found,
                    matmul_reduce_scatter_reference(equation, pairs, dim, None, biases),
                    strict=True,
                ):
                    assert torch.equal(part, expected)


def biases_of(
    equation: str, left: Sequence[int], right: Sequence[int], size: int
) -> list[Tensor | None]:
    """Return a separate bias for the last dim of the result of each rank. Every third rank has
    none."""
    letter = equation[-1]
    sizes = dict(zip(equation.partition("->")[0].replace(",", ""), (*left, *right), strict=True))
    return [
        None if rank % 3 == 2 else whole_numbers((sizes[letter],), 40 + rank)
        for rank in range(size)
    ]


def test_a_bias_is_rounded_with_its_product_in_every_chunk() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((12, 64), (24, 64), (24,))
    )
    for _, y in gather_all(
        VirtualRanks(2), "mk,nk->mn", shards_of(x, 0, 2), [w] * 2, 0, 0, 2, biases=[bias] * 2
    ):
        assert_rounded(
            y, [(torch.cat([x, torch.ones(12, 1)], 1), torch.cat([w, bias[:, None]], 1).t())]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 5])
def test_random_products_match_fp64_up_to_rounding(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).to(dtype) for shape in ((13, 64), (64, 24)))
    pairs = [
        tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((13, 64), (64, 24)))
        for _ in range(size)
    ]
    with HostThreads(size) as peers:
        gathered = gather_all(peers, "mk,kn->mn", shards_of(x, 0, size), [w] * size, 0, 0, 2)
        scattered = torch.cat(scatter_all(peers, "mk,kn->mn", pairs, 0, 2))
    for _, y in gathered:
        assert_rounded(y, [(x, w)])
    assert_rounded(scattered, pairs)


def assert_rounded(found: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Assert that each product has at most k fp32 rounding errors of its terms and one of the
    dtype, and so has the sum."""
    exact = sum(a.double() @ b.double() for a, b in pairs)
    sizes = sum(a.double().abs() @ b.double().abs() for a, b in pairs)
    slack = pairs[0][0].shape[1] * torch.finfo(torch.float32).eps * sizes
    rounding = torch.finfo(found.dtype).eps * (
        sum((a.double() @ b.double()).abs() for a, b in pairs) + exact.abs()
    )
    assert ((found.double() - exact).abs() <= slack + rounding).all()


@pytest.mark.parametrize("size", WORLDS)
def test_many_epochs_reuse_the_memory_without_a_reset_with_late_ranks(size: int) -> None:
    def pause(rank: int, phase: int) -> None:
        if (7 * rank + 3 * phase + len(taken)) % 11 == 0:
            time.sleep(0.0005)
        taken.append(rank)

    taken: list[int] = []
    x, w = whole_numbers((7, 2), 0), whole_numbers((2, 3), 1)
    with HostThreads(size, pause) as peers:
        for epoch in range(200):
            shards = shards_of(x + epoch, 0, size)
            others = [w - epoch % 5] * size
            found = gather_all(peers, "mk,kn->mn", shards, others, 0, 0, 2)
            assert all(
                torch.equal(whole, x + epoch) and torch.equal(y, (x + epoch) @ others[0])
                for whole, y in found
            )
            pairs = [(x + rank, w + epoch) for rank in range(size)]
            expected = sum((a @ b for a, b in pairs), torch.zeros(7, 3))
            assert torch.equal(torch.cat(scatter_all(peers, "mk,kn->mn", pairs, 0, 2)), expected)
        assert all(
            epochs == 200 for regions in peers._regions.values() for epochs in regions.epochs
        )
        assert len(peers._regions) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", WORLDS)
def test_sums_are_always_added_in_the_order_of_the_ranks(size: int, dtype: torch.dtype) -> None:
    """The factor of each rank is the identity, so that products are exact and only the order of the
    sum can differ."""
    generator = torch.Generator().manual_seed(3)
    values = [
        (torch.randn(37, 9, generator=generator) * (4096.0 if rank == 0 else 2.0**-10)).to(dtype)
        for rank in range(size)
    ]
    values[2:3] = [-values[0]] * len(
        values[2:3]
    )  # rank 1 is rounded away between the two, unless they are added first
    pairs = [(value, torch.eye(9, dtype=dtype)) for value in values]
    expected = torch.cat(matmul_reduce_scatter_reference("mk,kn->mn", pairs, 0))
    for provider in PROVIDERS:
        with peers_of(provider, size) as peers:
            for _ in range(5):
                assert torch.equal(
                    torch.cat(scatter_all(peers, "mk,kn->mn", pairs, 0, 2)), expected
                )
    if size > 2 and dtype != torch.float64:
        other = torch.cat(
            matmul_reduce_scatter_reference("mk,kn->mn", [pairs[0], *pairs[2:], pairs[1]], 0)
        )
        assert not torch.equal(other, expected)  # the data distinguishes the orders
