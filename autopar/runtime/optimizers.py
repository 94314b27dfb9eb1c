"""Checks of optimizers over distributed parameters at their steps.

A table lists the optimizers of torch that support DTensor parameters. For each of them, two steps
on sharded, strided and replicated parameters were compared with the plain model. The size of an
optimizer's state is compared with the size that the plan reserves.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RuntimeStateError, size_text
from autopar.runtime import changes
from autopar.runtime.dtensor import hold_value, shard_like
from autopar.runtime.dtensor_checkpoints import checkpointable
from autopar.runtime.rank_agreement import num_failures
from autopar.runtime.rank_comm import rank

# --------------------------------------------------------------------------------------------------
# Steps of optimizers on the local tensors of distributed parameters.
#
# An op on a DTensor takes several times as much host time as an op on a plain tensor, and an
# optimizer runs several ops for each parameter. The optimizers of `ELEMENTWISE` compute each
# element from the same element of the parameter, its gradient and its state. If these have the same
# placements, a step on this rank's local tensors is equal to a step on the full tensors.
#
# torch passes the optimizer to the hooks before a step, and the hooks may replace the arguments of
# the step. `take` returns a *stand-in* as the optimizer: an object of the same class and
# attributes, with the local tensors in its groups and its state. The user's optimizer is not
# changed; the step writes to the memory of its tensors. The first step runs on DTensors, so that
# torch creates the state.


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
_PARTS = "_autopar_parts"  # attribute of a stand-in: pairs of a parameter and its local tensor


def take(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a step on local tensors. A hook calls this before the step.

    Args:
        optimizer: the user's optimizer.
        args, kwargs: the arguments of the step, the optimizer first.

    Returns:
        The arguments with a stand-in as the optimizer; None if the step must run on the DTensors.
    """
    if len(args) > 1 or kwargs or not _is_elementwise(optimizer):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        stand_in = _stand_in(optimizer)
    return None if stand_in is None else ((stand_in,), {})


