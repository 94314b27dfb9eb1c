"""Run by two processes: microbatches whose losses are divided by what the whole batch counts, by a
buffer that the last stage reads alone,
in stages or under data parallelism, beside the plain model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.constraints import ddp, pipeline


class Classes(nn.Module):
    """Two layers, and two cross entropies of other labels, of one of which classes weigh as a
    buffer says, and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 4)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.last(torch.tanh(self.first(x)))
        other = F.cross_entropy(scores.sin(), (y + 1).clamp(min=0) % 4, ignore_index=0)
        return (
            F.cross_entropy(scores, y, weight=self.weights)
            + 0.5 * other
            + 0.01 * self.last.weight.norm()
        )


def run(rank: int, axis: str) -> list[float]:
    """The largest error of the loss and of this rank's gradients in two steps, between which the
    buffer changes."""
    torch.manual_seed(0)
    model = Classes().double()
    plain, y = copy.deepcopy(model), torch.randint(0, 4, (8,))
    y[2:4] = -100  # the second microbatch has no label
    batch = {"x": torch.randn(8, 6, dtype=torch.float64), "y": y}
    how: dict[str, Any] = {"constraints": [pipeline("stage", microbatches=4)]}
    how = how if axis == "stage" else {"constraints": [ddp()], "num_microbatches": 4}
    module: Any = autopar.compile(
        model, autopar.Mesh({axis: 2}), example_inputs=batch, hardware="cpu-gloo", **how
    )
    assert module.plan.pipeline.num_microbatches == 4
    worst = []
    for scale in (1.0, 5.0):
        for each in (module, plain):
            each.zero_grad()
            with torch.no_grad():
                each.get_buffer("weights")[0] *= scale
        loss, expected = module(**batch), plain(**batch)
        loss.backward()
        expected.backward()
        errors = [abs(float(loss - expected))]
        errors += [
            float((p.grad.full_tensor() - plain.get_parameter(n).grad).abs().max())
            for n, p in module.named_parameters()
        ]
        worst.append(max(errors))
    return worst
