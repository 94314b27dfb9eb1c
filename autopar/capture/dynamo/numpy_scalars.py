"""Trace NumPy scalars as the constants that they are.

Dynamo converts every NumPy scalar to a tensor, which cannot decide a branch or a size. It is a
constant here, like a Python number. Operations between constants are those of NumPy: the sum of
``numpy.float32(0.1)`` and ``0.2`` is rounded to float32, and ``isinstance(x, numpy.floating)``
holds. Operations of torch read the Python number, as torch itself does.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
from torch._dynamo.variables.misc import NumpyDTypeVariable, NumpyVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch.utils._pytree import tree_leaves

from autopar.core.same_values import NUMPY, is_numpy
from autopar.errors import CaptureError


class NumpyScalar(ConstantVariable):
    """Dynamo's variable of a NumPy scalar."""

    def __init__(self, value: Any, **options: Any) -> None:
        VariableTracker.__init__(self, **options)
        self.value = value

    def as_proxy(self) -> Any:
        """Return the Python number, which nodes of the graph have as an argument."""
        # torch reads a boolean of NumPy as a float: its product with integers is a float
        return float(self.value) if isinstance(self.value, numpy.bool_) else self.value.item()

    def var_getattr(self, tx: Any, name: str) -> Any:
        """Return the variable of an attribute, such as `dtype`.

        Args:
            tx: Dynamo's translator.
            name: name of the attribute.
        """
        if name == "dtype":
            return NumpyDTypeVariable(self.value.dtype)
        return super().var_getattr(tx, name)

    def call_method(self, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method, such as `item` or `astype`, if its arguments are constants.

        Args:
            tx: Dynamo's translator.
            name: name of the method.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        given = (*args, *kwargs.values())
        if not all(each.is_python_constant() for each in given) or not hasattr(self.value, name):
            return super().call_method(tx, name, list(args), kwargs)
        return VariableTracker.build(tx, _called(getattr(self.value, name), args, kwargs))


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function with the values of constant variables."""
    return function(
        *(each.as_python_constant() for each in args),
        **{key: each.as_python_constant() for key, each in kwargs.items()},
    )


def _has_scalars(given: Sequence[Any]) -> bool:
    """Return whether all variables are constants and one of them is or contains a NumPy scalar."""
    return all(each.is_python_constant() for each in given) and any(
        map(is_numpy, tree_leaves([each.as_python_constant() for each in given]))
    )


def _scalar(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the NumPy scalar that a function of NumPy computes from NumPy scalars, or the class of
    a scalar from any constant; None if it computes something else."""
    given = (*args, *kwargs.values())
    is_class = isinstance(function, type) and function in NUMPY
    if is_class:
        is_known = bool(given) and all(each.is_python_constant() for each in given)
    else:
        is_known = not _draws(function) and _has_scalars(given)
    result = _called(function, args, kwargs) if is_known else None
    return result if is_numpy(result) else None


def _draws(function: Any) -> bool:
    return str(getattr(function, "__module__", "") or "numpy.random").startswith("numpy.random")


def _as_array(tx: Any, variable: Any) -> Any:
    """Return the variable of an array with the dtype of a NumPy scalar; others unchanged."""
    if not isinstance(variable, NumpyScalar):
        return variable
    number = ConstantVariable(variable.value.item())
    return _CALL(NumpyVariable(type(variable.value)), tx, [number], {})


def _refuse_within(variable: Any) -> None:
    """Raise CaptureError if a list or another container has a NumPy scalar."""
    if isinstance(variable, NumpyScalar) or not variable.is_python_constant():
        return
    if any(map(is_numpy, tree_leaves(variable.as_python_constant()))):
        raise CaptureError(
            "forward makes a NumPy array of NumPy scalars",
            remedy="make a tensor of them: `torch.tensor([x.item() for x in scalars])`",
        )


_CALL = NumpyVariable.call_function
_OPERATORS = frozenset(
    (divmod, pow, *(each for each in vars(operator).values() if type(each) is type(operator.add)))
)


@contextlib.contextmanager
def constant_scalars() -> Iterator[None]:
    """Make Dynamo represent NumPy scalars by `NumpyScalar`."""
    build, create = VariableBuilder._wrap, ConstantVariable.create
    operate = BuiltinVariable.call_function
    handlers = dict.fromkeys(NUMPY, lambda _, value: NumpyScalar(value))

    def wrap(builder: Any, value: Any) -> Any:
        """Return the variable of a value that has a source."""
        if not is_numpy(value):
            return build(builder, value)
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        return NumpyScalar(value, source=builder.source)

    def create_any(value: Any, **options: Any) -> Any:
        """Return the variable of a constant."""
        return NumpyScalar(value, **options) if is_numpy(value) else create(value, **options)

    def call_numpy(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Return the variable of the result of a function of NumPy; `tx` is Dynamo's translator."""
        result = _scalar(variable.value, args, kwargs)
        if result is not None:
            return NumpyScalar(result)
        for each in (*args, *kwargs.values()):
            _refuse_within(each)
        arrays = [_as_array(tx, each) for each in args]
        return _CALL(variable, tx, arrays, {key: _as_array(tx, x) for key, x in kwargs.items()})

    def call_operator(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Return the variable of the result of an operator; `tx` is Dynamo's translator."""
        if any(isinstance(each, NumpyScalar) for each in args):
            if variable.fn in _OPERATORS and _has_scalars(args):
                return VariableTracker.build(tx, _called(variable.fn, args, kwargs))
            if any(isinstance(each, NumpyNdarrayVariable) for each in args):
                args = [_as_array(tx, each) for each in args]
        return operate(variable, tx, args, kwargs)

    with (
        mock.patch.object(VariableBuilder, "_wrap", wrap),
        mock.patch.object(ConstantVariable, "create", staticmethod(create_any)),
        mock.patch.object(BuiltinVariable, "call_function", call_operator),
        mock.patch.object(NumpyVariable, "call_function", call_numpy),
        mock.patch.dict(SourcelessBuilder._type_handlers, handlers),
    ):
        yield
