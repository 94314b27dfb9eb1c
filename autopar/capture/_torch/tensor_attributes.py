"""Attributes of tensors that are tensors (`x.T`, `mT`, `H`, `mH`, `real`, `imag`, `data`), as calls of the graph.

Of one of an argument, a parameter or a buffer Dynamo keeps where it was found, as it does of attributes of modules. What is returned as it
was found it does not take from the graph, but from there, once more, behind the graph; and nothing says then what the graph is to compute.
Without that place it is a value like any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch._dynamo.variables.tensor import TensorVariable

_GETS = ("tp_getattro_impl", "var_getattr")  # its method that gets an attribute, as of torch 2.14, and before


def computed_attributes() -> contextlib.AbstractContextManager[object]:
    """While it is entered, what Dynamo captures computes such attributes in its graph, also where they are returned."""
    name = next((name for name in _GETS if name in vars(TensorVariable)), None)
    if name is None:  # such attributes are refused where they are returned
        return contextlib.nullcontext()
    return mock.patch.object(TensorVariable, name, _without_place(getattr(TensorVariable, name)))


def _without_place(get: Callable[..., Any]) -> Callable[..., Any]:
    def found(self: Any, tx: Any, name: str) -> Any:
        value = get(self, tx, name)
        if isinstance(value, TensorVariable) and value.proxy.node.op != "placeholder":
            value.source = None
        return value

    return found
