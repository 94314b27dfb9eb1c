"""Experts whose rows are written directly by peers are bitwise equal to experts with all-to-alls,
and their shared memory matches the prediction."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from native import needs_host
from row_cases import D, H, between, both, most_of, random_operands, same
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.kernels import dispatched, library
from autopar.kernels.bind import bind
from autopar.kernels.collectives import AxisGroup, use_groups
from autopar.kernels.peers import HostThreads, Peers, VirtualRanks, provide_peers
from autopar.kernels.routed import BACK, COUNTS, GATES, MOST_RANKS, ROWS, Routes, shared_regions
from autopar.ops import expert_layers as experts_op
from autopar.ops.expert_layers import Together, dispatched_experts, dispatched_experts_backward
from autopar.program.abstract_executor import LiveBytes

pytestmark = needs_host
WORLDS, DTYPES = (1, 2, 3, 4, 8), (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("width", [H, 32])
def test_results_are_bitwise_equal_to_all_to_alls_with_reused_memory(
    width: int, size: int, per_rank: int, dtype: torch.dtype
) -> None:
    """Rows of 32 numbers are multiplied in place. Other rows are not aligned."""
    peers = VirtualRanks(size)
    with HostThreads(size) as threads:
        for seed in range(6):
            ranks = random_operands(
                size, per_rank, dtype, seed, torch.float32 if seed % 3 == 2 else None, width
            )
            expected = both(ranks, Together)
            assert same(both(ranks, between(peers)), expected)
            assert same(both(ranks, between(threads)), expected)


@pytest.mark.parametrize("per_rank", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_at_different_speeds_get_the_rows_of_each_step(size: int, per_rank: int) -> None:
    """Only signals synchronize the ranks, some of which are late. All steps use the same memory."""
    cases = [random_operands(size, per_rank, torch.float32, seed) for seed in range(5)]
    expected = [both(ranks, Together) for ranks in cases]

    def run(rank: int) -> list[int]:
        wrong, group = [], (most_of(size), size, "own pace of rows", rank, True)
        for step in range(100):
            operands = cases[step % 5][rank]
            if (rank + step) % 7 == 0:
                time.sleep(0.0005)
            found = (
                dispatched.experts_bound(*operands[1:], *group),
                *dispatched.experts_backward_bound(*operands, *group),
            )
            wrong += [] if same([found], [expected[step % 5][rank]]) else [step]
        return wrong

    with HostThreads(size) as peers, provide_peers("own pace of rows", peers):
        assert peers.run_on_each(run) == [[]] * size
        for (name, _), regions in peers._regions.items():
            assert regions.epochs == [200 if name == COUNTS else 100] * size


@pytest.mark.parametrize("backward", [False, True])
def test_a_step_of_a_graph_is_routed_if_its_last_argument_says_so(backward: bool) -> None:
    size, ranks = (
        2,
        [rank[0 if backward else 1 :] for rank in random_operands(2, 2, torch.float64, 1)],
    )
    step = dispatched.experts_backward if backward else dispatched.experts
    *operands, act, num, _ = ranks[0]
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(operands))]
    made = graph.call_function(
        step, (*nodes, act, num, (num, ((0, size),)), most_of(size), 0, False)
    )
    graph.output(made)

    def run(rank: int) -> Any:
        groups = (AxisGroup("routed steps", size, rank),)
        with use_groups(groups):
            emitted = fx.GraphModule({}, graph)(*ranks[rank][: len(operands)])
        bound = bind(fx.GraphModule({}, graph), groups)(*ranks[rank][: len(operands)])
        return [list(x) if backward else [x] for x in (emitted, bound)]

    expected = dispatched.TOGETHER[step](ranks, Together())
    with HostThreads(size) as peers, provide_peers("routed steps", peers):
        made.args = dispatched.with_routes(made.args, True)
        found = peers.run_on_each(run)
        assert {name for name, _ in peers._regions} >= {COUNTS, ROWS}  # type: ignore[misc]
    for mine, own in zip(found, expected, strict=True):
        assert same(mine, [own if backward else [own]] * 2)


def test_routes_are_limited_to_the_maximum_number_of_ranks_of_the_kernels() -> None:
    for size, kind in ((MOST_RANKS, dispatched.BetweenPeers), (MOST_RANKS + 1, dispatched.InGroup)):
        with provide_peers("many ranks", VirtualRanks(size)):
            assert isinstance(
                dispatched.exchange_of(torch.empty(0), 1, size, "many ranks", 0, True), kind
            )


def test_rows_as_wide_as_gates_use_a_separate_region() -> None:
    """With one number per row, the regions of tokens and gates differ only in their names."""
    ranks = [
        (g[:, :0], x[:, :1], i, w, up[..., :1].contiguous(), down[:, :0].contiguous(), *rest)
        for g, x, i, w, up, down, *rest in (random_operands(3, 2, torch.float32, 0))
    ]
    peers = VirtualRanks(3)
    found = dispatched_experts_backward(ranks, between(peers)())
    assert same(found, dispatched_experts_backward(ranks, Together()))
    assert {name for name, routes in peers._regions if routes.row_bytes == 4} == {
        ROWS,
        GATES,
        BACK + ROWS,
        BACK + GATES,
    }  # type: ignore[misc]


@pytest.mark.parametrize("per_rank", [1, 2])
def test_products_read_received_rows_in_place(
    per_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, seen, ranks = 3, [], random_operands(3, per_rank, torch.float32, 0, h=32)
    peers, forward_of, add_up = VirtualRanks(3), experts_op.forward_of, experts_op.add_up

    def watched(rows: Tensor, *rest: Any) -> Tensor:
        seen.append((ROWS, rows))
        return forward_of(rows, *rest)

    def added(rows: Tensor, *rest: Any) -> Tensor:
        seen.append((BACK + ROWS, rows))
        return add_up(rows, *rest)

    monkeypatch.setattr(experts_op, "forward_of", watched)
    monkeypatch.setattr(experts_op, "add_up", added)
    dispatched_experts([rank[1:] for rank in ranks], between(peers)())
    lies = {
        name: {part.untyped_storage().data_ptr() for part in r.data}
        for (name, _), r in peers._regions.items()
    }  # type: ignore[misc]
    assert {name for name, _ in seen} == {ROWS, BACK + ROWS} and len(seen) > size
    assert all(rows.untyped_storage().data_ptr() in lies[name] for name, rows in seen)


# ── shared and local memory ──


def test_python_and_c_compute_the_same_region_sizes() -> None:
    for row_bytes, per_rank, size, most in product((4, 20, 128), (1, 3), WORLDS, (1, 17)):
        sizes = (ctypes.c_int64 * 4)()
        native = library.NativeRoutes(0, 1, row_bytes, per_rank * size, size, 0, most)
        library.check(library.function("host", "ap_expert_rows_sizes_host")(sizes, native), "sizes")
        routes, peers = Routes(row_bytes, per_rank * size, size, most), VirtualRanks(size)
        for name, data in ((COUNTS, 0), (ROWS, 1), (GATES, 1), (BACK + ROWS, 2), (BACK + GATES, 2)):
            regions = routes.regions(peers, name)
            assert (len(regions.data[0]), len(regions.flags[0])) == (sizes[data], sizes[3])
        for name in ("dispatch", "combine", COUNTS, ROWS, BACK + GATES):
            regions = routes.regions(peers, name)
            assert regions.data[0].nbytes + regions.flags[0].nbytes == routes.num_bytes(name)


def held_by(peers: Peers, rank: int) -> dict[Any, int]:
    """Return the bytes of a rank by the name of its regions and by its routes."""
    return {
        key: r.data[rank].untyped_storage().nbytes() + r.flags[rank].untyped_storage().nbytes()
        for key, r in peers._regions.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "per_rank"), [(1, 2), (3, 1), (4, 2)])
def test_the_predicted_shared_memory_is_exact(size: int, per_rank: int, dtype: torch.dtype) -> None:
    for gates in (dtype, torch.float32):
        settings = H, D, per_rank, size, most_of(size), dtype.itemsize, gates.itemsize
        with HostThreads(size) as threads:
            for peers in (VirtualRanks(size), threads):
                for seed in range(2):  # the second run allocates nothing
                    dispatched_experts(
                        [rank[1:] for rank in random_operands(size, per_rank, dtype, seed, gates)],
                        between(peers)(),
                    )
                    assert held_by(peers, size - 1) == shared_regions(*settings, backward=False)
                for seed in range(2):
                    dispatched_experts_backward(
                        random_operands(size, per_rank, dtype, seed, gates), between(peers)()
                    )
                    assert held_by(peers, 0) == {
                        key: n
                        for b in (False, True)
                        for key, n in shared_regions(*settings, backward=b).items()
                    }


@pytest.mark.parametrize("backward", [False, True])
def test_the_live_memory_of_routes_equals_that_of_a_fake_group(backward: bool) -> None:
    """Picks are balanced. A fake group runs both ways and counts the larger memory."""
    size, tokens, width, num = 4, 16, 32, 8
    ids = (torch.arange(tokens).view(-1, 1) + torch.arange(2)) % num
    tensors = [
        torch.ones(tokens, width),
        torch.ones(tokens, width),
        ids,
        torch.ones(tokens, 2),
        torch.ones(2, 2, 48, width),
    ]
    operands = [*tensors, torch.ones(2, width, 48)][0 if backward else 1 :]
    step = dispatched.experts_backward_bound if backward else dispatched.experts_bound
    settings = "silu", num, [0, 2, 4, 6], 2 * tokens, size

    together = dispatched.TOGETHER[dispatched.experts_backward if backward else dispatched.experts]

    def peak(known: Sequence[Tensor], run: Callable[[], object]) -> int:
        with LiveBytes() as memory:
            memory.register(known)
            memory.reset_peak()
            run()
            return memory.peak_bytes - memory.live_bytes

    def run(rank: int) -> int:
        step(*operands, *settings, "rows live", rank, True)
        shared = [regions.data[rank] for regions in peers._regions.values()]
        return peak(
            [*operands, *shared], lambda: step(*operands, *settings, "rows live", rank, True)
        )

    with HostThreads(size) as peers, provide_peers("rows live", peers):
        measured = peers.run_on_each(run)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in operands]
        apart, counted = (
            peak(fake, lambda routed=routed: step(*fake, *settings, "", 0, routed))
            for routed in (False, True)
        )
        alone = peak(
            fake,
            lambda: together([(*fake, *settings[:3])], dispatched.FakePeers(size, tuple(fake))),
        )
    assert measured == [alone] * size
    assert counted == max(alone, apart)
    assert alone < apart, "rows that come are not held"
