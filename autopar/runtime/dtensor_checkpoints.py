"""What pickles hold of distributed tensors: ``torch.save(pm.state_dict(), file)`` writes what the
plain model loads, or is refused.

A pickle is made by one process, and a collective in it would wait for the others. So a tensor is
written only where this process has the whole of it.
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

_stages: set[DeviceMesh] = set()  # of which a module has several
_REMEDY = (
    "on every rank call state = pm.full_state_dict(), whose tensors are whole, and then save it on"
    " one rank: torch.save(state, file); an optimizer's state is saved by autopar.Checkpoints"
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
    if not all(
        size == 1 or p.is_replicate() for size, p in zip(sizes, tensor.placements, strict=True)
    ):
        refuse_parts(f"this rank holds a part of a tensor of shape {tuple(tensor.shape)}")
    local = tensor.detach().to_local()
    return local.requires_grad_(tensor.requires_grad and tensor.is_leaf).__reduce_ex__(protocol)


def refuse_parts(why: str, action: str = "torch.save or pickle") -> NoReturn:
    """Raises RuntimeStateError: what `action` would write is not the whole."""
    raise RuntimeStateError(f"{action} would write this rank's parts alone: {why}", remedy=_REMEDY)


# --------------------------------------------------------------------------------------------------
# Strided DTensors in checkpoints.
#
# torch.distributed.checkpoint describes a DTensor's local data as one box of the full tensor.
# Where a placement is strided the local data is several boxes; torch then refuses to save.
# `CheckpointTensor` is the same DTensor (it shares the local tensor) that lists its boxes,
# through the methods by which torch lets a tensor describe itself. A checkpoint so written holds
# the full tensor under its own name and loads into any other mesh, layout or plain model.
#
# `checkpointable` puts them into a state dict. `ParallelModule` does so for its own;
# `watch_optimizers` for optimizers.

Run = tuple[int, int, int]
"""Start in the full dim, start in the local dim, length."""


class CheckpointTensor(DTensor):
    """A DTensor that torch.distributed.checkpoint saves and loads box by box; operators on it
    give plain DTensors."""

    @staticmethod
    def of(tensor: DTensor) -> CheckpointTensor:
        """The same tensor, sharing its memory."""
        return CheckpointTensor(tensor.to_local(), tensor._spec, requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises RuntimeStateError: this process has a part of it."""
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
        """The boxes of the full tensor that lie here, a run per dim."""
        return list(itertools.product(*(self._runs(dim) for dim in range(self.dim()))))

    def _runs(self, dim: int) -> list[Run]:
        """The runs of consecutive indices of `dim` that lie here, found by replaying the
        placements."""
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
    """A state dict, nested or not, whose strided DTensors can be checkpointed; everything else
    is passed on as it is."""
    return tree_map(_checkpointable_leaf, state)


def _checkpointable_leaf(value: Any) -> Any:
    if isinstance(value, DTensor) and any(
        isinstance(placement, _StridedShard) for placement in value.placements
    ):
        return CheckpointTensor.of(value)
    return value
