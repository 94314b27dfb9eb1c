"""The op that computes a product, reduce-scatters it, adds a residual and applies a norm. It equals
its reference bit by bit, with gradients, and falls back to separate steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from norm_cases import EPS, NORMED, Ranks, ranks_of, same, scaled_ranks
from overlap_cases import WORLDS
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar import ops
from autopar.errors import KernelError
from autopar.kernels import bound_ops, chunked, fused, library, normed
from autopar.kernels import normed as normed_scatter
from autopar.kernels import peers as providers
from autopar.kernels.bind import bind
from autopar.kernels.collectives import AxisGroup, use_groups
from autopar.kernels.fused import scatter_norm_all
from autopar.kernels.overlapped import ChunkedDim
from autopar.kernels.peers import HostThreads, Peers, VirtualRanks
from autopar.ops.norms import RmsNorm

OP = torch.ops.autopar.matmul_reduce_add_rmsnorm
EQUATION = "mk,kn->mn"
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def kernels() -> None:
    if library.host() is None:
        pytest.skip(f"no kernels for the host: {library.why_not()}")


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use kernels whose waits have a timeout."""
    monkeypatch.setenv("AUTOPAR_KERNELS", "debug")
    library.forget()
    if library.host() is None:
        pytest.skip(f"no kernels for the host: {library.why_not()}")
    yield
    library.forget()


def kernel_results(
    peers: Peers, equation: str, ranks: Ranks, dim: int, num_chunks: int, rounded: bool
) -> list[tuple[Tensor, ...]]:
    return list(
        scatter_norm_all(
            peers, equation, ranks.pairs, ranks.norms(rounded=rounded), dim, num_chunks
        )
    )


def reference_results(
    equation: str, ranks: Ranks, dim: int, rounded: bool
) -> list[tuple[Tensor, ...]]:
    settings = ranks.pairs, ranks.residuals, ranks.weights, dim, EPS, rounded
    return list(normed_scatter.matmul_reduce_add_rmsnorm_reference(equation, *settings))


# --- equality with the reference
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", library.FLOATS)
@pytest.mark.parametrize("size", WORLDS)
def test_virtual_ranks_give_the_results_of_the_reference(
    kernels: None, size: int, dtype: torch.dtype
) -> None:
    peers = VirtualRanks(size)
    for epoch, (equation, left, right, dim) in enumerate(NORMED * 2):
        ranks = ranks_of(equation, left, right, dim, size, dtype, seed=epoch)
        for num_chunks, rounded in ((1, False), (2, True), (2, False), (3, True)):
            assert same(
                kernel_results(peers, equation, ranks, dim, num_chunks, rounded),
                reference_results(equation, ranks, dim, rounded),
            )


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("size", WORLDS)
def test_delayed_threads_give_correct_results_over_many_epochs(
    kernels: None, size: int, rounded: bool
) -> None:
    def pause(rank: int, phase: int) -> None:
        if (7 * rank + 3 * phase + len(pauses)) % 11 == 0:
            time.sleep(0.0005)
        pauses.append(rank)

    pauses: list[int] = []
    with HostThreads(size, pause) as peers:
        for epoch in range(40):
            ranks = ranks_of(EQUATION, (7, 2), (2, 9), 0, size, BF16, seed=epoch)
            assert same(
                kernel_results(peers, EQUATION, ranks, 0, 2, rounded),
                reference_results(EQUATION, ranks, 0, rounded),
            )
        assert [regions.epochs for regions in peers._regions.values()] == [[40] * size]


@pytest.mark.parametrize("dtype", library.FLOATS)
@pytest.mark.parametrize("size", WORLDS)
def test_parts_are_always_added_in_the_order_of_the_ranks(
    kernels: None, size: int, dtype: torch.dtype
) -> None:
    ranks, peers = scaled_ranks((37, 9), size, dtype), VirtualRanks(size)
    expected = reference_results(EQUATION, ranks, 0, True)
    assert all(same(kernel_results(peers, EQUATION, ranks, 0, 2, True), expected) for _ in range(5))


# --- injected faults
# --------------------------------------------------------------------------------------------------


