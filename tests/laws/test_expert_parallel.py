"""The expert parallelism preset: communication and memory match the formulas, each rank computes
with its own experts, and results match the model.

Volumes are those documented in `autopar.constraints.expert_parallel`, per layer and axis, counted
in the emitted program.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from torch import nn
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import ops
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.constraints import (
    Megatron,
    ddp,
    expert_parallel,
    fsdp,
    megatron,
    parallelisms,
    pipeline,
    read_constraint,
    tensor_parallel,
)
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.planner import Planned

LAYERS, B, S, H, F, E, K = 2, zoo_small.BATCH, zoo_small.SEQUENCE, 32, 48, 4, 2
EXPERTS = (E * 2 * F * H, E * H * F)  # elements of both weights of a layer
LINE, SQUARE = Mesh({"expert": 2}), Mesh({"data": 2, "expert": 2})


@cache
def planned(
    mesh: Mesh, *constraints: Any, times: int = 1
) -> tuple[Planned, nn.Module, dict[str, Any]]:
    model, batch = zoo_small.mixtral(num_layers=LAYERS)
    batch = {
        name: torch.cat([value.roll(n, 1) for n in range(times)]) for name, value in batch.items()
    }
    return (
        plan_model(model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=constraints)[
            1
        ],
        model,
        batch,
    )


def moved(made: Planned, phase: str, kind: str, axis: int) -> Counter[int]:
    """Return the number of elements of the full tensors that are gathered, scattered or reduced
    within an axis, and the number of collectives."""
    size = made.plan.mesh.shape[axis]
    steps = [
        (step.phase, step.collective) for _, step in made.plan.steps()
    ]  # before collectives are bucketed
    found = [c for p, c in steps if (p, c.kind, c.axis) == (phase, kind, axis)]
    return Counter(
        max(c.bytes, c.output_bytes(size)) // getattr(torch, c.dtype).itemsize for c in found
    )


def per_layer(*sizes: int) -> Counter[int]:
    return Counter({size: count * LAYERS for size, count in Counter(sizes).items()})


def is_right(made: Planned, model: nn.Module, batch: dict[str, Any]) -> bool:
    return autopar.verify(made.plan, model, batch).ok and autopar.check(made.plan, model, batch).ok


def gradients_are_of_their_own(made: Planned, model: nn.Module, axis: int) -> None:
    """Assert that no gradient of an expert is reduced along the expert axis, and that gradients of
    the local experts are reduced along the data axis."""
    dense = Counter(p.numel() for name, p in model.named_parameters() if "experts" not in name)
    assert moved(made, "backward", "all_reduce", axis) == dense
    assert not axis or moved(made, "backward", "all_reduce", 0) == dense + per_layer(
        *(n // 2 for n in EXPERTS)
    )


PLACES = [(LINE, (), 0), (Mesh({"expert": 4}), (), 0), (SQUARE, (ddp("data"),), 1)]
NAMES = ["2", "4", "data beside"]


@pytest.mark.parametrize(("mesh", "beside", "axis"), PLACES, ids=NAMES)
def test_tokens_are_gathered_and_results_scattered_once_a_layer(
    mesh: Mesh, beside: tuple[Any, ...], axis: int
) -> None:
    made, model, batch = planned(mesh, expert_parallel("expert", tokens="gathered"), *beside)
    tokens = (
        B * S // (1 if len(mesh.shape) == 1 else mesh.shape[0])
    )  # all devices of the axis together
    assert moved(made, "forward", "all_gather", axis) == per_layer(
        tokens * H, tokens * K, tokens * K
    )
    assert moved(made, "forward", "reduce_scatter", axis) == per_layer(tokens * H)
    assert moved(made, "backward", "all_gather", axis) == per_layer(tokens * H)
    assert moved(made, "backward", "reduce_scatter", axis) == per_layer(tokens * H, tokens * K)
    gradients_are_of_their_own(made, model, axis)
    assert len(mesh.shape) == 1 or not moved(made, "forward", "all_gather", 0)
    assert is_right(made, model, batch)


@pytest.mark.parametrize(("mesh", "beside", "axis"), PLACES, ids=NAMES)
def test_rows_are_dispatched_and_combined_once_a_layer(
    mesh: Mesh, beside: tuple[Any, ...], axis: int
) -> None:
    """Volumes are elements that a device passes to a collective, of which it sends (P−1)/P: h for
    each pick of its tokens in both directions; in backward again, with the gradients of results and
    gates; and one count per expert."""
    made, model, batch = planned(mesh, expert_parallel("expert", tokens="dispatched"), *beside)
    pairs = B * S // mesh.num_devices * K
    assert moved(made, "forward", "all_to_all", axis) == per_layer(E, pairs * H, pairs * H)
    assert moved(made, "backward", "all_to_all", axis) == per_layer(
        E, pairs * 2 * H, pairs, pairs * H, pairs
    )
    for phase, kind in itertools.product(("forward", "backward"), ("all_gather", "reduce_scatter")):
        assert not moved(made, phase, kind, axis)
    gradients_are_of_their_own(made, model, axis)
    assert len(mesh.shape) == 1 or not moved(made, "forward", "all_to_all", 0)
    assert is_right(made, model, batch)


class Sparse(nn.Module):
    """Keeps the two largest scores of each token among zeros that the model creates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        made = self.model(**batch)
        values, places = made.logits.topk(2, dim=-1)
        kept = torch.zeros(made.logits.shape, dtype=values.dtype).scatter(-1, places, values)
        return made.loss + kept.pow(2).mean()


