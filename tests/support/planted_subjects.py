"""The subjects of planted faults, by name. Each contains the feature that its faults break."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zoo_small
from hosts import quick_hosts
from overlapping import overlapping
from planted import Call, Subject
from torch import Tensor, nn

from autopar.constraints import ddp, expert_parallel, fsdp, layout, megatron, offload, pipeline
from autopar.core.mesh import Mesh

_LINE, _SQUARE = Mesh({"data": 2}), Mesh({"data": 2, "tensor": 2})


class Blocks(nn.Module):
    """Blocks of x + down(drop(act(up(x)))) with the mean square as the loss."""

    def __init__(
        self,
        width: int = 8,
        hidden: int = 16,
        num: int = 2,
        drop: float = 0.0,
        act: type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        block = (nn.Linear(width, hidden), act(), nn.Dropout(drop), nn.Linear(hidden, width))
        blocks = [nn.Sequential(*block)]
        for _ in range(num - 1):
            modules = nn.Linear(width, hidden), act(), nn.Dropout(drop), nn.Linear(hidden, width)
            blocks.append(nn.Sequential(*modules))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().pow(2).mean()


class Twins(nn.Module):
    """Two parameters with the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(self.up(x)) + (self.first + self.second)).pow(2).mean()


class Row(nn.Module):
    """A loss that is a sum, so that backward starts with one value for all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return 3 * ((x @ self.second) * x + self.first).sum()


class Branches(nn.Module):
    """Two values of the same shape that each layer passes on."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, 2 * x
        for layer in self.layers:
            a, b = torch.tanh(layer(b)) + a, torch.sigmoid(a) * b
        return (a * b).pow(2).mean()


class Values(Branches):
    """The same layers, which return values instead of a loss."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, 2 * x
        for layer in self.layers:
            a, b = torch.tanh(layer(b)) + a, torch.sigmoid(a) * b
        return a * b


class Tied(nn.Module):
    """An embedding that is read at the start and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(24, 8), nn.RMSNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.norm(x) @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Heads(nn.Module):
    """Causal attention with four heads between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in parts)
        result = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(result.transpose(1, 2).flatten(2))


class Attention(nn.Module):
    """Layers of attention."""

    def __init__(self, num: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Heads() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Images(nn.Module):
    """Two convolutions, the first followed by a batch norm."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).pow(2).mean()


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"x": torch.randn(shape).to(dtype)}


def _tokens() -> dict[str, Tensor]:
    ids, labels = torch.randint(0, 24, (2, 4, 6)).unbind(0)
    labels = labels.clone()
    labels[0, :4] = -100
    return {"ids": ids, "labels": labels}


def _builder(
    kind: Callable[..., nn.Module],
    batch: Callable[..., Any],
    *shape: int,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> Callable[[], Call]:
    def build() -> Call:
        inputs = batch(*shape, dtype=dtype) if shape else batch()
        return kind(**how).to(dtype), inputs

    return build


SUBJECTS: dict[str, Subject] = {
    "split": Subject(
        _builder(Blocks, _x, 8, 8, act=nn.GELU), _SQUARE, [megatron(tp=2, dp=2, zero=3)]
    ),
    "replicas": Subject(_builder(Blocks, _x, 8, 8, dtype=torch.bfloat16), _LINE, [ddp()]),
    "nodes": Subject(_builder(Blocks, _x, 8, 8), Mesh({"node": 2, "gpu": 2}), [ddp()]),
    "twins": Subject(_builder(Twins, _x, 8, 8), _LINE, [ddp()]),
    "row": Subject(_builder(Row, _x, 8, 8), _LINE),
    "sums": Subject(
        _builder(Twins, _x, 8, 8, dtype=torch.bfloat16),
        _LINE,
        [megatron(dp=2, zero=1, microbatches=2)],
    ),
    "dropout": Subject(_builder(Blocks, _x, 8, 8, drop=0.3), _SQUARE, [megatron(tp=2, dp=2)]),
    "dropout in microbatches": Subject(
        _builder(Blocks, _x, 8, 8, drop=0.3), _LINE, [megatron(dp=2, microbatches=2)]
    ),
    "stages": Subject(
        _builder(Branches, _x, 8, 8),
        Mesh({"stage": 2, "data": 2}),
        [pipeline("stage", microbatches=2), ddp()],
    ),
    "interleaved": Subject(
        _builder(Branches, _x, 6, 8, num=6),
        Mesh({"stage": 3}),
        [pipeline("stage", microbatches=3, schedule="interleaved_1f1b")],
    ),
    "without loss": Subject(
        _builder(Values, _x, 8, 8),
        Mesh({"stage": 2}),
        [pipeline("stage", microbatches=2)],
    ),
    "dispatched": Subject(
        partial(zoo_small.mixtral, num_layers=1), _LINE, [expert_parallel("data", "dispatched")]
    ),
    "gathered": Subject(
        partial(zoo_small.mixtral, num_layers=1), _LINE, [expert_parallel("data", "gathered")]
    ),
    "hosted": Subject(
        _builder(Blocks, _x, 8, 8, dtype=torch.bfloat16),
        _LINE,
        [fsdp(), layout("*", storage="S(0) host")],
        quick_hosts(),
    ),
    "waiting": Subject(
        _builder(Attention, _x, 4, 8, 16, num=2),
        _LINE,
        [fsdp(), offload(parameters=False)],
        quick_hosts(),
        {"memory_bytes": 30_000},
    ),
    "tied": Subject(
        _builder(Tied, _tokens),
        Mesh({"stage": 2, "data": 2}),
        [pipeline("stage", microbatches=2), ddp()],
    ),
    "counts": Subject(_builder(Tied, _tokens), _LINE, [megatron(dp=2, microbatches=2)]),
    "vocabulary": Subject(
        _builder(Tied, _tokens), _LINE, [layout("table", weight="S(0)", storage="S(0)")]
    ),
    "attention": Subject(_builder(Attention, _x, 4, 8, 16), _SQUARE, [megatron(tp=2, cp=2)]),
    "again": Subject(
        _builder(Attention, _x, 4, 8, 16, num=2), _LINE, [megatron(dp=2, recompute="full")]
    ),
    "images": Subject(
        _builder(Images, _x, 2, 3, 12, 12),
        _LINE,
        [layout("first", input="S(2)~1~1"), layout("second", input="S(2)~2~2")],
        "cpu-gloo",
    ),
    "channels": Subject(
        _builder(Images, _x, 4, 3, 32, 32, channels=64), _LINE, [ddp()], "cpu-gloo"
    ),
    "kernels": Subject(
        _builder(Blocks, _x, 2, 16, 32, width=32, hidden=64, num=1),
        Mesh({"gpu": 4}),
        [megatron(tp=4, sequence=True)],
        overlapping(),
    ),
    "uneven": Subject(_builder(Blocks, _x, 6, 8, hidden=10), Mesh({"data": 3}), [fsdp()]),
}
