"""Dims that are not divisible by an axis are sharded unevenly, priced by the largest shard, and
computed exactly."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.layout_graph import local_bytes, neighbours
from autopar.core.mesh import Mesh
from autopar.program.lockstep import run_lockstep
from autopar.program.peak_memory import trace_peak
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import ModelSpec
from benchmarks.random_plans import Prepared, prepare, random_plan


@cache
def prepared(name: str, mesh: str) -> tuple[Prepared, nn.Module, dict[str, Tensor]]:
    model, batch = ModelSpec.known(name).build()
    return prepare(model, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo")), model, batch


CASES = [("tiny-gpt2", "3", 0), ("tiny-llama", "a=2,b=3", 0), ("tiny-vit", "3", 2)]
CASES += [
    pytest.param(m, mesh, s, marks=pytest.mark.slow)
    for m in ("tiny-bert", "tiny-llama")
    for mesh in ("3", "5")
    for s in (1, 2)
]


@pytest.mark.parametrize(("name", "mesh", "seed"), CASES)
def test_random_plans_on_three_ranks_match_the_model_and_are_priced_as_emitted(
    name: str, mesh: str, seed: int
) -> None:
    ready, model, batch = prepared(name, mesh)
    _, program = random_plan(ready, seed)
    assert any(
        "length" in node.kwargs
        for graph in (program.stages[0].forward, program.stages[0].backward)
        for node in graph.graph.nodes
    )
    assert verify_program(ready.trace, program, model, (), batch).ok
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    ran = run_lockstep(program, tensors, tensors, batch)
    assert Counter((phase, str(c)) for phase, _, c in ran.records) == Counter(
        (phase, str(c)) for phase, _, c in program.stages[0].collectives
    )


def test_no_rank_needs_more_memory_than_predicted() -> None:
    for name, seed in (("tiny-gpt2", 0), ("tiny-vit", 2)):
        _, program = random_plan(prepared(name, "3")[0], seed)
        assert (
            max(trace_peak(program.stages[0], coordinate=(rank,)).peak_bytes for rank in range(3))
            <= trace_peak(program.stages[0]).peak_bytes
        )


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50257, 768)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.table(ids) @ self.table.weight.T, ids)


def test_an_indivisible_batch_and_vocabulary_are_sharded_if_that_is_faster() -> None:
    batch = {"ids": torch.empty(4097, dtype=torch.int64, device="meta")}
    with torch.device("meta"):
        model = Narrow()
    plan = autopar.plan(model, Mesh.parse("8"), example_inputs=batch, hardware="h100-sxm")
    logits = next(
        node.strategy.inputs[0]
        for entry in plan.entries
        for node in entry.nodes
        if "sum_exp" in node.node
    )
    assert str(logits) in ("S(0)", "S(1)")
    alone = autopar.plan(model, 1, example_inputs=batch, hardware="h100-sxm")
    assert plan.prediction.step_s < alone.prediction.step_s / 2


def test_only_one_axis_may_split_unevenly_and_no_shard_is_empty() -> None:
    def fits(layout: str, *shape: int) -> bool:
        return Layout.parse(layout).fits(shape, (2, 4))

    assert fits("R S(0)", 7) and fits("S(0) R", 3) and fits("S(0) S(1)", 7, 7)
    assert not fits("R S(0)", 6)  # shards of 2, 2, 2 and 0
    assert not fits("S(0) S(0)", 12)
    assert fits("S(0) S(0)", 16)


def test_a_collective_of_uneven_shards_is_priced_by_the_largest() -> None:
    layout = Layout.parse("S(0)")
    assert local_bytes((7, 4), torch.float32, layout, (4,)) == 2 * 4 * 4
    (gather,) = [
        c for c, target in neighbours((7, 4), torch.float32, layout, (4,)) if target.is_replicated
    ]
    assert gather.bytes == 2 * 4 * 4
