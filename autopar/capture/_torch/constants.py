"""Values that forward makes of plain numbers are known: ``torch.tensor(sizes)``, ``torch.arange(n)``, and what follows from these alone.

Where forward reads one (`.tolist()`, `.item()`, a mask that picks rows), it gets the number, and shapes may follow from it. torch knows
single numbers so; here it knows small tensors, too. What is written to from elsewhere is known no more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from autopar.capture._torch.origins import Origins, note_branch

_MOST = 1 << 14  # elements of a value that is known: a graph holds as many as literals
_MOST_WORK = 1 << 22  # elements that an op computes: of pointwise ops those of the result, else the product of all operands'
_MOST_READ, _MOST_WORK_READ = 1 << 24, 1 << 26  # the same where forward reads a value that would be unknown otherwise
_ATEN = torch.ops.aten
_MAKING = frozenset(
    (
        _ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step, _ATEN.full.default, _ATEN.zeros.default, _ATEN.ones.default,
        _ATEN.scalar_tensor.default, _ATEN.eye.default, _ATEN.eye.m, _ATEN.linspace.default,
    )
)  # fmt: skip
# Of these the shape and dtype alone come from a tensor.
_ZEROS = frozenset((_ATEN.zeros_like.default, _ATEN.new_zeros.default))
_ONES = frozenset((_ATEN.ones_like.default, _ATEN.new_ones.default))
_FILLED = {_ATEN.full_like.default: 1, _ATEN.new_full.default: 2}  # the position of the value


@contextlib.contextmanager
def known_values(origins: Origins) -> Iterator[None]:
    """Such values are known to every mode that is made meanwhile, Dynamo's among them; what is read of others, `origins` notes."""
    dispatch = FakeTensorMode.dispatch
    most, work = (_MOST_READ, _MOST_WORK_READ) if origins.is_reading else (_MOST, _MOST_WORK)

    def dispatched(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        if func is _ATEN.equal.default and all(x.constant is not None for x in operands):
            with no_dispatch():
                return torch.equal(*(x.constant for x in operands))
        with _unknown_where_many(operands, func, mode, work):
            result = dispatch(mode, func, types, args, kwargs or {})
        if _is_small(result, most) and (value := _made(func, args, kwargs or {}, result)) is not None:
            result, operands = mode.fake_tensor_converter.from_real_tensor(mode, value, make_constant=True), []
        origins.note(func, operands, result)
        return result

    known = mock.patch.object(FakeTensorMode, "may_turn_const", partialmethod(_may_be_known, most=most))
    with mock.patch.object(FakeTensorMode, "dispatch", dispatched), known, origins.followed():
        yield


def or_its_value(variable: Any) -> Any:
    """Of a tensor of Dynamo's with one known element whether it is true, which a branch asks; else `variable`."""
    known = variable.realize() if isinstance(variable, LazyVariableTracker) else variable
    asked = known.as_proxy().node.meta.get("example_value") if isinstance(known, TensorVariable) else None
    value = getattr(asked, "constant", None)
    if value is None or value.numel() != 1:
        note_branch(asked)
        return variable
    with no_dispatch():
        return ConstantVariable.create(bool(value))


def _made(func: Any, args: Any, kwargs: Any, result: FakeTensor) -> torch.Tensor | None:
    """The value that an op makes of plain numbers; None for other ops."""
    with no_dispatch():
        if func in _MAKING:
            made: torch.Tensor = func(*args, **kwargs)
            return made
        fill = 0 if func in _ZEROS else 1 if func in _ONES else args[_FILLED[func]] if func in _FILLED else None
        if not isinstance(fill, int | float) or not result.is_contiguous():
            return None
        return torch.full(result.shape, fill, dtype=result.dtype)


def _is_small(result: Any, most: int) -> bool:
    return (
        isinstance(result, FakeTensor)
        and result.device.type == "cpu"
        and all(isinstance(size, int) for size in result.shape)
        and result.numel() <= most
    )


def _may_be_known(mode: FakeTensorMode, value: torch.Tensor, *, most: int) -> bool:
    return value.numel() <= most and value.layout is torch.strided and not mode.is_our_fake(value) and value.device.type != "meta"


@contextlib.contextmanager
def _unknown_where_many(operands: list[FakeTensor], func: Any, mode: FakeTensorMode, work: int) -> Iterator[None]:
    """Nothing large is computed: a mask of a long sequence stays unknown."""
    known = [(x, x.constant) for x in operands if x.constant is not None]
    if not isinstance(func, torch._ops.OpOverload) or len(known) < len(operands) or _work_of(func, [value for _, value in known]) <= work:
        yield
        return
    for operand, value in known:
        operand.constant = None
        if func._schema.is_mutable:
            mode.fake_tensor_converter.invalidate_constant_aliases(value)
    try:
        yield
    finally:
        for operand, value in known if not func._schema.is_mutable else ():
            operand.constant = value


def _work_of(func: Any, values: Sequence[torch.Tensor]) -> int:
    if torch.Tag.pointwise in func.tags:
        return math.prod(torch.broadcast_shapes(*(value.shape for value in values)))
    return math.prod(value.numel() for value in values)
