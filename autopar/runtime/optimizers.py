"""Which of torch's optimizers take DTensor parameters: a table, checked at an optimizer's first
step.

The table was made by running two steps of each on sharded, strided and replicated parameters
against the plain model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RuntimeStateError, size_text
from autopar.runtime.dtensor import parted_as
from autopar.runtime.dtensor_checkpoints import checkpointable
from autopar.runtime.rank_agreement import num_failures
from autopar.runtime.rank_comm import rank

# --------------------------------------------------------------------------------------------------
# The state that an optimizer holds beside parameters, compared with what the plan reserves for
# it.
#
# A plan counts so many copies of each trained parameter as the optimizer's state
# (`autopar.planner.PlanOptions.optimizer`). An optimizer with more state may not fit the memory,
# one with less leaves memory unused that the plan could spend. Neither is wrong, so that the log
# says it, after a step.

log = logging.getLogger("autopar")

_PLANNED = "_autopar_planned_state"
_TOLD = "_autopar_told_of_state"
_NUM_STEPS = "_autopar_num_steps"
# of the parameters' own bytes, up to which a difference is not worth a word: step counts, a scalar
# or a row here and there
_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class PlannedState:
    """What a plan reserves.

    Attributes:
        optimizer: its name as an option. num_copies: how many copies of each parameter. options: of
            all optimizers that may be planned, the same number by name.
    """

    optimizer: str
    num_copies: int
    options: dict[str, int]


def note_planned(parameters: Iterable[Tensor], planned: PlannedState) -> None:
    """Compare what optimizers of these parameters hold with `planned`."""
    for parameter in parameters:
        setattr(parameter, _PLANNED, planned)


def check_state(optimizer: Optimizer) -> None:
    """Warn where the state differs from the planned one; looked at after steps 1, 2, 4, 8 and so
    on, since some state grows."""
    num_steps = vars(optimizer).get(_NUM_STEPS, 0) + 1
    setattr(optimizer, _NUM_STEPS, num_steps)
    if num_steps & (num_steps - 1):
        return
    held = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if hasattr(p, _PLANNED) and p.grad is not None
    ]
    if not held:
        return
    planned: PlannedState = getattr(held[0], _PLANNED)
    own = sum(map(_local_bytes, held))
    reserved, used = planned.num_copies * own, _state_bytes(optimizer, held)
    more = used > reserved
    if abs(used - reserved) <= _SHARE * own or vars(optimizer).get(_TOLD) == more:
        return
    setattr(optimizer, _TOLD, more)
    if rank() == 0:
        log.warning(
            "%s holds %s of state beside %s of parameters on this rank, and the plan reserves %s,"
            " for optimizer=%r: %s",
            type(optimizer).__name__,
            size_text(used),
            size_text(own),
            size_text(reserved),
            planned.optimizer,
            _remedy(planned, used / max(own, 1), used - reserved),
        )


def _remedy(planned: PlannedState, num_copies: float, missing_bytes: int) -> str:
    """What to do about a state of so many copies, where so many bytes are missing."""
    alike = [
        name
        for name, num in planned.options.items()
        if abs(num - num_copies) <= _SHARE and name != "none"
    ]
    if alike:
        return f"compile with optimizer={alike[0]!r}, which reserves as much"
    least = min(
        (
            (num, name)
            for name, num in planned.options.items()
            if num > num_copies and name != "none"
        ),
        default=None,
    )
    if least is not None and least[1] != planned.optimizer and least[0] != planned.num_copies:
        return f"compile with optimizer={least[1]!r}, which is nearer"
    if missing_bytes > 0:
        return (
            "the step may need more than its budget: compile with memory_bytes smaller by"
            f" {size_text(missing_bytes)}"
        )
    return "the plan keeps to less memory than there is"


def _state_bytes(optimizer: Optimizer, held: list[Tensor]) -> int:
    """Of these parameters on this rank, without single numbers, as the count of steps is."""
    leaves = (leaf for p in held for leaf in tree_leaves(optimizer.state.get(p, {})))
    found = {id(x): x for x in leaves if isinstance(x, Tensor) and x.dim() > 0}
    return sum(map(_local_bytes, found.values()))


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
_FUSED = ("Adagrad", "SGD")  # whose fused step DTensor has no rule for
_MARK = "_autopar_parameter"
_REPLACED = WeakIdKeyDictionary()  # parameters of plain models that were compiled
_hook: list[RemovableHandle] = []


def check_optimizer(optimizer: Optimizer) -> None:
    """Make sure that the optimizer computes on DTensors what it computes on plain tensors.

    Classes that are in neither list (other packages' optimizers, and subclasses of those that work)
    pass: nothing is known against them.

    Raises:
        RuntimeStateError: for those known to fail, with the reason.
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
            what = (
                f"torch.optim.{cls.__name__}(fused=True) does not work on distributed parameters:"
                " DTensor has no rule for its one kernel"
            )
            raise RuntimeStateError(what, remedy="leave fused=True out; Adam and AdamW take it")


class Steps:
    """Whether optimizers have stepped since a module was called."""

    def __init__(self) -> None:
        self.has_stepped, self._num_failures = False, 0

    def take(self, parameters: Iterable[Tensor]) -> bool | None:
        """Whether one has; None if none has and there is nothing to train, or ranks have done
        different things. From now on none has."""
        has_stepped, self.has_stepped = self.has_stepped, False
        before, self._num_failures = self._num_failures, num_failures()
        if before != self._num_failures:
            return None
        return True if has_stepped else False if any(p.requires_grad for p in parameters) else None


def watch_optimizers(parameters: Iterable[Tensor], steps: Steps) -> None:
    """Check every optimizer that holds one of `parameters` at its first step, make its state
    dict checkpointable, and note its steps."""
    for parameter in parameters:
        setattr(parameter, _MARK, steps)
    if not _hook:
        _hook.append(register_optimizer_step_pre_hook(_before_step))
        _hook.append(
            register_optimizer_step_post_hook(lambda optimizer, *_: check_state(optimizer))
        )


def watch_replaced(parameters: Iterable[Tensor]) -> None:
    """Refuse steps of optimizers that hold these and no gradient: they are of a plain model,
    whose compiled one is trained."""
    for parameter in parameters:
        _REPLACED[parameter] = True


def _check_replaced(optimizer: Optimizer) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p in _REPLACED for p in held) and all(p.grad is None for p in held):
        what = (
            "the optimizer holds parameters of the plain model, which have no gradients: those of"
            " the compiled one are others"
        )
        raise RuntimeStateError(what, remedy="build it after autopar.compile, of pm.parameters()")


def _share_state(optimizer: Optimizer) -> None:
    """Whole tensors in its state, as that of a plain model's optimizer has them, become this
    rank's parts beside distributed parameters."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            alike = isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0
            if alike and not isinstance(value, DTensor):
                state[name] = parted_as(parameter, value)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    marks = {
        id(mark): mark
        for group in optimizer.param_groups
        for p in group["params"]
        if (mark := getattr(p, _MARK, None)) is not None
    }
    for steps in marks.values():
        steps.has_stepped = True
    if getattr(optimizer, _MARK, False):
        return
    _check_replaced(optimizer)
    if marks:
        check_optimizer(optimizer)
        _share_state(optimizer)
        optimizer.register_load_state_dict_post_hook(_share_state)
        optimizer.register_state_dict_post_hook(
            lambda _, state: {**state, "state": checkpointable(state["state"])}
        )
        setattr(optimizer, _MARK, True)  # others may be given parameters later
