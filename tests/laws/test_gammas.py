"""Gamma numbers and the distributions of torch that use them: Gamma, Beta, Dirichlet and StudentT,
with gradients of their parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet, Gamma, StudentT

from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.ops import random
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepare, random_plan


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.softplus(self.up(x)) + 0.1
        drawn = (
            Gamma(h, h.flip(-1)).rsample()
            + Beta(h, h + 1).rsample()
            + Dirichlet(h).rsample()
            + StudentT(h + 2).rsample().tanh()
        )
        return self.down(drawn).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2", "a=2,b=2"])
def test_gamma_draws_loss_and_gradients_match_the_plain_model_under_random_layouts(
    mesh: str,
) -> None:
    torch.manual_seed(0)
    model, batch = Noisy(), {"x": torch.randn(8, 4, 8)}
    ready = prepare(model, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo"))
    for seed in range(3):
        _, program = random_plan(ready, seed, recompute_share=0.5)
        assert verify_program(ready.trace, program, model, (), batch).max_error < 1e-9


@pytest.mark.parametrize("alpha", [0.05, 0.7, 1.0, 3.5, 40.0])
def test_gamma_numbers_have_the_distribution_of_torch(alpha: float) -> None:
    """The shares below nine quantiles of a million numbers of torch agree within five standard
    deviations."""
    num, state = 40000, random.initial_state(3)
    tries, unit = (num, random.GAMMA_TRIES), (0.0, 1.0, torch.float64)
    normals, uniforms = (
        kind(state, tries, *unit, draw=i) for i, kind in enumerate((random.normal, random.uniform))
    )
    last = random.uniform(state, (num,), *unit, draw=2)
    made = random.gamma(torch.full((num,), alpha, dtype=torch.float64), normals, uniforms, last)
    torch.manual_seed(0)
    plain = torch._standard_gamma(torch.full((1_000_000,), alpha, dtype=torch.float64))
    shares = torch.arange(1, 10) / 10
    below = (made[:, None] < plain.quantile(shares.double())).double().mean(0)
    assert float((below - shares).abs().max()) < 5 * (0.25 / num + 0.25 / 1_000_000) ** 0.5
