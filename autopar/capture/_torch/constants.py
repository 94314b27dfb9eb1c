"""Values that forward makes of plain numbers are known: ``torch.tensor(sizes)``, ``torch.arange(n)``, and what follows from these alone.

Where forward reads one (`.tolist()`, `.item()`, a mask that picks rows), it gets the number, and shapes may follow from it. torch knows
single numbers so; here it knows small tensors, too. What is written to from elsewhere is known no more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from autopar.capture._torch.origins import Origins, note_branch

_MOST = 1 << 14  # elements of a value that is known: a graph holds as many as literals
_MOST_WORK = 1 << 22  # of the product of all operands' numbers of elements, which bounds what they are broadcast to
_ATEN = torch.ops.aten
_MAKING = frozenset(
    (_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step, _ATEN.full.default, _ATEN.zeros.default, _ATEN.ones.default)
)


@contextlib.contextmanager
def known_values(origins: Origins) -> Iterator[None]:
    """Such values are known to every mode that is made meanwhile, Dynamo's among them; what is read of others, `origins` notes."""
    dispatch = FakeTensorMode.dispatch

    def dispatched(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        with _unknown_where_many(operands, func, mode):
            result = dispatch(mode, func, types, args, kwargs or {})
        if func in _MAKING and _is_small(result):
            with no_dispatch():
                value = func(*args, **(kwargs or {}))
            return mode.fake_tensor_converter.from_real_tensor(mode, value, make_constant=True)
        origins.note(func, operands, result)
        return result

    known = mock.patch.object(FakeTensorMode, "may_turn_const", _may_be_known)
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


def _is_small(result: Any) -> bool:
    return (
        isinstance(result, FakeTensor)
        and result.device.type == "cpu"
        and all(isinstance(size, int) for size in result.shape)
        and result.numel() <= _MOST
    )


def _may_be_known(mode: FakeTensorMode, value: torch.Tensor) -> bool:
    return value.numel() <= _MOST and value.layout is torch.strided and not mode.is_our_fake(value) and value.device.type != "meta"


@contextlib.contextmanager
def _unknown_where_many(operands: list[FakeTensor], func: Any, mode: FakeTensorMode) -> Iterator[None]:
    """Nothing large is computed: a mask of a long sequence stays unknown."""
    known = [(x, x.constant) for x in operands if x.constant is not None]
    if len(known) < len(operands) or math.prod(value.numel() for _, value in known) <= _MOST_WORK:
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
