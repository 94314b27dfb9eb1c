"""What autopar does, one assert each."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).pow(2).mean()


BATCH = {"x": torch.randn(64, 256, generator=torch.Generator().manual_seed(0))}
MESH = autopar.Mesh({"node": 2, "gpu": 2})


def plan(**options: object) -> autopar.Plan:
    return autopar.plan(Net(), MESH, example_inputs=BATCH, **{"hardware": "cpu-gloo", **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def planned() -> autopar.Plan:
    return plan()


def test_a_plan_is_proven_within_its_gap_of_the_best(planned: autopar.Plan) -> None:
    assert (
        planned.proof.bound_s <= planned.proof.objective_s <= planned.proof.bound_s * 1.01 + 1e-12
    )


def test_a_plan_fits_into_the_memory_it_is_given(planned: autopar.Plan) -> None:
    budget = int(planned.prediction.peak_bytes * 0.7)
    assert plan(memory_bytes=budget).prediction.peak_bytes <= budget


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(autopar.AutoparError, match="no plan fits"):
        plan(memory_bytes=1000)


def test_a_plan_is_the_same_each_time(planned: autopar.Plan) -> None:
    assert plan().dumps() == planned.dumps()


def test_a_plan_comes_back_from_its_file(planned: autopar.Plan, tmp_path: Path) -> None:
    planned.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").dumps() == planned.dumps()


def test_all_ranks_together_compute_what_the_plain_model_computes(planned: autopar.Plan) -> None:
    assert autopar.verify(planned, Net(), BATCH).max_error <= 1e-9


def test_a_forced_layout_is_in_the_plan() -> None:
    forced = plan(constraints=[autopar.constraints.layout("up", weight="R S(0)")])
    up = next(
        choice
        for name, choice in forced.node_choices().items()
        if name.startswith("up/dot/forward")
    )
    assert str(up.inputs[1]) == "R S(0)"


def test_one_line_makes_a_module_that_trains_on_one_device() -> None:
    torch.manual_seed(0)
    pm = autopar.compile(Net(), 1, example_inputs=BATCH, hardware="cpu-gloo")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = pm(**BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_the_sample_in_the_package_docstring_runs() -> None:
    assert doctest.testmod(autopar).failed == 0


def test_importing_autopar_imports_neither_transformers_nor_matplotlib() -> None:
    code = "import sys, autopar; print({'transformers', 'matplotlib'} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )
