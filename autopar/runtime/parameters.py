"""Parameters, buffers and outputs as DTensors, in their storage layouts
(`autopar.core.stored_placements`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from autopar.core.layout import local_shape
from autopar.core.stored_placements import stored_dims, stored_placements
from autopar.errors import RuntimeStateError
from autopar.kernels import host
from autopar.program.program import ProgramTensor
from autopar.program.splitting import local_part
from autopar.runtime.device_mesh import joined_axes, wrap_local
from autopar.runtime.guards import fill_missing


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage of a parameter, buffer or output on this rank.

    Attributes:
        tensor: the tensor of the program.
        devices: the program's mesh.
        dtensor_mesh: the mesh of the DTensor: `devices`, possibly with some axes joined.
        placements: the placements of the DTensor on `dtensor_mesh`.
        graph_shape: the local shape in terms of the tensor's `view`, as in graphs.
        stored_shape: the local shape in terms of the tensor's `shape`, as in the DTensor.
        spec: the spec of the DTensor; all tensors of this storage share it.
    """

    tensor: ProgramTensor
    devices: DeviceMesh
    dtensor_mesh: DeviceMesh
    placements: tuple[Placement, ...]
    graph_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    spec: DTensorSpec

    @staticmethod
    def of(tensor: ProgramTensor, devices: DeviceMesh) -> Storage:
        """Return the storage of a tensor on this rank of the program's mesh."""
        mesh_shape, coordinate = tuple(devices.shape), devices.get_coordinate()
        local = local_shape(tensor.view, tensor.layout, mesh_shape, coordinate)
        stored = tuple(
            math.prod(local[d] for d in group) for group in stored_dims(tensor.shape, tensor.view)
        )
        at = stored_placements(tensor.shape, tensor.view, tensor.layout, mesh_shape)
        joined_mesh = joined_axes(devices, at.axes)
        stride = tuple(math.prod(tensor.shape[d + 1 :]) for d in range(len(tensor.shape)))
        meta = TensorMeta(torch.Size(tensor.shape), stride, tensor.dtype)
        spec = DTensorSpec(joined_mesh, at.placements, tensor_meta=meta)
        return Storage(tensor, devices, joined_mesh, at.placements, local, stored, spec)

    def distribute(self, full: Tensor) -> DTensor:
        """Copy this rank's shard of a full tensor to its device, and return it as a DTensor. If
        `full` is on the meta device, the result is marked as having no values
        (`autopar.runtime.guards`)."""
        if self.tensor.layout.host:
            return self.wrap(self._on_host(full))
        device = torch.device(self.devices.device_type, _device_index(self.devices))
        if full.is_meta:
            return self.wrap(
                fill_missing(torch.empty(self.stored_shape, dtype=full.dtype, device=device))
            )
        part = local_part(
            full,
            self.tensor.layout,
            tuple(self.devices.shape),
            self.tensor.view,
            self.devices.get_coordinate() or (),
        )
        return self.wrap(part.detach().to(device).clone(memory_format=torch.contiguous_format))

    def _on_host(self, full: Tensor) -> Tensor:
        """Return this rank's shard in host memory. The memory is pinned if the mesh consists of
        GPUs."""
        local = host.empty(self.stored_shape, full.dtype, pinned=self.devices.device_type == "cuda")
        if full.is_meta:
            fill_missing(local)
        else:
            part = local_part(
                full,
                self.tensor.layout,
                tuple(self.devices.shape),
                self.tensor.view,
                self.devices.get_coordinate() or (),
            )
            local.copy_(part.detach().reshape(self.stored_shape))
        return local

    def wrap(self, local: Tensor) -> DTensor:
        """Wrap a local tensor as a DTensor without a copy. The local tensor may have `graph_shape`
        or `stored_shape`."""
        local = local.reshape(self.stored_shape)
        if local.dtype == self.tensor.dtype and not local.requires_grad:
            return DTensor(local, self.spec, requires_grad=False)  # no autograd function runs
        meta = self.spec.tensor_meta
        assert meta is not None, "a storage has a shape"
        return wrap_local(local, self.dtensor_mesh, self.placements, meta.shape, meta.stride)

    def local(self, stored: Tensor) -> Tensor:
        """Return the local tensor of a stored tensor as a view with `graph_shape`.

        Raises:
            RuntimeStateError: if the tensor was converted to another dtype or moved after the
                program was compiled, or was replaced by a tensor with another storage.
        """
        local = stored.to_local() if isinstance(stored, DTensor) else stored
        expected = "cpu" if self.tensor.layout.host else self.devices.device_type
        if local.dtype != self.tensor.dtype or local.device.type != expected:
            raise RuntimeStateError(
                f"{self.tensor.name!r} is {local.dtype} on {local.device.type}, but the program"
                f" expects {self.tensor.dtype} on {expected}",
                remedy=(
                    "convert the model before autopar.compile, and do not convert the compiled"
                    " module"
                ),
            )
        if local.shape != self.stored_shape or not self._is_shard_of(stored):
            raise self._replaced_error(stored)
        return local.view(self.graph_shape)

    def _is_shard_of(self, stored: Tensor) -> bool:
        """Return whether the local tensor is this rank's shard of the tensor. A plain tensor counts
        as replicated."""
        if stored.shape != self.tensor.shape:
            return False
        if not isinstance(stored, DTensor) or stored.placements == self.placements:
            return True
        both = zip(self.placements, stored.placements, strict=False)
        return all(
            size == 1 or mine == its
            for size, (mine, its) in zip(self.dtensor_mesh.shape, both, strict=False)
        )

    def _replaced_error(self, stored: Tensor) -> RuntimeStateError:
        name, kind = (
            self.tensor.name,
            f"a DTensor {stored.placements}" if isinstance(stored, DTensor) else "a plain tensor",
        )
        expected = (
            "a replicated tensor"
            if self.tensor.layout.is_replicated
            else f"a DTensor {self.placements}"
        )
        return RuntimeStateError(
            f"{name!r} was replaced by {kind} of shape {tuple(stored.shape)}, but the program"
            f" expects {expected} of shape {self.tensor.shape}",
            remedy=(
                f"compute it from p = pm.get_parameter({name!r}); or pass"
                " torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements);"
                " or load the values into pm with pm.load_state_dict"
            ),
        )


def _device_index(devices: DeviceMesh) -> int | None:
    if devices.device_type == "cpu":
        return None
    return int(getattr(torch, devices.device_type).current_device())
