"""Parameters that are stored in one dtype and read in a narrower one: communication, memory, and
results that match the model.

The reference is a model that casts its parameters when it reads them, so that autograd returns
gradients in the stored dtype.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_small
from measured import measured_peak
from torch import Tensor, nn

import autopar
from autopar.api.planning import plan_model
from autopar.capture import Trace, capture, execute
from autopar.constraints import Constraint, ddp, fsdp, megatron, pipeline, tensor_parallel
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost import tensor_values
from autopar.emit import emit_stage
from autopar.emit.context import CAST
from autopar.errors import (
    AutoparError,
    EmissionError,
    InfeasibleError,
    PlanError,
    VerificationError,
)
from autopar.planner import Planned
from autopar.plans import Plan
from autopar.program.peak_memory import trace_peak
from autopar.program.program import StageProgram
from autopar.verification import relative_error, verify_program
from benchmarks.random_plans import prepared_trace, random_plan

BF16 = torch.bfloat16
LEARNING_RATE = 1e-5
ALONE = replace(HardwareProfile.load("h100-sxm"), overlap_slowdown=1.0, hash="alone")  # no overlap
LINE, SQUARE = Mesh({"gpu": 2}), Mesh({"a": 2, "b": 2})
KINDS = ("gpt2", "llama", "bert", "vit", "mixtral")
WAYS: dict[str, tuple[Mesh, tuple[Constraint, ...], dict[str, Any]]] = {
    "free": (SQUARE, (), {}),
    "fsdp": (SQUARE, (fsdp(),), {}),
    "tensor parallel": (LINE, (tensor_parallel("1d", axes="gpu"),), {}),
    "ZeRO-1": (LINE, (megatron(dp=2, zero=1, microbatches=2),), {}),
    "ZeRO-2": (LINE, (megatron(dp=2, zero=2, microbatches=2),), {}),
    "Megatron": (SQUARE, (megatron(tp="b", zero=1, microbatches=2),), {}),
    "microbatches": (LINE, (fsdp(),), {"num_microbatches": 2}),
    "stages": (SQUARE, (pipeline("a", microbatches=2),), {}),
}


@functools.cache
def planned(kind: str, way: str, **options: Any) -> tuple[Planned, nn.Module, dict[str, Any]]:
    model, batch = getattr(zoo_small, kind)()
    mesh, constraints, more = WAYS[way]
    asked: dict[str, Any] = {
        "hardware": "h100-sxm",
        "constraints": constraints,
        "precision": "bf16",
        **more,
        **options,
    }
    return plan_model(model, mesh, example_inputs=batch, **asked)[1], model, batch


def steps_of(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """Return phase, key, kind and dtype of all collectives. The key of the summed gradient of a
    parameter ends in ``/sum``."""
    for stage in plan.stages:
        for (node, _), s in keyed(stage):
            key = f"{node}/sum" if node.endswith("/storage") and s.result == 1 else node
            yield s.phase, key, s.collective.kind, s.collective.dtype


def keyed(plan: Plan) -> Iterator[tuple[tuple[str, int], Any]]:
    yield from (
        (node if isinstance(node, tuple) else (node, 0), step) for node, step in plan.steps()
    )


def programs(made: Planned) -> tuple[StageProgram, ...]:
    return made.program.stages


def cast_model(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and gradients of the model with its parameters and floating-point inputs cast
    where they are read."""
    plain = copy.deepcopy(model)
    named = dict(plain.named_parameters())
    given = {name: x.to(BF16) if x.is_floating_point() else x for name, x in batch.items()}
    loss = torch.func.functional_call(
        plain, {name: p.to(BF16) for name, p in named.items()}, (), given
    ).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in named.items() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_the_trace_matches_the_model_with_cast_parameters(kind: str) -> None:
    model, batch = getattr(zoo_small, kind)()
    trace = capture(model, (), batch, precision=BF16)
    assert all(p.dtype == torch.float32 and p.compute_dtype == BF16 for p in trace.parameters)
    named = dict(model.named_parameters(remove_duplicate=False))
    inputs = [batch[i.path] for i in trace.inputs]
    assert [i.dtype for i in trace.inputs] == [x.dtype for x in inputs]
    outputs, gradients, _ = execute(trace, named, dict(model.named_buffers()), inputs)
    loss, wanted = cast_model(model, batch)
    position = next(n for n, o in enumerate(trace.outputs) if o.is_loss)
    assert outputs[position].item() == pytest.approx(loss.item(), rel=1e-2)
    floor = 0.1 * max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        assert gradients[name].dtype == torch.float32
        assert relative_error(gradients[name], gradient, floor) < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_plans_match_the_model_and_are_certified(kind: str, way: str) -> None:
    made, model, batch = planned(kind, way)
    plan = Plan.loads(made.plan.dumps())
    found = autopar.check(plan, model, batch)
    assert found.ok, str(found)
    assert autopar.verify(plan, model, batch).ok
    if kind != "mixtral":  # bf16 decides ties and near ties of experts differently
        assert autopar.verify(plan, model, batch, dtype=None).dtype == "bfloat16"
    assert "parameters read in bf16" in str(autopar.explain(plan))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_random_mixed_precision_plans_match_the_model(kind: str, seed: int) -> None:
    model, batch = getattr(zoo_small, kind)()
    ready = prepared_trace(
        capture(model, (), batch, precision=BF16), SQUARE, HardwareProfile.load("cpu-gloo")
    )
    _, program = random_plan(ready, seed, loudness=(1.0, 1.0), recompute_share=0.3)
    assert verify_program(ready.trace, program, model, (), batch).ok
    if kind != "mixtral":
        assert verify_program(ready.trace, program, model, (), batch, dtype=None).ok


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_move_in_the_narrow_dtype_and_gradients_are_reduced_in_the_wide_one(
    kind: str, way: str
) -> None:
    made, model, batch = planned(kind, way)
    moved = list(steps_of(made.plan))
    gathers = {
        dtype
        for _, key, name, dtype in moved
        if name == "all_gather" and key.endswith(("/parameter", "/storage"))
    }
    assert gathers <= {"bfloat16"}
    wide, narrow = gradients_of(capture(model, (), batch, precision=BF16))
    sums = [
        (phase, key, dtype)
        for phase, key, name, dtype in moved
        if name in ("reduce_scatter", "all_reduce")
    ]
    assert {dtype for phase, key, dtype in sums if phase == "step" or key in wide} <= {"float32"}
    assert not [key for _, key, _ in sums if key in narrow]
    if way in ("fsdp", "ZeRO-1", "ZeRO-2", "microbatches"):
        assert gathers and [key for phase, key, _ in sums if phase == "step" or key in wide]


