"""Overflows that gradient scalers find, shared by the stages of a pipeline.

`torch.amp.GradScaler` skips a step and lowers its scale where a gradient has an infinite or undefined value. A DTensor's gradient says so
on all ranks of its mesh, and the mesh of a stage has the ranks of that stage alone. Other stages would take the step, with another scale
from then on. So what any stage finds is told to all, once for each optimizer whose gradients are checked, where the scaler gathers what it
found: `GradScaler._unscale_grads_`, through which both `unscale_` and steps of fused optimizers go. torch's own `ShardedGradScaler` does
the same there.

The check is collective. Every rank has to call the scaler for the same optimizers in the same order, as every rank runs the same script.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_GROUPS: dict[tuple[int, ...], tuple[dist.ProcessGroup, str]] = {}  # ranks of a pipeline → their group, and the type of its devices


def share_overflows(group: dist.ProcessGroup, device_type: str) -> None:
    """Let all ranks of a pipeline know what gradient scalers find on one of them, from now on."""
    _GROUPS[tuple(dist.get_process_group_ranks(group))] = group, device_type
    if not hasattr(torch.amp.GradScaler._unscale_grads_, "__wrapped__"):
        torch.amp.GradScaler._unscale_grads_ = _sharing(torch.amp.GradScaler._unscale_grads_)  # type: ignore[method-assign]


def _sharing(unscale: Any) -> Any:
    @functools.wraps(unscale)
    def unscale_and_share(scaler: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any) -> Any:
        found: dict[torch.device, Tensor] = unscale(scaler, optimizer, inv_scale, found_inf, *args, **kwargs)
        for group, device_type in _live_groups():
            _share(found, found_inf, group, device_type)
        return found

    return unscale_and_share


def _share(found: dict[torch.device, Tensor], found_inf: Tensor, group: dist.ProcessGroup, device_type: str) -> None:
    """Write into `found`, by device, what any rank of the group has found; a rank without gradients takes part, too."""
    here = [x.to(device_type).clamp(max=1.0) for x in found.values()]
    told = torch.stack([sum(here, torch.zeros((), device=device_type)), torch.tensor(float(bool(here)), device=device_type)])
    dist.all_reduce(told, dist.ReduceOp.MAX, group)
    if not found and bool(told[1]):
        found[found_inf.device] = found_inf
    for each in found.values():
        each.copy_(told[0])


def _live_groups() -> list[tuple[dist.ProcessGroup, str]]:
    """Those of pipelines whose process groups were not destroyed."""
    for ranks, (group, _) in [*_GROUPS.items()]:
        if not dist.is_initialized() or not _is_known(group):
            del _GROUPS[ranks]
    return [*_GROUPS.values()]


def _is_known(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # torch says so of a group that was destroyed
        return False
