"""Interleaved stages: gradients match the model, the memory of ranks matches the prediction and
fits the budget, and all claims are certified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from changed import with_options
from torch import Tensor

import autopar
from autopar.api.planning import plan_model
from autopar.capture.dynamo.fakes import FakeTensorMode
from autopar.constraints import megatron, pipeline
from autopar.errors import ConstraintError, InfeasibleError
from autopar.planner import Planned
from autopar.planner.pipeline.step_schedule import phases_s
from autopar.plans import Pipeline, Plan
from autopar.program import transfers
from autopar.program.peak_memory import LiveBytes
from autopar.program.schedule import interleaved_schedule
from autopar.program.stage_memory import chunk_memory, rank_peak, stage_work
from autopar.program.transfers import Interleaving
from benchmarks import zoo

Made = tuple[Planned, torch.nn.Module, dict[str, Any]]
INTER = {"schedule": "interleaved_1f1b", "microbatches": 4}


def planned(
    name: str,
    mesh: dict[str, int],
    *constraints: Any,
    layers: int = 4,
    hardware: str = "h100-sxm",
    **options: Any,
) -> Made:
    settings = (
        options.pop("settings", {}) | {}
        if name == "t5"
        else {"num_hidden_layers": layers, **options.pop("settings", {})}
    )
    model, batch = zoo.build(name, batch=8, **settings)
    made = plan_model(
        model,
        autopar.Mesh(mesh),
        example_inputs=batch,
        hardware=hardware,
        constraints=constraints,
        **options,
    )[1]
    return made, model, batch


def pipe_of(made: Planned) -> Pipeline:
    assert made.plan.pipeline is not None
    return made.plan.pipeline


@pytest.fixture(scope="module")
def llama() -> Made:
    return planned(
        "llama",
        {"stage": 2, "data": 2},
        megatron(pp=2, dp="data", zero=3, microbatches=4, chunks=2),
    )


@pytest.fixture(scope="module")
def bare() -> Made:
    """Return a certified plan with the fewest devices and layers that interleaved stages
    support."""
    made, model, batch = planned(
        "llama", {"stage": 2}, pipeline("stage", **INTER, chunks=2), layers=2
    )
    assert autopar.check(made.plan, model, batch).ok
    return made, model, batch


@pytest.fixture(scope="module")
def gpt2() -> Made:
    """Return a plan with tied weights, dropout and uneven cuts."""
    cuts = [f"transformer.h.{layer}" for layer in (1, 2, 3, 5)]
    force = pipeline("stage", **INTER, chunks=3, cuts=[*cuts, "transformer.ln_f"])
    return planned(
        "gpt2", {"stage": 2}, force, layers=6, hardware="cpu-gloo", settings={"dropout": 0.1}
    )


@pytest.fixture(scope="module")
def t5() -> Made:
    """Return a plan with a decoder that reads the result of the encoder in all later stages, and an
    embedding that several stages of one rank read."""
    return planned("t5", {"stage": 2}, pipeline("stage", **INTER), hardware="cpu-gloo")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_interleaved_stages_equal_the_plain_model(
    name: str, request: pytest.FixtureRequest
) -> None:
    made, model, batch = request.getfixturevalue(name)
    assert len(pipe_of(made).stages) == 2 * pipe_of(made).num_chunks > 2
    report = autopar.verify(made.plan, model, batch)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_interleaved_plans_are_certified_and_round_trip(
    name: str, request: pytest.FixtureRequest
) -> None:
    made, model, batch = request.getfixturevalue(name)
    found = autopar.check(made.plan, model, batch)
    assert found.ok, str(found)
    assert found.step_s == pytest.approx(made.plan.prediction.step_s, rel=1e-12)
    assert found.peak_bytes == made.plan.prediction.peak_bytes == max(pipe_of(made).rank_bytes)
    assert found.certified_bound_s == pytest.approx(made.plan.proof.certified_bound_s, rel=1e-12)
    assert (
        0
        < made.plan.proof.certified_bound_s
        <= made.plan.proof.bound_s
        < made.plan.proof.objective_s
    )
    assert made.plan.proof.certified_bound_s == pytest.approx(made.plan.proof.bound_s, rel=1e-6), (
        "but for the solver's tolerance"
    )
    assert Plan.loads(made.plan.dumps()) == made.plan


def piped(**changes: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        assert plan.pipeline is not None
        return replace(plan, pipeline=replace(plan.pipeline, **changes))

    return change


def predicted(**changes: float) -> Callable[[Plan], Plan]:
    return lambda plan: replace(
        plan,
        prediction=replace(
            plan.prediction,
            **{name: getattr(plan.prediction, name) * by for name, by in changes.items()},
        ),
    )


CHANGES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "the step": (predicted(step_s=0.99), "time"),
    "the simulated step": (predicted(simulated_s=0.99), "time"),
    "the bound and the gap": (
        lambda plan: replace(
            plan, proof=replace(plan.proof, bound_s=plan.proof.objective_s, gap=0.0)
        ),
        "bound",
    ),
    "the bound over all cuts": (
        lambda plan: replace(
            plan, proof=replace(plan.proof, certified_bound_s=plan.proof.certified_bound_s * 1.001)
        ),
        "bound",
    ),
    "the peak": (predicted(peak_bytes=2), "memory"),
    "the compute of the rank that does most": (predicted(compute_s=0.5), "time"),
    "what a rank holds": (
        lambda plan: piped(
            rank_bytes=(plan.pipeline.rank_bytes[0] - 1, plan.pipeline.rank_bytes[1])
        )(plan),
        "memory",
    ),  # type: ignore[union-attr]
    "the microbatches in flight": (piped(num_in_flight=(4, 3, 2, 2)), "memory"),
    "the schedule": (piped(schedule="1f1b"), "model"),
    "the share of a stage that is none": (
        lambda plan: piped(budgets=(0, *plan.pipeline.budgets[1:]))(plan),
        "memory",
    ),  # type: ignore[union-attr]
    "the share of a stage beyond all": (
        lambda plan: piped(budgets=(2**60, *plan.pipeline.budgets[1:]))(plan),
        "memory",
    ),  # type: ignore[union-attr]
    "what crosses": (
        lambda plan: piped(crossings=((), *plan.pipeline.crossings[1:]))(plan),
        "moves",
    ),  # type: ignore[union-attr]
    "with what a stage begins": (
        lambda plan: piped(modules=plan.pipeline.modules[::-1])(plan),
        "model",
    ),  # type: ignore[union-attr]
    "the budget": (
        lambda plan: with_options(plan, memory_bytes=min(plan.pipeline.rank_bytes)),
        "memory",
    ),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_claim_of_interleaved_stages_is_detected(bare: Made, name: str) -> None:
    change, claim = CHANGES[name]
    made, model, batch = bare
    changed = change(made.plan)
    assert changed != made.plan
    found = autopar.check(changed, model, batch)
    assert not found.ok and claim in {f.claim for f in found.findings}, str(found)


class _Transfer:
    """A transfer in progress. It keeps its tensor alive, as transfers of process groups do."""

    def __init__(self, tensor: Tensor, peer: int, group: Any) -> None:
        self.tensor = tensor

    def wait(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "outputs"),
    [("llama", "dtensor"), ("gpt2", "full"), pytest.param("t5", "dtensor", marks=pytest.mark.slow)],
)
def test_the_memory_composed_from_chunks_equals_that_of_the_running_rank(
    name: str, outputs: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is a run of the rank's own order with transfers that nobody sends."""
    made: Planned = request.getfixturevalue(name)[0]
    program, pipe = made.program, pipe_of(made)
    for call, value in (
        ("irecv", _Transfer),
        ("isend", _Transfer),
        ("get_global_rank", lambda _, rank: rank),
    ):
        monkeypatch.setattr(transfers.dist, call, value)
    for rank in range(2):
        chunks = {number: program.stages[number] for number in range(rank, len(pipe.stages), 2)}
        memory, shared = LiveBytes(), dict[str, Tensor]()
        with FakeTensorMode(), torch.no_grad():
            works, held = {}, {}
            for number, stage in chunks.items():
                works[number], tensors = stage_work(stage, outputs, memory)
                names = [t.name for t in (*stage.parameters, *stage.buffers)]
                held[number] = [
                    shared.setdefault(name, x) for name, x in zip(names, tensors, strict=True)
                ]
            given = {
                t.name: torch.empty(t.shape, dtype=t.dtype)
                for s in chunks.values()
                for t in s.inputs
                if not t.crosses
            }
            group: Any = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
            running = Interleaving(works, transfers.Transfers(group), 4)
            with memory:
                counted = {t.name for s in chunks.values() for t in s.inputs if t.given}
                memory.register(x for name, x in given.items() if name not in counted)
                batch_bytes = memory.live_bytes  # memory of the user
                memory.register((*shared.values(), *given.values()))
                for _ in range(2):  # constants of a graph exist from the second run on
                    memory.reset_peak()
                    changed: set[str] = set()
                    for number, work in works.items():
                        count, stage = len(chunks[number].parameters), chunks[number]
                        buffers = [
                            x.clone() if t.name in changed else x
                            for t, x in zip(stage.buffers, held[number][count:], strict=True)
                        ]
                        changed |= {*stage.mutated}
                        wanted = {t.name for t in stage.outputs if outputs == "full" or t.is_loss}
                        work.begin(
                            wanted, held[number][:count], buffers, [given] * 4, 1.0, keep=True
                        )
                    del work, buffers
                    running.run(backward=True)
                    for number in works:
                        works[number].finish()
        put_together = rank_peak(
            {n: chunk_memory(s, outputs) for n, s in chunks.items()},
            interleaved_schedule(2, len(chunks), 4)[rank],
            4,
        )
        assert put_together == memory.peak_bytes - batch_bytes, rank


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_forward_and_backward_times_of_a_microbatch_match_the_timeline(
    name: str, request: pytest.FixtureRequest
) -> None:
    for stage in pipe_of(request.getfixturevalue(name)[0]).stages:
        if stage.overlap.slowdown == 1.0:
            forward_s = sum(bar[4] for bar in stage.prediction.timeline if bar[1] == "forward")
            assert phases_s(stage) == pytest.approx(
                (forward_s, stage.prediction.step_s - forward_s)
            )


