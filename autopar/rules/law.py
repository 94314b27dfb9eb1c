"""The law that every rule must pass: split → run → join equals run (`trial`), for every strategy
that is offered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.rules.call import Call
from autopar.rules.knowledge import strategies
from autopar.rules.trial import check_option, check_strategy

__all__ = ["check_option", "check_options", "check_strategies", "check_strategy"]


def check_options(call: Call, make_inputs: Callable[[], Sequence[torch.Tensor]], n: int) -> int:
    """Check every option of `call` that splits evenly on an axis of size `n`; gives how many there
    were.

    Raises:
        RuleError: where an option does not reproduce the whole op.
    """
    return check_strategies(call, make_inputs(), (n,))


def check_strategies(call: Call, inputs: Sequence[torch.Tensor], mesh_shape: Sequence[int]) -> int:
    """As `check_options`, for every strategy on a mesh."""
    found = strategies(call, mesh_shape)
    for strategy in found:
        check_strategy(call, inputs, strategy, mesh_shape)
    return len(found)
