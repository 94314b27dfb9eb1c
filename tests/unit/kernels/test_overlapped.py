"""The overlapped products as operators: registration, gradients, and the decomposition that
replaces them if they cannot run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from overlap_cases import whole_numbers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import KernelError
from autopar.kernels import bound_ops, chunked, fused, library, overlapped
from autopar.kernels import overlapped as overlapped_references
from autopar.kernels import peers as providers
from autopar.kernels.chunked import check_chunked, multiply_into, result_shape
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.fused import shards_of
from autopar.kernels.overlapped import ChunkedDim
from autopar.kernels.peers import HostThreads, VirtualRanks
from autopar.ops.products import dot

GATHER, SCATTER = torch.ops.autopar.all_gather_matmul, torch.ops.autopar.matmul_reduce_scatter


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


# --- operators
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("equation", "which", "dim"), [("mk,kn->mn", 0, 0), ("bsk,nk->bsn", 0, 1), ("nk,sk->sn", 1, 0)]
)
def test_all_gather_matmul_passes_opcheck(
    equation: str, which: int, dim: int, with_bias: bool
) -> None:
    sizes = {"m": 5, "k": 3, "n": 4, "b": 2, "s": 6}
    terms = equation.split("->")[0].split(",")
    x, other = (
        torch.randn([sizes[letter] for letter in term], requires_grad=True)
        for term in (terms[which], terms[1 - which])
    )
    bias = (torch.randn(4, requires_grad=True),) if with_bias else ()
    torch.library.opcheck(
        GATHER, (x, other, equation, which, dim, x.shape[dim], 1, "", 0, 2, *bias)
    )


@pytest.mark.parametrize("with_addend", [False, True])
@pytest.mark.parametrize(
    ("equation", "dim"), [("mk,kn->mn", 0), ("bsk,nk->bsn", 1), ("mk,kn->mn", 1)]
)
def test_matmul_reduce_scatter_passes_opcheck(equation: str, dim: int, with_addend: bool) -> None:
    sizes = {"m": 5, "k": 3, "n": 4, "b": 2, "s": 6}
    left, right, result = (
        torch.randn([sizes[letter] for letter in term])
        for term in equation.replace("->", ",").split(",")
    )
    addend = result.requires_grad_() if with_addend else None
    bias = () if with_addend else (torch.randn(4, requires_grad=True),)
    torch.library.opcheck(
        SCATTER,
        (left.requires_grad_(), right.requires_grad_(), addend, equation, dim, 1, "", 0, 2, *bias),
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_fake_results_have_the_shapes_of_an_uneven_shard(rank: int) -> None:
    with FakeTensorMode():
        x, w = torch.empty(2, (3, 3, 1)[rank], 4), torch.empty(5, 4)
        whole, y = GATHER(x, w, "bsk,nk->bsn", 0, 1, 7, 3, "anyone", rank, 2)
        part = SCATTER(y, torch.empty(6, 5), None, "bsn,mn->bsm", 1, 3, "anyone", rank, 2)
    assert (tuple(whole.shape), tuple(y.shape), tuple(part.shape)) == (
        (2, 7, 4),
        (2, 7, 5),
        (2, (3, 3, 1)[rank], 6),
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("equation", "left", "right", "which", "dim"),
    [
        ("mk,kn->mn", (7, 3), (3, 4), 0, 0),
        ("bsk,nk->bsn", (2, 7, 3), (4, 3), 0, 1),
        ("mk,nk->mn", (3, 5), (7, 5), 1, 0),
        ("bmk,bkn->bmn", (7, 2, 3), (7, 3, 2), 0, 0),
    ],
)
def test_gradients_of_all_gather_matmul_match_the_reference(
    kernels: None,
    equation: str,
    left: tuple[int, ...],
    right: tuple[int, ...],
    which: int,
    dim: int,
    size: int,
) -> None:
    operands = whole_numbers(left, 1), whole_numbers(right, 2)
    shards = [shard.requires_grad_() for shard in shards_of(operands[which], dim, size)]
    others = [(operands[1 - which] + rank).requires_grad_() for rank in range(size)]
    length, width = operands[which].shape[dim], result_shape(equation, *operands)[-1]
    biases = [whole_numbers((width,), 50 + rank).requires_grad_() for rank in range(size)]

    def loss(rank: int, whole: Tensor, y: Tensor) -> Tensor:
        return (y * whole_numbers(y.shape, 7 + rank)).sum() + (
            whole * whole_numbers(whole.shape, 17 + rank)
        ).sum()

    def run(rank: int) -> tuple[Tensor, ...]:
        outputs = GATHER(
            shards[rank],
            others[rank],
            equation,
            which,
            dim,
            length,
            size,
            "gradients",
            rank,
            2,
            biases[rank],
        )
        return torch.autograd.grad(loss(rank, *outputs), (shards[rank], others[rank], biases[rank]))

    with HostThreads(size) as peers, providers.provide_peers("gradients", peers):
        gradients = peers.run_on_each(run)
    reference = overlapped_references.all_gather_matmul_reference(
        equation, shards, others, which, dim, biases
    )
    total = sum((loss(rank, *outputs) for rank, outputs in enumerate(reference)), torch.zeros(()))
    expected = torch.autograd.grad(total, [*shards, *others, *biases])
    assert all(
        torch.equal(a, b)
        for a, b in zip([f[i] for i in range(3) for f in gradients], expected, strict=True)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("equation", "left", "right", "dim"),
    [
        ("mk,kn->mn", (7, 3), (3, 4), 0),
        ("bsk,nk->bsn", (2, 7, 3), (4, 3), 1),
        ("mk,kn->mn", (2, 3), (3, 7), 1),
    ],
)
def test_gradients_of_matmul_reduce_scatter_match_the_reference(
    kernels: None, equation: str, left: tuple[int, ...], right: tuple[int, ...], dim: int, size: int
) -> None:
    pairs = [
        (
            whole_numbers(left, rank).requires_grad_(),
            whole_numbers(right, 9 + rank).requires_grad_(),
        )
        for rank in range(size)
    ]
    shape = result_shape(equation, *pairs[0])
    addends = [whole_numbers(shape, 20 + rank).requires_grad_() for rank in range(size)]
    biases = [whole_numbers(shape[-1:], 50 + rank).requires_grad_() for rank in range(size)]

    def run(rank: int) -> tuple[Tensor, ...]:
        y = SCATTER(
            *pairs[rank], addends[rank], equation, dim, size, "gradients", rank, 2, biases[rank]
        )
        return torch.autograd.grad(
            (y * whole_numbers(y.shape, 30 + rank)).sum(),
            (*pairs[rank], addends[rank], biases[rank]),
        )

    with HostThreads(size) as peers, providers.provide_peers("gradients", peers):
        gradients = peers.run_on_each(run)
    parts = overlapped_references.matmul_reduce_scatter_reference(
        equation, pairs, dim, addends, biases
    )
    total = sum(
        ((part * whole_numbers(part.shape, 30 + rank)).sum() for rank, part in enumerate(parts)),
        torch.zeros(()),
    )
    expected = torch.autograd.grad(
        total,
        [x for pair, *more in zip(pairs, addends, biases, strict=True) for x in (*pair, *more)],
    )
    assert all(
        torch.equal(a, b) for a, b in zip([x for f in gradients for x in f], expected, strict=True)
    )


# --- functions called by programs
# --------------------------------------------------------------------------------------------------


def test_ranks_at_different_speeds_get_the_results_of_each_epoch(kernels: None) -> None:
    """Each rank calls the functions 100 times in a row. Only the signals synchronize the ranks."""
    x, w = whole_numbers((11, 3), 1), whole_numbers((3, 4), 2)

    def run(rank: int) -> bool:
        group, is_correct = AxisGroup("own pace", 3, rank), True
        for epoch in range(100):
            whole = x + epoch
            gathered, y = overlapped.all_gather_dot(
                "mk,kn->mn", (shards_of(whole, 0, 3)[rank], w), 0, ChunkedDim.of(0, group, 2), 11
            )
            part = overlapped.dot_reduce_scatter(
                "mk,kn->mn", (whole + rank, w), ChunkedDim.of(0, group, 2)
            )
            with_addend = overlapped.dot_reduce_scatter(
                "mk,kn->mn", (whole + rank, w), ChunkedDim.of(0, group, 2), y * rank
            )
            expected = shards_of(
                sum(((whole + other) @ w for other in range(3)), torch.zeros(11, 4)), 0, 3
            )[rank]
            is_correct = (
                is_correct
                and torch.equal(gathered, whole)
                and torch.equal(y, whole @ w)
                and torch.equal(part, expected)
            )
            is_correct = is_correct and torch.equal(
                with_addend, expected + 3 * shards_of(y, 0, 3)[rank]
            )
        return is_correct

    with HostThreads(3) as peers, providers.provide_peers("own pace", peers):
        assert peers.run_on_each(run) == [True] * 3


def test_axis_of_size_one_computes_only_the_product() -> None:
    x, w, group = torch.randn(5, 3), torch.randn(3, 4), AxisGroup("", 1, 0)
    whole, y = overlapped.all_gather_dot("mk,kn->mn", (x, w), 0, ChunkedDim.of(0, group, 2))
    assert whole is x
    assert torch.equal(y, dot("mk,kn->mn", x, w))
    assert torch.equal(
        overlapped.dot_reduce_scatter("mk,kn->mn", (x, w), ChunkedDim.of(0, group, 2)), y
    )
    assert torch.equal(
        overlapped.dot_reduce_scatter("mk,kn->mn", (x, w), ChunkedDim.of(0, group, 2), y), 2 * y
    )


def test_bias_is_added_only_by_the_first_shard_of_the_contracted_dims() -> None:
    x, w, bias = whole_numbers((5, 3), 1), whole_numbers((3, 4), 2), whole_numbers((4,), 3)
    over = ChunkedDim(dim=0, size=1, name="", coordinate=0, num_chunks=2)
    for starts, expected_bias in (
        ((), bias),
        ((0,), bias),
        ((0, 0), bias),
        ((3,), 0 * bias),
        ((0, 3), 0 * bias),
    ):
        _, y = fused.gather_bound(x, w, "mk,kn->mn", 0, over, bias, starts)
        part = fused.scatter_bound(x, w, None, "mk,kn->mn", over, bias, starts)
        assert torch.equal(y, x @ w + expected_bias) and torch.equal(part, y)


def test_fake_group_gives_the_shapes_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x, w, group = torch.randn(4, 3), torch.randn(3, 4), AxisGroup("", 3, 1)
    whole, y = overlapped.all_gather_dot("mk,kn->mn", (x, w), 0, ChunkedDim.of(0, group, 2), 11)
    assert (tuple(whole.shape), tuple(y.shape)) == ((11, 3), (11, 4))
    assert tuple(
        overlapped.dot_reduce_scatter("mk,kn->mn", (whole, w), ChunkedDim.of(0, group, 2)).shape
    ) == (4, 4)
    assert not caplog.records


def test_collective_and_product_run_with_one_warning_without_shared_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(providers, "_said", set())
    monkeypatch.setattr(
        bound_ops, "all_gather", lambda x, dim, size, name, length=None: torch.cat([x] * size, dim)
    )
    monkeypatch.setattr(
        bound_ops,
        "reduce_scatter",
        lambda x, dim, op, size, name, coordinate: x.chunk(size, dim)[coordinate] * size,
    )
    x, w, group = whole_numbers((4, 3), 1), whole_numbers((3, 4), 2), AxisGroup("gloo", 2, 1)
    with caplog.at_level(logging.WARNING, "autopar.kernels"):
        for _ in range(2):
            whole, y = overlapped.all_gather_dot("mk,kn->mn", (x, w), 0, ChunkedDim.of(0, group, 2))
            part = overlapped.dot_reduce_scatter("mk,kn->mn", (x, w), ChunkedDim.of(0, group, 2))
            added = overlapped.dot_reduce_scatter(
                "mk,kn->mn", (x, w), ChunkedDim.of(0, group, 2), x @ w
            )
            same = (
                GATHER(x, w, "mk,kn->mn", 0, 0, 8, 2, "gloo", 1, 2),
                SCATTER(x, w, None, "mk,kn->mn", 0, 2, "gloo", 1, 2),
            )
    assert torch.equal(whole, torch.cat([x, x]))
    assert torch.equal(y, whole @ w)
    assert torch.equal(part, (x @ w)[2:] * 2)
    assert torch.equal(added, 2 * part)
    assert torch.equal(same[0][1], y)
    assert torch.equal(same[1], part)
    assert ["cannot access each other's memory" in record.message for record in caplog.records] == [
        True
    ]


def test_unsupported_dtype_uses_the_decomposition(
    kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_ops, "reduce_scatter", lambda x, *_: x)
    x = torch.ones(2, 2, dtype=torch.complex64)
    with HostThreads(2) as peers, providers.provide_peers("complex", peers):
        assert torch.equal(SCATTER(x, x, None, "mk,kn->mn", 0, 2, "complex", 0, 1), x @ x)


# --- signals
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_missing_signal_of_a_peer_raises_a_timeout_error(debug: None) -> None:
    x, w = whole_numbers((2, 3), 1), whole_numbers((3, 4), 2)
    with (
        HostThreads(2) as peers,
        providers.provide_peers("alone", peers),
        pytest.raises(KernelError, match=r"all_gather_matmul.*timed out"),
    ):
        GATHER(x, w, "mk,kn->mn", 0, 0, 4, 2, "alone", 0, 1)
    with (
        HostThreads(2) as peers,
        providers.provide_peers("alone", peers),
        pytest.raises(KernelError, match=r"reduce_scatter.*timed out"),
    ):
        SCATTER(x, w, None, "mk,kn->mn", 0, 2, "alone", 0, 1)


def test_signal_before_its_data_gives_wrong_results(kernels: None) -> None:
    """Rank 1 signals before it writes its shard, so that rank 0 multiplies the previous
    contents."""
    x, w = whole_numbers((4, 3), 1), whole_numbers((3, 4), 2)
    shards, shape = shards_of(x, 0, 2), [4, 3]

    def product_of_rank_0(early: bool) -> Tensor:
        peers = VirtualRanks(2)
        shards_seen = chunked.Shards.of(shape, 0, x.dtype, 2, 1)
        regions = chunked.gather_regions(peers, shards_seen)
        regions.data[1].zero_()
        job, y = overlapped.prepare_gather("mk,kn->mn", shards[0], w, 0, 0, shape)
        late, _ = overlapped.prepare_gather("mk,kn->mn", shards[1], w, 0, 0, shape)
        if early:
            library.check(
                library.function("host", "ap_epoch_signal_host")(regions.flags[1].data_ptr(), 1),
                "signal",
            )
            peers_of_rank_0 = HostThreads(2)
            peers_of_rank_0._regions = peers._regions
            chunked.gather(peers_of_rank_0, shards_seen, {0: job})
            peers_of_rank_0.close()
        else:
            chunked.gather(peers, shards_seen, {0: job, 1: late})
        return y

    assert torch.equal(product_of_rank_0(early=False), x @ w)
    assert not torch.equal(product_of_rank_0(early=True), x @ w)


# --- equations, providers
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "equation",
    [
        "mk,kn->mn",
        "mk,nk->mn",
        "km,kn->mn",
        "nk,mk->mn",
        "kn,mk->mn",
        "mjk,jkn->mn",
        "m,n->mn",
        "bmk,bkn->bmn",
    ],
)
def test_product_is_written_into_the_given_output(equation: str) -> None:
    sizes = {"m": 5, "k": 3, "n": 4, "b": 2, "j": 2}
    left, right = (
        whole_numbers([sizes[letter] for letter in term], seed)
        for seed, term in enumerate(equation.split("->")[0].split(","))
    )
    expected = torch.einsum(equation, left, right)
    for out in (
        torch.zeros(expected.shape),
        torch.zeros(*expected.shape, 2)[..., 0],
    ):  # the second output is not contiguous
        multiply_into(equation, left, right, out)
        assert torch.equal(out, expected)
        for bias in (whole_numbers(expected.shape[-1:], 3), whole_numbers((), 4)):
            multiply_into(equation, left, right, out, bias)
            assert torch.equal(out, expected + bias)


def test_contracted_dims_and_zero_chunks_are_refused() -> None:
    x, w, group = torch.ones(2, 3), torch.ones(3, 4), AxisGroup("", 2, 0)
    with pytest.raises(ValueError, match="must be in the result"):
        overlapped.all_gather_dot("mk,kn->mn", (x, w), 0, ChunkedDim.of(1, group, 1))
    with pytest.raises(ValueError, match="0 chunks"):
        overlapped.dot_reduce_scatter("mk,kn->mn", (x, w), ChunkedDim.of(0, group, 0))
    with pytest.raises(ValueError, match="not a product of two"):
        check_chunked("mk->m", "m", 1)


def test_virtual_ranks_must_run_together_and_names_are_unique() -> None:
    peers = VirtualRanks(2)
    with pytest.raises(KernelError, match="must run together"):
        peers.run((0,), ())
    with (
        providers.provide_peers("twice", peers),
        pytest.raises(KernelError, match=r"'twice' .* empty or in use"),
        providers.provide_peers("twice", peers),
    ):
        pass
