"""Causal attention of mirrored shards: the work of ranks is balanced, results are correct, and the
communication matches the documentation.

The hardware has slow attention, so that small models gain from it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from measured import measured_peak
from slow_attention import slow_attention
from torch import nn

import autopar
from autopar import ops
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.certificate import certify
from autopar.constraints import context_parallel, megatron
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.ops import softmax_attention
from autopar.planner import Planned
from autopar.plans import Plan
from autopar.program.peak_memory import trace_peak
from autopar.program.program import StageProgram
from autopar.rules import call_on, strategies

LAYERS, B, S = 2, zoo_small.BATCH, zoo_small.SEQUENCE
LINE = Mesh({"context": 2})
WAYS: dict[str, tuple[Mesh, tuple[Any, ...]]] = {
    "two": (LINE, (context_parallel("context"),)),
    "three": (Mesh({"context": 3}), (context_parallel("context"),)),
    "six": (Mesh({"context": 6}), (context_parallel("context"),)),
    "beside data, sharded": (Mesh({"data": 2, "context": 2}), (megatron(dp=2, cp=2, zero=3),)),
    "beside tensor": (Mesh({"context": 2, "tensor": 2}), (megatron(tp=2, cp=2),)),
    "in microbatches": (LINE, (megatron(cp=2, microbatches=2),)),
    "recomputed": (LINE, (megatron(cp=2, recompute="full"),)),
    "in stages": (Mesh({"stage": 2, "context": 2}), (megatron(pp=2, cp=2, microbatches=2),)),
    "freely": (Mesh({"a": 3}), ()),
}
SLOW = {("gpt2", way) for way in WAYS if way not in ("two", "in stages")} | {
    ("llama", "recomputed"),
    ("llama", "six"),
}
CASES = [
    pytest.param(k, w, marks=[pytest.mark.slow] * ((k, w) in SLOW), id=f"{k} {w}")
    for k in ("gpt2", "llama")
    for w in WAYS
]


@cache
def planned(kind: str, way: str) -> tuple[Planned, nn.Module, dict[str, Any]]:
    model, batch = getattr(zoo_small, kind)(num_layers=LAYERS)
    mesh, force = WAYS[way]
    return (
        plan_model(model, mesh, example_inputs=batch, hardware=slow_attention(), constraints=force)[
            1
        ],
        model,
        batch,
    )


def attentions(plan: Plan) -> list[str]:
    """Return the layouts of queries of each attention and its backward."""
    plans = plan.stages
    chosen = [
        c
        for each in plans
        for e in each.entries
        for c in (*e.nodes, *e.recompute)
        if "/attention" in c.node
    ]
    return [str(c.strategy.outputs[0]) for c in chosen]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_gradients_of_mirrored_plans_match_the_model_and_the_plan_is_certified(
    kind: str, way: str
) -> None:
    made, model, batch = planned(kind, way)
    found = attentions(made.plan)
    assert found and all("~mirrored" in at for at in found)
    assert Plan.loads(made.plan.dumps()) == made.plan
    assert autopar.verify(made.plan, model, batch).ok
    certificate = autopar.check(made.plan, model, batch, hardware=slow_attention())
    assert certificate.ok, str(certificate)


def test_queries_and_outputs_are_swapped_once_per_phase_and_kept_mirrored() -> None:
    made, model, _ = planned("llama", "two")
    config: Any = model.config
    steps = [(step.phase, step.collective) for _, step in made.plan.steps()]
    swaps = Counter((phase, c.axis, c.dim, c.bytes) for phase, c in steps if c.kind == "swap")
    part = (
        B
        * config.num_attention_heads
        * (config.hidden_size // config.num_attention_heads)
        * S
        // 2
        * 4
    )
    assert swaps == {("forward", 0, 2, part): 2 * LAYERS, ("backward", 0, 2, part): 2 * LAYERS}
    kept = [k for k in made.plan.kept if any("~mirrored" in str(at) for at in k.layouts)]
    assert len(kept) >= 3, "queries, outputs and their sums"


def counted(
    program: StageProgram, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Return the number of pairs of query and key that each rank computes in a step. With a causal
    mask, half of the pairs of a square count."""
    pairs = 0.0

    attend = softmax_attention.attend

    def seen(kernel: Any) -> Any:
        def run(*operands: Any) -> Any:
            nonlocal pairs
            *tensors, _mask, is_causal, _scale = operands
            q, k, *_ = tensors if kernel is attend else tensors[1]
            pairs += q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / (2 if is_causal else 1)
            return kernel(*operands)

        return run

    monkeypatch.setattr(softmax_attention, "attend", seen(attend))
    monkeypatch.setattr(
        softmax_attention, "attend_backward", seen(softmax_attention.attend_backward)
    )
    found = []
    for rank in range(program.mesh.num_devices):
        pairs = 0.0
        measured_peak(program, batch, coordinate=program.mesh.coordinate(rank))
        found.append(pairs)
    return found


