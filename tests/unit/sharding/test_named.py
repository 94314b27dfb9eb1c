"""Presets on a trace: which products are sharded by columns and by rows, which tensors stay
replicated, and which models are refused."""

from __future__ import annotations

import pytest
import torch
import zoo_small
from torch import nn

from autopar import constraints, hf
from autopar.capture import Trace, capture
from autopar.constraints import Constraint
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.sharding import resolve
from autopar.sharding.propagate import product_of, read_trace
from autopar.sharding.resolve_presets import Walks
from autopar.verification import verify_program

TENSOR = constraints.tensor_parallel("1d", axes="gpu")


class Block(nn.Module):
    """x + down(norm(relu(up(x))))."""

    def __init__(self, norm: nn.Module | None = None, *, inner: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(8, inner),
            nn.Linear(inner, 8),
            norm or nn.Identity(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.norm(torch.relu(self.up(x))))).pow(2).mean()


class Tied(nn.Module):
    """Two linear layers between an embedding and a head with the same weight. The loss has its
    classes along dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.chain = nn.Embedding(40, 8), Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = self.table(ids)
        logits = (
            tokens + self.chain.down(torch.relu(self.chain.up(tokens)))
        ) @ self.table.weight.t()
        return nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean()


class Sides(nn.Module):
    """A gated chain of linear layers, and a linear layer whose result goes into the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.alone = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return y.pow(2).mean() + torch.tanh(self.alone(y)).mean()


def trace_model(model: nn.Module, *shape: int) -> Trace:
    return capture(model, (torch.ones(*(shape or (4, 8))),), {})


def products(trace: Trace) -> dict[str, str]:
    """Map the module of each product with a weight to the placements of its operands and results.
    Unconstrained operands are shown as R."""
    rows = resolve(trace, [TENSOR], Mesh(2)).named.rows
    graph = read_trace(trace)
    words = {None: "R"}
    return {
        node.meta["module"]: " ".join(
            str(words.get(label, label))
            for label in (*rows[name][0][1].inputs, *rows[name][0][1].outputs)
        )
        for name, node in graph.nodes.items()
        if product_of(graph, node)
    }


def plan_with(trace: Trace, constraint: Constraint, mesh: Mesh, *beside: Constraint) -> Planned:
    return make_plan(
        trace,
        mesh,
        HardwareProfile.load("h100-sxm"),
        PlanOptions(constraints=(constraint, *beside)),
    )


def test_chain_of_two_linears_is_sharded_by_columns_and_then_by_rows() -> None:
    assert products(trace_model(Block())) == {
        "up": "R S(0) S(0) S(1)",
        "down": "S(1) S(1) R R",
    }, "the bias of the last linear is replicated"


