"""What kernels save, against the formulas computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from overlapping import NORMING, overlapping
from torch import fx

from autopar import ops
from autopar.capture.graphs import shape_of
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.cost.kernel_times import KernelSite, seconds_saved
from autopar.cost.op_times import call_time
from autopar.rules import Call, call_of

SIZE, ROWS, WIDTH = 4, 64, 32
BYTES_PER_S = 1e7  # so slow that passes over memory are most of what is saved
PART_BYTES = 4 * ROWS * WIDTH // SIZE
S, P, R = (Layout.parse(text) for text in ("S(0)", "P", "R"))


def profile(share: float | None = 0.5) -> HardwareProfile:
    kernels = {
        name: figure
        for name, figure in {**NORMING, "reduce_add_rmsnorm": share}.items()
        if figure is not None
    }
    made = overlapping(kernels=kernels, flops_per_s=1e6)
    even = dict.fromkeys(made.memory_efficiency, 1.0)
    return replace(
        made, memory_bandwidth_bytes_per_s=BYTES_PER_S, memory_efficiency=even, hash=f"{share}"
    )


def site(*, normed: bool, biased: bool = False) -> KernelSite:
    """A product of [64, 16] and [16, 32], with or without a bias, of which each of 4 ranks has a
    partial sum, and the norm after it."""
    graph = fx.Graph()

    def tensor(name: str, *shape: int) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    def call(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))  # type: ignore[operator]
        return node

    product = call(
        ops.dot,
        "mk,kn->mn",
        tensor("a", ROWS, 16),
        tensor("b", 16, WIDTH),
        *([tensor("bias", WIDTH)] if biased else []),
    )
    total = call(torch.ops.aten.add.Tensor, tensor("residual", *shape_of(product)), product)
    squares = call(ops.square_sum, total, torch.float32)
    norm = call(
        ops.rms_norm,
        total,
        squares,
        tensor("weight", WIDTH),
        WIDTH,
        1e-6,
        torch.float32,
        torch.float32,
        torch.float32,
    )
    after: tuple[tuple[Call, Strategy], ...] = (
        (call_of(total), Strategy((S, S), (S,))),
        (call_of(squares), Strategy((S,), (S,))),
        (call_of(norm), Strategy((S, S, R), (S,))),
    )
    split = Strategy((Layout.parse("S(1)"), Layout.parse("S(0)"), *([R] if biased else [])), (P,))
    return KernelSite(
        call_of(product), split, (SIZE,), "reduce_scatter", SIZE, 0, False, after if normed else ()
    )


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_a_norm_saves_what_all_of_it_takes_apart_less_one_pass_over_what_came_the_residual_the_sum_and_the_norm(  # noqa: E501
    share: float,
) -> None:
    here, moved_s = profile(share), 10.0
    (plain_s, chunks), (normed_s, same) = (
        seconds_saved(site(normed=normed), moved_s, here) for normed in (False, True)
    )
    apart_s = sum(
        call_time(call, strategy, (SIZE,), here) for call, strategy in site(normed=True).normed
    )
    expected_s = apart_s + PART_BYTES * ((SIZE + 1) - (SIZE + 3) / share) / BYTES_PER_S
    assert chunks == same
    assert normed_s == pytest.approx(plain_s + expected_s) if expected_s > 0 else normed_s == 0.0
    assert (expected_s > 0) == (share > 0.5), "one slow pass takes longer than several fast ones"


@pytest.mark.parametrize("num", [1, 4])
def test_a_bias_is_read_with_each_chunk_and_is_no_part_of_what_moves(num: int) -> None:
    plain, biased = site(normed=False), site(normed=False, biased=True)
    reads, makes = biased.infos(num)
    assert [info.shape for info in (*reads, *makes)] == [
        (ROWS // num, 4),
        (4, WIDTH),
        (WIDTH,),
        (ROWS // num, WIDTH),
    ]
    assert biased.region(2, 0, 1) == plain.region(2, 0, 1) and biased.region(
        0, 0, 1
    ) == plain.region(0, 0, 1)
    fast = replace(
        profile(),
        peak_flops_per_s=dict.fromkeys(profile().peak_flops_per_s, 1e15),
        hash="fast for a bias",
    )
    assert biased.seconds(fast, num) - plain.seconds(fast, num) == pytest.approx(
        4 * WIDTH / BYTES_PER_S
    )


def test_no_more_is_saved_than_the_collective_takes_and_nothing_without_a_figure() -> None:
    moved_s, here = 2e-2, replace(profile(1.0), device_type="", hash="norms of several passes")
    assert (
        seconds_saved(site(normed=False), moved_s, here)[0]
        < seconds_saved(site(normed=True), moved_s, here)[0]
    )
    assert (
        seconds_saved(
            site(normed=True),
            1e-2,
            replace(here, kernels={**here.kernels, "matmul_reduce_scatter": 1.0}),
        )[0]
        == 1e-2
    )
    assert seconds_saved(site(normed=True), moved_s, profile(None))[0] == 0.0
