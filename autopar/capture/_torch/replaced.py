"""Functions of torch's in whose place Dynamo reads others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo import trace_rules
from torch.nn import functional

from autopar.ops import ctc_loss


@contextlib.contextmanager
def functions_replaced() -> Iterator[None]:
    """The CTC loss by an op that has fixed shapes; and cuDNN's flags, which change nothing that is computed, by nothing."""
    trace_rules.get_torch_obj_rule_map()  # found by name once for the process: later, Dynamo would take what stands there now for torch's

    def flags(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with mock.patch.object(functional, "ctc_loss", ctc_loss), mock.patch.object(torch.backends.cudnn, "flags", flags):
        yield