@pytest.mark.parametrize("way", ["two", "three", "beside data, sharded"])
def test_all_ranks_compute_equally_many_pairs_that_sum_to_the_total(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, model, batch = planned("llama", way)
    config: Any = model.config
    ranks = counted(made.stage_program(), batch, monkeypatch)
    whole = 2 * LAYERS * B * config.num_attention_heads * S * S / 2  # for forward and backward
    assert ranks == [whole / len(ranks)] * len(ranks)


def test_with_plain_shards_the_last_rank_computes_the_most_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = zoo_small.llama(num_layers=LAYERS)
    mesh, force = Mesh({"context": 4}), (context_parallel("context"),)
    made = plan_model(
        model, mesh, example_inputs=batch, hardware=slow_attention(), constraints=force
    )[1]
    assert set(attentions(made.plan)) == {"S(2)"}, "parts of three tokens have no halves"
    ranks = counted(made.stage_program(), batch, monkeypatch)
    assert ranks == sorted(ranks) and ranks[3] == pytest.approx(7 * ranks[0])


def test_mirrored_attention_takes_its_share_and_less_than_the_last_plain_shard() -> None:
    times: dict[str, dict[str, float]] = {}
    for size in (1, 2, 4):
        model, batch = zoo_small.llama(num_layers=LAYERS)
        force = (context_parallel("context"),) if size > 1 else ()
        plan = autopar.plan(
            model,
            Mesh({"context": size}),
            example_inputs=batch,
            hardware=slow_attention(),
            constraints=force,
        )
        times[str(size)] = {
            e.phase: e.time_s for e in plan.entries for c in e.nodes if "/attention" in c.node
        }
    for phase, whole_s in times["1"].items():
        overhead_s = slow_attention().launch_overhead_s
        assert times["2"][phase] - overhead_s == pytest.approx((whole_s - overhead_s) / 2, rel=1e-3)
        assert times["4"][phase] - overhead_s == pytest.approx(
            (whole_s - overhead_s) / 4 * (2 - 1 / 4), rel=1e-3
        ), "the last plain part"


def test_fast_attention_uses_plain_shards() -> None:
    model, batch = zoo_small.llama(num_layers=LAYERS)
    plan = autopar.plan(
        model,
        LINE,
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=(context_parallel("context"),),
    )
    assert set(attentions(plan)) == {"S(2)"}, "swaps would cost more than they save"


@pytest.mark.parametrize("way", ["two", "three"])
def test_the_predicted_memory_of_mirrored_plans_is_exact(way: str) -> None:
    batch, (mesh, force) = {"x": torch.randn(2, 36, 8)}, WAYS[way]
    made = plan_model(
        Attending(is_causal=True),
        mesh,
        example_inputs=batch,
        hardware=slow_attention(),
        constraints=force,
    )[1]
    assert all("mirrored" in at for at in attentions(made.plan))
    program = made.stage_program()
    ranks = range(program.mesh.num_devices)
    measured = [measured_peak(program, batch, coordinate=(rank,))[0] for rank in ranks]
    assert measured == [trace_peak(program, coordinate=(rank,)).peak_bytes for rank in ranks]
    assert max(measured) == trace_peak(program).peak_bytes


class Attending(nn.Module):
    """Attention with four heads."""

    def __init__(self, *, masked: bool = False, is_causal: bool = False) -> None:
        super().__init__()
        self.project, self.masked, self.is_causal = nn.Linear(8, 3 * 32), masked, is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        return (
            nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=self.is_causal
            )
            .pow(2)
            .sum()
        )


@pytest.mark.parametrize("masked", [False, True])
def test_attention_that_is_not_causal_uses_plain_shards(masked: bool) -> None:
    batch, force = {"x": torch.randn(1, 16, 8)}, (context_parallel("context"),)
    made = plan_model(
        Attending(masked=masked),
        LINE,
        example_inputs=batch,
        hardware=slow_attention(),
        constraints=force,
    )[1]
    assert attentions(made.plan) and not any("mirrored" in at for at in attentions(made.plan))


