"""Models with gradients of inputs."""

from __future__ import annotations

from typing import Any

import torch
import zoo_small
from torch import Tensor, nn


class Shifted(nn.Module):
    """Layers that all read the same second input."""

    def __init__(self, num: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(num))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) + shift)
        loss: Tensor = (x * x).mean()
        return loss


class Several(nn.Module):
    """Returns no loss, reads one input twice, returns one unchanged, and uses one only in a
    comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, scale: Tensor, seen: Tensor) -> dict[str, Tensor]:
        features = torch.relu(self.left(x)) * scale
        return {"out": self.right(features) + x[:, :4], "x": x, "positive": (seen > 0).sum(0)}


class Convolutions(nn.Module):
    """A classifier of images with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(image))
        return logits


def shifted() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Shifted(), {
        "x": torch.randn(8, 12, requires_grad=True),
        "shift": torch.randn(12, requires_grad=True),
    }


def several(rows: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(rows, 8),
        "scale": torch.randn(rows, 16),
        "seen": torch.randn(rows, 3),
    }
    return Several(), {name: x.requires_grad_() for name, x in batch.items()}


def convolutions() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Convolutions(), {"image": torch.randn(8, 3, 8, 8, requires_grad=True)}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    """Return a Llama that reads embeddings, as with soft prompts."""
    model, batch = zoo_small.llama()
    ids = batch["input_ids"]
    torch.manual_seed(0)
    embeddings = torch.randn(*ids.shape, model.config.hidden_size, requires_grad=True)
    return model, {"inputs_embeds": embeddings, "labels": ids}


def frozen(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return one of the other models with frozen parameters."""
    model, batch = globals()[kind]()
    return model.requires_grad_(False), batch