def test_tied_embedding_is_replicated_if_the_loss_cannot_read_sharded_scores(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ids = Tied(), torch.arange(24).view(4, 6)
    trace = capture(model, (ids,), {})
    plan = plan_with(trace, TENSOR, Mesh(2))
    assert {
        p.name: str(p.layout) for p in plan.program.stages[0].parameters if "bias" not in p.name
    } == {
        "table.weight": "R",
        "chain.up.weight": "S(0)",
        "chain.down.weight": "S(1)",
    }
    assert verify_program(trace, plan.program, model, (ids,), {}).ok
    assert "replicates tensors that an op cannot read as shards" in caplog.text


def test_linears_with_a_norm_between_or_before_the_loss_stay_replicated() -> None:
    with pytest.raises(ConstraintError, match="no chain of linear layers can be sharded"):
        products(trace_model(Block(nn.LayerNorm(16))))
    assert products(trace_model(Sides())) == {
        "gate": "R S(0) S(1)",
        "up": "R S(0) S(1)",
        "down": "S(1) S(1) R",
        "alone": "R R R",
    }


class Spelled(nn.Module):
    """An RMS norm written with elementary ops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "norm", [Spelled(), nn.RMSNorm(16), nn.Softmax(-1)], ids=lambda norm: type(norm).__name__
)
def test_handwritten_norms_and_softmax_prevent_sharding_of_the_chain(norm: nn.Module) -> None:
    with pytest.raises(ConstraintError, match="no chain of linear layers"):
        products(trace_model(Block(norm)))


def test_log_names_linears_that_stay_replicated_and_the_op_that_causes_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = zoo_small.bert(num_layers=2)
    with caplog.at_level("WARNING", logger="autopar"):
        products(capture(model, (), batch))
    names = (
        "cls.predictions.transform.dense (for"
        " cls.predictions.transform.LayerNorm/native_layer_norm/forward/0)"
    )
    assert [r.getMessage() for r in caplog.records] == [
        f"{TENSOR} replicates tensors that an op cannot read as shards: {names}"
    ]


def test_head_with_fewer_classes_than_features_stays_replicated() -> None:
    model, batch = zoo_small.vit(num_layers=1)
    assert products(capture(model, (), batch))["classifier"] == "R R R R"


def test_keys_with_one_head_stay_replicated_if_queries_are_sharded_by_heads() -> None:
    model, batch = zoo_small.llama(num_layers=1, num_key_value_heads=1)
    trace = capture(model, (), batch)
    labels = products(trace)
    block = "model.layers.0.self_attn."
    assert labels[f"{block}q_proj"] == "R S(0) S(2)" and labels[f"{block}o_proj"] == "S(2) S(1) R"
    assert labels[f"{block}k_proj"] == labels[f"{block}v_proj"] == "R R R"
    assert verify_program(trace, plan_with(trace, TENSOR, Mesh(2)).program, model, (), batch).ok


@pytest.mark.slow
def test_attention_bias_with_an_added_mask_is_sharded_by_heads() -> None:
    spec = (
        't5:{"num_layers": 1, "num_decoder_layers": 1, "d_model": 32, "d_kv": 8, "d_ff": 48,'
        ' "num_heads": 4, "vocab_size": 96}'
    )
    model, batch = hf.build(spec, batch=2, seq=8)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    storage = resolve(capture(model, (), batch), [TENSOR], Mesh(2)).named.rests
    biases = [rests for name, rests in storage.items() if "relative_attention_bias" in name]
    assert len(biases) == 2 and all(
        str(next(iter(rests[0][0] or ()))) == "S(1)" for rests in biases
    )


def test_number_of_heads_not_divisible_by_the_axes_is_refused() -> None:
    model, batch = zoo_small.llama(num_layers=1)
    message = (
        r"tensor_parallel\('1d', axes=\['gpu'\]\) cannot hold:"
        r" model\.layers\.0\.self_attn/view/forward/1"
        r" has a tensor of shape \(4, 12, 2, 8\), whose dim 2 would be in 4 parts(.|\n)*op"
        r" aten\.view\.default in module"
        r" model\.layers\.0\.self_attn(.|\n)*a multiple of 4"
    )
    with pytest.raises(ConstraintError, match=message):
        plan_with(capture(model, (), batch), TENSOR, Mesh(4))


def test_batch_that_cannot_be_sharded_over_the_axes_is_refused() -> None:
    with pytest.raises(
        ConstraintError,
        match=r"ddp\(axes=\['gpu'\]\) cannot hold: a batch of 4 cannot be split over 8 devices",
    ):
        plan_with(trace_model(Block()), constraints.ddp(), Mesh(8))
    with pytest.raises(ConstraintError, match=r"no input has a batch dim \(dim 0\) to shard"):
        plan_with(trace_model(Block(), 1, 8), constraints.ddp(), Mesh(2))


def test_batch_is_gathered_for_an_op_that_cannot_run_on_a_shard_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).sort(dim=0).values[0].mean()

    plan_with(trace_model(Sorted()), constraints.ddp(), Mesh(2))
    assert caplog.messages[-1].startswith(
        "ddp(axes=['gpu']) gathers the batch for ops that cannot compute on a shard of it: /sort"
    )


def test_attention_mask_is_replicated_instead_of_gathered() -> None:
    model, batch = zoo_small.bert(num_layers=1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    plan = plan_with(capture(model, (), batch), constraints.ddp(), Mesh(2))
    assert {c.kind for _, _, c in plan.program.stages[0].collectives} <= {"all_reduce", "slice"}


def test_expanded_scalar_is_sharded_like_the_batch() -> None:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(x), labels, label_smoothing=0.1)

    model, batch = Smoothed(), {"x": torch.randn(4, 8), "labels": torch.tensor([0, 5, 2, 1])}
    trace = capture(model, (), batch)
    plan = plan_with(trace, constraints.ddp(), Mesh(2))
    assert verify_program(trace, plan.program, model, (), batch).ok
    expanded = [s for key, s in plan.plan.node_choices().items() if "expand/backward" in key]
    assert expanded and all(str(s.outputs[0]) == "S(0)" for s in expanded)


class Filled(nn.Module):
    """Keep the two largest features of each sample, set the others to zero, and multiply by a
    constant tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        values, places = y.topk(2, dim=-1)
        largest = torch.full(y.shape, 0.5) * torch.zeros(y.shape).scatter(-1, places, values)
        return self.down(largest).pow(2).mean()


@pytest.mark.parametrize(
    "presets",
    [(constraints.ddp(),), (constraints.fsdp(),), (constraints.ddp("a"), constraints.fsdp("b"))],
    ids=lambda presets: " ".join(map(str, presets)),
)
def test_created_tensors_are_sharded_like_the_batch(
    presets: tuple[Constraint, ...],
) -> None:
    model, batch = Filled(), (torch.randn(8, 8),)
    trace = capture(model, batch, {})
    plan = plan_with(trace, presets[0], Mesh({"a": 2, "b": 2}), *presets[1:])
    assert verify_program(trace, plan.program, model, batch, {}).ok
    choices = plan.plan.node_choices()
    assert {
        str(choices[f"/{op}/forward/0"].outputs[0]) for op in ("scatter.src", "mul.Tensor")
    } == {"S(0) S(0)"}


def test_layout_that_contradicts_a_preset_is_refused_with_the_possible_layouts() -> None:
    options = PlanOptions(constraints=(TENSOR, constraints.layout("up", weight="S(1)")))
    with pytest.raises(
        ConstraintError,
        match=(
            r"no strategy has input 1 of up/dot/forward/0 as 'S\(1\)'(.|\n)*can be one of: S\(0\)"
        ),
    ):
        make_plan(trace_model(Block()), Mesh(2), HardwareProfile.load("h100-sxm"), options)


def test_fused_projection_is_stored_sharded_by_heads_over_two_axes() -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    result = plan_with(
        capture(model, (), batch),
        constraints.tensor_parallel("1d", axes=("a", "b")),
        Mesh({"a": 2, "b": 2}),
    )
    entry = next(
        e
        for e in result.plan.entries
        if e.kind == "parameter" and "c_attn.weight" in str(e.nodes[0].node)
    )
    assert str(entry.nodes[0].strategy.outputs[0]) == "S(2) S(2)"


def test_fused_projection_with_an_impossible_storage_is_refused() -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    constraint = constraints.layout("*.c_attn", storage="S(1)#1 S(1)#0")
    with pytest.raises(
        ConstraintError,
        match=r"c_attn\.weight of .* cannot be stored as S\(2\)#1 S\(2\)#0.*a DTensor cannot shard",
    ):
        plan_with(capture(model, (), batch), constraint, Mesh({"a": 2, "b": 2}))


def test_axes_of_size_one_add_no_constraints() -> None:
    resolved = resolve(
        trace_model(Block()),
        [constraints.ddp("a"), constraints.tensor_parallel("1d", axes="b")],
        Mesh({"a": 1, "b": 2}),
    )
    assert {axis for rows in resolved.named.rows.values() for axis, _ in rows} == {1}


def test_axes_of_different_sizes_share_a_walk_if_both_divide_the_batch() -> None:
    mesh = Mesh({"node": 2, "gpu": 4})
    for batch, plan, is_shared in (
        (8, constraints.fsdp, True),
        (7, constraints.fsdp, False),
        (7, lambda axis: constraints.tensor_parallel("1d", axes=axis), True),
    ):
        walks = Walks(trace_model(Block(), batch, 8))
        (node,), (gpu,) = (walks.spreads(plan(axis), mesh).values() for axis in mesh.names)
        assert (node is gpu) == is_shared
