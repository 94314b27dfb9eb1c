"""Models that return no loss, for losses computed outside the model."""

from __future__ import annotations

from typing import Any

import torch
import zoo_small
from torch import Tensor, nn


class Several(nn.Module):
    """Returns a tensor twice, a view of it, a parameter, a tensor without a gradient, and a tensor
    that needs a collective if rows are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = torch.relu(self.first(x))
        out = self.last(features)
        flat = out.reshape(-1)
        return {
            "out": out,
            "same": out,
            "flat": flat,
            "weight": self.last.weight,
            "best": out.argmax(-1),
            "total": features.sum(0),
            "n": 3,
        }


class Convolutions(nn.Module):
    """A classifier with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.body = nn.Sequential(
            convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(32, 5)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(image))
        return logits


class Layers(nn.Module):
    """Returns the results of its last layer and of an intermediate layer, a mean, and a
    parameter."""

    def __init__(self, num: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(32, 16), nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            for _ in range(num)
        )
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, features = self.embedding(tokens), []
        for layer in self.layers:
            x = x + self.dropout(layer(x))
            features.append(x)
        return {
            "logits": self.head(x) * self.scale,
            "early": features[1],
            "size": x.pow(2).mean(),
            "total": x.sum((0, 1)),
            "scale": self.scale,
        }


def layers(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Layers(dropout=dropout), {"tokens": torch.randint(0, 32, (8, 6))}


def several(samples: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Several(), {"x": torch.randn(samples, 8)}


def convolutions(samples: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Convolutions(), {"image": torch.randn(samples, 3, 8, 8)}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    return _unlabelled(*zoo_small.llama())


def llama_layer() -> tuple[nn.Module, dict[str, Tensor]]:
    return _unlabelled(*zoo_small.llama(num_layers=1))


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    return _unlabelled(*zoo_small.bert())


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    return _unlabelled(*zoo_small.gpt2())


def _unlabelled(model: nn.Module, batch: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    return model, {name: x for name, x in batch.items() if name != "labels"}