class Large(nn.Module):
    """Products of so many rows that the time is compute and bandwidth. A gradient that is reduced
    before the cast has half as many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).float().pow(2).mean()


def large() -> tuple[Large, dict[str, Tensor]]:
    with torch.device("meta"):
        return Large(), {"x": torch.empty(256, 1024, 1024)}


@pytest.mark.parametrize(
    ("mesh", "num_microbatches"), [(Mesh({"gpu": 4}), 1), (SQUARE, 1), (SQUARE, 4)]
)
def test_no_gradient_is_reduced_before_its_cast_even_if_that_were_faster(
    mesh: Mesh, num_microbatches: int
) -> None:
    model, batch = large()
    asked: dict[str, Any] = {
        "hardware": ALONE,
        "precision": "bf16",
        "num_microbatches": num_microbatches,
    }
    plan = autopar.plan(model, mesh, example_inputs=batch, **asked)
    summed = [
        (key, dtype)
        for _, key, kind, dtype in steps_of(plan)
        if kind in ("reduce_scatter", "all_reduce")
    ]
    assert summed and {dtype for _, dtype in summed} == {"float32"}
    assert {key.split(".")[0].split("/")[0] for key, _ in summed} >= {"up", "down"}


def test_the_certificate_refuses_gradients_reduced_before_their_cast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = large()
    links = {name: replace(link, latency_s=0.0, curves={}) for name, link in ALONE.links.items()}
    by_bytes = replace(
        ALONE, links=links, launch_overhead_s=0.0, hash="by bytes"
    )  # so that buckets save nothing
    with monkeypatch.context() as patch:
        patch.setattr(tensor_values, "only_widened", lambda trace: {})
        plan = autopar.plan(
            model, Mesh({"gpu": 4}), example_inputs=batch, hardware=by_bytes, precision="bf16"
        )
    found = autopar.check(plan, model, batch, hardware=by_bytes)
    assert any(
        "it moves bfloat16, but the tensor is torch.float32" in f.what for f in found.findings
    ), str(found)


def gradients_of(trace: Trace) -> tuple[set[str], set[str]]:
    """Return the keys of the gradients of parameters, and of the casts that only they have."""
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    wide, narrow = set(), set()
    for p in trace.parameters:
        left = [] if p.gradient is None else [results[p.gradient]]
        while left:
            node = left.pop()
            wide.add(node.meta["key"])
            if node.target is torch.ops.aten.add.Tensor:
                left += node.args
            else:
                assert (
                    node.target is torch.ops.aten._to_copy.default
                    and node.meta["val"].dtype == torch.float32
                )
                narrow |= {node.args[0].meta["key"]} if len(node.args[0].users) == 1 else set()
    assert len(narrow) >= len(trace.parameters) // 2
    return wide, narrow


@pytest.mark.slow
def test_fsdp_moves_the_same_elements_in_half_the_bytes() -> None:
    def sent(kind: str, **options: Any) -> tuple[int, int]:
        """Return the communicated elements and bytes of weights."""
        made, _, _ = planned("llama", "fsdp", **options)
        steps = [s.collective for _, s in keyed(made.plan) if s.collective.kind == kind]
        sizes = [(c.bytes // getattr(torch, c.dtype).itemsize, c.bytes) for c in steps]
        return sum(n for n, _ in sizes if n >= 256), sum(size for n, size in sizes if n >= 256)

    (num, size), (as_many, twice) = sent("all_gather"), sent("all_gather", precision=None)
    assert num == as_many > 0 and 2 * size == twice
    assert sent("reduce_scatter") == sent("reduce_scatter", precision=None)


@pytest.mark.parametrize("way", WAYS)
def test_stored_parameters_are_wide_and_copies_are_narrow(way: str) -> None:
    made, _, _ = planned("llama", way)
    for stage in made.plan.stages:
        rests = stage.prediction.memory_bytes
        assert rests["optimizer"] == 2 * rests["parameters"]
        if way in ("microbatches", "stages"):
            assert 2 * rests["copies"] == rests["parameters"]
        elif way in ("free", "fsdp", "tensor parallel"):
            assert "copies" not in rests, "they are gone before the step ends"
    for program in programs(made):
        assert {t.dtype for t in program.parameters} == {torch.float32}
        casts = [n for n in program.forward.graph.nodes if n.meta.get("key", "").endswith(CAST)]
        assert len(casts) == (0 if program.accumulates else len(program.parameters))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("way", ["free", "fsdp", "tensor parallel"])
def test_the_predicted_peak_of_mixed_precision_equals_the_measured_peak(
    kind: str, way: str
) -> None:
    """The peak is measured on real tensors, with process groups that do nothing."""
    made, _, batch = planned(kind, way)
    program = made.stage_program()
    peak_bytes, gradients = measured_peak(program, batch)
    assert peak_bytes == trace_peak(program).peak_bytes
    assert {g.dtype for g in gradients} == {torch.float32}


class Tower(nn.Module):
    """Layers that are wide relative to the batch, so that weights and their copies take most of the
    memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_bounds_and_the_least_needed_memory_are_valid_for_found_plans(
    autocast: bool,
) -> None:
    torch.manual_seed(0)
    model, batch = Tower(), {"x": torch.randn(16, 64)}

    def plan(memory_bytes: int | None) -> Plan:
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            options: dict[str, Any] = {
                "hardware": "h100-sxm",
                "memory_bytes": memory_bytes,
                "num_microbatches": 1,
            }
            return autopar.plan(
                model, 1, example_inputs=batch, precision=None if autocast else "bf16", **options
            )

    made = [plan(None)]
    for share in (1.0, 0.98, 0.95, 0.8):
        try:
            made.append(plan(int(share * made[0].prediction.peak_bytes)))
        except InfeasibleError as error:
            proven, found = (int(n) for n in re.findall(r"\((\d+) bytes", str(error)))
            assert proven <= min(found, *(p.prediction.peak_bytes for p in made))
    assert len(made) > 1
    for p in made:
        within = [q for q in made if q.prediction.peak_bytes <= p.options["memory_bytes"]]
        assert within and all(p.proof.bound_s <= q.prediction.step_s * (1 + 1e-9) for q in within)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_training_accumulates_updates_that_bf16_would_round_away(kind: str) -> None:
    """Updates far below the resolution of bf16 accumulate in the weights, as in the reference."""
    model, batch = getattr(zoo_small, kind)()
    reference = copy.deepcopy(model)
    module = autopar.compile(
        model, Mesh(1), example_inputs=batch, hardware="h100-sxm", precision="bf16"
    )
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    ours = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    for _ in range(5):
        module(**batch).loss.backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())
        _, gradients = cast_model(reference, batch)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= LEARNING_RATE * gradients[name]
        ours.step()
        ours.zero_grad()
    moved = max(
        float((p.detach() - before[name]).abs().max()) for name, p in reference.named_parameters()
    )
    assert moved > 0
    kept = {name: p.detach().full_tensor() for name, p in module.named_parameters()}
    for name, p in reference.named_parameters():
        assert float((kept[name] - p.detach()).abs().max()) < 0.05 * moved
    pairs = [(kept[name], before[name]) for name in kept]
    num_moved = sum(int((new != old).sum()) for new, old in pairs)
    num_in_bf16 = sum(int((new.to(BF16) != old.to(BF16)).sum()) for new, old in pairs)
    assert num_in_bf16 < num_moved / 10  # in bf16, the other weights would not have changed


