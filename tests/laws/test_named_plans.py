"""Presets apply to arbitrary models: layouts, collectives and volumes match the papers, and results
match the model.

Volumes are counted in the emitted program. Terms are those of `autopar.constraints.parallel`:
elements that one device sends in ring algorithms.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from torch import nn

from autopar import constraints, hf
from autopar.capture import Trace, capture
from autopar.constraints import Constraint
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.verification import verify_program

LAYERS, B, S, H = 2, zoo_small.BATCH, zoo_small.SEQUENCE, 32
T5 = (
    f't5:{{"num_layers": {LAYERS}, "num_decoder_layers": {LAYERS}, "d_model": {H}, "d_kv": 8,'
    f' "d_ff": 48, "num_heads": 4, "vocab_size": {zoo_small.VOCABULARY},'
    ' "decoder_start_token_id": 0}'
)
PROFILE = HardwareProfile.load("h100-sxm")
KINDS = ("gpt2", "llama", "bert", "vit", "t5")
LINE, SQUARE = Mesh(2), Mesh({"data": 2, "tensor": 2})


@cache
def traced(kind: str) -> tuple[Trace, nn.Module, dict[str, Any]]:
    if kind == "t5":
        model, batch = hf.build(T5, device="cpu", batch=B, seq=S)
    else:  # as many positions as tokens: the full table is read
        positions = {"gpt2": {"n_positions": S}, "bert": {"max_position_embeddings": S}}.get(
            kind, {}
        )
        model, batch = getattr(zoo_small, kind)(num_layers=LAYERS, **positions)
    return capture(model, (), batch), model, batch


@cache
def planned(kind: str, mesh: Mesh, *forced: Constraint, memory_bytes: int | None = None) -> Planned:
    return make_plan(
        traced(kind)[0], mesh, PROFILE, PlanOptions(constraints=forced, memory_bytes=memory_bytes)
    )


def sizes(kind: str) -> Counter[int]:
    """Return the number of parameters of each size."""
    return Counter(math.prod(p.shape) for p in traced(kind)[0].parameters)


def moved(plan: Planned, phase: str, kind: str, axis: int = 0) -> Counter[int]:
    """Return the number of collectives of a kind by the number of elements of the full tensor that
    is gathered, scattered or reduced along the axis."""
    size = plan.plan.mesh.shape[axis]
    steps = [
        (step.phase, step.collective) for _, step in plan.plan.steps()
    ]  # before collectives are bucketed
    found = [c for p, c in steps if (p, c.kind, c.axis) == (phase, kind, axis)]
    return Counter(max(c.bytes, c.output_bytes(size)) // 4 for c in found)


def sent(plan: Planned, phase: str) -> float:
    """Return the elements that one device sends in a phase."""
    total = 0.0
    for axis, size in enumerate(plan.plan.mesh.shape):
        for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            total += (
                times
                * sum(n * count for n, count in moved(plan, phase, kind, axis).items())
                * (size - 1)
                / size
            )
    return total


def storage(plan: Planned) -> dict[str, str]:
    return {p.name: str(p.layout) for p in plan.program.stages[0].parameters}


def tokens(kind: str) -> int:
    return 17 if kind == "vit" else S


@pytest.mark.parametrize("kind", KINDS)
def test_data_parallelism_reduces_every_gradient_once(kind: str) -> None:
    """The gradient of each parameter is reduced once: 2Ψ(P−1)/P elements (Li et al., 2020;
    Rajbhandari et al., 2020, section 7.1)."""
    plan = planned(kind, LINE, constraints.ddp())
    assert set(storage(plan).values()) == {"R"}
    assert moved(plan, "forward", "all_reduce") == {1: 2}, (
        "the loss and the number of labels that count"
    )
    expected = sizes(kind)
    if (
        kind == "t5"
        # the gradients of both relative biases are summed as biases [heads, s, s], before the
        # gradient of the lookup
    ):
        expected = expected - Counter({32 * 4: 2}) + Counter({4 * S * S: 1 + LAYERS})
    assert moved(plan, "backward", "all_reduce") == expected
    assert {c.kind for _, _, c in plan.program.stages[0].collectives} <= {"all_reduce", "slice"}
    if kind != "t5":
        assert sent(plan, "backward") == 2 * sum(n * count for n, count in sizes(kind).items()) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_data_parallelism_splits_all_inputs_and_activations_only_over_the_batch(
    kind: str,
) -> None:
    plan = planned(kind, LINE, constraints.ddp()).plan
    inputs = [
        e
        for e in plan.entries
        if e.kind == "input" and e.key != "tangent/input" and "tangent" not in e.key
    ]
    assert inputs and all(
        str(s) == "S(0)" for e in inputs for n in e.nodes for s in n.strategy.outputs
    )
    heads = [
        n.strategy
        for e in plan.entries
        if e.phase == "forward"
        for n in e.nodes
        if n.node.split("/")[1:2] in (["dot"], ["attention"])
    ]
    assert heads and all(str(s.inputs[0]) == str(s.outputs[0]) == "S(0)" for s in heads)


@pytest.mark.parametrize("kind", KINDS)
def test_fully_sharded_parameters_are_gathered_once_and_their_gradients_scattered_once(
    kind: str,
) -> None:
    """With sufficient memory, gathered copies are kept: 2Ψ(P−1)/P elements, one all-gather and one
    reduce-scatter per parameter (Rajbhandari et al., 2020, section 7.1). The gradient of a lookup
    by position is summed before the lookup."""
    plan = planned(kind, LINE, constraints.fsdp())
    assert "R" not in storage(plan).values()
    whole, rests = (
        planned(kind, LINE, constraints.ddp()).plan.prediction.memory_bytes,
        plan.plan.prediction.memory_bytes,
    )
    total = sum(n * count for n, count in sizes(kind).items())
    assert (whole["parameters"], whole["optimizer"]) == (4 * total, 8 * total), "AdamW in float32"
    assert (rests["parameters"], rests["optimizer"]) == (4 * total / 2, 8 * total / 2)
    assert moved(plan, "forward", "all_gather") == sizes(kind)
    assert not moved(plan, "backward", "all_gather")
    lookups = {"gpt2": [S * H], "bert": [S * H], "t5": [32 * 4] * 2}.get(kind, [])
    assert moved(plan, "backward", "reduce_scatter") == sizes(kind) - Counter(lookups)
    assert moved(plan, "backward", "all_reduce").total() == (
        1 + LAYERS if kind == "t5" else len(lookups)
    )


def test_fsdp_on_two_axes_moves_as_much_as_on_one_axis_of_the_same_size() -> None:
    """A gather over two axes sends n/4 and then n/2 of n elements: (P−1)/P with P = 4."""
    plan = planned("llama", SQUARE, constraints.fsdp())
    assert all(layout.count("S") == 2 for layout in storage(plan).values())
    total = sum(n * count for n, count in sizes("llama").items())
    assert sent(plan, "backward") == total * 3 / 4
    loss = sum(
        n * c for axis in (0, 1) for n, c in moved(plan, "forward", "all_reduce", axis).items()
    )
    assert sent(plan, "forward") == total * 3 / 4 + loss


def test_with_little_memory_parameters_are_gathered_again_in_backward() -> None:
    """At most 3Ψ(P−1)/P elements are sent (Rajbhandari et al., 2020, section 7.2): two all-gathers
    and one reduce-scatter per parameter."""
    ample = planned("llama", LINE, constraints.fsdp())
    short = planned(
        "llama", LINE, constraints.fsdp(), memory_bytes=int(ample.plan.prediction.peak_bytes * 0.9)
    )
    again = moved(short, "backward", "all_gather")
    assert again and again <= sizes("llama")
    assert (
        moved(short, "forward", "all_gather")
        == moved(short, "backward", "reduce_scatter")
        == sizes("llama")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallelism_reduces_twice_per_layer_and_phase(kind: str) -> None:
    """There is one all-reduce of b·s·h elements for attention and one for the MLP, in forward and
    in backward (Shoeybi et al., 2019, section 3, figure 4); one for a vocabulary-parallel embedding
    and one, in backward, for the head; and three of b·s elements for its cross entropy."""
    plan = planned(kind, LINE, constraints.tensor_parallel("1d", axes="gpu"))
    b_s, layers = B * tokens(kind), 2 * LAYERS
    forward = {"vit": layers, "t5": layers + 3 * LAYERS + 2}.get(
        kind, layers + 1
    )  # cross-attention is a third one; there are two embeddings
    # The backward of BERT adds the gradient of the residual to that of q before those of k and v,
    # so that the three are reduced separately. The encoder output of T5 gets the sum of the
    # gradients of all keys and values.
    backward = {"vit": layers, "t5": layers + 3 * LAYERS + 2, "bert": 4 * LAYERS + 1}.get(
        kind, layers + 1
    )
    assert moved(plan, "forward", "all_reduce") == Counter({b_s * H: forward}) + Counter(
        {b_s: 0 if kind == "vit" else 3}
    )
    assert moved(plan, "backward", "all_reduce") == {b_s * H: backward}
    assert {c.kind for _, _, c in plan.program.stages[0].collectives} <= {"all_reduce", "slice"}
    large = {
        n
        for n, layout in storage(plan).items()
        if layout == "R" and math.prod(_shape(kind, n)) >= H * H
    }
    whole = {"bert": 1}.get(kind, 0) + (
        kind == "vit"
    )  # the head of BERT has a linear layer before a norm; the patches of ViT are a convolution
    assert len(large) == whole, f"rest whole: {large}"


def _shape(kind: str, name: str) -> tuple[int, ...]:
    return next(p.shape for p in traced(kind)[0].parameters if p.name == name)


def test_tensor_parallelism_splits_columns_first_and_rows_last() -> None:
    llama = storage(planned("llama", LINE, constraints.tensor_parallel("1d", axes="gpu")))
    block = {n.removeprefix("model.layers.1."): layout for n, layout in llama.items() if ".1." in n}
    columns = {f"self_attn.{n}_proj.weight": "S(0)" for n in "qkv"} | {
        f"mlp.{n}_proj.weight": "S(0)" for n in ("gate", "up")
    }
    rows = {"self_attn.o_proj.weight": "S(1)", "mlp.down_proj.weight": "S(1)"}
    assert block == columns | rows | {
        "input_layernorm.weight": "R",
        "post_attention_layernorm.weight": "R",
    }
    assert {llama[n] for n in ("model.embed_tokens.weight", "lm_head.weight")} == {
        "S(0)"
    } and llama["model.norm.weight"] == "R"
    gpt2 = storage(planned("gpt2", LINE, constraints.tensor_parallel("1d", axes="gpu")))
    block = {
        n.removeprefix("transformer.h.1."): layout
        for n, layout in gpt2.items()
        if ".1." in n and "ln" not in n
    }
    assert (
        block
        # q, k and v are one parameter, viewed as [h, 3, h]; the bias of row-parallel layers is
        # added to the sum
        == {
            "attn.c_attn.weight": "S(2)",
            "attn.c_attn.bias": "S(1)",
            "attn.c_proj.weight": "S(0)",
            "attn.c_proj.bias": "R",
            "mlp.c_fc.weight": "S(1)",
            "mlp.c_fc.bias": "S(0)",
            "mlp.c_proj.weight": "S(0)",
            "mlp.c_proj.bias": "R",
        }
    )
    assert gpt2["transformer.wte.weight"] == "S(0)" and gpt2["transformer.wpe.weight"] == "R"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0, 3])
def test_megatron_combines_tensor_and_data_parallelism_on_their_axes(kind: str, zero: int) -> None:
    plan = planned(kind, SQUARE, constraints.megatron(tp=2, dp=2, zero=zero))
    alone = planned(kind, LINE, constraints.tensor_parallel("1d", axes="gpu"))
    for phase in ("forward", "backward"):  # half of the samples
        assert moved(plan, phase, "all_reduce", 1) == {
            n // 2: c for n, c in moved(alone, phase, "all_reduce").items()
        }
    tensor = {name: layout.split()[1].partition("#")[0] for name, layout in storage(plan).items()}
    assert tensor == storage(alone)
    local = Counter(
        math.prod(_shape(kind, n)) // (1 if layout == "R" else 2) for n, layout in tensor.items()
    )
    if kind != "t5" and not zero:
        assert moved(plan, "backward", "all_reduce", 0) == local
        assert all(layout.startswith("R ") for layout in storage(plan).values())
    # also for the bias of a fused projection, which is sharded over both axes in mesh order, so
    # that the tensor axis is gathered first
    if zero:
        assert not any(layout.startswith("R ") for layout in storage(plan).values())
        fused = [3 * H] * sum(n.endswith("c_attn.bias") for n in tensor)
        assert moved(plan, "forward", "all_gather", 0) == local - Counter(
            n // 2 for n in fused
        ) + Counter(fused)


NAMED = [
    (LINE, constraints.ddp()),
    (LINE, constraints.fsdp()),
    (LINE, constraints.tensor_parallel(axes="gpu")),
    (SQUARE, constraints.megatron(tp=2, dp=2)),
    (SQUARE, constraints.megatron(tp=2, dp=2, zero=3)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mesh", "forced"), NAMED, ids=str)
def test_a_named_plan_matches_the_model(kind: str, mesh: Mesh, forced: Constraint) -> None:
    trace, model, batch = traced(kind)
    assert verify_program(trace, planned(kind, mesh, forced).program, model, (), batch).ok


@pytest.mark.parametrize("kind", ["llama", "vit"])
@pytest.mark.parametrize(("mesh", "forced"), NAMED, ids=str)
def test_the_free_plan_is_never_slower_than_a_named_one(
    kind: str, mesh: Mesh, forced: Constraint
) -> None:
    free, named = planned(kind, mesh).plan.proof, planned(kind, mesh, forced).plan.proof
    assert free.bound_s <= named.objective_s
    assert free.objective_s * (1 - PlanOptions().gap) <= named.objective_s


def test_one_axis_may_be_constrained_and_the_other_free() -> None:
    trace, model, batch = traced("llama")
    plan = planned("llama", SQUARE, constraints.tensor_parallel("1d", axes="tensor"))
    assert {
        layout.split()[1].partition("#")[0] for n, layout in storage(plan).items() if "proj" in n
    } <= {"S(0)", "S(1)"}
    assert verify_program(trace, plan.program, model, (), batch).ok
    assert (
        plan.plan.proof.bound_s
        <= planned("llama", SQUARE, constraints.megatron(tp=2)).plan.proof.objective_s
    )


def test_an_indivisible_batch_is_split_unevenly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    wrapped = _Loss(model)
    batch = {"x": torch.randn(3, 8)}
    trace = capture(wrapped, (), batch)
    plan = make_plan(trace, LINE, PROFILE, PlanOptions(constraints=(constraints.ddp(),)))
    assert verify_program(trace, plan.program, wrapped, (), batch).ok


class _Loss(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.net(x)).pow(2).mean()
