"""Device meshes of torch when process groups are destroyed and created again."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.core.mesh import Mesh
from autopar.runtime.device_mesh import device_mesh, joined_axes


def test_joined_axes_are_rebuilt_for_new_process_groups() -> None:
    for _ in range(2):
        devices = device_mesh(Mesh({"a": 1, "b": 1}))
        joined = joined_axes(devices, [[0, 1]])
        x = torch.ones(2)
        dist.all_reduce(x, group=joined.get_group(0))
        assert torch.equal(x, torch.ones(2))
        dist.destroy_process_group()