def test_adding_parts_in_another_order_changes_the_results(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_in_reverse_order(out: Any, parts: Sequence[Tensor], *rest: Any) -> None:
        forward_into(out, [parts[0], *parts[:0:-1]], *rest)

    ranks, forward_into = scaled_ranks((37, 9), 3, F32), normed.forward_into
    monkeypatch.setattr(normed, "forward_into", add_in_reverse_order)
    assert not same(
        kernel_results(VirtualRanks(3), EQUATION, ranks, 0, 2, False),
        reference_results(EQUATION, ranks, 0, False),
    )


@pytest.mark.parametrize(
    ("later", "further"), [(1, 0), (0, 1)], ids=["the epoch's before", "the next rank's"]
)
def test_reading_a_part_from_a_wrong_slot_changes_the_results(
    kernels: None, monkeypatch: pytest.MonkeyPatch, later: int, further: int
) -> None:
    """A rank writes its own part and reads all parts in slots of another epoch or rank. The peers
    write to the correct slots."""

    def other_slot(
        shards: chunked.Shards, regions: Any, rank: int, epoch: int, out: Tensor, sender: int
    ) -> Tensor:
        return slot(shards, regions, rank, epoch + later, out, (sender + further) % shards.size)

    slot, peers = chunked._slot, VirtualRanks(3)
    first, second = (ranks_of(EQUATION, (11, 3), (3, 40), 0, 3, seed=seed) for seed in range(2))
    assert same(
        kernel_results(peers, EQUATION, first, 0, 2, False),
        reference_results(EQUATION, first, 0, False),
    )
    monkeypatch.setattr(chunked, "_slot", other_slot)
    assert not same(
        kernel_results(peers, EQUATION, second, 0, 2, False),
        reference_results(EQUATION, second, 0, False),
    )


def test_missing_signal_of_a_peer_raises_a_timeout_error(debug: None) -> None:
    ranks = ranks_of(EQUATION, (2, 3), (3, 4), 0, 2)
    with (
        HostThreads(2) as peers,
        providers.provide_peers("alone", peers),
        pytest.raises(KernelError, match=r"reduce_scatter.*timed out"),
    ):
        OP(*ranks.of(0), EQUATION, 0, 2, "alone", 0, 1, EPS, False)


# --- the operator
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("equation", "left", "right", "dim"), [NORMED[0], NORMED[2]])
def test_operator_passes_opcheck(
    equation: str, left: tuple[int, ...], right: tuple[int, ...], dim: int, rounded: bool
) -> None:
    operands = [x.requires_grad_() for x in ranks_of(equation, left, right, dim, 1).of(0)]
    torch.library.opcheck(OP, (*operands, equation, dim, 1, "", 0, 2, EPS, rounded))


@pytest.mark.parametrize("rank", [0, 2])
def test_fake_results_have_the_shapes_of_an_uneven_shard(rank: int) -> None:
    shape = (2, (3, 3, 1)[rank], 5)
    with FakeTensorMode():
        a, b, residual, weight = (
            torch.empty(each, dtype=BF16) for each in ((2, 7, 4), (5, 4), shape, (5,))
        )
        results = OP(a, b, residual, weight, "bsk,nk->bsn", 1, 3, "anyone", rank, 2, EPS, True)
    assert [(tuple(x.shape), x.dtype) for x in results] == [
        (shape, BF16),
        (shape[:2], F32),
        (shape, BF16),
    ]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("equation", "left", "right", "dim"), NORMED)
