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


def computed_attributes() -> contextlib.AbstractContextManager[object]:
    """While it is entered, what Dynamo captures computes such attributes in its graph, also where they are returned."""
    return mock.patch.object(TensorVariable, "var_getattr", _without_place(TensorVariable.var_getattr))


def _without_place(var_getattr: Callable[..., Any]) -> Callable[..., Any]:
    def found(self: Any, tx: Any, name: str) -> Any:
        value = var_getattr(self, tx, name)
        if isinstance(value, TensorVariable) and value.proxy.node.op != "placeholder":
            value.source = None
        return value

    return found
