"""Views of storages as sizes, strides and offsets, and tensors made from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from autopar.capture.dynamo.fakes import fake_like, is_fake, no_modes
from autopar.kernels import host

MOST_KINDS = 50_000
"""Number of views that are cached. A program has a few hundred different views."""


@dataclass(frozen=True, slots=True, eq=False)
class StridedView:
    """The view that a tensor has of its storage. Equal views are one object (`view_of`), so that
    keys that contain them can be compared quickly.

    Attributes:
        size, stride, offset: the size, stride and offset of the tensor, in elements.
        dtype: the dtype of the elements.
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
    """Return the view that a tensor has of its storage."""
    size, stride = tuple(x.shape), tuple(x.stride())
    return _view(size, stride, x.storage_offset(), x.dtype, x.is_conj(), x.is_neg())


def flat(num_bytes: int, dtype: torch.dtype, *, on_host: bool = False) -> Tensor:
    """Return an uninitialized tensor of one dim.

    Args:
        num_bytes: the size of the tensor in bytes.
        dtype: the dtype of the elements.
        on_host: whether the tensor is in host memory.
    """
    make = host.empty if on_host else torch.empty
    return make((num_bytes // dtype.itemsize,), dtype=dtype)


def as_view(base: Tensor, view: StridedView) -> Tensor:
    """Return a tensor with the given view of the storage of another tensor.

    Args:
        base: the other tensor.
        view: the view.
    """
    size, stride, offset, dtype = view.size, view.stride, view.offset, view.dtype
    if is_fake(base):  # created without the fake mode, whose dispatch is slow
        with no_modes():
            plain = torch.empty(0, dtype=dtype, device="meta").set_(
                base.untyped_storage(), offset, size, stride
            )
            x = fake_like(plain, base.device, base.fake_mode)
    else:
        x = (base if base.dtype == dtype else base.view(dtype)).as_strided(size, stride, offset)
    x = x.conj() if view.is_conj else x
    return torch._neg_view(x) if view.is_neg else x
