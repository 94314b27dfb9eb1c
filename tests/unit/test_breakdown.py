"""The breakdown of a plan by modules: descriptions of layouts and parallelism, and sums that
match the prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from made_plan import ALL, WIRE_S, entry, made_plan, made_staged_plan, strategy
from torch import nn

import autopar
from autopar.breakdown import (
    CROSSING,
    WAITING,
    ModulePart,
    breakdown,
    copies_of,
    in_words,
    label,
    owner,
    step_parts,
)
from autopar.breakdown.parallelism import has_two_dims, parallelism_of
from autopar.constraints import fsdp, layout, megatron, pipeline
from autopar.core.layout import Layout
from autopar.core.units import seconds, share
from autopar.explanation import explain
from benchmarks import zoo

NAMES = ("node", "gpu")


@pytest.fixture(scope="module")
def parts() -> dict[str, ModulePart]:
    return {part.module: part for part in breakdown(made_plan())}


@pytest.mark.parametrize(
    ("op", "layouts", "expected"),
    [
        ("dot", "S(0) S(1), R R -> S(0) S(1)", ("data", "sequence")),
        ("dot", "S(0) R, R S(0) -> S(0) S(2)", ("data", "tensor")),
        ("dot", "S(0) S(2), R S(1) -> S(0) P", ("data", "tensor")),
        ("dot", "R R, R R -> R R", ("replicated", "replicated")),
        ("attention", "S(0) S(1), S(0) S(1), S(0) S(1) -> S(0) S(1), S(0) S(1)", ("data", "heads")),
        ("attention", "S(0) S(2), S(0) R, S(0) R -> S(0) S(2), S(0) S(2)", ("data", "sequence")),
        ("embedding", "S(0) R, R S(1) -> P S(1)", ("tensor", "sequence")),
        ("embedding", "R R, S(0) S(1) -> S(0) S(1)", ("data", "sequence")),
        ("add", "S(0) S(2), S(0) S(2) -> S(0) S(2)", ("data", "tensor")),
        ("sum", "S(0) S(1) -> P P", ("data", "sequence")),
    ],
)
def test_the_parallelism_of_an_op_is_derived_from_its_layouts(
    op: str, layouts: str, expected: tuple[str, ...]
) -> None:
    assert tuple(parallelism_of(op, strategy(layouts), axis) for axis in (0, 1)) == expected


@pytest.mark.parametrize(
    ("matmuls", "expected"),
    [
        (["R S(1), R S(0) -> R P"], True),
        (["R R, R S(1) -> R S(1)"], True),
        (["R R, R S(1) -> R S(2)"], False),
        (["R S(1), R S(1) -> R S(1)", "R S(2), R S(0) -> R P"], False),  # heads, then features
        (["S(0) S(1), R R -> S(0) S(1)"], False),
        ([], False),
    ],
)
def test_sharded_matmuls_show_the_last_dim_of_activations(
    matmuls: list[str], expected: bool
) -> None:
    assert has_two_dims(map(strategy, matmuls)) == expected
    axis_of = parallelism_of("relu", strategy("R S(1) -> R S(1)"), 1, two_dims=expected)
    assert axis_of == ("tensor" if expected else "sequence")


@pytest.mark.parametrize(("shape", "name"), [((8, 64), "features"), ((8, 4, 64), "features")])
def test_split_hidden_features_are_not_called_a_sequence(shape: tuple[int, ...], name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    plan = autopar.plan(
        model,
        autopar.Mesh({"gpu": 2}),
        example_inputs=(torch.ones(shape),),
        hardware="cpu-gloo",
        constraints=[autopar.constraints.tensor_parallel(axes="gpu")],
    )
    (relu,) = (part for part in breakdown(plan) if part.main_op == "relu")
    assert relu.leaves is not None and relu.parallelism == ("tensor",)
    assert in_words(relu.leaves, ("gpu",), relu.role) == f"{name} over gpu"
    assert "sequence" not in str(explain(plan))


def test_parts_are_labelled_with_the_parallelism_of_their_layouts(
    parts: dict[str, ModulePart],
) -> None:
    said = {module: label(part, NAMES) for module, part in parts.items()}
    assert said["net.embed"] == "data over node, tensor over gpu"
    assert said["net.layers.*.up"] == "data over node, tensor over gpu; weights ZeRO-2 over node"
    assert said["net.layers.*.attention"] == "data over node, heads over gpu"
    assert said["net.layers.*.norm"] == "replicated"
    assert said["net.head"] == "data over node, sequence over gpu; weights ZeRO-3 over node"


def test_repeated_modules_are_one_part_with_instances(parts: dict[str, ModulePart]) -> None:
    assert parts["net.layers.*.up"].instances == ALL
    assert parts["net.layers.*.up"].matches("net.layers.2.up")
    assert parts["net.layers.*.up"].matches("*.up")
    assert not parts["net.layers.*.up"].matches("net.layers.3.up")


def test_copies_with_another_decision_are_a_separate_part() -> None:
    plan = made_plan()
    last = entry(
        [("net.layers.{0}.attention/attention/forward/0", "R R, R R, R R -> R R, R R")],
        instances=((3,),),
        time_s=1e-3,
    )
    parts = breakdown(
        type(plan)(
            **{**{f: getattr(plan, f) for f in plan.__slots__}, "entries": (*plan.entries, last)}
        )
    )
    names = {
        part.name: part.parallelism for part in parts if part.module == "net.layers.*.attention"
    }
    assert names == {
        "net.layers.*.attention [0-2]": ("data", "heads"),
        "net.layers.*.attention [3]": ("replicated", "replicated"),
    }


def test_times_and_kept_bytes_of_the_parts_add_up_to_the_prediction(
    parts: dict[str, ModulePart],
) -> None:
    prediction = made_plan().prediction
    assert sum(p.compute_s for p in parts.values()) == pytest.approx(prediction.compute_s)
    assert sum(p.communication_s for p in parts.values()) == pytest.approx(
        prediction.communication_s
    )
    assert sum(p.kept_bytes for p in parts.values()) == prediction.memory_bytes["activations"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).pow(2).mean()


@pytest.mark.parametrize("memory_bytes", [None, 40 * 2**20])
def test_the_parts_of_a_real_plan_add_up_to_the_prediction(memory_bytes: int | None) -> None:
    mesh = autopar.Mesh({"node": 2, "gpu": 2})
    plan = autopar.plan(
        Net(),
        mesh,
        example_inputs={"x": torch.randn(256, 1024)},
        hardware="cpu-gloo",
        memory_bytes=memory_bytes,
    )
    parts = breakdown(plan)
    assert sum(p.compute_s for p in parts) == pytest.approx(plan.prediction.compute_s)
    assert sum(p.communication_s for p in parts) == pytest.approx(plan.prediction.communication_s)
    assert sum(p.kept_bytes for p in parts) == plan.prediction.memory_bytes["activations"]


class Stacked(nn.Module):
    """Convolutions and norms in one list. Their biases of equal size share a decision."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(*kinds, nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.body(x).pow(2).mean()
        return loss