@pytest.mark.slow
def test_created_tensors_are_read_as_shards_with_expert_and_data_parallelism() -> None:
    model, batch = zoo_small.mixtral(num_layers=1, dtype=torch.float64)
    forced = (expert_parallel("expert", tokens="dispatched"), fsdp("data"))
    _, made = plan_model(
        Sparse(model), SQUARE, example_inputs=batch, hardware="h100-sxm", constraints=forced
    )
    assert autopar.verify(made.plan, Sparse(model), batch).ok


def test_over_two_axes_tokens_are_gathered_in_sequence() -> None:
    made, model, batch = planned(
        Mesh({"a": 2, "b": 2}), expert_parallel(("a", "b"), tokens="gathered")
    )
    gathered = moved(made, "forward", "all_gather", 0), moved(made, "forward", "all_gather", 1)
    assert sorted(sum(c.elements()) for c in gathered) == [
        LAYERS * B * S * (H + 2 * K) // 2,
        LAYERS * B * S * (H + 2 * K),
    ]
    assert is_right(made, model, batch)


@pytest.mark.parametrize(
    ("mesh", "ep", "zero"),
    [(LINE, 2, 0), (SQUARE, 2, 0), (SQUARE, 4, 0), (SQUARE, 2, 3), (SQUARE, 4, 3)],
)
def test_a_device_stores_its_share_of_parameters(mesh: Mesh, ep: int, zero: int) -> None:
    """There are Ψ_e elements of experts and Ψ other elements on D devices. A device stores Ψ_e/ep +
    Ψ, or both divided by D for ZeRO stage 3."""
    made, model, _ = planned(mesh, megatron(ep=ep, zero=zero))
    experts = LAYERS * sum(EXPERTS)
    other, devices = (
        sum(p.numel() for p in model.parameters()) - experts,
        made.plan.mesh.num_devices,
    )
    elements = (experts + other) // devices if zero else experts // ep + other
    rests = made.plan.prediction.memory_bytes
    assert (rests["parameters"], rests["optimizer"], rests["gradients"]) == (
        4 * elements,
        8 * elements,
        4 * elements,
    )


