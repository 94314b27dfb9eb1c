"""Notes whether forward reads `torch.is_grad_enabled`. The result is a constant of the graph, so
the program is for calls in that mode only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from autopar.capture.diagnostics import is_torchs
from autopar.capture.trace import OutsideValue
from autopar.core import torch_state


@contextlib.contextmanager
def noted_gradient_mode(reads: list[OutsideValue]) -> Iterator[None]:
    """Append to `reads` if code outside of torch reads the mode in which forward is called. Code of
    torch reads it to choose between ops that compute the same."""
    call, mode = TorchInGraphFunctionVariable.call_function, torch.is_grad_enabled()
    steps = (("", torch_state.GRADIENT_MODE),)

    def call_and_note(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch; `tx` is Dynamo's translator."""
        result = call(variable, tx, args, kwargs)
        if (
            variable.value is torch.is_grad_enabled
            and torch.is_grad_enabled() is mode  # forward has not set another mode
            and not is_torchs(tx.f_code.co_filename)
        ):
            name = "result of torch.is_grad_enabled()"
            reads[:] = [OutsideValue(name, torch_state.__name__, steps, mode)]
        return result

    with mock.patch.object(TorchInGraphFunctionVariable, "call_function", call_and_note):
        yield
