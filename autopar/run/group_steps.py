"""One communication step within one group of virtual ranks, whose tensors lie in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.collective import Kind
from autopar.errors import VerificationError
from autopar.halo import Halo, window
from autopar.kernels.bound import part_of
from autopar.layout import part_range
from autopar.mirrored import swapped
from autopar.run.splitting import reduce


def check_parts(parts: Sequence[Tensor], joined: int, length: int | None) -> None:
    """The ranks of a group bring equal shapes; along the dim that is joined the parts of `length`, where that is said."""
    shapes = [tuple(part.shape) for part in parts]
    expected = [shapes[0]] * len(shapes)
    if length is not None:
        own = [part_range(length, [len(parts)], [index])[1] for index in range(len(parts))]
        expected = [(*shapes[0][:joined], n, *shapes[0][joined + 1 :]) for n in own]
    if shapes != expected:
        raise VerificationError(f"ranks bring different shapes: {shapes}")


def step(kind: Kind, parts: list[Tensor], dim: int, to_dim: int, reduce_op: str) -> list[Tensor]:
    """One communication step within one group."""
    size = len(parts)
    if kind == "slice":
        return [_chunks(part, dim, size)[index] for index, part in enumerate(parts)]
    if kind == "all_reduce":
        return [reduce(parts, reduce_op)] * size
    if kind == "swap":
        return swapped(parts, dim)
    if kind == "reduce_scatter":
        return _chunks(reduce(parts, reduce_op), dim, size)
    whole = torch.cat(parts, dim=dim)
    return [whole] * size if kind == "all_gather" else _chunks(whole, to_dim, size)


def with_halos(parts: list[Tensor], halo: Halo) -> list[Tensor]:
    """Each part with what it asks of its neighbours."""
    lengths = [part.shape[halo.dim] for part in parts]
    whole = torch.cat(parts, dim=halo.dim)
    return [window(whole, halo, sum(lengths[:i]), length) for i, length in enumerate(lengths)]


def _chunks(x: Tensor, dim: int, size: int) -> list[Tensor]:
    return [chunk.contiguous() for chunk in x.split(part_of(x.shape[dim], size), dim)]