def give_back(optimizer: Optimizer, args: tuple[Any, ...]) -> None:
    """Update the user's optimizer after a step of a stand-in: add the new state, and increment the
    version counters of the parameters.

    Args:
        optimizer: the user's optimizer.
        args: the arguments of the step, as `take` returned them.
    """
    stepped = args[0]
    parts: list[tuple[DTensor, Tensor]] | None = vars(stepped).get(_PARTS)
    if parts is None:
        return
    for parameter, local in parts:
        user_state = optimizer.state[parameter]
        for name, value in stepped.state[local].items():
            if name not in user_state or _local(user_state[name]) is not value:
                user_state[name] = _as_state(value, parameter)
    increment_version([parameter for parameter, _ in parts])


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has a known class and no settings or hooks that need
    DTensors."""
    if type(optimizer) not in ELEMENTWISE or optimizer._optimizer_step_pre_hooks:
        return False
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return False
    return not any(
        group.get("differentiable") or any(isinstance(x, Tensor) for x in group.values())
        for group in optimizer.param_groups
    )


def _stand_in(optimizer: Optimizer) -> Optimizer | None:
    """Create the stand-in for a step. Return None if a gradient or state has other placements than
    its parameter, or a state does not exist yet."""
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
                state[parameter] = optimizer.state[parameter]  # both optimizers share this dict
                continue
            user_state = optimizer.state.get(parameter, {})
            if not _is_sharded_like(parameter.grad, parameter) or not _has_state(
                optimizer, group, user_state, parameter
            ):
                return None
            local = parameter._local_tensor.detach()
            local.grad = parameter.grad._local_tensor
            state[local] = {name: _local(value) for name, value in user_state.items()}
            parts.append((parameter, local))
            mine.append(local)
        groups.append({**group, "params": mine})
    stand_in: Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(vars(optimizer), param_groups=groups, state=state, **{_PARTS: parts})
    return stand_in


def _has_state(
    optimizer: Optimizer, group: dict[str, Any], held: dict[str, Any], parameter: DTensor
) -> bool:
    """Return whether the state of a parameter is complete and has its placements."""
    if not held and not (isinstance(optimizer, SGD) and not group["momentum"]):
        return False
    return all(
        _is_sharded_like(value, parameter)
        for value in held.values()
        if isinstance(value, Tensor) and (value.dim() or isinstance(value, DTensor))
    )


def _is_sharded_like(value: Any, parameter: DTensor) -> bool:
    """Return whether a value is a DTensor with the shape, mesh and placements of a parameter."""
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
    """Convert a value that a step added to the state of a local tensor to a value for the state of
    the parameter."""
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


# --------------------------------------------------------------------------------------------------
# The size of an optimizer's state, compared with the size that the plan reserves for it.
#
# A plan reserves a number of copies of each trained parameter for the optimizer's state
# (`autopar.request.PlanOptions.optimizer`). An optimizer with more state may exceed the memory
# budget; an optimizer with less state leaves memory unused. Neither is an error, so a difference is
# logged after a step.

log = logging.getLogger("autopar")

_PLANNED = "_autopar_planned_state"
_TOLD = "_autopar_told_of_state"
_NUM_STEPS = "_autopar_num_steps"
# Differences of at most this fraction of the parameters' bytes are not logged. They are caused by
# step counts and other small values.
_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class PlannedState:
    """The optimizer state that a plan reserves memory for.

    Attributes:
        optimizer: the value of the option `optimizer`.
        num_copies: the number of copies of each parameter.
        options: the number of copies for each possible value of the option.
    """

    optimizer: str
    num_copies: int
    options: dict[str, int]


def note_planned(parameters: Iterable[Tensor], planned: PlannedState) -> None:
    """Attach the planned state to parameters. The state of their optimizers is compared with it."""
    for parameter in parameters:
        setattr(parameter, _PLANNED, planned)


def check_state(optimizer: Optimizer) -> None:
    """Log a warning if the size of the state differs from the planned size. The sizes are compared
    after steps 1, 2, 4, 8 and so on, since some states grow."""
    num_steps = vars(optimizer).get(_NUM_STEPS, 0) + 1
    setattr(optimizer, _NUM_STEPS, num_steps)
    if num_steps & (num_steps - 1):
        return
    planned_parameters = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if hasattr(p, _PLANNED) and p.grad is not None
    ]
    if not planned_parameters:
        return
    planned: PlannedState = getattr(planned_parameters[0], _PLANNED)
    parameter_bytes = sum(map(_local_bytes, planned_parameters))
    reserved, used = (
        planned.num_copies * parameter_bytes,
        _state_bytes(optimizer, planned_parameters),
    )
    more = used > reserved
    if abs(used - reserved) <= _SHARE * parameter_bytes or vars(optimizer).get(_TOLD) == more:
        return
    setattr(optimizer, _TOLD, more)
    if rank() == 0:
        log.warning(
            "%s holds %s of state for %s of parameters on this rank, but the plan reserves %s for"
            " optimizer=%r: %s",
            type(optimizer).__name__,
            size_text(used),
            size_text(parameter_bytes),
            size_text(reserved),
            planned.optimizer,
            _remedy(planned, used / max(parameter_bytes, 1), used - reserved),
        )


def _remedy(planned: PlannedState, num_copies: float, missing_bytes: int) -> str:
    """Return the remedy for a state of `num_copies` copies that exceeds the plan by `missing_bytes`
    bytes."""
    sufficient = [
        name
        for name, num in planned.options.items()
        if abs(num - num_copies) <= _SHARE and name != "none"
    ]
    if sufficient:
        return f"compile with optimizer={sufficient[0]!r}, which reserves enough"
    least = min(
        (
            (num, name)
            for name, num in planned.options.items()
            if num > num_copies and name != "none"
        ),
        default=None,
    )
    if least is not None and least[1] != planned.optimizer and least[0] != planned.num_copies:
        return f"compile with optimizer={least[1]!r}, which is closer"
    if missing_bytes > 0:
        return (
            "the step may exceed its memory budget: compile with memory_bytes smaller by"
            f" {size_text(missing_bytes)}"
        )
    return "the step still fits into the memory of the device"


def _state_bytes(optimizer: Optimizer, held: list[Tensor]) -> int:
    """Return the size in bytes of the states of parameters on this rank, without scalars such as
    step counts."""
    leaves = (leaf for p in held for leaf in tree_leaves(optimizer.state.get(p, {})))
    tensors = {id(x): x for x in leaves if isinstance(x, Tensor) and x.dim() > 0}
    return sum(map(_local_bytes, tensors.values()))


def _local_bytes(x: Tensor) -> int:
    return (x.to_local() if isinstance(x, DTensor) else x).nbytes


SUPPORTED = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
REFUSED = {"SparseAdam": "gradients are dense"}
_FUSED = ("Adagrad", "SGD")  # DTensor has no rule for their fused step
_MARK = "_autopar_parameter"
_REPLACED = WeakIdKeyDictionary()  # parameters of plain models that were compiled
_hook: list[RemovableHandle] = []


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer is not known to fail on DTensors. Classes that are in neither list,
    such as optimizers of other packages, are accepted.

    Raises:
        RuntimeStateError: if the optimizer is known to fail. The message contains the reason.
    """
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    for cls in type(optimizer).__mro__:
        if not cls.__module__.startswith("torch.optim"):
            continue
        if cls.__name__ in REFUSED:
            raise RuntimeStateError(
                f"torch.optim.{cls.__name__} does not work on distributed parameters:"
                f" {REFUSED[cls.__name__]}",
                remedy=f"use one of {', '.join(SUPPORTED)}",
            )
        if cls.__name__ in _FUSED and is_fused:
            message = (
                f"torch.optim.{cls.__name__}(fused=True) does not work on distributed parameters:"
                " DTensor has no sharding rule for its fused kernel"
            )
            raise RuntimeStateError(
                message, remedy="leave out fused=True; Adam and AdamW support it"
            )