def test_a_rank_computes_only_its_own_experts() -> None:
    made, _, _ = planned(SQUARE, megatron(ep=2))
    seen = [c for e in made.plan.entries for c in e.nodes if "experts/experts" in c.node]
    assert len(seen) == 2, "forward and backward, of all layers alike"
    for choice in seen:
        up = choice.strategy.inputs[3 + ("backward" in choice.node)]
        assert up.placements[1] == Shard(0) and up.placements[0] != Shard(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "asked"),
    [
        (Mesh({"data": 2, "expert": 4}), megatron(ep=4)),
        (Mesh({"data": 2, "expert": 2, "tensor": 2}), megatron(tp=2, ep=2, zero=3)),
        (SQUARE, megatron(ep=4, zero=1, microbatches=2)),
        pytest.param(
            Mesh({"stage": 2, "data": 1, "expert": 2}),
            megatron(pp=2, ep=2, zero=2, microbatches=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(LINE, megatron(ep=2, recompute="full"), marks=pytest.mark.slow),
    ],
    ids=["8", "tensor beside", "microbatches", "stages", "recomputed"],
)
def test_loss_outputs_and_gradients_match_the_model(mesh: Mesh, asked: Megatron) -> None:
    made, model, batch = planned(mesh, asked, times=2)
    assert autopar.verify(made.plan, model, batch).ok


def test_tensor_parallelism_splits_the_hidden_dim_of_experts() -> None:
    made, model, batch = planned(LINE, tensor_parallel("1d", axes="expert"))
    for phase, lookup_or_head in (("forward", 1), ("backward", 1)):
        assert moved(made, phase, "all_reduce", 0)[B * S * H] == 2 * LAYERS + lookup_or_head, (
            "attention and experts"
        )
    used = [
        c.strategy
        for e in made.plan.entries
        for c in e.nodes
        if c.node.endswith("experts/forward/0")
    ]
    assert used and all(str(s.inputs[3]) == str(s.inputs[4]) == "S(2)" for s in used)
    assert is_right(made, model, batch)


@pytest.mark.slow
def test_experts_are_not_gathered_below_zero_stage_3() -> None:
    """All parameters except experts are kept gathered during a step. Experts are read as stored."""
    made, model, _ = planned(LINE, megatron(ep=2, zero=2, microbatches=2))
    other = sum(p.numel() for name, p in model.named_parameters() if "experts" not in name)
    rests = made.plan.prediction.memory_bytes
    assert rests["parameters"] == 4 * (LAYERS * sum(EXPERTS) + other) // 2
    assert rests["copies"] <= 4 * other


TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}


def of_type(
    kind: str, implementation: str = "batched_mm", **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 96,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(
        kind, **sizes, num_key_value_heads=4 if kind == "deepseek_v3" else 2, **settings
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    return model, zoo_small.mixtral()[1]


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("olmoe", "deepseek_v3")),
    ],
)
def test_expert_parallelism_of_other_models(kind: str) -> None:
    model, batch = of_type(kind, **TYPES[kind])
    plan = autopar.plan(
        model,
        LINE,
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=(expert_parallel("expert"),),
    )
    assert autopar.verify(plan, model, batch).ok


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_every_expert_implementation_of_transformers_gives_the_same_graph(
    implementation: str,
) -> None:
    ours, (model, batch) = [
        capture(*_call(zoo_small.mixtral())),
        of_type("mixtral", implementation, num_local_experts=E, num_experts_per_tok=K),
    ]
    theirs = capture(*_call((model, batch)))
    assert [(n.op, n.target, n.meta.get("key")) for n in theirs.graph.nodes] == [
        (n.op, n.target, n.meta.get("key")) for n in ours.graph.nodes
    ]
    assert sum(n.target is ops.experts for n in theirs.graph.nodes) == LAYERS
    expected = model(**batch).loss  # the replaced modules are restored
    assert torch.isfinite(expected)
    assert "experts_forward" not in type(model.model.layers[0].mlp.experts).forward.__qualname__


def _call(built: tuple[nn.Module, dict[str, Any]]) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    return built[0], (), built[1]


