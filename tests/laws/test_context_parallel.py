"""The context parallelism preset: the sequence is sharded over an axis, keys and values are
gathered, and results match the model.

Volumes are those documented in `autopar.constraints.context_parallel`, counted in the emitted
program.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from measured import measured_peak
from torch import nn

import autopar
from autopar.api.planning import plan_model
from autopar.constraints import context_parallel, ddp, megatron, parallelisms, read_constraint
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.planner import Planned
from autopar.program.peak_memory import trace_peak
from benchmarks import zoo


class Samples(nn.Module):
    """A loss of samples with one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).pow(2).mean()


class Attending(nn.Module):
    """Causal attention with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 3 * 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind()
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).pow(2).sum()


class Backwards(nn.Module):
    """Each token is weighed with the mask of the token at the mirrored position."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(mask.flip(1)) * self.up(x)).pow(2).mean()


LAYERS, B, S = 2, zoo_small.BATCH, zoo_small.SEQUENCE
LINE = Mesh({"context": 2})


@cache
def planned(kind: str, mesh: Mesh, *constraints: Any) -> tuple[Planned, nn.Module, dict[str, Any]]:
    model, batch = getattr(zoo_small, kind)(num_layers=LAYERS)
    return (
        plan_model(model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=constraints)[
            1
        ],
        model,
        batch,
    )


