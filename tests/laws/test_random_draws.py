"""Dropout and other random draws give the same numbers under all layouts, meshes and
recomputations, and in the plain model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.execute import execute
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import CaptureError
from autopar.ops import random
from autopar.program.lockstep import run_lockstep
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepare, random_plan
from benchmarks.zoo import build

PROFILE = HardwareProfile.load("cpu-gloo")


class Noisy(nn.Module):
    """All kinds of supported draws. Each of them affects the loss, except one that is
    overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout1d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.channels(self.drop(torch.relu(self.up(x))))
        y = self.drop(self.down(h)) + 0.1 * torch.randn_like(x) * torch.rand(x.shape) * torch.randn(
            x.shape, generator=None
        )
        y = (
            y
            + torch.bernoulli(x.sigmoid().detach()) * torch.randint(1, 5, (8,))
            + torch.empty_like(x).exponential_(2.0)
        )
        y = y * torch.rand_like(x).uniform_(0.5, 2.0) + torch.empty_like(x).normal_(1.0, 0.1)
        y = nn.functional.rrelu(y - 1, 0.2, 0.4, training=True)
        return y[:, torch.randperm(4, generator=None)].pow(2).mean()


def noisy() -> tuple[nn.Module, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return Noisy(), {"x": torch.randn(8, 4, 8, generator=generator)}


@pytest.mark.parametrize("mesh", ["2", "4", "a=2,b=2", "8"])
def test_every_kind_of_draw_matches_the_plain_model_under_random_layouts(mesh: str) -> None:
    model, batch = noisy()
    ready = prepare(model, batch, Mesh.parse(mesh), PROFILE)
    for seed in range(3):
        _, program = random_plan(ready, seed, recompute_share=0.5)
        assert verify_program(ready.trace, program, model, (), batch).max_error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "bert",
        pytest.param("t5", marks=pytest.mark.slow),
        pytest.param("vit", marks=pytest.mark.slow),
    ],
)
def test_models_with_dropout_match_the_plain_model_with_the_same_random_numbers(
    name: str,
) -> None:
    model, batch = build(name, dropout=0.1)
    ready = prepare(model, batch, Mesh.parse("a=2,b=2"), PROFILE)
    _, program = random_plan(ready, 0)
    assert verify_program(ready.trace, program, model, (), batch).ok


def test_each_step_draws_new_numbers_and_a_seed_restarts_the_sequence() -> None:
    model, batch = noisy()
    pm = autopar.compile(model, 1, example_inputs=batch)
    pm.manual_seed(5)
    first, begun = [pm(**batch).item() for _ in range(3)], pm.random_state
    assert len(set(first)) == 3
    rest = [pm(**batch).item() for _ in range(2)]
    pm.manual_seed(5)
    assert [pm(**batch).item() for _ in range(3)] == first
    pm.manual_seed(6)
    assert pm(**batch).item() not in first
    pm.random_state = begun
    assert [pm(**batch).item() for _ in range(2)] == rest
    assert random.STATE not in pm.state_dict()


def test_a_model_without_draws_has_only_the_random_state_that_is_set() -> None:
    pm = autopar.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.LayerNorm(16), Mean()),
        1,
        example_inputs=(torch.ones(4, 4),),
    )
    assert pm.random_state is None
    pm.random_state = 3  # the random state with which a program of another mode would start
    assert pm.random_state == 3


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


@pytest.mark.slow
def test_equal_layers_draw_different_numbers_with_one_decision() -> None:
    model, batch = build("gpt2", dropout=0.1)
    trace = capture(model, (), batch)
    draws = [node.kwargs["draw"] for node in trace.graph.nodes if "draw" in node.kwargs]
    assert draws == list(range(7))
    plan = autopar.plan(model, Mesh.parse("2"), example_inputs=batch, hardware="cpu-gloo")
    masks = [entry for entry in plan.entries if entry.op == "keep_mask"]
    assert {len(entry.instances) for entry in masks} == {1, 2}


def test_lockstep_draws_on_any_mesh_equal_those_of_the_traced_graph() -> None:
    model, batch = noisy()
    tensors = {**dict(model.named_parameters()), random.STATE: random.initial_state(9)}
    results = []
    for mesh in ("1", "2", "a=2,b=2", "8"):
        ready = prepare(model, batch, Mesh.parse(mesh), PROFILE)
        _, program = random_plan(ready, 1)
        ran = run_lockstep(program, tensors, tensors, batch, dtype=torch.float64)
        results.append(ran.outputs)
        assert ran.buffers[random.STATE] == tensors[random.STATE] + 1
    traced, *_ = execute(ready.trace, tensors, tensors, list(batch.values()), dtype=torch.float64)
    for outputs in results:
        torch.testing.assert_close(next(iter(outputs.values())), traced[0], rtol=1e-12, atol=0)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum() * torch.poisson(torch.ones(4)).sum()


def test_an_unsupported_draw_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="poisson") as refusal:
        capture(Unknown(), (torch.ones(2, 4),))
    assert "torch.poisson(torch.ones(4))" in str(refusal.value)
