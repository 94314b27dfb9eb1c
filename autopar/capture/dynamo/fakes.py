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
    """Return a mode whose tensors have no data, and the shapes, strides and dtypes that kernels
    return; other tensors are converted."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Not a subclass, which higher-order operators would not know.
    mode.dispatch = partial(_dispatch_fake, mode)
    return mode


def _dispatch_fake(
    mode: FakeMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    result = FakeTensorMode.dispatch(
        mode, func, types, args, kwargs or {}
    )  # as it is then: `known_values`
    return as_kernels_give(
        func, args, kwargs or {}, result, lambda sample, device: fake_like(sample, device, mode)
    )


def is_fake(value: Any) -> bool:
    """Whether `value` is a fake tensor."""
    return isinstance(value, FakeTensor)


def fake_like(sample: torch.Tensor, device: torch.device, mode: FakeMode) -> torch.Tensor:
    """Return a new fake tensor that shares the storage of a meta tensor.

    Args:
        sample: a plain tensor on ``meta``, whose shape, strides and dtype it gets.
        device: the device that it reports.
        mode: its mode.
    """
    return FakeTensor(mode, sample, device)


def give_value(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Let a fake tensor hold `value` until it is written to."""
    assert isinstance(fake, FakeTensor), "a tensor of a mode"
    with no_dispatch():
        fake.constant = value.clone()
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


def no_modes() -> contextlib.AbstractContextManager[None]:
    """Compute with plain tensors, whatever modes are active."""
    return no_dispatch()


def make_fake(tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None) -> torch.Tensor:
    """Return a fake tensor on the CPU with the shape and strides of a real one.

    Args:
        tensor: the real or fake tensor; a known value is kept.
        mode: the mode of the result.
        precision: the widest floating dtype of the result, or None.
    """
    with mode:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=narrow_dtype(tensor.dtype, precision), device="cpu"
        )
    value = getattr(tensor, "constant", None)  # of a fake tensor that is known
    if value is not None and made.dtype == value.dtype:
        give_value(made, value)
    return made


def views_of_one_mode() -> contextlib.AbstractContextManager[object]:
    """Let the mode that converts a real view own it: torch 2.13 makes views by ops, which an outer
    mode would intercept."""
    make = FakeTensorMode.from_tensor

    def make_in_own_mode(mode: FakeMode, tensor: torch.Tensor, **how: Any) -> FakeTensor:
        """Make a fake tensor; that of a real view with no other mode active."""
        with (
            _disable_current_modes()
            if tensor._is_view() and not is_fake(tensor)
            else contextlib.nullcontext()
        ):
            return make(mode, tensor, **how)

    return mock.patch.object(FakeTensorMode, "from_tensor", make_in_own_mode)