def moved(made: Planned, phase: str, kind: str, axis: int = 0) -> Counter[int]:
    """Return the number of elements that are gathered, scattered or reduced along the axis, and the
    number of collectives."""
    size = made.plan.mesh.shape[axis]
    steps = [
        (step.phase, step.collective) for _, step in made.plan.steps()
    ]  # before collectives are bucketed
    found = [c for p, c in steps if (p, c.kind, c.axis) == (phase, kind, axis)]
    return Counter(max(c.bytes, c.output_bytes(size)) // 4 for c in found)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(kind: str) -> None:
    made, model, batch = planned(kind, LINE, context_parallel("context"))
    config: Any = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    features = heads * (config.hidden_size // config.num_attention_heads)
    per_layer = Counter({B * S * features: 2 * LAYERS})
    assert moved(made, "forward", "all_gather") == per_layer
    assert moved(made, "backward", "reduce_scatter") == per_layer
    assert not moved(made, "forward", "all_to_all") and not moved(made, "backward", "all_to_all")
    once = Counter(p.numel() for p in model.parameters())
    reduced = moved(made, "backward", "all_reduce")
    assert reduced.total() >= once.total() - 2, (
        "each gradient once; one read through a lookup may be summed before it"
    )
    assert autopar.verify(made.plan, model, batch).ok and autopar.check(made.plan, model, batch).ok


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_activation_is_split_along_the_sequence(kind: str) -> None:
    made, _, _ = planned(kind, LINE, context_parallel("context"))
    heads = [c.strategy for e in made.plan.entries for c in e.nodes if "/attention" in c.node]
    assert heads
    for strategy in heads:
        assert str(strategy.outputs[0]) == "S(2)", "queries and what they make, by tokens"
    dots = [
        c.strategy
        for e in made.plan.entries
        if e.phase == "forward"
        for c in e.nodes
        if "/dot/" in c.node
    ]
    assert dots and all(str(s.outputs[0]) == "S(1)" and str(s.inputs[0]) == "S(1)" for s in dots)


@pytest.mark.slow
def test_context_parallelism_with_data_and_tensor_parallelism_and_sharded_parameters() -> None:
    mesh = Mesh({"data": 2, "context": 2, "tensor": 2})
    made, model, batch = planned("llama", mesh, megatron(tp=2, cp=2, dp=2, zero=3))
    assert moved(made, "forward", "all_gather", 1).total() >= 2 * LAYERS
    assert moved(made, "forward", "all_reduce", 2).total() > 0
    rests = made.plan.prediction.memory_bytes
    total = 4 * sum(p.numel() for p in model.parameters())
    assert rests["parameters"] < total / 4 * 1.1, "over data, context, and mostly tensor axes"
    assert autopar.verify(made.plan, model, batch).ok


def test_memory_is_predicted_for_the_rank_whose_queries_see_the_most_keys() -> None:
    batch, force = {"x": torch.randn(2, 36, 8)}, (context_parallel("context"),)
    _, made = plan_model(
        Attending(),
        Mesh({"context": 4}),
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=force,
    )
    measured = [
        measured_peak(made.stage_program(), batch, coordinate=(rank,))[0] for rank in range(4)
    ]
    assert measured == [
        trace_peak(made.stage_program(), coordinate=(rank,)).peak_bytes for rank in range(4)
    ]
    assert measured[0] < measured[3] == max(measured) == trace_peak(made.stage_program()).peak_bytes


@pytest.mark.parametrize("beside", [(), (ddp("data"),)], ids=["alone", "data beside"])
def test_each_device_reads_its_shard_of_values_computed_from_a_full_mask(
    beside: tuple[Any, ...],
) -> None:
    model, batch = Backwards(), {"x": torch.randn(4, S, 8), "mask": torch.randn(4, S, 6)}
    mesh, forced = Mesh({"data": 2, "context": 2}), (context_parallel("context"), *beside)
    plan = autopar.plan(model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=forced)
    assert autopar.verify(plan, model, batch).ok


def test_a_sequence_not_divisible_by_the_devices() -> None:
    made, model, batch = planned("llama", Mesh({"context": 3}), context_parallel("context"))
    assert autopar.verify(made.plan, model, batch).ok


@pytest.mark.parametrize(
    ("name", "op"), [("opt", "view"), ("mamba", "convolution"), ("mixtral", "view")]
)
def test_an_op_that_cannot_run_on_a_sequence_shard_is_named(name: str, op: str) -> None:
    model, batch = zoo.build(name, batch=4)
    with pytest.raises(ConstraintError, match=rf"/{op}/forward(.|\n)*shard of the sequence"):
        autopar.plan(
            model,
            LINE,
            example_inputs=batch,
            hardware="h100-sxm",
            constraints=(context_parallel("context"),),
        )


def test_a_model_without_a_sequence_is_refused() -> None:
    with pytest.raises(ConstraintError, match="no input has a sequence"):
        autopar.plan(
            Samples(),
            LINE,
            example_inputs=torch.ones(4, 1),
            hardware="h100-sxm",
            constraints=(context_parallel("context"),),
        )


def test_degrees_are_assigned_to_axes_from_the_last() -> None:
    mesh = Mesh({"a": 2, "b": 2, "c": 2})
    wish = megatron(tp=2, cp=2, dp=2)
    assert [(p.name, p.axes) for p in parallelisms([wish], mesh)] == [
        ("tensor_parallel_1d", ("c",)),
        ("context_parallel", ("b",)),
        ("ddp", ("a",)),
    ]
    assert "cp=2" in str(wish) and read_constraint(wish.to_json()) == wish
    named = megatron(tp="a", cp=("b",), dp="c")
    assert read_constraint(named.to_json()) == named
    with pytest.raises(ConstraintError, match="no combination of axes of mesh"):
        list(parallelisms([megatron(cp=3)], mesh))


def test_the_error_of_an_op_states_which_dim_is_the_sequence() -> None:
    model, batch = (
        zoo_small.vit()
    )  # images have their channels at the position of the tokens of other models
    said = (
        r"native_layer_norm/.*the sequence \(dim 1 of input pixel_values, \[4, 3, \d+, \d+\]\).* it"
        r" reads \(4, 17, 32\) as S\(2\)"
    )
    with pytest.raises(ConstraintError, match=said):
        autopar.plan(
            model,
            LINE,
            example_inputs=batch,
            hardware="h100-sxm",
            constraints=(context_parallel("context"),),
        )


def test_a_batch_of_features_is_refused_with_plans_that_can_split_the_model() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 8))
    said = (
        r"dim 1 of input 0, \[8, 16\], which is the features dim of \(batch, features\), .*: it has"
        r" \(8, 16\) as S\(1\)"
    )
    said += r"[\s\S]*what to do: .*fsdp\(\)"
    with pytest.raises(ConstraintError, match=said):
        autopar.plan(
            model,
            LINE,
            example_inputs=(torch.randn(8, 16),),
            hardware="h100-sxm",
            constraints=(context_parallel("context"),),
        )
