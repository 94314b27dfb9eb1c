"""Full values of the parameters and buffers of a compiled module, gathered from all ranks and
stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_flatten

from autopar.errors import RuntimeStateError
from autopar.runtime.device_mesh import wrap_local
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import of_all, rank

if TYPE_CHECKING:
    from autopar.runtime.parameter_module import Holder


def whole_values(
    holder: Holder, names: Collection[str] | None = None, *, rank0_only: bool = True
) -> dict[str, Tensor]:
    """Gather full values on the host, under all names that the model has for them.

    Every rank must call this. Tied parameters share one tensor.

    Args:
        holder: the compiled module.
        names: names of parameters and saved buffers; by default all of them.
        rank0_only: if True, ranks other than 0 get an empty dict.

    Returns:
        Plain tensors on the CPU, by name.

    Raises:
        RuntimeStateError: on all ranks, if values are missing or torch cannot gather one.
    """
    holder.check_values()
    names_by_owner = {
        owner: own
        for owner, own in holder.same_names().items()
        if names is None or any(name in names for name in own)
    }
    everywhere = of_all(names_by_owner)
    _check_joined({own[0]: holder.stored(own[0]) for own in names_by_owner.values()})
    full_values = dict[str, Tensor]()
    for owner in dict.fromkeys(owner for each in everywhere for owner in each):
        holders = [number for number, each in enumerate(everywhere) if owner in each]
        value = _whole(holder.stored(names_by_owner[owner][0])) if owner in names_by_owner else None
        wanting = {0} if rank0_only else set(range(len(everywhere)))
        if wanting - set(holders):  # the value belongs to a stage that some of these ranks lack
            value = _broadcast(value, holders[0])
        if rank() in wanting and value is not None:
            names_of_tensor = everywhere[holders[0]][owner]
            full_values |= {
                name: value for name in names_of_tensor if names is None or name in names
            }
    return full_values


def _broadcast(value: Tensor | None, source: int) -> Tensor | None:
    """Broadcast the value of rank `source`; every rank must call this."""
    box = [value if rank() == source else None]
    with announced("gathers the full state", is_aside=True):
        dist.broadcast_object_list(box, src=source)
    return box[0]


def extra_states(model: nn.Module) -> dict[str, object]:
    """Return the results of ``get_extra_state`` of all modules, by their keys in a state dict."""
    base = nn.Module.get_extra_state
    return {
        f"{path}._extra_state" if path else "_extra_state": module.get_extra_state()
        for path, module in model.named_modules(remove_duplicate=False)
        if getattr(type(module), "get_extra_state", base) is not base
    }


def is_same(one: object, other: object) -> bool:
    """Return whether two extra states are equal."""
    (mine, spec), (its, other_spec) = tree_flatten(one), tree_flatten(other)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
        for a, b in zip(mine, its, strict=True)
    )


def _check_joined(held: Mapping[str, Tensor]) -> None:
    """Raise an error on all ranks if torch < 2.12 cannot gather a tensor because it is sharded
    inside a dim, such as the heads of a fused projection."""
    if torch.__version__ >= (2, 12):
        return
    unjoined = [
        name
        for name, x in held.items()
        if isinstance(x, DTensor) and any(isinstance(p, _StridedShard) for p in x.placements)
    ]
    if names := sorted({name for of_one in of_all(unjoined) for name in of_one}):
        message = (
            f"torch {torch.__version__} cannot gather {names[0]!r}, which is sharded inside a dim"
        )
        remedy = (
            "save weights with autopar.save_weights and states with autopar.Checkpoints, or use a"
            " newer torch"
        )
        raise RuntimeStateError(message, remedy=remedy)


def _whole(stored: Tensor) -> Tensor:
    """Return a copy of the full tensor on the CPU."""
    value = stored.detach()
    if not isinstance(value, DTensor):
        return value.cpu().clone()
    local, mesh = value.to_local(), value.device_mesh
    if (
        local.device.type != mesh.device_type
    ):  # the tensor is offloaded to the host, where NCCL cannot communicate
        on_device = local.to(mesh.device_type)
        value = wrap_local(on_device, mesh, value.placements, value.shape, value.stride())
    full_tensor = value.full_tensor()
    return full_tensor.cpu() if full_tensor.device.type != "cpu" else full_tensor.clone()
