"""The law of rules: for every strategy of a rule, split → run → join equals run (`trial`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.rules.call import Call
from autopar.rules.knowledge import strategies
from autopar.rules.trial import check_option, check_strategy

__all__ = ["check_option", "check_options", "check_strategies", "check_strategy"]


def check_options(call: Call, make_inputs: Callable[[], Sequence[torch.Tensor]], n: int) -> int:
    """Check every option of a call on one axis.

    Args:
        call: the call.
        make_inputs: creates its operands.
        n: number of devices on the axis.

    Returns:
        The number of options that were checked.

    Raises:
        RuleError: an option does not reproduce the results of the full op.
    """
    return check_strategies(call, make_inputs(), (n,))


def check_strategies(call: Call, inputs: Sequence[torch.Tensor], mesh_shape: Sequence[int]) -> int:
    """Check every strategy of a call on a mesh.

    Args:
        call: the call.
        inputs: its operands.
        mesh_shape: number of devices on each axis of the mesh.

    Returns:
        The number of strategies that were checked.

    Raises:
        RuleError: a strategy does not reproduce the results of the full op.
    """
    checked = strategies(call, mesh_shape)
    for strategy in checked:
        check_strategy(call, inputs, strategy, mesh_shape)
    return len(checked)