def test_modules_of_different_kinds_in_one_list_are_different_parts() -> None:
    example = {"x": torch.randn(8, 4, 8, 8)}
    plan = autopar.plan(Stacked(), 2, example_inputs=example, hardware="cpu-gloo")
    shared = [e for e in plan.entries if e.kind == "parameter" and len(e.instances) > 2]
    assert shared, "biases of convolutions and of norms share a decision"
    found = breakdown(plan)
    mine = [part for part in found if part.pattern == "body.*"]
    copies = [i for part in mine for i in part.instances]
    assert sorted(copies) == [(0,), (1,), (2,), (3,), (4,)], "each module is in one part"
    kinds = {i: part.main_op for part in mine for (i,) in part.instances}
    assert kinds[0] == kinds[3] == "convolution" and kinds[2] == "relu"
    assert kinds[1] == kinds[4] and kinds[1] not in ("convolution", "relu")
    assert sum(p.compute_s for p in found) == pytest.approx(plan.prediction.compute_s)
    assert sum(p.kept_bytes for p in found) == plan.prediction.memory_bytes["activations"]


@pytest.mark.parametrize(
    ("layout", "role", "said"),
    [
        ("S(0) R", "weight", "rows over node"),
        ("S(0)#1 S(0)#0", "weight", "rows over gpu, then node"),
        ("R S(1)", "weight", "columns over gpu"),
        ("S(0) S(2)", "activation", "batch over node, features over gpu"),
        ("S(0) P", "activation", "batch over node, partial over gpu"),
        ("S(3) R", "activation", "dim 3 over node"),
        ("R R", "activation", "whole"),
        ("S(0) S(1)~mirrored", "activation", "batch over node, sequence over gpu, mirrored"),
        ("S(1) S(3)~1~2", "image", "channels over node, space 1 over gpu with a halo of 1 and 2"),
    ],
)
def test_layouts_are_described_with_the_outermost_axis_first(
    layout: str, role: str, said: str
) -> None:
    assert in_words(Layout.parse(layout), NAMES, role) == said


