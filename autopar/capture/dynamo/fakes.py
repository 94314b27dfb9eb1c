"""Fake tensors: shapes, strides and dtypes without data."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.precision import as_kernels_give, narrow_dtype

FakeMode: TypeAlias = FakeTensorMode


def new_fake_mode() -> FakeMode:
    """Return a fake tensor mode that also accepts real tensors, and whose results have the dtypes
    that kernels return (`autopar.capture.precision`)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # The method is replaced because higher-order operators do not accept a subclass of the mode.
    mode.dispatch = partial(_dispatch_fake, mode)
    return mode


def _dispatch_fake(
    mode: FakeMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    result = FakeTensorMode.dispatch(
        mode, func, types, args, kwargs or {}
    )  # looked up at each call, since `known_values` replaces it
    return as_kernels_give(
        func, args, kwargs or {}, result, lambda sample, device: fake_like(sample, device, mode)
    )


def is_fake(value: Any) -> bool:
    """Return whether `value` is a fake tensor."""
    return isinstance(value, FakeTensor)


def fake_like(sample: torch.Tensor, device: torch.device, mode: FakeMode) -> torch.Tensor:
    """Return a new fake tensor that shares the storage of a meta tensor.

    Args:
        sample: a plain tensor on ``meta`` that defines the shape, strides and dtype.
        device: the device that the fake tensor reports.
        mode: the mode of the fake tensor.
    """
    return FakeTensor(mode, sample, device)


def give_value(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Attach the known `value` to a fake tensor, until the tensor is written to."""
    assert isinstance(fake, FakeTensor), "the tensor is fake"
    with no_dispatch():
        fake.constant = value.clone()
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


def no_modes() -> contextlib.AbstractContextManager[None]:
    """Return a context that computes with plain tensors regardless of the active modes."""
    return no_dispatch()


def make_fake(tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None) -> torch.Tensor:
    """Return a fake tensor on the CPU with the shape and strides of a real one.

    Args:
        tensor: the real or fake tensor; the result has its known value, if any.
        mode: the mode of the result.
        precision: dtype of the result if `tensor` has a wider floating dtype, or None.
    """
    with mode:
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=narrow_dtype(tensor.dtype, precision), device="cpu"
        )
    value = getattr(tensor, "constant", None)  # the known value of a fake tensor
    if value is not None and fake.dtype == value.dtype:
        give_value(fake, value)
    return fake


def views_of_one_mode() -> contextlib.AbstractContextManager[object]:
    """Make the mode that converts a real view own the result: torch 2.13 converts views with ops,
    which an outer mode would intercept."""
    make = FakeTensorMode.from_tensor

    def make_in_own_mode(mode: FakeMode, tensor: torch.Tensor, **how: Any) -> FakeTensor:
        """Convert a tensor to a fake tensor; convert a real view with no other mode active."""
        with (
            _disable_current_modes()
            if tensor._is_view() and not is_fake(tensor)
            else contextlib.nullcontext()
        ):
            return make(mode, tensor, **how)

    return mock.patch.object(FakeTensorMode, "from_tensor", make_in_own_mode)
