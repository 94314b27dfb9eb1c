"""Parameters that stay gathered during a step of several microbatches: the ZeRO stages have the
communication of the paper, accumulate in fp32, and match the model.

There are Ψ elements on P devices, and M microbatches. Volumes are elements that a device sends in
ring algorithms (Rajbhandari et al., "ZeRO", 2020, sections 5 and 7).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_small
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.distributed.tensor import Partial, Shard

import autopar
from autopar.api.planning import plan_model
from autopar.breakdown import breakdown
from autopar.capture.trace import Parameter
from autopar.constraints import fsdp, megatron, pipeline
from autopar.core.collective import Collective
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, local_shape
from autopar.core.layout_graph import all_layouts
from autopar.core.mesh import Mesh
from autopar.cost.op_times import CollectivePrices
from autopar.cost.zero_stages import HeldLayouts, StepMoves, held_ways, stage_on
from autopar.emit.context import CALLS
from autopar.errors import ConstraintError, LayoutError, ValidationError
from autopar.kernels.collectives import add_to
from autopar.planner import Planned
from autopar.plans import Plan
from autopar.program.interpreter import Ranks
from autopar.program.lockstep import run_lockstep
from autopar.program.splitting import local_part

LINE, SQUARE = Mesh({"data": 2}), Mesh({"data": 2, "tensor": 2})
MICROBATCHES = 2
ALONE = replace(
    HardwareProfile.load("h100-sxm"), overlap_slowdown=1.0, hash="alone"
)  # communication per use is never overlapped


def planned(
    kind: str, mesh: Mesh, *constraints: Any, hardware: Any = "h100-sxm", **options: Any
) -> tuple[Planned, nn.Module, dict[str, Any]]:
    model, batch = getattr(zoo_small, kind)()
    made = plan_model(
        model, mesh, example_inputs=batch, hardware=hardware, constraints=constraints, **options
    )[1]
    return made, model, batch


def moved(made: Planned, phase: str, kind: str) -> Counter[int]:
    """Return the number of elements that are gathered, scattered or reduced along the first axis,
    and the number of collectives before bucketing."""
    assert made.plan.pipeline is not None
    steps = [(step.phase, step.collective) for _, step in made.plan.pipeline.stages[0].steps()]
    found = [c for p, c in steps if (p, c.kind, c.axis) == (phase, kind, 0)]
    return Counter(
        max(c.bytes, c.output_bytes(2)) // getattr(torch, c.dtype).itemsize for c in found
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_zero_stage_has_the_communication_of_the_paper(stage: int) -> None:
    made, model, batch = planned(
        "llama", LINE, megatron(dp=2, zero=stage, microbatches=MICROBATCHES)
    )
    sizes = Counter(p.numel() for p in model.parameters())
    once, none = sizes, Counter[int]()
    gathered = {1: ("step", "forward"), 2: ("step", "forward"), 3: ("forward", "step")}[stage]
    assert [moved(made, phase, "all_gather") for phase in gathered] == [once, none]
    scattered = {1: ("step", "backward"), 2: ("backward", "step"), 3: ("backward", "step")}[stage]
    assert [moved(made, phase, "reduce_scatter") for phase in scattered] == [once, none]
    assert not moved(made, "step", "all_reduce")
    total = 4 * sum(n * count for n, count in sizes.items())
    rests = made.plan.prediction.memory_bytes
    assert (rests["parameters"], rests["optimizer"]) == (total / 2, total)
    assert rests.get("copies", 0) == (total if stage < 3 else 0)
    assert rests["gradients"] == (total if stage == 1 else total / 2)
    pipe = made.plan.pipeline
    assert pipe is not None
    said = {part.sharded[0] for part in breakdown(pipe.stages[0]) if part.weights}
    assert (
        said == {f"ZeRO-{stage}"} if stage < 3 else said <= {"ZeRO-2", "ZeRO-3"}
    )  # gathered per use, and some copies are kept until backward
    assert autopar.verify(made.plan, model, batch).ok
    assert autopar.check(made.plan, model, batch).ok


@pytest.mark.parametrize("stage", [1, 2])
def test_over_two_axes_each_gradient_is_accumulated_once(stage: int) -> None:
    made, model, batch = planned("llama", Mesh({"a": 2, "b": 2}), megatron(dp=4, zero=stage))
    added = [n for n in made.program.stages[0].backward.graph.nodes if n.target is add_to]
    assert len(added) == len({n.args[0] for n in added})
    assert autopar.verify(made.plan, model, batch).ok


@pytest.mark.slow
def test_data_parallelism_reduces_once_per_step_without_overlap() -> None:
    made, model, batch = planned(
        "llama", LINE, megatron(dp=2, microbatches=MICROBATCHES), hardware=ALONE
    )
    assert moved(made, "step", "all_reduce") == Counter(p.numel() for p in model.parameters())
    assert not moved(made, "backward", "all_reduce")
    assert autopar.verify(made.plan, model, batch).ok


def test_zero_stages_1_and_2_are_available_for_one_microbatch() -> None:
    made, model, batch = planned("gpt2", LINE, megatron(dp=2, zero=1))
    assert (
        made.plan.pipeline is not None
        and made.plan.pipeline.num_microbatches == 1
        and made.plan.pipeline.accumulates
    )
    assert (
        moved(made, "step", "all_gather").total() and moved(made, "step", "reduce_scatter").total()
    )
    assert autopar.verify(made.plan, model, batch).ok and autopar.check(made.plan, model, batch).ok
    again = Plan.loads(made.plan.dumps())
    assert again == made.plan


@pytest.mark.parametrize(("stage", "tied"), [(1, True), (1, False), (2, True)])
def test_with_tensor_parallelism_a_fused_bias_is_kept_and_accumulated_in_shards(
    stage: int, tied: bool
) -> None:
    """The bias is stored by heads over both axes in mesh order. Once per step, it is gathered and
    its sums are reduced through the tensor axis, so that the data axis sends all of it. Like all
    other parameters, it is kept in shards of the tensor axis."""
    model, batch = zoo_small.gpt2(tie_word_embeddings=tied)
    asked = megatron(dp=2, tp=2, zero=stage)
    made = plan_model(
        model, SQUARE, example_inputs=batch, hardware="h100-sxm", constraints=(asked,)
    )[1]
    split = {
        p.name
        for p in made.program.stages[0].parameters
        if p.layout.placements[1] != Layout.parse("R").placements[0]
    }
    local = {name: p.numel() // (1 + (name in split)) for name, p in model.named_parameters()}
    moves = {name: n * (1 + name.endswith("c_attn.bias")) for name, n in local.items()}
    assert {"transformer.h.0.attn.c_attn.bias", "transformer.wte.weight"} < split
    assert moved(made, "step", "all_gather") == Counter(moves.values())
    # looked up by indices that all samples share; its gradient is summed where it is computed
    position = "transformer.wpe.weight"
    reduced = Counter(n for name, n in moves.items() if name != position)
    phases = ("step", "backward") if stage == 1 else ("backward", "step")
    assert [moved(made, phase, "reduce_scatter") for phase in phases] == [reduced, Counter()]
    total, rests = 4 * sum(local.values()), made.plan.prediction.memory_bytes
    assert (rests["parameters"], rests["optimizer"], rests["copies"]) == (total / 2, total, total)
    assert rests["gradients"] == (total - 4 * local[position] / 2 if stage == 1 else total / 2)
    assert autopar.verify(made.plan, model, batch).ok and autopar.check(made.plan, model, batch).ok


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 4])
def test_zero_stage_1_with_pipeline_and_tensor_parallelism(num_layers: int) -> None:
    mesh = Mesh({"stage": 2, "data": 2, "tensor": 2})
    model, batch = zoo_small.gpt2(num_layers=num_layers)
    asked = megatron(pp=2, tp=2, dp=2, zero=1, microbatches=MICROBATCHES)
    made = plan_model(model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=(asked,))[
        1
    ]
    for stage in made.program.stages:
        assert not any(
            c.kind == "reduce_scatter" for phase, _, c in stage.collectives if phase == "backward"
        )
    assert autopar.verify(made.plan, model, batch).ok and autopar.check(made.plan, model, batch).ok


@pytest.mark.slow
def test_zero_with_pipeline_and_tensor_parallelism() -> None:
    mesh = Mesh({"stage": 2, "data": 2, "tensor": 2})
    made, model, batch = planned(
        "gpt2", mesh, megatron(pp=2, tp=2, dp=2, zero=2, microbatches=MICROBATCHES)
    )
    for stage in made.program.stages:
        kinds = {c.kind for phase, _, c in stage.collectives if phase == "step"}
        assert (
            "all_gather" in kinds and "reduce_scatter" not in kinds
        )  # parameters that cannot be sharded are replicated and reduced once
    assert autopar.verify(made.plan, model, batch).ok and autopar.check(made.plan, model, batch).ok


@pytest.mark.slow
def test_the_planner_keeps_gathered_copies_if_that_is_faster_and_they_fit() -> None:
    """Full parameters with their optimizer states do not fit. They are gathered once if the copies
    fit, otherwise per use."""
    ample = planned("llama", LINE, hardware=ALONE, num_microbatches=MICROBATCHES)[
        0
    ].plan.prediction.peak_bytes
    steps, copies, per_use = [], [], []
    for share in (0.75, 0.55):
        limits = {
            "memory_bytes": int(ample * share),
            "gap": 1e-4,
        }  # the ways to keep a parameter have almost equal costs
        made, _, _ = planned("llama", LINE, hardware=ALONE, num_microbatches=MICROBATCHES, **limits)
        pipe = made.plan.pipeline
        assert pipe is not None
        steps.append(made.plan.prediction.step_s)
        copies.append(made.plan.prediction.memory_bytes.get("copies", 0))
        per_use.append(
            [part.sharded[0] for part in breakdown(pipe.stages[0]) if part.weights].count("ZeRO-3")
        )
    assert steps == sorted(steps), "less memory is never faster"
    assert copies[0] > 2 * copies[1] and per_use[0] < per_use[1], (
        "what was held gathered is gathered per use"
    )


@pytest.mark.parametrize("zero", [-1, 4])
def test_unknown_zero_stages_are_refused(zero: int) -> None:
    with pytest.raises(ConstraintError, match="zero"):
        megatron(dp=2, zero=zero)


def test_fully_sharded_parameters_are_not_kept_gathered() -> None:
    made, _, _ = planned("llama", LINE, fsdp("data"), num_microbatches=MICROBATCHES)
    assert "copies" not in made.plan.prediction.memory_bytes and not moved(
        made, "step", "all_gather"
    )


# ── the ways to keep a parameter ──


class ByBytes(CollectivePrices):
    """Costs per byte and per collective."""

    def __call__(self, c: Collective) -> float:
        return c.bytes * 1e-9 + 1e-6


def ways(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> list[HeldLayouts]:
    return [
        w
        for at in all_layouts(shape, mesh_shape)
        for w in held_ways(at, mesh_shape, trained=True, stages={})
    ]


@examples(40)
@given(
    shape=st.lists(st.integers(2, 6), min_size=1, max_size=3).map(tuple),
    mesh_shape=st.lists(st.sampled_from([2, 3]), min_size=1, max_size=2).map(tuple),
    seed=st.integers(0, 2**16),
)
def test_collectives_convert_every_storage_layout_and_every_gradient_sum(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], seed: int
) -> None:
    """On numbers, the shards of a parameter become the shards that are read, and partial sums
    become the shards of the gradient."""
    mesh = Mesh({f"axis{i}": n for i, n in enumerate(mesh_shape)})
    moves = StepMoves(mesh_shape, ByBytes(mesh, HardwareProfile.load("h100-sxm")), 2)
    p = Parameter("w", (), "w", shape, shape, torch.float32, True, 0, torch.float32)
    found = ways(shape, mesh_shape)
    generator = torch.Generator().manual_seed(seed)
    held = found[int(torch.randint(len(found), (), generator=generator))]
    try:
        gathers, reduces = moves.gathers(p, held), moves.reduces(p, held)
    except LayoutError:
        assert moves.seconds(p, held) is None
        return
    whole = torch.randint(-8, 8, shape, generator=generator).double()
    assert_leads(
        whole, mesh, held.storage, [s.collective for s in gathers], held.working, generator
    )
    assert_leads(whole, mesh, held.sums, [s.collective for s in reduces], held.storage, generator)


def assert_leads(
    whole: torch.Tensor,
    mesh: Mesh,
    source: Layout,
    collectives: list[Collective],
    target: Layout,
    generator: torch.Generator,
) -> None:
    graph, at = fx.Graph(), source
    node = graph.placeholder("x")
    for c in collectives:
        dim = {
            "all_gather": None,
            "all_reduce": None,
            "reduce_scatter": c.dim,
            "slice": c.dim,
            "all_to_all": c.to_dim,
        }[c.kind]
        length = {}
        if c.kind in ("all_gather", "all_to_all") and whole.shape[c.dim] % at.num_shards(
            c.dim, mesh.shape
        ):
            length = {"length": whole.shape[c.dim]}
        at = (
            at.with_placement(c.axis, Shard(dim))
            if dim is not None
            else at.with_placement(c.axis, Layout.parse("R").placements[0])
        )
        call, args = CALLS[c.kind](c, at)
        node = graph.call_function(call, (node, *args), length)
    graph.output((node,))
    assert at == target
    (result,) = Ranks(mesh, None, None, torch.device("cpu"))(
        fx.GraphModule({}, graph), "step", [parts_of(whole, mesh, source, generator)]
    )
    for rank, part in enumerate(result):
        assert torch.equal(part, parts_of(whole, mesh, target, generator)[rank])


def parts_of(
    whole: torch.Tensor, mesh: Mesh, layout: Layout, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return one tensor per rank. Partial sums are random terms that add up to the full tensor."""
    sharded = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Shard)]
    partial = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Partial)]
    plain = Layout(
        [p if isinstance(p, Shard) else Layout.parse("R").placements[0] for p in layout.placements],
        layout.order,
    )
    terms: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
    last = tuple(mesh.shape[a] - 1 for a in partial)
    for place in itertools.product(*(range(mesh.shape[a]) for a in sharded)):
        coordinate = [0] * len(mesh.shape)
        for axis, index in zip(sharded, place, strict=True):
            coordinate[axis] = index
        missing = local_part(whole, plain, mesh.shape, tuple(whole.shape), coordinate).clone()
        for who in itertools.product(*(range(mesh.shape[a]) for a in partial)):
            if who != last:
                terms[place, who] = torch.randint(
                    -8, 8, missing.shape, generator=generator
                ).double()
                missing = missing - terms[place, who]
        terms[place, last] = missing
    result = []
    for rank in range(mesh.num_devices):
        c = mesh.coordinate(rank)
        result.append(terms[tuple(c[a] for a in sharded), tuple(c[a] for a in partial)].clone())
    return result


