"""Named plans on a trace: which products are split by columns and by rows, what stays whole, and
who refuses."""

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
    """x + down(relu(up(x))), with a norm of choice between."""

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
    """A chain of two between look-ups and scores of one table, scored by a loss that has classes
    along dim 1."""

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
    """Two chains beside each other: a gate that is multiplied, and a linear that ends in the
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.alone = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return y.pow(2).mean() + torch.tanh(self.alone(y)).mean()


def traced(model: nn.Module, *shape: int) -> Trace:
    return capture(model, (torch.ones(*(shape or (4, 8))),), {})


def products(trace: Trace) -> dict[str, str]:
    """Module of each product with a weight → placements of both and of what it makes; what is
    free is read whole."""
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


def planned(trace: Trace, constraint: Constraint, mesh: Mesh, *beside: Constraint) -> Planned:
    return make_plan(
        trace,
        mesh,
        HardwareProfile.load("h100-sxm"),
        PlanOptions(constraints=(constraint, *beside)),
    )


def test_of_a_chain_of_two_the_first_is_split_by_columns_and_the_last_by_rows() -> None:
    assert products(traced(Block())) == {
        "up": "R S(0) S(0) S(1)",
        "down": "S(1) S(1) R R",
    }, "the last one's bias is whole"


def test_a_table_whose_scores_are_not_read_in_parts_is_whole_for_its_look_ups_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ids = Tied(), torch.arange(24).view(4, 6)
    trace = capture(model, (ids,), {})
    plan = planned(trace, TENSOR, Mesh(2))
    assert {
        p.name: str(p.layout) for p in plan.program.stages[0].parameters if "bias" not in p.name
    } == {
        "table.weight": "R",
        "chain.up.weight": "S(0)",
        "chain.down.weight": "S(1)",
    }
    assert verify_program(trace, plan.program, model, (ids,), {}).ok
    assert "replicates tensors that an op cannot read as shards" in caplog.text


def test_what_a_norm_stands_between_stays_whole_and_so_does_what_ends_in_the_loss() -> None:
    with pytest.raises(ConstraintError, match="no chain of linear layers can be sharded"):
        products(traced(Block(nn.LayerNorm(16))))
    assert products(traced(Sides())) == {
        "gate": "R S(0) S(1)",
        "up": "R S(0) S(1)",
        "down": "S(1) S(1) R",
        "alone": "R R R",
    }


class Spelled(nn.Module):
    """A norm as models spell it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    "norm", [Spelled(), nn.RMSNorm(16), nn.Softmax(-1)], ids=lambda norm: type(norm).__name__
)
def test_a_sum_over_the_split_dim_beside_a_product_is_a_norm_too(norm: nn.Module) -> None:
    with pytest.raises(ConstraintError, match="no chain of linear layers"):
        products(traced(Block(norm)))


def test_linears_that_stay_whole_for_an_op_are_named_with_it_in_the_log(
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


def test_a_head_of_fewer_classes_than_features_stays_whole() -> None:
    model, batch = zoo_small.vit(num_layers=1)
    assert products(capture(model, (), batch))["classifier"] == "R R R R"


def test_keys_of_one_head_stay_whole_where_queries_of_several_are_split() -> None:
    model, batch = zoo_small.llama(num_layers=1, num_key_value_heads=1)
    trace = capture(model, (), batch)
    found = products(trace)
    block = "model.layers.0.self_attn."
    assert found[f"{block}q_proj"] == "R S(0) S(2)" and found[f"{block}o_proj"] == "S(2) S(1) R"
    assert found[f"{block}k_proj"] == found[f"{block}v_proj"] == "R R R"
    assert verify_program(trace, planned(trace, TENSOR, Mesh(2)).program, model, (), batch).ok


@pytest.mark.slow
def test_a_bias_of_attention_is_split_by_heads_though_a_mask_is_added_to_it() -> None:
    spec = (
        't5:{"num_layers": 1, "num_decoder_layers": 1, "d_model": 32, "d_kv": 8, "d_ff": 48,'
        ' "num_heads": 4, "vocab_size": 96}'
    )
    model, batch = hf.build(spec, batch=2, seq=8)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    found = resolve(capture(model, (), batch), [TENSOR], Mesh(2)).named.rests
    biases = [rests for name, rests in found.items() if "relative_attention_bias" in name]
    assert len(biases) == 2 and all(
        str(next(iter(rests[0][0] or ()))) == "S(1)" for rests in biases
    )


def test_heads_that_the_axes_do_not_divide_are_refused_by_the_op_that_makes_them() -> None:
    model, batch = zoo_small.llama(num_layers=1)
    message = (
        r"tensor_parallel\('1d', axes=\['gpu'\]\) cannot hold:"
        r" model\.layers\.0\.self_attn/view/forward/1"
        r" has a tensor of shape \(4, 12, 2, 8\), whose dim 2 would be in 4 parts(.|\n)*op"
        r" aten\.view\.default in module"
        r" model\.layers\.0\.self_attn(.|\n)*a multiple of 4"
    )
    with pytest.raises(ConstraintError, match=message):
        planned(capture(model, (), batch), TENSOR, Mesh(4))


def test_a_batch_smaller_than_the_axes_is_refused() -> None:
    with pytest.raises(
        ConstraintError,
        match=r"ddp\(axes=\['gpu'\]\) cannot hold: a batch of 4 cannot be split over 8 devices",
    ):
        planned(traced(Block()), constraints.ddp(), Mesh(8))
    with pytest.raises(ConstraintError, match=r"no input has a batch dim \(dim 0\) to shard"):
        planned(traced(Block(), 1, 8), constraints.ddp(), Mesh(2))


def test_an_op_that_mixes_samples_and_has_no_rule_for_it_gets_all_of_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).sort(dim=0).values[0].mean()

    planned(traced(Sorted()), constraints.ddp(), Mesh(2))
    assert caplog.messages[-1].startswith(
        "ddp(axes=['gpu']) gathers the batch for ops that cannot compute on a shard of it: /sort"
    )


