"""Tensors that have shapes, strides and dtypes, and no data."""

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
    """A mode in which tensors have no data, and the shapes, strides and dtypes that kernels give
    them; others become such."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Not a subclass, which higher-order operators would not know.
    mode.dispatch = partial(_dispatch_fake, mode)  # type: ignore[method-assign]
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
    """Whether `value` is a tensor of such a mode."""
    return isinstance(value, FakeTensor)


def fake_like(sample: torch.Tensor, device: torch.device, mode: FakeMode) -> torch.Tensor:
    """A new fake tensor on `device`, which looks like `sample`, a plain one on meta, and shares
    its storage."""
    return FakeTensor(mode, sample, device)


def give_value(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Let a fake tensor hold `value`, until it is written to."""
    assert isinstance(fake, FakeTensor), "a tensor of a mode"
    with no_dispatch():
        fake.constant = value.clone()
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


def no_modes() -> contextlib.AbstractContextManager[None]:
    """Plain tensors for a while, whatever modes are on."""
    return no_dispatch()


def make_fake(tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None) -> torch.Tensor:
    """A new fake tensor on the cpu like a real one, floating ones no wider than `precision`."""
    with mode:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=narrow_dtype(tensor.dtype, precision), device="cpu"
        )
    value = getattr(tensor, "constant", None)  # of a fake tensor that is known
    if value is not None and made.dtype == value.dtype:
        give_value(made, value)
    return made


def views_of_one_mode() -> contextlib.AbstractContextManager[object]:
    """A real view that a mode makes fake is that mode's: torch (2.13) makes views by ops, which
    an outer mode would take for its own."""
    make = FakeTensorMode.from_tensor

    def make_in_own_mode(mode: FakeMode, tensor: torch.Tensor, **how: Any) -> FakeTensor:
        with (
            _disable_current_modes()
            if tensor._is_view() and not is_fake(tensor)
            else contextlib.nullcontext()
        ):
            return make(mode, tensor, **how)

    return mock.patch.object(FakeTensorMode, "from_tensor", make_in_own_mode)