def test_a_forced_zero_stage_is_gathered_and_reduced_through_inner_axes() -> None:
    """The axis shards the same dim outside of another axis, over which the parameter stays sharded
    for its readers."""
    for stage, sums in ((1, "P S(0)"), (2, "S(0) S(0)")):
        found = list(held_ways(Layout.parse("S(0) S(0)"), (2, 2), trained=True, stages={0: stage}))
        assert ("R S(0)", sums) in [(str(w.working), str(w.sums)) for w in found]
        assert all(str(w.working).startswith("R") for w in found)
    per_use = list(held_ways(Layout.parse("S(0) S(0)"), (2, 2), trained=True, stages={0: 3}))
    assert all(str(w.working).startswith("S(0)") for w in per_use)


def test_the_storage_options_are_the_zero_stages_on_each_axis() -> None:
    found = ways((4, 4), (2,))
    rests = [w for w in found if str(w.storage) == "S(0)"]
    assert [stage_on(w, 0) for w in rests] == [1, 2, 3]
    assert [(str(w.working), str(w.sums)) for w in rests] == [
        ("R", "P"),
        ("R", "S(0)"),
        ("S(0)", "S(0)"),
    ]
    assert [(str(w.working), str(w.sums)) for w in found if str(w.storage) == "R"] == [
        ("R", "R"),
        ("R", "P"),
    ]
    frozen = list(held_ways(Layout.parse("S(0)"), (2,), trained=False, stages={}))
    assert [str(w.working) for w in frozen] == ["R", "S(0)"]
    assert [
        stage_on(w, 0) for w in held_ways(Layout.parse("S(0)"), (2,), trained=True, stages={0: 2})
    ] == [2]