def test_gradients_match_the_reference(
    kernels: None,
    equation: str,
    left: tuple[int, ...],
    right: tuple[int, ...],
    dim: int,
    size: int,
    rounded: bool,
) -> None:
    ranks = ranks_of(equation, left, right, dim, size, torch.float64)
    leaves = [[x.requires_grad_() for x in ranks.of(rank)] for rank in range(size)]

    def loss(y: Tensor, normed: Tensor) -> Tensor:
        return y.sin().sum() + normed.cos().sum()

    def run(rank: int) -> tuple[Tensor, ...]:
        y, squares, normed = OP(
            *leaves[rank], equation, dim, size, "gradients", rank, 2, EPS, rounded
        )
        assert not squares.requires_grad
        return torch.autograd.grad(loss(y, normed), leaves[rank])

    with HostThreads(size) as peers, providers.provide_peers("gradients", peers):
        gradients = peers.run_on_each(run)
    total = sum(
        (loss(y, normed) for y, _, normed in reference_results(equation, ranks, dim, rounded)),
        torch.zeros((), dtype=torch.float64),
    )
    expected = torch.autograd.grad(total, [x for own in leaves for x in own])
    for a, b in zip([x for own in gradients for x in own], expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


# --- functions called by programs
# --------------------------------------------------------------------------------------------------


def steps(
    ranks: Ranks, rank: int, part: Tensor, dtype: torch.dtype, rounded: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the steps that follow the reduce_scatter in a graph without the kernel."""
    y = ranks.residuals[rank] + part
    squares = ops.square_sum(y, dtype)
    return (
        y,
        squares,
        ops.rms_norm(y, squares, ranks.weights[rank], y.shape[-1], EPS, dtype, rounded, y.dtype),
    )


def call_step(
    ranks: Ranks, rank: int, group: AxisGroup, rounded: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    a, b, residual, weight = ranks.of(rank)
    norm = RmsNorm(residual.shape[-1], EPS, library.wide(a.dtype), rounded, a.dtype)
    return normed_scatter.dot_reduce_add_rmsnorm(
        EQUATION, (a, b), residual, weight, ChunkedDim.of(0, group, 2), norm
    )


@pytest.mark.parametrize("rounded", [BF16, F32])
def test_ranks_at_different_speeds_get_the_results_of_each_epoch(
    kernels: None, rounded: torch.dtype
) -> None:
    epochs = [ranks_of(EQUATION, (11, 3), (3, 16), 0, 3, BF16, seed=epoch) for epoch in range(30)]
    expected = [reference_results(EQUATION, ranks, 0, rounded == BF16) for ranks in epochs]

    def run(rank: int) -> bool:
        group = AxisGroup("own pace", 3, rank)
        return all(
            same([call_step(ranks, rank, group, rounded)], [reference[rank]])
            for ranks, reference in zip(epochs, expected, strict=True)
        )

    with HostThreads(3) as peers, providers.provide_peers("own pace", peers):
        assert peers.run_on_each(run) == [True] * 3


@pytest.mark.parametrize("dtype", library.FLOATS)
def test_axis_of_size_one_runs_the_separate_steps(dtype: torch.dtype) -> None:
    ranks = ranks_of(EQUATION, (11, 3), (3, 16), 0, 1, dtype)
    results = call_step(ranks, 0, AxisGroup("", 1, 0), dtype)
    assert same(
        [results], [steps(ranks, 0, ops.dot(EQUATION, *ranks.pairs[0]), library.wide(dtype), dtype)]
    )


def test_fake_group_gives_the_shapes_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    results = call_step(
        ranks_of(EQUATION, (11, 3), (3, 16), 0, 3, BF16), 1, AxisGroup("", 3, 1), BF16
    )
    assert [(tuple(x.shape), x.dtype) for x in results] == [
        ((4, 16), BF16),
        ((4,), F32),
        ((4, 16), BF16),
    ]
    assert not caplog.records


@pytest.mark.parametrize("rounded", [BF16, F32])
def test_separate_steps_run_with_one_warning_without_shared_memory(
    rounded: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(providers, "_said", set())
    monkeypatch.setattr(
        bound_ops,
        "reduce_scatter",
        lambda x, dim, op, size, name, coordinate: x.chunk(size, dim)[coordinate] * size,
    )
    ranks = ranks_of(EQUATION, (4, 3), (3, 16), 0, 2, BF16)
    with caplog.at_level(logging.WARNING, "autopar.kernels"):
        results = call_step(ranks, 1, AxisGroup("gloo", 2, 1), rounded)
        whole = OP(*ranks.of(1), EQUATION, 0, 2, "gloo", 1, 2, EPS, rounded == BF16)
    part = ops.dot(EQUATION, *ranks.pairs[1])[2:] * 2
    assert same([results], [steps(ranks, 1, part, F32, rounded)])
    reference = normed.reference_forward(
        [part], ranks.residuals[1], ranks.weights[1], EPS, rounded == BF16
    )
    assert same([whole], [reference])
    assert ["cannot access each other's memory" in record.message for record in caplog.records] == [
        True
    ]


def test_step_in_a_graph_is_bound_to_its_group() -> None:
    ranks = ranks_of(EQUATION, (11, 3), (3, 16), 0, 1)
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in ("a", "b", "residual", "weight")]
    norm = RmsNorm(16, EPS, F32, F32, F32)
    node = graph.call_function(
        fused.matmul_reduce_add_rmsnorm, (*operands, EQUATION, fused.ChunkedAxis(0, 1, 2), norm)
    )
    graph.output(node)
    groups, whole = [AxisGroup("other", 4, 2), AxisGroup("", 1, 0)], fx.GraphModule({}, graph)
    module = bind(whole, groups)
    (bound_node,) = (n for n in module.graph.nodes if n.op == "call_function")
    assert bound_node.target is fused.norm_bound
    assert bound_node.args[4:] == (EQUATION, ChunkedDim.of(0, groups[1], 2), norm)
    with use_groups(groups):
        results = whole(*ranks.of(0))
    assert same(
        [module(*ranks.of(0)), results],
        [steps(ranks, 0, ops.dot(EQUATION, *ranks.pairs[0]), F32, F32)] * 2,
    )


# --- refused operands
# --------------------------------------------------------------------------------------------------

A, B, X, W = torch.ones(4, 3), torch.ones(3, 8), torch.ones(2, 8), torch.ones(8)
GROUP = AxisGroup("", 2, 0)
REFUSED: list[tuple[str, Any, str]] = [
    (
        "the last dim",
        lambda: OP(A, B, torch.ones(4, 4), W, EQUATION, 1, 2, "", 0, 1, EPS, False),
        "has no full rows",
    ),
    (
        "the residual's shape",
        lambda: OP(A, B, X[:1], W, EQUATION, 0, 2, "", 0, 1, EPS, False),
        r"a residual \(1, 8\)",
    ),
    (
        "the residual's dtype",
        lambda: OP(A, B, X.double(), W, EQUATION, 0, 2, "", 0, 1, EPS, False),
        "a residual .* torch.float64",
    ),
    (
        "the weight's dtype",
        lambda: OP(A, B, X, W.double(), EQUATION, 0, 2, "", 0, 1, EPS, False),
        "float64 on cpu with torch.float32",
    ),
    (
        "the weight's shape",
        lambda: OP(A, B, X, W[1:], EQUATION, 0, 2, "", 0, 1, EPS, False),
        r"weight of \(7,\)",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_mismatched_operands_are_refused(call: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        call()


@pytest.mark.parametrize(
    ("n", "dtype", "rounded", "out"),
    [
        (9, F32, F32, F32),
        (8, torch.float64, F32, F32),
        (8, F32, BF16, F32),
        (8, F32, F32, BF16),
    ],
)
def test_unsupported_norms_are_refused(
    n: int, dtype: torch.dtype, rounded: torch.dtype, out: torch.dtype
) -> None:
    with pytest.raises(KernelError, match=f"no kernel computes this norm: n={n} of 8"):
        norm = RmsNorm(n, EPS, dtype, rounded, out)
        normed_scatter.dot_reduce_add_rmsnorm(
            EQUATION, (A, B), X, W, ChunkedDim.of(0, GROUP, 1), norm
        )


def test_supported_norms() -> None:
    assert normed_scatter.norms(BF16, BF16, F32, BF16, BF16)
    assert normed_scatter.norms(BF16, BF16, F32, F32, BF16)
    assert normed_scatter.norms(
        torch.float64, torch.float64, torch.float64, torch.float64, torch.float64
    )
    assert not normed_scatter.norms(BF16, None, F32, BF16, BF16)  # without a weight
    assert not normed_scatter.norms(BF16, F32, F32, BF16, BF16)
    assert not normed_scatter.norms(BF16, BF16, BF16, BF16, BF16)


def test_zero_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="0 chunks"):
        norm = RmsNorm(8, EPS, F32, F32, F32)
        normed_scatter.dot_reduce_add_rmsnorm(
            EQUATION, (A, B), X, W, ChunkedDim.of(0, GROUP, 0), norm
        )