@pytest.mark.parametrize(
    ("node", "module"),
    [
        ("ids/input", "(inputs)"),
        ("a/b/input", "(inputs)"),
        ("/sum.dim_IntList/forward/1 of the batch/input", "(inputs)"),
        ("net.layers.{0}/add.Tensor/forward/1/input", "(from the previous stage)"),
        ("net.layers.{0}/add.Tensor/forward/1/output", "(from the next stage)"),
        ("loss/output", ""),
    ],
)
def test_only_values_of_other_stages_are_attributed_to_a_stage(node: str, module: str) -> None:
    if node == "a/b/input":  # names in the model may contain a slash
        assert owner(node) not in CROSSING
    else:
        assert owner(node) == module


def test_recomputed_modules_count_their_recompute_time() -> None:
    plan = made_plan()
    slower = replace(plan, entries=tuple(replace(e, again_s=3 * e.again_s) for e in plan.entries))
    before, after = ({p.module: p for p in breakdown(each)} for each in (plan, slower))
    again = [module for module, part in before.items() if part.recomputed]
    assert again
    for module in again:
        assert after[module].recompute_s == pytest.approx(3 * before[module].recompute_s) != 0.0
        assert after[module].compute_s - before[module].compute_s == pytest.approx(
            2 * before[module].recompute_s
        )


class Layered(nn.Module):
    """Layers that are Sequentials with two linear layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


@pytest.mark.parametrize(
    ("instances", "module", "pattern", "text"),
    [
        (((0,), (1,), (2,), (5,)), "layers.*", "layers.*", "0-2,5"),
        (((0, 1), (0, 2), (1, 0)), "down.*.*", "down.*.*", "0.1-2,1.0"),
        (((0, 3), (1, 3), (2, 3)), "layers.*.3", "layers.*.*", "0-2"),
        (((4,),), "head.4", "head.*", ""),
        (((),), "head", "head", ""),
    ],
)
def test_copies_are_listed_by_the_indices_of_the_wildcards(
    instances: Any, module: str, pattern: str, text: str
) -> None:
    assert copies_of(instances, module, pattern) == text


def test_weights_with_the_same_name_and_different_layouts_are_all_compared() -> None:
    model = nn.Sequential()
    model.features = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    plan = autopar.plan(
        model,
        2,
        example_inputs=(torch.randn(4, 6),),
        hardware="cpu-gloo",
        constraints=(layout("features.0", storage="R"), layout("features.2", storage="S(0)")),
    )
    part = next(p for p in breakdown(plan) if {(0,), (2,)} <= set(p.instances))
    assert {str(w.storage) for w in part.weights if w.name == "weight"} == {"S(0)", "R"}
    assert not autopar.diff(plan, plan).changes


def test_indices_of_modules_within_a_layer_are_shown() -> None:
    plan = autopar.plan(Layered(), 2, example_inputs=(torch.randn(4, 8),), hardware="cpu-gloo")
    parts = {part.module: part for part in breakdown(plan)}
    assert {"layers.*.0", "layers.*.1", "layers.*.2"} <= parts.keys() and "layers.*.*" not in parts
    assert not any(part.copies for part in parts.values())
    assert parts["layers.*.2"].matches("layers.1.2") and parts["layers.*.2"].matches("layers.*.*")
    assert not parts["layers.*.2"].matches("layers.1.0")
    alone = autopar.plan(
        nn.Sequential(nn.Linear(8, 4), nn.ReLU()),
        2,
        example_inputs=(torch.randn(4, 8),),
        hardware="cpu-gloo",
    )
    assert "0" in {part.module for part in breakdown(alone)}


def test_the_parts_of_a_step_are_those_of_the_busiest_stage() -> None:
    plan = made_staged_plan(
        microbatches=8
    )  # the second stage receives from both sides and is the slowest
    parts = step_parts(plan)
    assert parts.rank == 1 and plan.prediction.simulated_s == pytest.approx(parts.total_s)
    assert (parts.compute_s, parts.again_s) == pytest.approx((8 * 21e-3, 8 * 6e-3))
    assert (parts.exposed_s, parts.receiving_s) == pytest.approx((8 * 6e-3, 8 * 2 * WIRE_S))
    assert parts.waiting_s == pytest.approx(
        27e-3 + 35e-3 + 37e-3 + 2 * WIRE_S - 2e-3
    )  # one microbatch in all other stages, and 2 ms less in the last
    assert f"stage 1, the busiest: compute {seconds(8 * 21e-3)} + run again" in "\n".join(
        explain(plan).summary()
    )
    whole = step_parts(made_plan())
    assert whole.rank is None and whole.waiting_s == 0.0
    assert (whole.compute_s, whole.again_s, whole.exposed_s) == pytest.approx((21e-3, 6e-3, 6e-3))


def test_overlapped_communication_is_not_exposed_and_slows_compute() -> None:
    plan = made_plan()
    hiding = replace(
        plan,
        prediction=replace(plan.prediction, hidden_s=4e-3),
        overlap=replace(plan.overlap, slowdown=0.25),
    )
    parts = step_parts(hiding)
    assert (parts.compute_s, parts.slowed_s, parts.exposed_s) == pytest.approx((21e-3, 1e-3, 2e-3))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved_1f1b", "chunks": 2},
}


@pytest.mark.parametrize("stages", [None, *SCHEDULES], ids=str)
def test_the_parts_of_a_step_of_a_real_plan_add_up_to_the_simulated_step(
    stages: str | None,
) -> None:
    mesh = autopar.Mesh({"stage": 2, "data": 2}, devices_per_node=2)
    along = (pipeline("stage", microbatches=4, **SCHEDULES[stages]),) if stages else ()
    made = autopar.plan(
        Deep(),
        mesh,
        example_inputs={"x": torch.randn(4096, 512)},
        hardware="h100-sxm",
        constraints=[fsdp("data"), *along],
        num_microbatches="auto" if stages else 4,
    )
    parts, said = step_parts(made), list(explain(made).summary())
    assert made.pipeline is not None and parts.total_s == pytest.approx(made.prediction.simulated_s)
    assert all(time_s >= -1e-12 for _, time_s in parts.items())
    assert parts.compute_s + parts.again_s == pytest.approx(made.prediction.compute_s)
    assert parts.slowed_s > 0.0
    if not stages:
        assert (
            parts.rank is None
            and parts.receiving_s == 0.0
            and parts.waiting_s == pytest.approx(0.0, abs=1e-12)
        )
        return
    assert parts.receiving_s > 0.0
    waits = (
        1
        - 4
        * max(
            sum(s.prediction.simulated_s for s in made.pipeline.stages[rank::2])
            for rank in range(2)
        )
        / parts.total_s
    )
    ends = (
        f"{WAITING} {seconds(parts.waiting_s)} ({share(waits)}) = {seconds(parts.total_s)} as"
        " emitted"
    )
    assert any(line.endswith(ends) for line in said)


def test_recompute_of_a_real_plan_is_a_separate_part_of_the_step() -> None:
    model, batch = zoo.build("llama", batch=8)
    forced = megatron(dp=2, pp=2, recompute="full", microbatches=4)
    made = autopar.plan(
        model,
        autopar.Mesh({"stage": 2, "data": 2}),
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=[forced],
    )
    parts = step_parts(made)
    assert made.pipeline is not None and parts.rank is not None
    again_s = sum(part.recompute_s for part in breakdown(made.pipeline.stages[parts.rank]))
    assert parts.again_s == pytest.approx(4 * again_s) and again_s > 0.0
    assert parts.total_s == pytest.approx(made.prediction.simulated_s)


class _Flattens(nn.Module):
    """A module that has only view nodes, which follow the decision of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 100_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.body(x), 1))