class Twice(nn.Module):
    """A table that is looked up in fp32 and multiplied in bf16, a projection, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(32, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.up(self.table(ids)))
        return nn.functional.cross_entropy(
            (x @ self.table.weight.T).float().flatten(0, 1), labels.flatten()
        )


def twice() -> tuple[Twice, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 8))
    return Twice(), {"ids": ids, "labels": ids.roll(1, 1)}


def under_autocast(fold: bool = True) -> Trace:
    model, batch = twice()
    with torch.autocast("cpu", dtype=BF16):
        return capture(model, (), batch, fold=fold)


def test_under_autocast_parameters_read_only_in_bf16_move_in_bf16() -> None:
    narrow = {p.name: p.is_narrowed for p in under_autocast().parameters}
    assert narrow == {
        "table.weight": False,
        "up.weight": True,
        "up.bias": True,
        "norm.weight": False,
        "norm.bias": False,
    }
    model, batch = twice()
    with torch.autocast("cpu", dtype=BF16):
        plan = autopar.plan(
            model, LINE, example_inputs=batch, hardware="h100-sxm", constraints=(fsdp(),)
        )
        found = autopar.check(plan, model, batch)
        assert found.ok, str(found)
        assert autopar.verify(plan, model, batch).ok
        assert autopar.verify(plan, model, batch, dtype=None).ok
    gathers = {key: dtype for _, key, kind, dtype in steps_of(plan) if kind == "all_gather"}
    assert gathers["up.weight/parameter"] == "bfloat16"
    assert {
        gathers[f"{name}/parameter"] for name in ("table.weight", "norm.weight", "norm.bias")
    } == {"float32"}


class Router(nn.Module):
    """Scores that are always computed in fp32, as in routers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scores = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        with torch.autocast("cpu", enabled=False):
            return self.scores(hidden.float()).softmax(-1).pow(2).mean()


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_ops_outside_autocast_are_computed_in_their_dtype(num_microbatches: int) -> None:
    torch.manual_seed(0)
    model, batch = Router(), {"x": torch.randn(4, 5, 8)}
    with torch.autocast("cpu", dtype=BF16):
        plan = autopar.plan(
            model,
            LINE,
            example_inputs=batch,
            hardware="cpu-gloo",
            num_microbatches=num_microbatches,
        )
        assert autopar.check(plan, model, batch).ok
        assert autopar.verify(plan, model, batch).ok
        assert autopar.verify(plan, model, batch, dtype=None).ok
        module = autopar.compile(
            model, 1, example_inputs=batch, hardware="cpu-gloo", num_microbatches=num_microbatches
        )
        assert module(**batch).item() == pytest.approx(model(**batch).item(), rel=1e-2)


