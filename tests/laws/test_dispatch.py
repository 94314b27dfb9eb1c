"""Dispatched experts match the unsharded op for all picks. Plans with dispatch are in
`test_dispatch_plans`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from native import needs_host
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar import ops
from autopar.analysis.work import works
from autopar.core.layout import Layout, Strategy
from autopar.errors import RuleError
from autopar.kernels import dispatched
from autopar.kernels.peers import HostThreads, provide_peers
from autopar.ops.expert_layers import (
    DISPATCHED,
    Together,
    dispatched_experts,
    dispatched_experts_backward,
)
from autopar.rules import (
    Call,
    Local,
    Starts,
    call_on,
    dispatch,
    localization,
    num_senders,
    own_moves,
    strategies,
    trial,
)
from autopar.rules.call import TensorInfo
from autopar.rules.dispatch import dispatch_axes
from autopar.rules.law import check_strategy

WHOLE = torch.float64
PICKS = ("any", "one", "none", "again")


def drawn(t: int, k: int, e: int, how: str, seed: int = 0, act: str = "relu") -> tuple[Any, ...]:
    """Return operands of experts in small integers, so that all sums are exact. `how` selects the
    picks: any experts or none, one expert for all, none for all, or the same expert for all picks
    of a token."""
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(WHOLE)

    ids = torch.randint(-1, e + 1, (t, k), generator=generator)
    ids = {
        "any": ids,
        "one": torch.full_like(ids, e - 1),
        "none": torch.full_like(ids, e),
        "again": ids[:, :1].expand(t, k).contiguous(),
    }[how]
    return whole(t, 3), ids, whole(t, k), whole(e, 2, 5, 3), whole(e, 4, 5), act, e


def both(args: tuple[Any, ...]) -> list[tuple[Call, list[Tensor]]]:
    grad = torch.randint(
        -3, 4, (args[0].shape[0], 4), generator=torch.Generator().manual_seed(1)
    ).to(WHOLE)
    forward = call_on(ops.experts, args, {}, ops.experts(*args))
    return [
        forward,
        call_on(ops.experts_backward, (grad, *args), {}, ops.experts_backward(grad, *args)),
    ]


def dispatching(call: Call, mesh_shape: tuple[int, ...]) -> list[Strategy]:
    return [s for s in strategies(call, mesh_shape) if dispatch_axes(call, s.inputs)]


# ── the op ──


@examples(30)
@given(
    t=st.integers(2, 9),
    k=st.integers(1, 3),
    e=st.sampled_from([2, 3, 4, 6, 8]),
    how=st.sampled_from(PICKS),
    seed=st.integers(0, 99),
    mesh_shape=st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3)]),
)
def test_every_dispatch_strategy_matches_the_unsharded_op(
    t: int, k: int, e: int, how: str, seed: int, mesh_shape: tuple[int, ...]
) -> None:
    for call, tensors in both(drawn(t, k, e, how, seed)):
        for strategy in dispatching(call, mesh_shape):
            check_strategy(call, tensors, strategy, mesh_shape)


def test_dispatch_supports_uneven_tokens_but_not_uneven_experts() -> None:
    for call, _ in both(drawn(7, 2, 4, "any")):
        assert len(dispatching(call, (4,))) == 1
    for call, _ in both(drawn(8, 2, 3, "any")):
        assert not dispatching(call, (2,))


def test_experts_may_be_sharded_over_a_second_axis_that_gathers() -> None:
    """Each rank sends to the ranks of its own column. At most one axis dispatches."""
    call, _ = both(drawn(8, 2, 8, "any"))[0]
    found = dispatching(call, (2, 2))
    assert all(len(dispatch_axes(call, s.inputs)) == 1 for s in found)
    beside = [s for s in found if all(p == Shard(0) for p in s.inputs[3].placements)]
    assert {str(s.inputs[0]) for s in beside} == {"S(0) R", "R S(0)"} and {
        s.inputs[3].order for s in beside
    } == {(0, 1), (1, 0)}


def parts(args: tuple[Any, ...], n: int) -> list[tuple[Any, ...]]:
    x, ids, gates, up, down, act, e = args
    starts = tuple(i * e // n for i in range(n))
    split = zip(x.chunk(n), ids.chunk(n), gates.chunk(n), up.chunk(n), down.chunk(n), strict=True)
    return [(*each, act, e, starts) for each in split]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("how", PICKS)
def test_dispatch_of_small_integers_is_exact(how: str, n: int) -> None:
    args = drawn(8, 3, 4, how)
    assert torch.equal(
        torch.cat(dispatched_experts(parts(args, n), Together())), ops.experts(*args)
    )
    grad = torch.randint(-3, 4, (8, 4)).to(WHOLE)
    found = dispatched_experts_backward(
        [(g, *p) for g, p in zip(grad.chunk(n), parts(args, n), strict=True)], Together()
    )
    for mine, theirs in zip(
        zip(*found, strict=True), ops.experts_backward(grad, *args), strict=True
    ):
        assert torch.equal(torch.cat(mine), theirs)


@needs_host
@pytest.mark.parametrize("how", PICKS)
def test_kernels_transfer_rows_between_peers_if_requested(how: str) -> None:
    """Ranks are threads that access each other's memory, with different numbers of tokens."""
    args = drawn(7, 3, 6, how)
    grad, n = torch.randint(-3, 4, (7, 4)).to(WHOLE), 3
    shares = [(g, *p) for g, p in zip(grad.chunk(n), parts(args, n), strict=True)]
    whole = ops.experts(*args), *ops.experts_backward(grad, *args)

    def run(rank: int) -> tuple[Tensor, ...]:
        group = 9, n, "dispatch between peers", rank, True
        share = shares[rank]
        assert isinstance(dispatched.exchange_of(share[1], *group), dispatched.BetweenPeers)
        assert isinstance(
            dispatched.exchange_of(share[1], *group[:-1], False), dispatched.InGroup
        ), "where nobody asks"
        return dispatched.experts_bound(*share[1:], *group), *dispatched.experts_backward_bound(
            *share, *group
        )

    with HostThreads(n) as peers, provide_peers("dispatch between peers", peers):
        found = peers.run_on_each(run)
    for mine, theirs in zip(zip(*found, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(mine), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_terms_of_a_token_are_added_in_the_order_of_experts(dtype: torch.dtype) -> None:
    """Linear layers that only scale by powers of two do not round. Therefore, each bit equals the
    unsharded op if the order of the sums is the same."""
    generator = torch.Generator().manual_seed(0)
    e, width = 8, 16
    x = torch.rand(32, width, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(e, generator=generator)[:5] for _ in range(32)])
    gates = torch.rand(32, 5, generator=generator) * 100
    scales = 2.0 ** torch.arange(e).view(e, 1, 1)
    up, down = (torch.eye(width).expand(e, width, width) * s for s in (scales, 1 / scales))
    args = (
        x,
        ids,
        gates,
        up.unsqueeze(1).to(dtype).contiguous(),
        down.to(dtype).contiguous(),
        "relu",
        e,
    )
    for n in (2, 4):
        assert torch.equal(
            torch.cat(dispatched_experts(parts(args, n), Together())), ops.experts(*args)
        )


def test_a_nan_row_affects_only_its_token() -> None:
    args = drawn(8, 2, 4, "any")
    args[0][3] = float("nan")
    args[1][3], args[1][5] = torch.tensor([0, 1]), torch.tensor([4, 4])
    found = torch.cat(dispatched_experts(parts(args, 2), Together()))
    assert found[3].isnan().all() and not found[torch.arange(8) != 3].isnan().any()
    assert not found[5].any(), "no expert picked"


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)])
def test_the_flops_of_all_rows_are_divided_over_ranks(mesh_shape: tuple[int, ...]) -> None:
    for call, _ in both(drawn(64, 2, 8, "any")):

        def flops(strategy: Strategy, call: Call = call) -> int:
            local = [
                [
                    TensorInfo(
                        tuple(n // at.num_shards(d, mesh_shape) for d, n in enumerate(i.shape)),
                        i.dtype,
                    )
                    for i, at in zip(infos, layouts, strict=True)
                ]
                for infos, layouts in (
                    (call.inputs, strategy.inputs),
                    (call.outputs, strategy.outputs),
                )
            ]
            return sum(
                w.flops * n
                for w, n in works(
                    call.target,
                    call.args,
                    call.kwargs,
                    *local,
                    num_senders(call, strategy, mesh_shape),
                )
            )

        whole, *_ = strategies(call, mesh_shape)
        for strategy in dispatching(call, mesh_shape):
            split = [
                any(isinstance(s, Shard) for s in axis)
                for axis in zip(*(x.placements for x in strategy.inputs), strict=True)
            ]
            shares = [n if is_split else 1 for n, is_split in zip(mesh_shape, split, strict=True)]
            if own_moves(call, strategy, mesh_shape) and len(shares) == 1:
                assert flops(strategy) * shares[0] == flops(whole)


# ── planted faults ──


def local_with(**change: Callable[[Any], Any]) -> Callable[[Any], Local]:
    """Return local arguments with some changes: ``starts``, or the function that the ranks run
    together."""

    def local(site: Any) -> Local:
        found = dispatch.local(site)
        if found.target not in DISPATCHED:
            return found
        args = tuple(
            change["starts"](a) if isinstance(a, Starts) and "starts" in change else a
            for a in found.args
        )
        return Local(
            change["target"](found.target) if "target" in change else found.target,
            args,
            found.kwargs,
        )

    return local


@dataclass(frozen=True, slots=True)
class Backwards(Starts):
    """Starts with the experts of the ranks in reverse order."""

    def at(self, mesh_shape: Any, coordinate: Any) -> tuple[int, ...]:
        return Starts(self.dim_size, self.layout, self.dim, self.axis).at(mesh_shape, coordinate)[
            ::-1
        ]


def backwards(token: Starts) -> Starts:
    return Backwards(token.dim_size, token.layout, token.dim, token.axis)


def apart(target: Any) -> Any:
    """Let each rank compute separately, without sending rows."""

    def run(ranks: Any, exchange: Any) -> Any:
        return [target([(*r[:-1], r[-1][i : i + 1])], exchange)[0] for i, r in enumerate(ranks)]

    return run


def ungated(target: Any) -> Any:
    """Set all gates to one."""
    at = -6
    return lambda ranks, exchange: target(
        [(*r[:at], torch.ones_like(r[at]), *r[at + 1 :]) for r in ranks], exchange
    )


@pytest.mark.parametrize(
    ("op", "change"),
    [
        (0, {"starts": backwards}),
        (1, {"starts": backwards}),
        (0, {"target": apart}),
        (1, {"target": apart}),
        (0, {"target": ungated}),
        (1, {"target": ungated}),
    ],
    ids=[
        "homes",
        "homes backward",
        "no exchange",
        "no exchange backward",
        "gates",
        "gates backward",
    ],
)
def test_a_wrong_dispatch_is_detected(
    op: int, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, tensors = both(drawn(8, 2, 4, "any"))[op]
    (strategy,) = dispatching(call, (2,))
    check_strategy(call, tensors, strategy, (2,))
    broken = local_with(**change)
    if "target" in change:
        monkeypatch.setattr(
            trial, "DISPATCHED", (*DISPATCHED, wrong := change["target"](DISPATCHED[op]))
        )
        broken = local_with(target=lambda _: wrong)
    monkeypatch.setattr(
        localization, "LOCALIZERS", {**localization.LOCALIZERS, call.target: broken}
    )
    with pytest.raises(RuleError, match="is wrong on shapes"):
        check_strategy(call, tensors, strategy, (2,))


@pytest.mark.parametrize("results", [[Partial("sum")], [Replicate()]])
def test_wrong_result_placements_of_dispatch_are_detected(results: list[Any]) -> None:
    call, tensors = both(drawn(8, 2, 4, "any"))[0]
    rows = Layout((Shard(0),))
    with pytest.raises(RuleError, match="is wrong on shapes"):
        check_strategy(call, tensors, Strategy((rows,) * 5, (Layout(results),)), (2,))
