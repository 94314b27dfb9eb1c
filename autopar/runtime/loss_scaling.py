"""The factor of the loss with which backward starts when it runs inside the call.

Programs with stages or several microbatches run backward inside the call. The user calls
`loss.backward()` later, and only then is the factor of the loss known, for example the factor of
`torch.amp.GradScaler`. This factor is the tangent. Gradients are linear in the tangent unless a
value overflows or underflows. A call therefore assumes a factor, and `loss.backward()` compares it
with the tangent:

    equal                           the gradients are published unchanged
    different, wide exponents       the gradients are multiplied by the ratio, which is exact except
                                    for rounding
    different, float16              the step runs again with the tangent, and later calls assume
                                    this factor

float16 has 5 exponent bits: a gradient that underflowed cannot be restored, and an overflow with
the assumed factor does not imply an overflow with the tangent. Other dtypes have at least 8
exponent bits. For them the step runs again only if a factor is beyond 2**64.

A gradient scaler changes its scale about once in thousands of steps, so few steps run twice.
Without a scaler, no step runs twice.
"""

from __future__ import annotations

import functools
import logging
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.capture.trace import Trace
from autopar.errors import RuntimeStateError
from autopar.runtime.optimizers import may_step_compiled
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import rank

log = logging.getLogger("autopar")

_WIDE = 64.0  # largest exponent of 2 of a factor that is safe for dtypes with 8 exponent bits
_ROUNDING = 1e-5  # relative; far below the precision of float16
# consecutive repeated steps before a warning is logged; a scaler that starts with a large scale
# repeats fewer steps
_MANY = 20


