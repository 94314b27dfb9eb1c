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
    """One communication step within one group.

    Results have the strides of those on real processes (`autopar.kernels.bound`): they are contiguous, and along an axis of size 1
    they are the operands. Kernels of ops read strides, so a plan is verified with the strides that it will run with.
    """
    size = len(parts)
    if size == 1:
        return parts
    if kind == "slice":
        return [_chunks(part, dim, size)[index] for index, part in enumerate(parts)]
    if kind == "all_reduce":
        return [reduce(parts, reduce_op).contiguous()] * size
    if kind == "swap":
        return [part.contiguous() for part in swapped(parts, dim)]
    if kind == "reduce_scatter":
        return _chunks(reduce(parts, reduce_op), dim, size)
    if dim == to_dim:
        return parts
    whole = torch.cat(parts, dim=dim).contiguous()
    return [whole] * size if kind == "all_gather" else _chunks(whole, to_dim, size)


def with_halos(parts: list[Tensor], halo: Halo) -> list[Tensor]:
    """Each part with what it asks of its neighbours."""
    lengths = [part.shape[halo.dim] for part in parts]
    whole = torch.cat(parts, dim=halo.dim)
    windows = (window(whole, halo, sum(lengths[:i]), length) for i, length in enumerate(lengths))
    return [part.contiguous() for part in windows]


def _chunks(x: Tensor, dim: int, size: int) -> list[Tensor]:
    return [chunk.contiguous() for chunk in x.split(part_of(x.shape[dim], size), dim)]
