"""Sequence parallelism with 1D tensor parallelism: ops outside of chains of linear layers are
sharded along the sequence, the communication is that of the Megatron papers, and results match
the model."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from torch import nn

import autopar
from autopar import hf
from autopar.api.planning import plan_model
from autopar.constraints import Constraint, megatron, tensor_parallel
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.planner import Planned
from autopar.plans import Plan

LAYERS, B, S, H = 2, zoo_small.BATCH, zoo_small.SEQUENCE, 32
T5 = (
    f't5:{{"num_layers": {LAYERS}, "num_decoder_layers": {LAYERS}, "d_model": {H}, "d_kv": 8,'
    f' "d_ff": 48, "num_heads": 4, "vocab_size": {zoo_small.VOCABULARY},'
    ' "decoder_start_token_id": 0}'
)
LINE = Mesh({"tp": 2})
ALONE = tensor_parallel("1d", axes="tp", sequence=True)
TOGETHER: dict[str, tuple[Mesh, tuple[Constraint, ...]]] = {
    "alone": (LINE, (ALONE,)),
    "three devices": (Mesh({"tp": 3}), (ALONE,)),
    "fully sharded": (Mesh({"dp": 2, "tp": 2}), (megatron(tp="tp", sequence=True, zero=3),)),
    "ZeRO-1": (
        Mesh({"dp": 2, "tp": 2}),
        (megatron(tp="tp", sequence=True, zero=1, microbatches=2),),
    ),
    "context": (Mesh({"cp": 2, "tp": 2}), (megatron(tp="tp", cp="cp", sequence=True),)),
    "recompute": (LINE, (megatron(tp="tp", sequence=True, recompute="full"),)),
    "stages": (
        Mesh({"pp": 2, "tp": 2}),
        (megatron(tp="tp", pp="pp", sequence=True, microbatches=2),),
    ),
}


def built(kind: str, **settings: Any) -> tuple[nn.Module, dict[str, Any]]:
    if kind == "t5":
        return hf.build(T5, device="cpu", batch=B, seq=S)
    return getattr(zoo_small, kind)(num_layers=LAYERS, **settings)


@cache
def planned(kind: str, way: str) -> tuple[Planned, nn.Module, dict[str, Any]]:
    # three devices take six heads
    six = {
        "llama": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
        "gpt2": {"n_head": 6, "n_embd": 48},
    }
    model, batch = built(kind, **(six.get(kind, {}) if way == "three devices" else {}))
    mesh, constraints = TOGETHER[way]
    return (
        plan_model(model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=constraints)[
            1
        ],
        model,
        batch,
    )


def moved(plan: Plan, phase: str, kind: str, axis: int = 0) -> Counter[int]:
    """Return the number of collectives of a kind by the number of elements of the full tensor."""
    size = plan.mesh.shape[axis]
    steps = [(step.phase, step.collective) for _, step in plan.steps()]
    return Counter(
        max(c.bytes, c.output_bytes(size)) // 4
        for p, c in steps
        if (p, c.kind, c.axis) == (phase, kind, axis)
    )


KINDS = ("gpt2", "llama", "bert", "t5", "mixtral")
REFUSED = {("t5", "context"), ("mixtral", "context")}  # also refused by context parallelism alone
PAIRS = [
    (kind, way)
    for kind in KINDS
    for way in TOGETHER
    if way != "three devices" and (kind, way) not in REFUSED
]


@pytest.mark.parametrize(("kind", "way"), PAIRS)
def test_sequence_parallel_plans_match_the_model_and_are_certified(kind: str, way: str) -> None:
    made, model, batch = planned(kind, way)
    plan = Plan.loads(made.plan.dumps())
    assert autopar.verify(plan, model, batch).ok
    found = autopar.check(plan, model, batch)
    assert found.ok, str(found)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_three_devices_shard_a_divisible_sequence(kind: str) -> None:
    made, model, batch = planned(kind, "three devices")
    assert S % 3 == 0
    assert autopar.verify(made.plan, model, batch).ok


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_each_all_reduce_becomes_an_all_gather_and_a_reduce_scatter(kind: str) -> None:
    """Each layer has two of each in forward; in backward, two reduce-scatters and the gathers of
    two gradients. Embedding and head add one (Korthikanti et al., 2022, section 4.2.2). No tensor
    of the size of the stream is all-reduced."""
    plan, stream = planned(kind, "alone")[0].plan, B * S * H
    chains = 2 * LAYERS + 1
    assert moved(plan, "forward", "all_gather")[stream] == chains
    assert moved(plan, "forward", "reduce_scatter") == {stream: chains}
    assert moved(plan, "backward", "all_gather")[stream] == chains
    assert moved(plan, "backward", "reduce_scatter") == {stream: chains}
    assert stream not in moved(plan, "forward", "all_reduce") + moved(
        plan, "backward", "all_reduce"
    )
    whole = plan_of(kind, constraints=(tensor_parallel("1d", axes="tp"),)).plan
    assert (whole_reduces := moved(whole, "forward", "all_reduce")[stream]) == chains
    assert sent(plan, "forward") == sent(whole, "forward"), (
        f"{whole_reduces} all-reduces move as much"
    )


def plan_of(kind: str, **options: Any) -> Planned:
    model, batch = built(kind)
    return plan_model(model, LINE, example_inputs=batch, hardware="h100-sxm", **options)[1]


def sent(plan: Plan, phase: str) -> int:
    """Return twice the number of elements of tensors of the size of the stream that a device sends,
    on two devices."""
    times = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    return sum(
        count * times[kind]
        for kind in times
        for n, count in moved(plan, phase, kind).items()
        if n == B * S * H
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_norms_and_the_residual_stream_are_sharded_along_the_sequence_and_chains_are_not(
    kind: str,
) -> None:
    plan = planned(kind, "alone")[0].plan
    norms = [
        n
        for e in plan.entries
        for n in e.nodes
        if "norm" in n.node.split("/")[1] and n.node.endswith("forward/0")
    ]
    assert norms and all(str(n.strategy.outputs[0]) == "S(1)" for n in norms)
    heads = [
        n
        for e in plan.entries
        for n in e.nodes
        if n.node.split("/")[1] == "attention" and e.phase == "forward"
    ]
    assert heads and all(str(n.strategy.outputs[0]) == "S(1)" for n in heads), "heads"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_sequence_parallelism_keeps_fewer_bytes(kind: str) -> None:
    plans = (
        plan_of(kind, constraints=(tensor_parallel(axes="tp", sequence=split),)).plan
        for split in (True, False)
    )
    split, whole = (plan.prediction.memory_bytes["activations"] for plan in plans)
    assert split < 0.9 * whole


def test_sequence_parallelism_without_a_sequence_is_refused() -> None:
    with pytest.raises(ConstraintError, match="sequence"):
        autopar.plan(
            Chain(),
            LINE,
            example_inputs={"x": torch.ones(4)},
            hardware="h100-sxm",
            constraints=(ALONE,),
        )
    with pytest.raises(ConstraintError, match="grids already shard"):
        tensor_parallel("2d", axes=("a", "b"), sequence=True)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x[:, None].expand(-1, 8)).relu()).pow(2).mean()


@pytest.mark.slow
def test_ops_that_gather_the_sequence_or_have_another_one_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        plan_of("mixtral", constraints=(ALONE,))
    assert (
        "gathers the sequence for ops that cannot compute on a shard of it:"
        " model.layers.*.mlp/view/forward/0" in caplog.text
    )
    caplog.clear()
    model, batch = built("t5")
    batch["labels"] = batch["labels"][:, : S // 2].contiguous()
    with caplog.at_level(logging.WARNING, "autopar"):
        plan = autopar.plan(
            model, LINE, example_inputs=batch, hardware="h100-sxm", constraints=(ALONE,)
        )
    assert "replicates tensors that depend only on inputs with another sequence" in caplog.text
    assert autopar.verify(plan, model, batch).ok