def test_of_two_axes_that_split_a_dim_only_the_inner_one_is_gathered_alone() -> None:
    found = list(held_ways(Layout.parse("S(0) S(0)"), (2, 2), trained=True, stages={}))
    assert {str(w.working) for w in found} == {"S(0) S(0)", "S(0) R", "R R"}
    assert all(math.prod(local_shape((8,), w.working, (2, 2))) in (2, 4, 8) for w in found)


# ── numerical results ──


class Scale(nn.Module):
    """loss = Σ w·x. The gradient of w is Σ x, in the dtype of w."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_16_bit_gradients_are_accumulated_in_fp32(zero: int) -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16 if the terms are added one by one, and 260 if the sum is
    rounded once (259 is between 258 and 260)."""
    x = torch.ones(8, 4, dtype=torch.bfloat16)
    x[0], x[1] = 128, 128
    x[2:] = 0.5
    model, mesh = Scale(torch.bfloat16), Mesh({"data": 2})
    made = plan_model(
        model,
        mesh,
        example_inputs={"x": x},
        hardware="h100-sxm",
        constraints=(megatron(dp=2, zero=zero, microbatches=4),),
    )[1]
    gradient = run_lockstep(made.program, dict(model.named_parameters()), {}, {"x": x}).gradients[
        "w"
    ]
    assert gradient.dtype == torch.bfloat16
    assert gradient.tolist() == [260.0] * 4


