"""A model as source text that tests edit, and the module that a new process would import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

SCALE = 0.5
SETTINGS = {"bias": True, "sizes": [8, 16]}


class Config:
    def __init__(self):
        self.width = 8
        self.kind = "gelu"


def activate(x, slope=0.1):
    return F.leaky_relu(x, slope) * SCALE


def wrapped(function):
    limit = 6.0

    def run(x):
        return function(x).clamp(max=limit)

    return run


clamped = wrapped(activate)


class Base(nn.Module):
    power = 2

    def norm(self, x):
        return x / x.norm()

    @property
    def factor(self):
        return 3.0


class Net(Base):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("count", torch.zeros(4))
        self.table = torch.arange(8.0)
        self.scale = 1.5

    def forward(self, x, y=None):
        x = self.down(clamped(self.up(x))) * self.scale + self.table
        loss = self.norm(self.drop(x)) ** self.power * self.factor
        return reduced(loss, SETTINGS)


def reduced(loss, settings):
    return loss.mean()


def make():
    return Net(), (torch.zeros(4, 8),)
"""


def load(folder: Path, source: str = SOURCE) -> ModuleType:
    """Return the module of a source, as a new process would import it."""
    path = folder / "cached_net.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("cached_net", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cached_net"] = module
    spec.loader.exec_module(module)
    return module
