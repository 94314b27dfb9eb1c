"""Memory formats that an operand or a gradient arrives in, and models that make them.

An operand is given its format within forward, from a contiguous input, or has it where it comes in.
The gradient of a result gets its format from what reads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Laid = Callable[[Tensor], Tensor]


def _order(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The same values, with elements in memory in the order of these dims."""
    if not x.dim():
        return x
    back = [list(dims).index(dim) for dim in range(x.dim())]
    return x.permute(*dims).contiguous().permute(*back)


def channels_last(x: Tensor) -> Tensor:
    """Dim 1 lies innermost; of a matrix this is its transposition."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    return _order(x, [*dims, 1]) if x.dim() > 1 else x


def reversed_dims(x: Tensor) -> Tensor:
    """The first dim lies innermost, the last one outermost."""
    return _order(x, list(reversed(range(x.dim()))))


def swapped(x: Tensor) -> Tensor:
    """The last two dims have changed places, as behind a transposition of heads and tokens."""
    dims = list(range(x.dim()))
    return _order(x, [*dims[:-2], *dims[:-3:-1]])


def expanded(x: Tensor) -> Tensor:
    """The first dim repeats its first part: stride 0."""
    return x[:1].expand_as(x) if x.dim() else x


def spread(x: Tensor) -> Tensor:
    """The last dim repeats its first part."""
    return x[..., :1].expand_as(x) if x.dim() else x


def _beside(x: Tensor) -> Tensor:
    """What lies in memory beside `x`: other numbers, or, of indices, valid ones."""
    return x * 3 + 1 if x.is_floating_point() or x.is_complex() else torch.zeros_like(x)


def every_second(x: Tensor) -> Tensor:
    """Every second element of a larger tensor, from the second on: step 2, and an offset."""
    return torch.stack([_beside(x), x], -1).select(-1, 1)


def part(x: Tensor) -> Tensor:
    """A part of a larger tensor, behind another one, along the dim that lies innermost."""
    return torch.cat([_beside(x), x], -1)[..., x.shape[-1] :] if x.dim() else x


def part_of_channels(x: Tensor) -> Tensor:
    """A part of a larger tensor along dim 1."""
    return torch.cat([_beside(x), x], 1)[:, x.shape[1] :] if x.dim() > 1 else x


OPERANDS: Mapping[str, Laid] = {
    "contiguous": lambda x: x,
    "channels last": channels_last,
    "reversed": reversed_dims,
    "swapped": swapped,
    "expanded": expanded,
    "spread": spread,
    "every second": every_second,
    "part": part,
    "part of channels": part_of_channels,
}
EXPANDED = ("expanded", "spread")  # formats in which values repeat
RELAID = tuple(
    name for name in OPERANDS if name not in ("contiguous", *EXPANDED)
)  # formats in which values stay

Read = Callable[[Tensor, Tensor], Tensor]


def _apart(y: Tensor, w: Tensor) -> Tensor:
    return (torch.stack([w, y], -1) * torch.stack([y.detach(), w], -1)).sum()


def _joined(dim: int) -> Read:
    def read(y: Tensor, w: Tensor) -> Tensor:
        return (torch.cat([w, y], dim) * torch.cat([y.detach(), w], dim)).sum()

    return read


GRADIENTS: Mapping[str, Read] = {
    "contiguous": lambda y, w: (y * w).sum(),
    "channels last": lambda y, w: (y * channels_last(w)).sum(),
    "reversed": lambda y, w: (
        y.permute(*reversed(range(y.dim()))) * w.permute(*reversed(range(y.dim()))).contiguous()
    ).sum(),
    "expanded": lambda y, w: (y.sum(0) * w[0]).sum(),
    "spread": lambda y, w: (y.sum(-1) * w[..., 0]).sum(),
    "one number": lambda y, w: y.sum() * w.flatten()[0],
    "averaged": lambda y, w: (
        (y.flatten(2).mean(2) * w.flatten(2)[..., 0]).sum() if y.dim() > 2 else y.mean()
    ),
    "every second": _apart,
    "part": _joined(-1),
    "part of channels": lambda y, w: _joined(min(1, y.dim() - 1))(y, w),
}


class Branch(nn.Module):
    """A module behind operands of one format, before gradients of one format."""

    def __init__(self, inner: nn.Module, lay: Sequence[Laid], read: Read) -> None:
        super().__init__()
        self.inner, self.lay, self.read = inner, lay, read
        self.scale = nn.Parameter(torch.ones(()))

    def forward(
        self, xs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        laid = [lay(x * self.scale) for lay, x in zip(self.lay, xs, strict=True)]
        results = tree_leaves(self.inner(*laid))
        pairs = zip(results, weights, strict=True)
        return results, sum(self.read(y, w) if y.dim() else y * w for y, w in pairs)


class Branches(nn.Module):
    """Several, of the same inputs; the loss is their sum, and each has parameters of its own."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, xs: list[Tensor], weights: list[Tensor]) -> dict[str, object]:
        made = [branch(xs, weights) for branch in self.branches]
        return {"loss": sum(loss for _, loss in made), "results": [results for results, _ in made]}