def test_a_gradient_that_is_not_accumulated_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.emit import phase

    def overwritten(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return total.copy_(x)

    made, model, batch = planned("llama", LINE, megatron(dp=2, zero=1, microbatches=MICROBATCHES))
    assert autopar.verify(made.plan, model, batch).ok
    monkeypatch.setattr(phase, "add_to", overwritten)
    with pytest.raises(ValidationError, match="add_to"):
        autopar.verify(made.plan, model, batch)


@pytest.mark.slow
def test_the_certificate_refuses_changed_communication_once_per_step() -> None:
    made, model, batch = planned("llama", LINE, megatron(dp=2, zero=1, microbatches=MICROBATCHES))
    text = made.plan.dumps()
    pipe = made.plan.pipeline
    assert pipe is not None
    once = [c for c in pipe.stages[0].communications if c.phase == "step"]
    assert once
    changes = [
        text.replace('"phase": "step"', '"phase": "forward"', 1),
        text.replace('"accumulates": true', '"accumulates": false'),
        text.replace('"copies": ', '"copies": 1', 1),
        text.replace(
            f'"bytes": {once[-1].collective.bytes}', f'"bytes": {once[-1].collective.bytes * 2}', 1
        ),
        text.replace('/storage"', '/parameter"', 1),
    ]
    for changed in changes:
        assert changed != text
        try:
            certificate = autopar.check(Plan.loads(changed), model, batch)
        except autopar.AutoparError:
            continue
        assert not certificate.ok


@pytest.mark.slow
def test_a_pipeline_may_mix_the_stages_of_zero() -> None:
    """There are no constraints. All mixtures of the planner are correct, and less memory changes
    them."""
    mesh = Mesh({"stage": 2, "data": 2})
    made, model, batch = planned("gpt2", mesh, pipeline("stage", microbatches=MICROBATCHES))
    budget = int(made.plan.prediction.peak_bytes * 0.75)
    short, _, _ = planned(
        "gpt2", mesh, pipeline("stage", microbatches=MICROBATCHES), memory_bytes=budget
    )
    assert short.plan.prediction.peak_bytes <= budget
    assert (
        autopar.verify(short.plan, model, batch).ok and autopar.check(short.plan, model, batch).ok
    )
