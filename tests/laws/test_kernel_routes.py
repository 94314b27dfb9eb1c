"""Dispatch and combine equal their references for all worlds, with sequential and concurrent ranks,
and each is the gradient of the other."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from itertools import product

import pytest
import torch
from native import WORLDS, needs_host
from route_cases import WIDTH, random_tokens
from torch import Tensor

from autopar.errors import KernelError
from autopar.kernels import library, routed
from autopar.kernels.fused import combine_all, dispatch_all
from autopar.kernels.peers import HostThreads, VirtualRanks, provide_peers
from autopar.kernels.routed import Routes

pytestmark = needs_host
DISPATCH, COMBINE = torch.ops.autopar.moe_dispatch, torch.ops.autopar.moe_combine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("provider", ["virtual", "threads"])
def test_dispatch_and_combine_equal_their_references(
    provider: str, size: int, dtype: torch.dtype
) -> None:
    peers = VirtualRanks(size) if provider == "virtual" else HostThreads(size)
    for choices, per_rank in ((1, 1), (2, 3), (3, 2)):
        xs, experts, weights, most = random_tokens(size, choices, per_rank)
        xs = [x.to(dtype) for x in xs]
        expected = routed.moe_dispatch_reference(xs, experts, size * per_rank, most)
        found = dispatch_all(peers, xs, experts, size * per_rank, most)
        for job, parts in zip(found, expected, strict=True):
            assert all(
                torch.equal(a, b)
                for a, b in zip((job.rows, job.table, job.position), parts, strict=True)
            )
        changed = [
            (rows * (rank + 1), table, position)
            for rank, (rows, table, position) in enumerate(expected)
        ]
        wide = [w.to(torch.float64 if dtype == torch.float64 else torch.float32) for w in weights]
        wanted = routed.moe_combine_reference(
            [part[0] for part in changed], changed[0][1], [part[2] for part in changed], wide
        )
        for combined, (y, returned) in zip(combine_all(peers, changed, wide), wanted, strict=True):
            assert torch.equal(combined.returned, returned)
            assert torch.equal(combined.y, y)
    if isinstance(peers, HostThreads):
        peers.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dispatch_and_combine_are_each_others_gradient(size: int) -> None:
    xs, experts, weights, most = random_tokens(size, 2, 2)
    leaves = (
        [x.round(decimals=1).requires_grad_() for x in xs],
        [w.requires_grad_() for w in weights],
    )

    def loss(rank: int, y: Tensor, returned: Tensor) -> Tensor:
        return (y * (rank + 1)).square().sum() + (returned * (rank + 2)).sum()

    def run(rank: int) -> tuple[Tensor, ...]:
        group = size, "gradients of routes", rank
        rows, table, position = DISPATCH(leaves[0][rank], experts[rank], 2 * size, most, *group)
        y, returned = COMBINE(rows * rows, table, position, leaves[1][rank], *group)
        return torch.autograd.grad(loss(rank, y, returned), (leaves[0][rank], leaves[1][rank]))

    with HostThreads(size) as peers, provide_peers("gradients of routes", peers):
        found = peers.run_on_each(run)
    parts = routed.moe_dispatch_reference(leaves[0], experts, 2 * size, most)
    squares, positions = [part[0] * part[0] for part in parts], [part[2] for part in parts]
    outputs = routed.moe_combine_reference(squares, parts[0][1], positions, leaves[1])
    total = sum((loss(rank, *output) for rank, output in enumerate(outputs)), torch.zeros(()))
    expected = torch.autograd.grad(total, [*leaves[0], *leaves[1]])
    for a, b in zip([f[0] for f in found] + [f[1] for f in found], expected, strict=True):
        torch.testing.assert_close(a, b)


def test_ranks_at_different_speeds_get_the_rows_of_each_epoch() -> None:
    """Only signals synchronize the ranks, some of which are late. All epochs use the same
    memory."""
    size, most = 3, 14
    cases = [random_tokens(size, 2, 2, seed) for seed in range(5)]
    expected = [
        routed.moe_dispatch_reference(xs, experts, 2 * size, most) for xs, experts, _, _ in cases
    ]
    back = [
        routed.moe_combine_reference(
            [part[0] for part in parts], parts[0][1], [part[2] for part in parts], case[2]
        )
        for case, parts in zip(cases, expected, strict=True)
    ]

    def run(rank: int) -> list[int]:
        wrong = []
        for epoch in range(200):
            xs, experts, weights, _ = cases[epoch % 5]
            group = size, "own pace of routes", rank
            if (rank + epoch) % 7 == 0:
                time.sleep(0.0005)
            rows, table, position = DISPATCH(xs[rank], experts[rank], 2 * size, most, *group)
            y, _ = COMBINE(rows, table, position, weights[rank], *group)
            wrong += (
                []
                if torch.equal(rows, expected[epoch % 5][rank][0])
                and torch.equal(y, back[epoch % 5][rank][0])
                else [epoch]
            )
        return wrong

    with HostThreads(size) as peers, provide_peers("own pace of routes", peers):
        assert peers.run_on_each(run) == [[]] * size
        assert [regions.epochs for regions in peers._regions.values()] == [[200] * size] * 2


@pytest.mark.parametrize("choices", [1, 2])
def test_dispatch_and_combine_pass_opcheck(choices: int) -> None:
    x, experts, weights, most = (
        part[0] if isinstance(part, list) else part for part in random_tokens(1, choices, 4)
    )
    torch.library.opcheck(DISPATCH, (x.requires_grad_(), experts, 4, most + 2, 1, "", 0))
    rows, table, position = DISPATCH(x.detach(), experts, 4, most + 2, 1, "", 0)
    torch.library.opcheck(
        COMBINE, (rows.requires_grad_(), table, position, weights.requires_grad_(), 1, "", 0)
    )


def test_python_and_c_compute_the_same_route_sizes() -> None:
    for row_bytes, per_rank, size, most in product((0, 4, 20, 128), (1, 3), WORLDS, (0, 1, 17)):
        sizes = (ctypes.c_int64 * 3)()
        native = library.NativeRoutes(0, 1, row_bytes, per_rank * size, size, 0, most)
        library.check(library.function("host", "ap_moe_sizes_host")(sizes, native), "sizes")
        routes, peers = Routes(row_bytes, per_rank * size, size, most), VirtualRanks(size)
        regions = routes.regions(peers, "dispatch"), routes.regions(peers, "combine")
        assert [max(sizes[0], 1), max(sizes[1], 1)] == [len(region.data[0]) for region in regions]
        assert [sizes[2]] * 2 == [len(region.flags[0]) for region in regions]


def refused_of(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, KernelError)) as refused:
        call()
    return str(refused.value)


def test_invalid_picks_and_uneven_experts_are_refused() -> None:
    x, wrong = torch.ones(2, WIDTH), torch.tensor([[0], [4]])
    assert "numbered from 0 to 3" in refused_of(lambda: DISPATCH(x, wrong, 4, 2, 1, "", 0))
    assert "must be a multiple of 2 ranks" in refused_of(lambda: DISPATCH(x, wrong, 5, 2, 2, "", 0))
    assert "must be at most 1" in refused_of(lambda: DISPATCH(x, wrong, 8, 1, 1, "", 0))
    with HostThreads(2) as peers, provide_peers("refused", peers):
        assert "argument was refused" in refused_of(
            lambda: DISPATCH(x, wrong, 4, 2, 2, "refused", 0)
        )