def test_a_mask_comes_whole_rather_than_that_it_is_gathered() -> None:
    model, batch = zoo_small.bert(num_layers=1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    plan = planned(capture(model, (), batch), constraints.ddp(), Mesh(2))
    assert {c.kind for _, _, c in plan.program.stages[0].collectives} <= {"all_reduce", "slice"}


def test_what_is_made_of_a_scalar_is_made_in_parts_where_the_batch_is_split() -> None:
    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(x), labels, label_smoothing=0.1)

    model, batch = Smoothed(), {"x": torch.randn(4, 8), "labels": torch.tensor([0, 5, 2, 1])}
    trace = capture(model, (), batch)
    plan = planned(trace, constraints.ddp(), Mesh(2))
    assert verify_program(trace, plan.program, model, (), batch).ok
    expanded = [s for key, s in plan.plan.node_choices().items() if "expand/backward" in key]
    assert expanded and all(str(s.outputs[0]) == "S(0)" for s in expanded)


class Filled(nn.Module):
    """Of each sample's features the two largest remain, among zeros, and are weighed with a
    tensor that is made of nothing, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        values, places = y.topk(2, dim=-1)
        kept = torch.full(y.shape, 0.5) * torch.zeros(y.shape).scatter(-1, places, values)
        return self.down(kept).pow(2).mean()


@pytest.mark.parametrize(
    "forced",
    [(constraints.ddp(),), (constraints.fsdp(),), (constraints.ddp("a"), constraints.fsdp("b"))],
    ids=lambda forced: " ".join(map(str, forced)),
)
def test_of_what_is_made_of_nothing_each_device_reads_its_part(
    forced: tuple[Constraint, ...],
) -> None:
    model, batch = Filled(), (torch.randn(8, 8),)
    trace = capture(model, batch, {})
    plan = planned(trace, forced[0], Mesh({"a": 2, "b": 2}), *forced[1:])
    assert verify_program(trace, plan.program, model, batch, {}).ok
    choices = plan.plan.node_choices()
    assert {
        str(choices[f"/{op}/forward/0"].outputs[0]) for op in ("scatter.src", "mul.Tensor")
    } == {"S(0) S(0)"}


def test_a_layout_that_contradicts_a_named_plan_is_refused_with_what_is_left() -> None:
    options = PlanOptions(constraints=(TENSOR, constraints.layout("up", weight="S(1)")))
    with pytest.raises(
        ConstraintError,
        match=(
            r"no strategy has input 1 of up/dot/forward/0 as 'S\(1\)'(.|\n)*can be one of: S\(0\)"
        ),
    ):
        make_plan(traced(Block()), Mesh(2), HardwareProfile.load("h100-sxm"), options)


def test_a_fused_projection_rests_by_heads_over_two_axes() -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    made = planned(
        capture(model, (), batch),
        constraints.tensor_parallel("1d", axes=("a", "b")),
        Mesh({"a": 2, "b": 2}),
    )
    entry = next(
        e
        for e in made.plan.entries
        if e.kind == "parameter" and "c_attn.weight" in str(e.nodes[0].node)
    )
    assert str(entry.nodes[0].strategy.outputs[0]) == "S(2) S(2)"


def test_a_fused_projection_cannot_rest_with_two_of_its_parts_split_and_says_so() -> None:
    model, batch = zoo_small.gpt2(num_layers=1)
    forced = constraints.layout("*.c_attn", storage="S(1)#1 S(1)#0")
    with pytest.raises(
        ConstraintError,
        match=r"c_attn\.weight of .* cannot be stored as S\(2\)#1 S\(2\)#0.*a DTensor cannot shard",
    ):
        planned(capture(model, (), batch), forced, Mesh({"a": 2, "b": 2}))


def test_axes_of_one_device_ask_for_nothing() -> None:
    forced = resolve(
        traced(Block()),
        [constraints.ddp("a"), constraints.tensor_parallel("1d", axes="b")],
        Mesh({"a": 1, "b": 2}),
    )
    assert {axis for rows in forced.named.rows.values() for axis, _ in rows} == {1}


def test_axes_of_different_sizes_share_a_walk_if_the_batch_is_a_multiple_of_both() -> None:
    mesh = Mesh({"node": 2, "gpu": 4})
    for batch, plan, is_shared in (
        (8, constraints.fsdp, True),
        (7, constraints.fsdp, False),
        (7, lambda axis: constraints.tensor_parallel("1d", axes=axis), True),
    ):
        walks = Walks(traced(Block(), batch, 8))
        (node,), (gpu,) = (walks.spreads(plan(axis), mesh).values() for axis in mesh.names)
        assert (node is gpu) == is_shared
