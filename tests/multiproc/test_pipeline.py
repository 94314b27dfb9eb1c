"""Pipelines on two and four gloo processes follow the plain model: loss, clipped gradients, parameters, evaluation, state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from harness import run_processes  # noqa: E402
from worker_pipeline import built  # noqa: E402

import autopar  # noqa: E402
from autopar.constraints import fsdp, megatron, pipeline, tensor_parallel  # noqa: E402

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_pipeline.py")


def text(kind: str, mesh: dict[str, int], *constraints: Any, **options: Any) -> tuple[str, str]:
    model, batch = built(kind)
    return kind, autopar.plan(
        model, autopar.Mesh(mesh), example_inputs=batch, hardware="cpu-gloo", constraints=constraints, **options
    ).dumps()


def check(facts: list[dict[str, Any]], plans: dict[str, Any], *, staged: bool = True) -> None:
    for name in plans:
        for fact in (f[name] for f in facts):
            # 2e-6: both models compute their loss in float32, whatever their weights are.
            assert max(fact["loss"]) < 2e-6 and max(fact["norm"]) < 2e-6 and fact["clipped"]
            assert fact["parameters"] < 1e-5 and fact["logits"] < 1e-4 and fact["scaled"] < 1e-6
            measured, predicted = fact["peak"]
            assert abs(measured / predicted - 1) < 0.015  # some KB of a tiny model's 400
            assert fact["all held"] and fact["not all here"] == staged and fact["state"]


def test_two_stages() -> None:
    plans = {
        "tied": text("gpt2", {"stage": 2}, pipeline("stage", microbatches=4)),
        "gpipe": text("llama", {"stage": 2}, pipeline("stage", microbatches=2, schedule="gpipe")),
    }
    check(run_processes(2, WORKER, "run", plans), plans)


def test_two_processes_with_several_stages_each() -> None:
    inter = {"schedule": "interleaved_1f1b", "microbatches": 4}
    plans = {
        "two": text("llama:4", {"stage": 2}, pipeline("stage", **inter)),
        "tied, three": text("gpt2:6", {"stage": 2}, pipeline("stage", **inter, chunks=3)),
    }
    check(run_processes(2, WORKER, "run", plans), plans)


def test_four_processes_in_two_stages() -> None:
    plans = {
        "tensor": text("llama", {"stage": 2, "tensor": 2}, pipeline("stage", microbatches=2), tensor_parallel(axes="tensor")),
        "zero 1": text("gpt2", {"stage": 2, "data": 2}, megatron(pp="stage", dp=2, zero=1, microbatches=2)),
    }
    check(run_processes(4, WORKER, "run", plans), plans)


def test_microbatches_without_stages() -> None:
    plans = {"zero 2": text("gpt2", {"data": 2}, megatron(dp=2, zero=2, microbatches=2))}
    check(run_processes(2, WORKER, "run", plans), plans, staged=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero 1", "four ranks"])
def test_four_processes_with_several_stages_each(name: str) -> None:
    if name == "zero 1":
        plan = text("gpt2:4", {"stage": 2, "data": 2}, megatron(pp="stage", dp=2, zero=1, microbatches=2, chunks=2))
    else:
        plan = text("llama:8", {"stage": 4}, pipeline("stage", microbatches=4, schedule="interleaved_1f1b"))
    check(run_processes(4, WORKER, "run", {name: plan}, timeout_s=600.0), {name: plan})


@pytest.mark.slow
def test_parameters_gathered_per_use() -> None:
    plans = {"zero 3": text("gpt2", {"data": 2, "stage": 2}, pipeline("stage", microbatches=2), fsdp("data"))}
    check(run_processes(4, WORKER, "run", plans), plans)
    plans = {"zero 3": text("gpt2", {"data": 2}, fsdp("data"), num_microbatches=2)}
    check(run_processes(2, WORKER, "run", plans), plans, staged=False)