class _Scored(nn.Module):
    """A loss of the module that flattens, with a parameter before it so that backward reaches the
    view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 1, bias=False)
        self.inner = _Flattens()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inner(self.first(x)), y)


def test_transfers_of_a_module_without_decisions_count_with_the_decision_that_it_follows() -> None:
    with torch.device("meta"):
        model, batch = _Scored(), (torch.empty(16, 3, 32, 32), torch.zeros(16, dtype=torch.long))
    plan = autopar.plan(model, 2, hardware="h100-sxm", example_inputs=batch)
    moved = next(c for c in plan.communications if c.node == "inner/view/backward/0")
    found = {part.module: part for part in breakdown(plan)}
    assert "inner" not in found
    assert ("backward", moved.collective.kind) in {
        (t.phase, t.kind) for t in found["inner.fc"].transfers
    }
    assert sum(part.communication_s for part in found.values()) == pytest.approx(
        plan.prediction.communication_s
    )
    assert "inner.fc" in str(explain(plan))


def test_transfers_without_any_decision_are_a_separate_part() -> None:
    plan = made_plan()
    stray = replace(plan.communications[-1], node="net.stray/view/backward/0", module="net.stray")
    found = {
        part.module: part
        for part in breakdown(replace(plan, communications=(*plan.communications, stray)))
    }
    assert found["net.stray"].communication_s == pytest.approx(stray.time_s)