def test_causal_attention_with_a_mask_or_other_keys_has_no_mirrored_strategies() -> None:
    q = torch.randn(1, 1, 8, 4)
    result = ops.attention(q, q, q, None, True, 0.5)
    offered = {}
    for name, keys, mask in (
        ("plain", 8, None),
        ("masked", 8, torch.ones(1, 1, 8, 8)),
        ("fewer keys", 6, None),
    ):
        call, _ = call_on(
            ops.attention, (q, q[:, :, :keys], q[:, :, :keys], mask, True, 0.5), {}, result
        )
        offered[name] = any(s.outputs[0].special for s in strategies(call, (2,)))
    assert offered == {"plain": True, "masked": False, "fewer keys": False}


def plainly(at: Layout) -> Layout:
    return Layout.parse(str(at).replace("~mirrored", ""))


def with_attention(plan: Plan, change: Any) -> Plan:
    """Change the strategies of attention."""

    def of(c: Any) -> Any:
        if "/attention/" not in c.node:
            return c
        inputs, outputs = (
            tuple(map(change, layouts)) for layouts in (c.strategy.inputs, c.strategy.outputs)
        )
        return replace(c, strategy=replace(c.strategy, inputs=inputs, outputs=outputs))

    return replace(
        plan, entries=tuple(replace(e, nodes=tuple(map(of, e.nodes))) for e in plan.entries)
    )


def with_swaps(plan: Plan, change: Any) -> Plan:
    return replace(
        plan,
        communications=tuple(
            change(c) if c.collective.kind == "swap" else c for c in plan.communications
        ),
    )


def in_half(plan: Plan) -> Plan:
    entries = (
        replace(e, time_s=e.time_s / 2) if any("/attention" in c.node for c in e.nodes) else e
        for e in plan.entries
    )
    return replace(plan, entries=tuple(entries))


CHANGES: dict[str, tuple[Any, str]] = {
    "plain parts, not swapped": (lambda p: with_attention(p, plainly), "(?s)moves: .*"),
    "keys that are mirrored": (
        lambda p: with_attention(
            p, lambda at: Layout.parse("S(2)~mirrored") if str(at) == "R" else at
        ),
        "no rule allows",
    ),
    "a swap left out": (
        lambda p: replace(
            p, communications=tuple(c for c in p.communications if c.collective.kind != "swap")
        ),
        "moves: ",
    ),
    "a swap that leads nowhere": (
        lambda p: with_swaps(p, lambda c: replace(c, target=c.source)),
        "moves: ",
    ),
    "a swap from a whole": (
        lambda p: with_swaps(p, lambda c: replace(c, source=Layout.parse("R"))),
        "does not return this layout|reads a layout that does not exist",
    ),
    "a swap of another dim": (
        lambda p: with_swaps(p, lambda c: replace(c, collective=replace(c.collective, dim=1))),
        "a swap of dim 1 .* does not return this layout",
    ),
    "a swap called an all-to-all": (
        lambda p: with_swaps(
            p, lambda c: replace(c, collective=replace(c.collective, kind="all_to_all", to_dim=1))
        ),
        "does not return this layout",
    ),
    "half of a swap's bytes": (
        lambda p: with_swaps(
            p, lambda c: replace(c, collective=replace(c.collective, bytes=c.collective.bytes // 2))
        ),
        r"a device contributes \d+ bytes, not \d+",
    ),
    "a swap in no time": (
        lambda p: with_swaps(p, lambda c: replace(c, time_s=c.time_s / 2)),
        "it takes",
    ),
    "attention in half of its time": (in_half, "one instance takes"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_mirrored_plan_is_refused(name: str) -> None:
    made, _, _ = planned("llama", "two")
    change, said = CHANGES[name]
    changed = change(made.plan)
    assert changed != made.plan
    trace = traced("llama")
    assert certify(trace, made.plan, slow_attention()).ok
    found = certify(trace, changed, slow_attention())
    assert not found.ok
    assert any(re.search(said, str(f)) for f in found.findings), str(found)


@cache
def traced(kind: str) -> Any:
    model, batch = getattr(zoo_small, kind)(num_layers=LAYERS)
    return capture(model, (), batch)