def computes_in_fp16(trace: Trace) -> bool:
    """Return whether a value of the graph is in float16."""
    values = (leaf for node in trace.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    return any(isinstance(x, Tensor) and x.dtype == torch.float16 for x in values)


class LossScale:
    """The factor of the loss that calls of one module and its variants assume."""

    def __init__(self) -> None:
        self._given = 1.0
        self._seen: float | None = None  # the tangent of the last step that ran again
        self._num_repeats = 0  # consecutive

    @property
    def user_factor(self) -> float:
        """The factor that the user has set as ``pm.loss_scale``; 1 by default."""
        return self._given

    @user_factor.setter
    def user_factor(self, value: float) -> None:
        """Set the factor that later calls assume.

        Raises:
            RuntimeStateError: if the factor is not a positive, finite number.
        """
        if not (isinstance(value, int | float | Tensor) and math.isfinite(value) and value > 0):
            raise RuntimeStateError(
                f"loss_scale={value!r} is not a loss factor",
                remedy="set a positive number, such as scaler.get_scale()",
            )
        self._given, self._seen = float(value), None

    @property
    def assumed_factor(self) -> float:
        """The factor with which backward starts in the next call."""
        return self._given if self._seen is None else self._seen

    def learn(self, tangent: float) -> None:
        """Record that a step ran again with this factor. Later calls assume it."""
        if tangent == 0.0 or not math.isfinite(tangent):
            return
        self._seen = tangent
        self._num_repeats += 1
        if self._num_repeats == _MANY and rank() == 0:
            log.warning(
                "each of the last %d steps ran twice, because its loss was multiplied by a"
                " different factor from the step before: multiply inside the model's forward, or"
                " set pm.loss_scale to the whole factor before each call",
                _MANY,
            )

    def confirm(self) -> None:
        """Record that a step did not run again."""
        if self._num_repeats < _MANY:
            self._num_repeats = 0


def may_be_multiplied(assumed: float, tangent: float, *, is_fp16: bool) -> bool:
    """Return whether gradients for one factor may be multiplied by the ratio of the factors to
    obtain the gradients for another factor.

    Args:
        assumed: the factor with which backward started.
        tangent: the actual factor.
        is_fp16: whether a value of the graph is in float16.
    """
    if assumed == tangent:
        return True
    if is_fp16:
        return math.isclose(assumed, tangent, rel_tol=_ROUNDING)
    if tangent == 0.0 or not math.isfinite(tangent):
        return True
    return max(abs(math.log2(abs(x))) for x in (assumed, tangent)) <= _WIDE


class Backwards:
    """The count of backwards of one module. Ranks make comparisons that take time, such as reading
    a value from a GPU, in backwards 1, 2, 4, 8 and so on."""

    def __init__(self) -> None:
        self._num = 0

    def begin(self) -> bool:
        """Count a backward. Return whether ranks compare values that take time to compare."""
        self._num += 1
        return self._num & (self._num - 1) == 0


def describe_factor(tangent: Tensor | None, *, is_turn: bool) -> str:
    """Describe the factor of the loss with which a backward starts; empty if it is 1 or not read.
    Ranks announce the text, so that no rank multiplies its loss by another factor.

    Args:
        tangent: the tangent of the loss, a scalar; None if the loss is not used.
        is_turn: whether to wait for a GPU that has the tangent.
    """
    if tangent is None or not (is_turn or tangent.device.type == "cpu"):
        return ""
    factor = float(tangent)
    return "" if factor == 1.0 else f" of the loss multiplied by {factor!r}"


# --------------------------------------------------------------------------------------------------
# Sharing of overflows that gradient scalers find between the stages of a pipeline.
#
# `torch.amp.GradScaler` skips a step and lowers its scale if a gradient is infinite or NaN. A
# DTensor shares this with all ranks of its mesh, but the mesh of a stage contains only the ranks of
# that stage. Other stages would take the step and continue with a different scale. Overflows are
# therefore reduced over all stages in `GradScaler._unscale_grads_`, once per optimizer. Both
# `unscale_` and steps of fused optimizers call this method. torch's `ShardedGradScaler` does the
# same.
#
# The reduction is collective: every rank must call the scaler for the same optimizers in the same
# order. Ranks announce it, so that a rank which does not take part is named. Optimizers of other
# models are not reduced.

_ANNOUNCED = "unscales the gradients of an optimizer with a GradScaler"
_GROUPS: dict[
    tuple[int, ...], tuple[dist.ProcessGroup, str]
] = {}  # the group and device type of each pipeline, by its ranks


def share_overflows(group: dist.ProcessGroup, device_type: str) -> None:
    """From now on, share overflows that gradient scalers find with all ranks of a pipeline.

    Args:
        group: the ranks of the pipeline.
        device_type: the type of the devices on which the group communicates.
    """
    _GROUPS[tuple(dist.get_process_group_ranks(group))] = group, device_type
    if not hasattr(torch.amp.GradScaler._unscale_grads_, "__wrapped__"):
        torch.amp.GradScaler._unscale_grads_ = _share_overflows(
            torch.amp.GradScaler._unscale_grads_
        )


def _share_overflows(unscale: Any) -> Any:
    @functools.wraps(unscale)
    def unscale_and_share(
        scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Unscale gradients like the scaler, and share overflows.

        Args:
            scaler, optimizer, inv_scale, found_inf: as for `_unscale_grads_`.
        """
        overflows: dict[torch.device, Tensor] = unscale(
            scaler, optimizer, inv_scale, found_inf, *args, **kwargs
        )
        groups = _live_groups() if may_step_compiled(optimizer) else []
        for group, device_type in groups:
            is_whole = group.size() == dist.get_world_size()
            with announced(_ANNOUNCED) if is_whole else nullcontext():
                _share(overflows, found_inf, group, device_type)
        return overflows

    return unscale_and_share


def _share(
    found: dict[torch.device, Tensor], found_inf: Tensor, group: dist.ProcessGroup, device_type: str
) -> None:
    """Reduce `found`, the overflows by device, over the ranks of a group. Ranks without gradients
    also take part."""
    here = [x.to(device_type).clamp(max=1.0) for x in found.values()]
    flags = torch.stack(
        [
            sum(here, torch.zeros((), device=device_type)),
            torch.tensor(float(bool(here)), device=device_type),
        ]
    )
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    if not found and bool(flags[1]):
        found[found_inf.device] = found_inf
    for overflow in found.values():
        overflow.copy_(flags[0])


def _live_groups() -> list[tuple[dist.ProcessGroup, str]]:
    """Return the groups of pipelines that have not been destroyed, with their device types."""
    for ranks, (group, _) in [*_GROUPS.items()]:
        if not dist.is_initialized() or not _is_known(group):
            del _GROUPS[ranks]
    return [*_GROUPS.values()]


def _is_known(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # the group was destroyed
        return False
