"""Constraints of training also apply to evaluation, with the same stored parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.planning import plan_model
from autopar.constraints import fsdp, megatron, rests_as, tensor_parallel


class Pairs(nn.Module):
    """A symmetric contrastive loss of a linear layer and of embedding bags of equal length."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8))
        self.text, self.scale = nn.EmbeddingBag(20, 8, mode="mean"), nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        scores, labels = self.scale.exp() * a @ b.T, torch.arange(len(image))
        return {
            "loss": F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels),
            "scores": scores,
        }


class Tied(nn.Module):
    """An embedding with an odd number of rows, tied to the head. Without labels, it scores only the
    last token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(33, 16), nn.Linear(16, 33, bias=False)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = self.table(ids)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        if labels is None:
            return self.head(hidden[:, [-1]]), None
        scores = self.head(hidden)
        return scores, F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def pairs() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    batch = (torch.randn(6, 12), torch.randint(0, 20, (6, 5)))
    return Pairs(), batch, batch


def tied() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 33, (4, 6))
    return Tied(), (ids, ids.roll(1)), (ids,)


@pytest.mark.parametrize("case", [pairs, tied])
@pytest.mark.parametrize(
    "forced",
    [fsdp(), tensor_parallel("1d", axes="gpu"), megatron(dp=2, zero=3)],
    ids=["fsdp", "1d", "zero 3"],
)
def test_constraints_of_training_apply_in_evaluation_with_the_same_storage(
    case: Any, forced: Any
) -> None:
    model, batch, evaluated = case()
    mesh, options = autopar.Mesh({"gpu": 2}), {"hardware": "cpu-gloo"}
    _, made = plan_model(model, mesh, example_inputs=batch, constraints=(forced,), **options)
    storage = {t.name: t.layout for t in made.program.stages[0].parameters}
    assert any(not layout.is_replicated for layout in storage.values())
    constraints = (rests_as(storage), forced)
    _, further = plan_model(
        model, mesh, example_inputs=evaluated, constraints=constraints, inference=True, **options
    )
    assert {t.name: t.layout for t in further.program.stages[0].parameters} == {
        t.name: storage[t.name] for t in further.program.stages[0].parameters
    }
    autopar.verify(further.plan, model, evaluated)
    autopar.check(further.plan, model, evaluated)
