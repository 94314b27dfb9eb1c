"""Memory formats of operands and gradients, and models that create them.

An operand gets its format within forward, from a contiguous input, or has it as an input. The
gradient of a result gets its format from the reader of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Laid = Callable[[Tensor], Tensor]


def _order(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the same values with their elements in memory in the order of `dims`."""
    if not x.dim():
        return x
    back = [list(dims).index(dim) for dim in range(x.dim())]
    return x.permute(*dims).contiguous().permute(*back)


def channels_last(x: Tensor) -> Tensor:
    """Make dim 1 the innermost dim. A matrix is stored transposed."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    return _order(x, [*dims, 1]) if x.dim() > 1 else x


def reversed_dims(x: Tensor) -> Tensor:
    """Make the first dim the innermost and the last dim the outermost."""
    return _order(x, list(reversed(range(x.dim()))))


def swapped(x: Tensor) -> Tensor:
    """Exchange the last two dims in memory, as after a transposition of heads and tokens."""
    dims = list(range(x.dim()))
    return _order(x, [*dims[:-2], *dims[:-3:-1]])


def expanded(x: Tensor) -> Tensor:
    """Repeat the first slice of the first dim (stride 0)."""
    return x[:1].expand_as(x) if x.dim() else x


def spread(x: Tensor) -> Tensor:
    """Repeat the first slice of the last dim (stride 0)."""
    return x[..., :1].expand_as(x) if x.dim() else x


def _beside(x: Tensor) -> Tensor:
    """Return the values next to `x` in memory: other numbers, or valid indices."""
    return x * 3 + 1 if x.is_floating_point() or x.is_complex() else torch.zeros_like(x)


def every_second(x: Tensor) -> Tensor:
    """Return every second element of a larger tensor, with an offset of one element."""
    return torch.stack([_beside(x), x], -1).select(-1, 1)


def part(x: Tensor) -> Tensor:
    """Return a slice of a larger tensor along the innermost dim, with an offset."""
    return torch.cat([_beside(x), x], -1)[..., x.shape[-1] :] if x.dim() else x


def part_of_channels(x: Tensor) -> Tensor:
    """Return a slice of a larger tensor along dim 1."""
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
EXPANDED = ("expanded", "spread")  # formats with repeated values
RELAID = tuple(
    name for name in OPERANDS if name not in ("contiguous", *EXPANDED)
)  # formats that keep all values

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
    """A module whose operands have one format and whose gradients have one format."""

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
    """Several branches with the same inputs. The loss is their sum, and each branch has its own
    parameters."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, xs: list[Tensor], weights: list[Tensor]) -> dict[str, object]:
        losses = [branch(xs, weights) for branch in self.branches]
        return {
            "loss": sum(loss for _, loss in losses),
            "results": [results for results, _ in losses],
        }