@pytest.mark.slow
def test_the_stages_of_a_rank_share_its_memory() -> None:
    ample = planned("llama", {"stage": 2}, pipeline("stage", **INTER))[0]
    alone = [stage.prediction.peak_bytes for stage in pipe_of(ample).stages]
    budget = int(0.9 * max(pipe_of(ample).rank_bytes))
    assert max(alone) < budget  # each stage fits alone, but not both
    squeezed, model, batch = planned(
        "llama", {"stage": 2}, pipeline("stage", **INTER), memory_bytes=budget
    )
    assert max(pipe_of(squeezed).rank_bytes) <= budget
    assert min(pipe_of(squeezed).budgets) < budget
    assert squeezed.plan.prediction.step_s > ample.plan.prediction.step_s
    assert autopar.check(squeezed.plan, model, batch).ok
    with pytest.raises(InfeasibleError):
        planned("llama", {"stage": 2}, pipeline("stage", **INTER), memory_bytes=budget // 4)


def test_invalid_interleaved_pipelines_are_refused() -> None:
    with pytest.raises(ConstraintError, match="does not support 1 stages per device"):
        pipeline("stage", schedule="interleaved_1f1b", chunks=1)
    with pytest.raises(ConstraintError, match="does not support 2 stages per device"):
        pipeline("stage", schedule="1f1b", chunks=2)
    with pytest.raises(ConstraintError, match="does not define a pipeline with that many stages"):
        megatron(chunks=2)
    force = pipeline("stage", microbatches=2, schedule="interleaved_1f1b")
    with pytest.raises(ConstraintError, match="not a multiple of the 3 ranks"):
        planned("llama", {"stage": 3}, force)
    with pytest.raises(ConstraintError, match="one rank cannot interleave stages"):
        planned("llama", {"stage": 1, "data": 2}, force)
    with pytest.raises(ConstraintError, match="4096 stages were requested"):
        planned("llama", {"stage": 2048}, pipeline("stage", **INTER))


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (
            pipeline("stage", microbatches=2, schedule="interleaved_1f1b"),
            "not a multiple of the 3 ranks",
        ),
        (pipeline("stage", microbatches=2), "which 1F1B does not support"),
    ],
)
def test_an_impossible_interleaved_schedule_is_refused_before_a_microbatch_is_captured(
    asked: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.api.tracing._of_parts", None)  # it captures parts of a batch
    with pytest.raises(ConstraintError, match=what):
        planned("llama", {"stage": 3}, asked)


def test_interleaving_reduces_the_bubble_of_long_stages(llama: Made) -> None:
    """With the same cuts and one stage per rank, ranks wait (P − 1)·τ. Interleaved on half of the
    ranks, they wait for a smaller part of the step."""
    pipe = pipe_of(llama[0])
    times = [stage.prediction.step_s for stage in pipe.stages]
    busy = max(sum(times[rank::2]) for rank in range(2)) * 4
    assert busy < llama[0].plan.prediction.step_s < busy + max(times) * 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "chunks"), [(2, 2), pytest.param(8, 1, marks=pytest.mark.slow)]
)
def test_the_planner_interleaves_if_that_is_faster(microbatches: int, chunks: int) -> None:
    """With two microbatches, a device waits for a third of the time of 1F1B. With eight, it waits
    for a ninth, which is less than the cost of smaller stages on this machine."""
    mesh, settings = {"stage": 2}, {"hidden_size": 256, "intermediate_size": 1024}

    def with_schedule(schedule: str) -> Made:
        asked = pipeline("stage", microbatches=microbatches, schedule=schedule)
        return planned("llama", mesh, asked, hardware="cpu-gloo", settings=settings)

    chosen, model, batch = with_schedule("auto")
    steps = {
        schedule: with_schedule(schedule)[0].plan.prediction.step_s
        for schedule in ("1f1b", "interleaved_1f1b")
    }
    assert (
        chosen.plan.prediction.step_s == min(steps.values())
        and pipe_of(chosen).num_chunks == chunks
    )
    assert (steps["interleaved_1f1b"] < steps["1f1b"]) == (chunks > 1), "both kinds are tried"
    assert autopar.verify(chosen.plan, model, batch).ok


def test_the_planner_chooses_the_schedule_of_a_free_pipeline_axis() -> None:
    assert (
        pipeline().schedule,
        pipeline("stage").schedule,
        pipeline("stage", schedule="auto").schedule,
    ) == ("auto", "1f1b", "auto")
    with pytest.raises(ConstraintError, match="cuts determine the number of stages per device"):
        pipeline("stage", schedule="auto", cuts=["model.layers.1"])