class Steps:
    """A record of the steps of optimizers since a module was called.

    Attributes:
        descriptions: a description of each step, in order.
        before_call: the steps and changes of parameters and gradients before the current call of
            the module, in words; None if ranks have disagreed since the last call.
    """

    def __init__(self) -> None:
        self.descriptions: list[str] = []
        self.before_call: str | None = ""
        self._num_failures = 0

    def take(self, parameters: Iterable[Tensor]) -> bool | None:
        """Return whether an optimizer has stepped since the last call of this method.

        Args:
            parameters: the parameters of the module.

        Returns:
            None if no optimizer has stepped and no parameter is trained, or if ranks have disagreed
            since the last call.
        """
        steps_taken, self.descriptions, self.before_call = self.descriptions, [], None
        before, self._num_failures = self._num_failures, num_failures()
        changed = changes.take()
        if before != self._num_failures:
            return None
        parts = [f"a step of {', '.join(steps_taken)}"] if steps_taken else []
        self.before_call = " and ".join([*parts, changed] if changed else parts)
        return True if steps_taken else False if any(p.requires_grad for p in parameters) else None


_CHANGES = "_autopar_changes"  # attribute of an optimizer in a step: the record before the step
_COMPARED = (
    "lr",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "betas",
    "alpha",
    "rho",
    "eps",
    "amsgrad",
    "maximize",
)
"""The settings of optimizers that every rank must have. Others may hold state of the rank."""


def describe_step(optimizer: Optimizer) -> str:
    """Describe a step of an optimizer: its class, its learning rates, and a hash of the settings,
    the number of gradients and the number of states of all parameter groups. The text is equal on
    ranks with equal settings. Tensors on a GPU are left out, since reading them waits for the GPU.
    """
    with torch._C.DisableTorchFunctionSubclass():
        groups = [
            [(name, _plain(group[name])) for name in _COMPARED if name in group]
            + [("gradients", sum(p.grad is not None for p in group["params"]))]
            for group in optimizer.param_groups
        ]
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    groups.append([("states", sum(map(bool, states)))])
    rates = dict.fromkeys(str(value) for group in groups for name, value in group if name == "lr")
    digest = hashlib.blake2b(repr(groups).encode(), digest_size=4).hexdigest()
    shown = ", ".join([*rates][:_SHOWN_RATES])
    return f"{type(optimizer).__name__} with lr={shown} and settings {digest}"


_SHOWN_RATES = 3


def _plain(value: Any) -> Any:
    """Return the value of a setting as it is compared."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return value


def may_step_compiled(optimizer: Optimizer) -> bool:
    """Return whether an optimizer holds a parameter of a compiled module, or none at all, as on a
    stage that has none of its parameters."""
    is_empty = not any(group["params"] for group in optimizer.param_groups)
    return is_empty or any(True for _ in _marks(optimizer))


def _marks(optimizer: Optimizer) -> Iterator[Steps]:
    """Iterate over the records of the compiled modules whose parameters an optimizer holds, once
    per parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (mark := getattr(parameter, _MARK, None)) is not None:
                yield mark


def watch_optimizers(parameters: Iterable[Tensor], steps: Steps) -> None:
    """Register hooks that check every optimizer of these parameters at its first step, make its
    state dict checkpointable, and record its steps in `steps`."""
    for parameter in parameters:
        setattr(changes.keep(parameter), _MARK, steps)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))
        _hook.append(register_optimizer_step_post_hook(_after_step))


def watch_replaced(parameters: Iterable[Tensor]) -> None:
    """Register parameters of a plain model that was compiled. Steps of their optimizers raise an
    error unless a parameter has a gradient."""
    for parameter in parameters:
        _REPLACED[parameter] = True


def _check_replaced(optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p in _REPLACED for p in parameters) and all(p.grad is None for p in parameters):
        message = (
            "the optimizer holds parameters of the plain model, which get no gradients: the"
            " compiled module has its own parameters"
        )
        raise RuntimeStateError(
            message, remedy=("create the optimizer after autopar.compile, with pm.parameters()")
        )


def _shard_state(optimizer: Optimizer) -> None:
    """Replace full tensors in the state of distributed parameters by DTensors. The state dict of a
    plain model's optimizer contains full tensors."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            is_sharded_state = (
                isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
            )
            if is_sharded_state and not isinstance(value, DTensor):
                state[name] = shard_like(parameter, value)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Check an optimizer at its first step. Return the arguments of the step; None if they are
    unchanged."""
    marks = {id(mark): mark for mark in _marks(optimizer)}
    step_text = describe_step(optimizer) if marks else ""
    for steps in marks.values():
        steps.descriptions.append(step_text)
    setattr(optimizer, _CHANGES, changes.recorded())
    if getattr(optimizer, _MARK, False):
        return take(optimizer, args, kwargs)
    _check_replaced(optimizer)
    if marks:
        check_optimizer(optimizer)
        _shard_state(optimizer)
        optimizer.register_load_state_dict_post_hook(_shard_state)
        optimizer.register_state_dict_post_hook(
            lambda _, state: {**state, "state": checkpointable(state["state"])}
        )
        setattr(optimizer, _MARK, True)  # other optimizers may get marked parameters later
    return None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    changes.restore(vars(optimizer).pop(_CHANGES))
    give_back(optimizer, args)
    check_state(optimizer)
