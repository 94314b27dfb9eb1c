"""What pickles hold of distributed tensors: ``torch.save(pm.state_dict(), file)`` writes what the plain model loads, or is refused.

A pickle is made by one process, and a collective in it would wait for the others. So a tensor is written only where this process has the
whole of it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError

_stages: set[DeviceMesh] = set()  # of which a module has several
_REMEDY = (
    "on every rank call state = pm.full_state_dict(), whose tensors are whole, and then save it on one rank: torch.save(state, file); an "
    "optimizer's state is saved by autopar.Checkpoints"
)


def of_one_stage(mesh: DeviceMesh) -> None:
    """Tensors on this mesh are of one stage of a module alone."""
    _stages.add(mesh)


def is_of_one_stage(mesh: DeviceMesh) -> bool:
    """Whether `of_one_stage` was called with it."""
    return mesh in _stages


def has_stages() -> bool:
    """Whether any module of this process has several stages."""
    return bool(_stages)


def reduce_whole(tensor: DTensor, protocol: Any) -> Any:
    """Pickle a tensor as the plain tensor that it is.

    Raises:
        RuntimeStateError: if this process has a part of the tensor, or the tensors of one stage.
    """
    if is_of_one_stage(tensor.device_mesh):
        refuse_parts("this rank holds the parameters of its own stage alone")
    sizes = tensor.device_mesh.shape
    if not all(size == 1 or p.is_replicate() for size, p in zip(sizes, tensor.placements, strict=True)):
        refuse_parts(f"this rank holds a part of a tensor of shape {tuple(tensor.shape)}")
    local = tensor.detach().to_local()
    return local.requires_grad_(tensor.requires_grad and tensor.is_leaf).__reduce_ex__(protocol)


def refuse_parts(why: str, action: str = "torch.save or pickle") -> NoReturn:
    """Raises RuntimeStateError: what `action` would write is not the whole."""
    raise RuntimeStateError(f"{action} would write this rank's parts alone: {why}", remedy=_REMEDY)
