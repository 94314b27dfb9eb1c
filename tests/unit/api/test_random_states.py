"""Planning, verifying and checking leave the random state of the script unchanged, because the
script may draw its batches from it."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.core.mesh import Mesh


class Tied(nn.Module):
    """A model with a loss and an embedding tied to the head, so that plans have partial sums."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(38, 14), nn.Linear(14, 14)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.linear(self.table(ids))) + self.table(ids.flip(1))
        return F.cross_entropy((hidden @ self.table.weight.T).flatten(0, 1), ids.flatten())


def states() -> list[object]:
    numpy = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), (numpy[1].tolist(), numpy[2])]


def test_plan_check_and_verify_leave_the_global_random_state_unchanged() -> None:
    model, ids = Tied(), torch.randint(0, 38, (4, 6))
    before = states()
    plan = autopar.plan(
        model,
        Mesh({"gpu": 2}),
        example_inputs=(ids,),
        hardware="h100-sxm",
        constraints=[autopar.constraints.fsdp()],
    )
    assert states() == before
    assert autopar.check(plan, model, (ids,))
    assert states() == before
    assert autopar.verify(plan, model, (ids,))
    assert states() == before
