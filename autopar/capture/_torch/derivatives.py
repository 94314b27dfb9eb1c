"""Gradients that forward itself computes: `torch.autograd.grad` is part of the graph, and backward goes through it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable

# Refuses results that follow from a tensor on which forward called requires_grad_(), since torch.compile's own results would lack what that
# did to them. A program's results have the gradients of the joint graph alone, which begin at parameters and inputs.
_CHECK = "_check_requires_grad_intermediate_outputs"


@contextlib.contextmanager
def gradients_within() -> Iterator[None]:
    """Dynamo takes `torch.autograd.grad` into the graph; of `Tensor.backward`, which writes into parameters, it says that it does not."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
        if hasattr(OutputGraph, _CHECK):  # since torch 2.13
            stack.enter_context(mock.patch.object(OutputGraph, _CHECK, lambda *_: None))
        stack.enter_context(mock.patch.object(TensorVariable, "method_backward", _as_ever))
        stack.enter_context(mock.patch.object(TorchInGraphFunctionVariable, "call_function", _made_first))
        yield


_BACKWARD = TensorVariable.method_backward


_CALL = TorchInGraphFunctionVariable.call_function


def _made_first(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """``torch.zeros(4, requires_grad=True)``, which Dynamo refuses, is ``torch.zeros(4).requires_grad_()``, which it takes."""
    asked = kwargs.get("requires_grad")
    if asked is None or not asked.is_python_constant() or asked.as_python_constant() is not True:
        return _CALL(self, tx, args, kwargs)
    made = _CALL(self, tx, args, {name: value for name, value in kwargs.items() if name != "requires_grad"})
    return made.call_method(tx, "requires_grad_", [], {})


def _as_ever(*args: Any, **kwargs: Any) -> Any:
    with torch._dynamo.config.patch(trace_autograd_ops=False):
        return _BACKWARD(*args, **kwargs)
