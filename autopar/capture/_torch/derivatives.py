"""Gradients that forward itself computes: `torch.autograd.grad` is part of the graph, and backward goes through it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable

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
        yield


_BACKWARD = TensorVariable.method_backward


def _as_ever(*args: Any, **kwargs: Any) -> Any:
    with torch._dynamo.config.patch(trace_autograd_ops=False):
        return _BACKWARD(*args, **kwargs)