class _Island(nn.Module):
    """A product that exits autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.scores(x).pow(2).mean()


def test_the_backward_of_ops_outside_autocast_is_outside_autocast() -> None:
    torch.manual_seed(0)
    model, batch = _Island(), {"x": torch.randn(32, 64)}
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=BF16):
        pm = autopar.compile(model, Mesh(1), example_inputs=batch, hardware="cpu-gloo")
        loss, wanted = pm(**batch), plain(**batch)
        assert (
            autopar.verify(pm.plan, plain, batch, dtype=None).ok
            and autopar.verify(pm.plan, plain, batch).ok
        )
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(
        pm.get_parameter("scores.weight").grad.full_tensor(), plain.scores.weight.grad
    )


def test_verify_reports_if_the_plain_model_cannot_run_in_the_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), _Island()
    )  # torch requires statistics to have the dtype of the weights
    model[2].scores = nn.Linear(16, 16)
    batch = (torch.randn(8, 16),)
    plan = autopar.plan(model, LINE, example_inputs=batch, hardware="cpu-gloo", precision="bf16")
    assert autopar.verify(plan, model, batch).ok
    with pytest.raises(
        VerificationError,
        match=(
            r"with parameters in torch\.bfloat16 and buffers as they are(?s:.*)dtype=torch\.float64"
        ),
    ):
        autopar.verify(plan, model, batch, dtype=None)


@pytest.mark.slow
def test_a_model_already_in_the_precision_is_unchanged() -> None:
    model, batch = zoo_small.llama(dtype=BF16)
    asked, plain = (capture(model, (), batch, precision=precision) for precision in (BF16, None))
    assert asked.fingerprint == plain.fingerprint
    assert not any(p.is_narrowed for p in asked.parameters)


def test_a_precision_does_not_cast_buffers() -> None:
    model, batch = zoo_small.llama()
    dtypes = {name: b.dtype for name, b in model.named_buffers()}
    trace = capture(model, (), batch, precision=BF16)
    assert trace.buffers
    assert all(b.dtype == b.compute_dtype == dtypes[b.name] for b in trace.buffers)


@pytest.mark.parametrize("precision", ["fp8", "float32", torch.bfloat16])
def test_unknown_precisions_are_refused(precision: Any) -> None:
    model, batch = zoo_small.llama()
    with pytest.raises(AutoparError, match=r"precision=.* is not known\n.*pass one of bf16"):
        autopar.plan(model, LINE, example_inputs=batch, precision=precision)


def test_a_plan_is_refused_for_another_precision() -> None:
    made, model, batch = planned("llama", "fsdp")
    other = replace(made.plan, options={**made.plan.options, "precision": None})
    with pytest.raises(
        PlanError,
        match=r"does not fit this call:\n +\d+ ops in the plan, not in the model: .*/_to_copy/",
    ):
        autopar.verify(other, model, batch)


@pytest.mark.parametrize(
    "change",
    [
        ('"dtype": "bfloat16"', '"dtype": "float32"'),
        ('"kind": "reduce_scatter", "axis": 0', '"kind": "reduce_scatter", "axis": 0'),
        ('"activations": ', '"activations": 1'),
    ],
    ids=["gathers", "nothing", "kept bytes"],
)
def test_changed_mixed_precision_plans_are_refused(change: tuple[str, str]) -> None:
    made, model, batch = planned("llama", "fsdp")
    text = made.plan.dumps()
    other = Plan.loads(text.replace(*change, 1))
    same = change[0] == change[1]
    try:
        found = autopar.check(other, model, batch)
    except EmissionError:
        assert not same
    else:
        assert found.ok == same


def test_a_copy_that_backward_reads_and_the_plan_does_not_keep_is_refused() -> None:
    made, model, batch = planned("llama", "fsdp")
    first = next(n for n, k in enumerate(made.plan.kept) if k.node.endswith("/parameter"))
    found = autopar.check(
        replace(made.plan, kept=(*made.plan.kept[:first], *made.plan.kept[first + 1 :])),
        model,
        batch,
    )
    assert any("which no collective returns" in str(each) for each in found.findings)


@pytest.mark.parametrize("constraints", [(), (fsdp(),), (ddp(),)], ids=["free", "fsdp", "ddp"])
def test_a_small_model_fits_a_budget_with_its_narrow_copies(
    constraints: tuple[Constraint, ...],
) -> None:
    model, batch = zoo_small.llama()
    ample = autopar.plan(
        model,
        LINE,
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=constraints,
        precision="bf16",
    )
    tight = int(ample.prediction.peak_bytes * 0.9)
    plan = autopar.plan(
        model,
        LINE,
        example_inputs=batch,
        hardware="h100-sxm",
        constraints=constraints,
        precision="bf16",
        memory_bytes=tight,
        gap=0.1,
    )
    assert plan.prediction.peak_bytes <= tight
    assert autopar.verify(plan, model, batch).ok


def test_a_round_trip_does_not_change_emission() -> None:
    made, model, batch = planned("llama", "fsdp")
    trace = capture(model, (), batch, precision=BF16)
    again = emit_stage(trace, Plan.loads(made.plan.dumps()))
    assert [n.meta.get("key") for n in again.forward.graph.nodes] == [
        n.meta.get("key") for n in made.stage_program().forward.graph.nodes
    ]


@pytest.mark.parametrize("stored", [BF16, torch.float32], ids=str)
def test_a_norm_without_eps_uses_the_eps_of_torch(stored: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 4), Squared()).to(stored)
    batch = (0.01 * torch.randn(8, 16, dtype=stored),)
    plan = autopar.plan(
        model,
        2,
        example_inputs=batch,
        hardware="h100-sxm",
        precision="bf16" if stored == torch.float32 else None,
    )
    assert (
        autopar.verify(plan, model, batch).ok and autopar.verify(plan, model, batch, dtype=None).ok
    )


class Squared(nn.Module):
    """A squared loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().pow(2).mean()
