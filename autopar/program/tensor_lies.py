"""How tensors lie in their storages, and tensors made to lie so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autopar.capture.dynamo.fakes import fake_like, is_fake, no_modes
from autopar.kernels import host

MOST_KINDS = 50_000
"""Remembered; programs of one session have a few hundred each."""


@dataclass(frozen=True, slots=True, eq=False)
class Lie:
    """How a tensor lies in its storage. Equal ones are one object (`lie_of`), so that keys with
    them are quick to compare.

    Attributes:
        is_conj, is_neg: whether it is read conjugated, or negated.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


_lie = lru_cache(MOST_KINDS)(Lie)


def lie_of(x: Tensor) -> Lie:
    """Return how a tensor lies in its storage."""
    size, stride = tuple(x.shape), tuple(x.stride())
    return _lie(size, stride, x.storage_offset(), x.dtype, x.is_conj(), x.is_neg())


def flat(num_bytes: int, dtype: torch.dtype, *, on_host: bool = False) -> Tensor:
    """Return an uninitialised tensor of one dim with so many bytes."""
    make = host.empty if on_host else torch.empty
    return make((num_bytes // dtype.itemsize,), dtype=dtype)


def as_lying(base: Tensor, lie: Lie) -> Tensor:
    """Return a tensor that lies in the storage of `base` in a given way."""
    size, stride, offset, dtype = lie.size, lie.stride, lie.offset, lie.dtype
    if is_fake(
        base
    ):  # by hand: the mode's dispatch of what says nothing new would take ten times as long
        with no_modes():
            plain = torch.empty(0, dtype=dtype, device="meta").set_(
                base.untyped_storage(), offset, size, stride
            )
            x = fake_like(plain, base.device, base.fake_mode)
    else:
        x = (base if base.dtype == dtype else base.view(dtype)).as_strided(size, stride, offset)
    x = x.conj() if lie.is_conj else x
    return torch._neg_view(x) if lie.is_neg else x
