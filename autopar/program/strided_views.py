"""Views of storages as sizes, strides and offsets, and tensors made from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autopar.capture.dynamo.fakes import fake_like, is_fake, no_modes
from autopar.kernels import host

MOST_KINDS = 50_000
"""Number of views that are kept; programs have a few hundred different ones each."""


@dataclass(frozen=True, slots=True, eq=False)
class StridedView:
    """The view of its storage that a tensor is. Equal views are one object (`view_of`), so that
    keys which contain them are compared quickly.

    Attributes:
        size, stride, offset: as of the tensor, in elements.
        dtype: dtype of the elements.
        is_conj, is_neg: whether the elements are read conjugated or negated.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


_view = lru_cache(MOST_KINDS)(StridedView)


def view_of(x: Tensor) -> StridedView:
    """Return the view of its storage that a tensor is."""
    size, stride = tuple(x.shape), tuple(x.stride())
    return _view(size, stride, x.storage_offset(), x.dtype, x.is_conj(), x.is_neg())


def flat(num_bytes: int, dtype: torch.dtype, *, on_host: bool = False) -> Tensor:
    """Return an uninitialized tensor of one dim.

    Args:
        num_bytes: its size.
        dtype: dtype of its elements.
        on_host: whether it is in the host's memory.
    """
    make = host.empty if on_host else torch.empty
    return make((num_bytes // dtype.itemsize,), dtype=dtype)


def as_view(base: Tensor, view: StridedView) -> Tensor:
    """Return the tensor that is a view of the storage of another one.

    Args:
        base: a tensor with this storage.
        view: the view.
    """
    size, stride, offset, dtype = view.size, view.stride, view.offset, view.dtype
    if is_fake(base):  # made without the fake mode, whose dispatch is slow
        with no_modes():
            plain = torch.empty(0, dtype=dtype, device="meta").set_(
                base.untyped_storage(), offset, size, stride
            )
            x = fake_like(plain, base.device, base.fake_mode)
    else:
        x = (base if base.dtype == dtype else base.view(dtype)).as_strided(size, stride, offset)
    x = x.conj() if view.is_conj else x
    return torch._neg_view(x) if view.is_neg else x