@pytest.mark.slow
def test_experts_with_biases_are_not_replaced() -> None:
    """They are computed by another op, so that expert parallelism finds no experts to shard."""
    model, batch = of_type("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    with pytest.raises(ConstraintError, match=r"no experts to shard; only .* without biases"):
        autopar.plan(
            model,
            LINE,
            example_inputs=batch,
            hardware="h100-sxm",
            constraints=(expert_parallel("expert"),),
        )


@pytest.mark.slow
def test_samples_of_expert_models_are_independent_for_microbatches() -> None:
    made, model, batch = planned(Mesh({"stage": 2}), pipeline("stage", microbatches=2))
    assert not any("promise" in line for line in made.plan.proof.covers)
    assert autopar.verify(made.plan, model, batch).ok


@pytest.mark.slow
def test_the_planner_splits_experts_without_a_constraint_if_that_is_faster() -> None:
    """With eight devices and eight large experts, gathering tokens sends less than gathering
    weights, and sharded experts have smaller products."""
    config = AutoConfig.for_model(
        "mixtral",
        num_hidden_layers=2,
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(8, 1024, dtype=torch.long)
    plan = autopar.plan(
        model,
        Mesh({"gpu": 8}),
        example_inputs={"input_ids": ids, "labels": ids},
        hardware="h100-sxm",
        outputs="loss",
    )
    used = [
        c.strategy for e in plan.entries for c in e.nodes if c.node.endswith("experts/forward/0")
    ]
    assert used and all(str(s.inputs[3]) == str(s.inputs[4]) == "S(0)" for s in used)


# ── refusals and their messages ──


def test_a_model_without_experts_is_refused() -> None:
    model, batch = zoo_small.llama()
    with pytest.raises(
        ConstraintError, match=r"expert_parallel\(axes=\['expert'\]\): the model has no experts"
    ):
        autopar.plan(
            model,
            LINE,
            example_inputs=batch,
            hardware="h100-sxm",
            constraints=(expert_parallel("expert"),),
        )


@pytest.mark.parametrize(
    ("mesh", "asked"),
    [(Mesh({"a": 3}), expert_parallel("a")), (Mesh({"a": 2, "b": 4}), megatron(ep=8))],
)
def test_a_number_of_experts_not_divisible_by_the_axis_is_refused_with_the_op(
    mesh: Mesh, asked: Any
) -> None:
    with pytest.raises(
        ConstraintError,
        match=(
            r"the 4 experts of .*layers\.0\.mlp\.experts/experts/forward/0 are not a multiple of"
            r" [38] devices"
        ),
    ):
        planned(mesh, asked)


def test_experts_are_split_over_axes_of_data_parallelism() -> None:
    mesh = Mesh({"a": 2, "b": 2, "c": 2})
    found = [(p.name, p.axes) for p in parallelisms([megatron(tp=2, ep=2)], mesh)]
    assert found == [("tensor_parallel_1d", ("c",)), ("expert_parallel", ("b",)), ("ddp", ("a",))]
    assert [(p.name, p.axes) for p in parallelisms([megatron(ep=4, dp=8, zero=3)], mesh)] == [
        ("expert_parallel", ("b", "c")),
        ("fsdp", ("a",)),
    ]
    beside = [(p.name, p.axes) for p in parallelisms([ddp("a"), expert_parallel(("b", "c"))], mesh)]
    assert beside == [("ddp", ("a",)), ("expert_parallel", ("b", "c"))]
    named = megatron(dp=("a", "b"), tp="c", ep="b")
    assert [p.axes for p in parallelisms([named], mesh)] == [("c",), ("b",), ("a",)]
    with pytest.raises(
        ConstraintError, match="split over axes of data parallelism, which c are not"
    ):
        list(parallelisms([megatron(tp="c", ep="c")], mesh))
    with pytest.raises(ConstraintError, match="no combination of axes of mesh"):
        list(parallelisms([megatron(tp=4, ep=4)], mesh))


@pytest.mark.parametrize("wish", [megatron(ep=2, dp=4), megatron(ep=("a", "b"), cp=2, zero=3)])
def test_an_expert_parallel_constraint_round_trips(wish: Any) -> None:
    assert read_constraint(wish.to_json()) == wish and "ep=" in str(wish)


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [("", ""), ("gathered", ", tokens='gathered'"), ("dispatched", ", tokens='dispatched'")],
)
def test_the_method_of_expert_parallelism_is_shown_and_round_trips(tokens: Any, shown: str) -> None:
    wish = expert_parallel("a", tokens)
    assert (
        read_constraint(wish.to_json()) == wish
        and str(wish) == f"expert_parallel(axes=['a']{shown})"
    )


def test_an_unknown_method_of_expert_parallelism_is_refused() -> None:
    with pytest.raises(ConstraintError, match=r"in expert_parallel, got 'copied'"):
        expert_parallel("a", "copied")  # type: ignore[arg-type]


def test_only_one_axis_may_dispatch() -> None:
    with pytest.raises(
        ConstraintError,
        match=(
            r"tokens='dispatched'\) cannot hold: an op can dispatch tokens along one mesh axis"
            r" only, not 2"
        ),
    ):
        planned(Mesh({"a": 2, "b": 2}), expert_parallel(("a", "b"), tokens="dispatched"))
