"""Arguments of a call that are constants of its program: plain values that are not tensors.

A capture specializes the program to their values, and a call with other values runs another
program. The constants are

- numbers, strings, bytes, None and Ellipsis,
- dtypes, devices, layouts and memory formats of torch,
- members of an `enum.Enum`,
- NumPy's numbers, booleans and strings, whose dtype decides how NumPy rounds,
- frozen dataclasses whose fields are constants, or tuples of constants.

Other objects may change after the capture, or cannot be compared. They are refused
(`autopar.capture.dynamo.call_objects`).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.core.same_values import is_numpy, is_plain, is_same

_OF_GRAPHS = (Tensor, bool, int, float, str, type(None))  # AOTAutograd accepts these leaves
_MISSING = object()  # the value of a field that was deleted


def is_constant(value: Any) -> bool:
    """Return whether a leaf of a call is a constant."""
    if isinstance(value, torch.Size):  # a structure of leaves
        return False
    if is_plain(value):
        return True
    return _is_frozen(value) and all(map(_is_constant_field, _fields_of(value)))


def _is_constant_field(value: Any) -> bool:
    return all(map(_is_constant_field, value)) if type(value) is tuple else is_constant(value)


def _is_frozen(value: Any) -> bool:
    """Return whether a value is an object of a frozen dataclass."""
    kind: Any = type(value)
    # a subclass that is no dataclass inherits the parameters, but its objects may change
    return "__dataclass_params__" in vars(kind) and bool(kind.__dataclass_params__.frozen)


def _fields_of(value: Any) -> list[Any]:
    return [getattr(value, field.name, _MISSING) for field in fields(value)]


def same_constant(one: Any, other: Any) -> bool:
    """Return whether two constants have the same type, which may decide a dtype, and equal values
    (`autopar.core.same_values`). Other objects are compared by identity."""
    if type(one) is not type(other):
        return False
    if _is_frozen(one):
        return same_constant(tuple(_fields_of(one)), tuple(_fields_of(other)))
    if type(one) is tuple:
        return len(one) == len(other) and all(map(same_constant, one, other))
    return is_same(one, other)


def without_constants(tree: Any) -> Any:
    """Return a structure of leaves with None instead of the constants that AOTAutograd rejects,
    which Dynamo's graph no longer reads."""
    return pytree.tree_map(
        lambda leaf: (
            leaf
            if (isinstance(leaf, _OF_GRAPHS) and not is_numpy(leaf)) or not is_constant(leaf)
            else None
        ),
        tree,
    )
