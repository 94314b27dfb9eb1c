"""Distributed tensors in pickles and in checkpoints of torch.distributed.checkpoint.

``torch.save(pm.state_dict(), file)`` writes plain tensors, which the plain model can load, or
raises an error. A single process writes a pickle, and a collective would wait for the other ranks
forever. A tensor can therefore be pickled only if this process holds the full tensor.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from autopar.errors import RuntimeStateError

_stages: set[DeviceMesh] = set()  # meshes of stages of modules with several stages
_REMEDY = (
    "call state = pm.full_state_dict() on every rank, which returns full tensors, then save it on"
    " one rank: torch.save(state, file); autopar.Checkpoints saves an optimizer's state"
)


def of_one_stage(mesh: DeviceMesh) -> None:
    """Register the mesh of one stage of a module with several stages."""
    _stages.add(mesh)


def is_of_one_stage(mesh: DeviceMesh) -> bool:
    """Return whether a mesh was registered with `of_one_stage`."""
    return mesh in _stages


def has_stages() -> bool:
    """Return whether any module of this process has several stages."""
    return bool(_stages)


def reduce_whole(tensor: DTensor, protocol: Any) -> Any:
    """Pickle a distributed tensor as a plain tensor.

    Raises:
        RuntimeStateError: if this process holds only a shard of the tensor, or only the tensors of
            one stage.
    """
    if is_of_one_stage(tensor.device_mesh):
        refuse_parts("this rank holds only the parameters of its own stage")
    sizes = tensor.device_mesh.shape
    if not all(
        size == 1 or p.is_replicate() for size, p in zip(sizes, tensor.placements, strict=True)
    ):
        refuse_parts(f"this rank holds a shard of a tensor of shape {tuple(tensor.shape)}")
    local = tensor.detach().to_local()
    return local.requires_grad_(tensor.requires_grad and tensor.is_leaf).__reduce_ex__(protocol)


def refuse_parts(why: str, action: str = "torch.save or pickle") -> NoReturn:
    """Raise RuntimeStateError, since `action` would write only this rank's shards.

    Args:
        why: the reason, for the message.
        action: the refused action, for the message.
    """
    raise RuntimeStateError(f"{action} would write only this rank's shards: {why}", remedy=_REMEDY)


# --------------------------------------------------------------------------------------------------
# Strided DTensors in checkpoints.
#
# torch.distributed.checkpoint describes a DTensor's local data as one box of the full tensor. If a
# placement is strided, the local data consists of several boxes, and torch refuses to save it.
# `CheckpointTensor` shares the local tensor of such a DTensor and lists its boxes with the methods
# that torch provides for this purpose. The checkpoint then contains the full tensor under its own
# name, and it loads into any other mesh, layout or plain model.
#
# `checkpointable` replaces the tensors of a state dict. `Holder` calls it for its own state dict,
# and `watch_optimizers` calls it for those of optimizers.

Run = tuple[int, int, int]
"""Start in the full dim, start in the local dim, and length."""


class CheckpointTensor(DTensor):
    """A DTensor that torch.distributed.checkpoint saves and loads box by box. Ops on it return
    plain DTensors."""

    @staticmethod
    def of(tensor: DTensor) -> CheckpointTensor:
        """Return a `CheckpointTensor` that shares the memory of the tensor."""
        return CheckpointTensor(tensor.to_local(), tensor._spec, requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor as a plain tensor; see `reduce_whole`."""
        return reduce_whole(self, protocol)

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(run[0] for run in box), sizes=torch.Size(run[2] for run in box)
            )
            for box in self.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.boxes():
            if torch.Size(run[0] for run in box) == index.offset:
                local = self.to_local()
                for dim, (_, start, length) in enumerate(box):
                    local = local.narrow(dim, start, length)
                return local
        raise KeyError(f"no part of {index.fqn} begins at {index.offset}")

    def boxes(self) -> list[tuple[Run, ...]]:
        """Return the boxes of the full tensor that this rank holds, each with one run per dim."""
        return list(itertools.product(*(self._runs(dim) for dim in range(self.dim()))))

    def _runs(self, dim: int) -> list[Run]:
        """Return the runs of consecutive indices of a dim that this rank holds, found by applying
        the placements to all indices."""
        indices = torch.arange(self.shape[dim])
        coordinate = self.device_mesh.get_coordinate() or ()
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
                blocks = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
                parts = [
                    _chunk(block, self.device_mesh.size(axis), coordinate[axis])
                    for block in _all_chunks(indices, blocks)
                ]
                indices = torch.cat(parts)
        return _consecutive(indices.tolist())


def _all_chunks(indices: Tensor, num_parts: int) -> list[Tensor]:
    return [_chunk(indices, num_parts, part) for part in range(num_parts)]


def _chunk(indices: Tensor, num_parts: int, part: int) -> Tensor:
    length = -(-len(indices) // num_parts)
    return indices[length * part : length * (part + 1)]


def _consecutive(indices: list[int]) -> list[Run]:
    runs: list[Run] = []
    for position, index in enumerate(indices):
        if runs and index == runs[-1][0] + runs[-1][2]:
            start, local, length = runs[-1]
            runs[-1] = (start, local, length + 1)
        else:
            runs.append((index, position, 1))
    return runs


def checkpointable(state: Any) -> Any:
    """Replace the strided DTensors of a state dict, nested or not, by `CheckpointTensor`. Other
    values are unchanged."""
    return tree_map(_checkpointable_leaf, state)


def _checkpointable_leaf(value: Any) -> Any:
    if isinstance(value, DTensor) and any(
        isinstance(placement, _StridedShard) for placement in value.placements
    ):
        return CheckpointTensor.of(value)
    return value
