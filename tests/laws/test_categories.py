"""Categorical draws: torch.multinomial, and the distributions of torch that use it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.execute import execute
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.ops import random
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepare, random_plan

WEIGHTS = torch.tensor([0.0, 1.0, 2.0, 5.0])


class Policy(nn.Module):
    """A policy that learns from its draws: an action, several experts without replacement, and
    tokens with replacement."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scores = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor, reward: Tensor) -> Tensor:
        scores = self.scores(torch.relu(self.up(x)))
        policy = torch.distributions.Categorical(logits=scores)
        loss = -(policy.log_prob(policy.sample()) * reward).mean()
        flat = scores.flatten(0, 1).softmax(-1)
        for picks in (torch.multinomial(flat, 3), torch.multinomial(flat, 4, replacement=True)):
            loss = loss - flat.gather(1, picks).log().mean()
        return loss


@pytest.mark.parametrize("mesh", ["2", "a=2,b=2"])
def test_draws_loss_and_gradients_of_a_policy_match_the_plain_model_under_random_layouts(
    mesh: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, batch = (
        Policy(),
        {
            "x": torch.randn(8, 4, 8, generator=generator),
            "reward": torch.randn(8, 4, generator=generator),
        },
    )
    ready = prepare(model, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo"))
    for seed in range(3):
        _, program = random_plan(ready, seed, recompute_share=0.5)
        assert verify_program(ready.trace, program, model, (), batch).max_error < 1e-12


class Drawing(nn.Module):
    def __init__(self, num: int, replacement: bool) -> None:
        super().__init__()
        self.num, self.replacement = num, replacement
        self.weights = nn.Parameter(WEIGHTS.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.multinomial(self.weights.detach().expand(len(x), -1), self.num, self.replacement)
            + 0 * x[:, None].long()
        )


@pytest.mark.parametrize(("num", "replacement"), [(1, False), (2, False), (3, True)])
def test_categories_have_the_frequencies_of_torch(num: int, replacement: bool) -> None:
    """Frequencies of 20,000 draws agree within five standard deviations. Categories without weight
    are never drawn, and no category is drawn twice without replacement."""
    model, x = Drawing(num, replacement), torch.zeros(20000)
    trace = capture(model, (x,), inference=True)
    tensors = {"weights": model.weights.detach(), random.STATE: random.initial_state(1)}
    drawn = execute(trace, tensors, tensors, (x,))[0][0]
    assert drawn.shape == (20000, num) and int(drawn.min()) > 0
    torch.manual_seed(0)
    plain = model(x)
    for place in range(num):
        ours, theirs = (
            torch.bincount(picks[:, place], minlength=4) / 20000 for picks in (drawn, plain)
        )
        assert float((ours - theirs).abs().max()) < 5 * (2 * 0.25 / 20000) ** 0.5
    assert replacement or bool((drawn.sort(1).values.diff(dim=1) > 0).all())
