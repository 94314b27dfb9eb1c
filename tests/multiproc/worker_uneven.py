"""Run by four processes: communication steps on dims that are not divisible by four."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from worker_steps import peak

from autopar.core.layout import Layout, part_range
from autopar.core.mesh import Mesh
from autopar.core.placements import Halo, window
from autopar.kernels import collectives as steps
from autopar.program.splitting import local_part
from autopar.runtime.device_mesh import device_mesh, groups_of

MESH, SHAPE = Mesh({"a": 4}), (7, 10, 11)


def part(full: Tensor, dim: int | None, rank: int) -> Tensor:
    """Return the shard of this rank, split in `dim`."""
    layout = Layout.parse("R" if dim is None else f"S({dim})")
    return local_part(full, layout, MESH.shape, full.shape, (rank,)).contiguous()


def run(rank: int) -> dict[str, Any]:
    """Return wrong results, and differences of allocations between real and fake groups."""
    full = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    addends = torch.randint(-9, 9, (4, *SHAPE), generator=torch.Generator().manual_seed(1)).float()
    cases: dict[str, tuple[Any, Tensor, tuple[Any, ...], Tensor]] = {}
    for dim, length in enumerate(SHAPE):
        cases[f"gather {dim}"] = (steps.all_gather, part(full, dim, rank), (dim, 0, length), full)
        cases[f"shard {dim}"] = (steps.shard, full, (dim, 0), part(full, dim, rank))
        for halo in (Halo(dim, 1, 1), Halo(dim, 0, 1, lowest=True)):
            start, own = part_range(SHAPE[dim], [4], [rank])
            arguments = (dim, halo.before, halo.after, halo.lowest, 0)
            cases[str(halo)] = (
                steps.halo,
                part(full, dim, rank),
                arguments,
                window(full, halo, start, own),
            )
        for reduce_op, whole in (("sum", addends.sum(0)), ("max", addends.amax(0))):
            cases[f"{reduce_op} {dim}"] = (
                steps.reduce_scatter,
                addends[rank].clone(),
                (dim, reduce_op, 0),
                part(whole, dim, rank),
            )
    for dim, to_dim in permutations(range(3), 2):
        arguments = (dim, to_dim, 0, SHAPE[dim])
        cases[f"exchange {dim} {to_dim}"] = (
            steps.all_to_all,
            part(full, dim, rank),
            arguments,
            part(full, to_dim, rank),
        )
    groups, facts = groups_of(device_mesh(MESH)), {"wrong": [], "memory": []}
    for name, (target, x, arguments, expected) in cases.items():
        with steps.use_groups(groups):
            if not torch.equal(target(x.clone(), *arguments), expected):
                facts["wrong"].append(name)
            real = min(
                peak(lambda x, target=target, a=arguments: target(x, *a), x.clone())
                for _ in range(10)
            )
        with FakeTensorMode(), steps.use_groups(steps.fake_groups(MESH, (rank,))):
            fake = peak(lambda x, target=target, a=arguments: target(x, *a), torch.empty(x.shape))
        facts["memory"] += [] if real == fake else [(name, real, fake)]
    return facts
