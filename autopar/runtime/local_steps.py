"""Steps of optimizers on the local tensors of distributed parameters.

An op on a DTensor costs several times as much host time as one on a plain tensor, and an optimizer
calls some for each parameter. The optimizers of `ELEMENTWISE` compute each element from the same
element of the parameter, its gradient and its state. If these have the same placements, the step on
this rank's local tensors is the step of the whole tensors.

torch passes the optimizer itself to the hooks before a step, and takes other arguments of the step
from them. `take` returns a *stand-in* as the optimizer: an object of the same class and attributes,
with the local tensors in its groups and its state. The user's optimizer is not changed, and what
the step wrote is in the memory of its own tensors. A first step is computed on DTensors, so that
torch makes the state.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from autopar.runtime.dtensor import hold_value

ELEMENTWISE = (
    ASGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Adamax,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SGD,
)
_PARTS = "_autopar_parts"  # attribute of a stand-in: each parameter with its local tensor


def take(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a step on local tensors, as a hook before the step.

    Args:
        optimizer: the user's optimizer.
        args, kwargs: the arguments of the step, the optimizer first.

    Returns:
        The arguments with a stand-in as the optimizer; None if the step has to be computed on the
        parameters themselves.
    """
    if len(args) > 1 or kwargs or not _is_taken(optimizer):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        made = _stand_in(optimizer)
    return None if made is None else ((made,), {})


def give_back(optimizer: Optimizer, args: tuple[Any, ...]) -> None:
    """Complete the user's optimizer after a step of a stand-in: state that the step has added, and
    the version counters of parameters.

    Args:
        optimizer: the user's optimizer.
        args: the arguments of the step, as `take` returned them.
    """
    stepped = args[0]
    parts: list[tuple[DTensor, Tensor]] | None = vars(stepped).get(_PARTS)
    if parts is None:
        return
    for parameter, local in parts:
        held = optimizer.state[parameter]
        for name, value in stepped.state[local].items():
            if name not in held or _local(held[name]) is not value:
                held[name] = _as_state(value, parameter)
    increment_version([parameter for parameter, _ in parts])


def _is_taken(optimizer: Optimizer) -> bool:
    """Whether the optimizer is of a known class, without settings or hooks that need DTensors."""
    if type(optimizer) not in ELEMENTWISE or optimizer._optimizer_step_pre_hooks:
        return False
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return False
    return not any(
        group.get("differentiable") or any(isinstance(x, Tensor) for x in group.values())
        for group in optimizer.param_groups
    )


def _stand_in(optimizer: Optimizer) -> Optimizer | None:
    """Make the stand-in of a step; None if a gradient or a state is not split as its parameter, or
    a state has not been made yet."""
    parts: list[tuple[DTensor, Tensor]] = []
    state: dict[Tensor, Any] = defaultdict(dict)
    groups = []
    for group in optimizer.param_groups:
        mine = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if not isinstance(parameter, DTensor):
                mine.append(parameter)
                state[parameter] = optimizer.state[parameter]  # one dict of both
                continue
            held = optimizer.state.get(parameter, {})
            if not _is_split_as(parameter.grad, parameter) or not _has_state(
                optimizer, group, held, parameter
            ):
                return None
            local = parameter._local_tensor.detach()
            local.grad = parameter.grad._local_tensor
            state[local] = {name: _local(value) for name, value in held.items()}
            parts.append((parameter, local))
            mine.append(local)
        groups.append({**group, "params": mine})
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(vars(optimizer), param_groups=groups, state=state, **{_PARTS: parts})
    return made


def _has_state(
    optimizer: Optimizer, group: dict[str, Any], held: dict[str, Any], parameter: DTensor
) -> bool:
    """Whether the state of a parameter is complete, and split like it."""
    if not held and not (isinstance(optimizer, SGD) and not group["momentum"]):
        return False
    return all(
        _is_split_as(value, parameter)
        for value in held.values()
        if isinstance(value, Tensor) and (value.dim() or isinstance(value, DTensor))
    )


def _is_split_as(value: Any, parameter: DTensor) -> bool:
    """Whether a tensor is a DTensor of the shape, mesh and placements of a parameter."""
    if not isinstance(value, DTensor):
        return False
    mine, its = parameter._spec, value._spec
    return (
        (its.mesh is mine.mesh or its.mesh == mine.mesh)
        and its.placements == mine.placements
        and value._local_tensor.shape == parameter._local_tensor.shape
        and value.shape == parameter.shape
    )


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _as_state(value: Any, parameter: DTensor) -> Any:
    """Return a value that a step has added to the state of a local tensor, for the parameter."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    spec = parameter._spec
    return hold_value(
        DTensor.from_local(
            value,
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    )
