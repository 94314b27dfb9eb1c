"""The state that an optimizer holds beside parameters, compared with what the plan reserves for it.

A plan counts so many copies of each trained parameter as the optimizer's state (`autopar.planning.PlanOptions.optimizer`). An optimizer
with more state may not fit the memory, one with less leaves memory unused that the plan could spend. Neither is wrong, so that the log
says it, after a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autopar.errors import size_text
from autopar.run.ranks import rank

log = logging.getLogger("autopar")

_PLANNED = "_autopar_planned_state"
_TOLD = "_autopar_told_of_state"
_NUM_STEPS = "_autopar_num_steps"
_SHARE = 0.05  # of the parameters' own bytes, up to which a difference is not worth a word: step counts, a scalar or a row here and there


@dataclass(frozen=True, slots=True)
class PlannedState:
    """What a plan reserves.

    Attributes:
        optimizer: its name as an option. num_copies: how many copies of each parameter. options: of all optimizers that may be planned,
            the same number by name.
    """

    optimizer: str
    num_copies: int
    options: dict[str, int]


def note_planned(parameters: Iterable[Tensor], planned: PlannedState) -> None:
    """Compare what optimizers of these parameters hold with `planned`."""
    for parameter in parameters:
        setattr(parameter, _PLANNED, planned)


def check_state(optimizer: Optimizer) -> None:
    """Warn where the state differs from the planned one; looked at after steps 1, 2, 4, 8 and so on, since some state grows."""
    num_steps = vars(optimizer).get(_NUM_STEPS, 0) + 1
    setattr(optimizer, _NUM_STEPS, num_steps)
    if num_steps & (num_steps - 1):
        return
    held = [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, _PLANNED) and p.grad is not None]
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
            "%s holds %s of state beside %s of parameters on this rank, and the plan reserves %s, for optimizer=%r: %s",
            type(optimizer).__name__, size_text(used), size_text(own), size_text(reserved), planned.optimizer,
            _remedy(planned, used / max(own, 1), used - reserved),
        )  # fmt: skip


def _remedy(planned: PlannedState, num_copies: float, missing_bytes: int) -> str:
    """What to do about a state of so many copies, where so many bytes are missing."""
    alike = [name for name, num in planned.options.items() if abs(num - num_copies) <= _SHARE and name != "none"]
    if alike:
        return f"compile with optimizer={alike[0]!r}, which reserves as much"
    least = min(((num, name) for name, num in planned.options.items() if num > num_copies and name != "none"), default=None)
    if least is not None and least[1] != planned.optimizer and least[0] != planned.num_copies:
        return f"compile with optimizer={least[1]!r}, which is nearer"
    if missing_bytes > 0:
        return f"the step may need more than its budget: compile with memory_bytes smaller by {size_text(missing_bytes)}"
    return "the plan keeps to less memory than there is"


def _state_bytes(optimizer: Optimizer, held: list[Tensor]) -> int:
    """Of these parameters on this rank, without single numbers, as the count of steps is."""
    leaves = (leaf for p in held for leaf in tree_leaves(optimizer.state.get(p, {})))
    found = {id(x): x for x in leaves if isinstance(x, Tensor) and x.dim() > 0}
    return sum(map(_local_bytes, found.values()))


def _local_bytes(x: Tensor) -> int:
    return (x.to_local() if isinstance(x, DTensor) else x).nbytes
