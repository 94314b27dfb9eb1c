"""Runs in processes with one GPU each or with a shared GPU: overlapped products over the symmetric
memory of torch."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from overlap_cases import whole_numbers

from autopar.kernels import overlapped
from autopar.kernels import overlapped as overlapped_references
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.fused import shards_of
from autopar.kernels.overlapped import ChunkedDim
from autopar.kernels.peers import peers_of


def run(rank: int) -> dict[str, Any]:
    """Return the epochs with wrong results among 50, and the reason why no kernels run, if there is
    one."""
    size = dist.get_world_size()
    shared = torch.cuda.device_count() < size
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = str(int(shared))
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    processes = (
        dist.group.WORLD if shared else dist.new_group(backend="nccl", device_id=device)
    )  # NCCL needs one GPU per process
    assert processes is not None
    group = AxisGroup(processes.group_name, size, rank)
    x, w = whole_numbers((67, 16), 1).to(device), whole_numbers((16, 24), 2).to(device)
    wrong = []
    for epoch in range(50):
        whole, pairs = x + epoch % 7, [(x + epoch % 7 + other, w) for other in range(size)]
        gathered, y = overlapped.all_gather_dot(
            "mk,kn->mn", (shards_of(whole, 0, size)[rank], w), 0, ChunkedDim.of(0, group, 2), 67
        )
        part = overlapped.dot_reduce_scatter("mk,kn->mn", pairs[rank], ChunkedDim.of(0, group, 2))
        expected = overlapped_references.matmul_reduce_scatter_reference("mk,kn->mn", pairs, 0)[
            rank
        ]
        wrong += (
            [epoch]
            if not (
                torch.equal(gathered, whole)
                and torch.equal(y, whole @ w)
                and torch.equal(part, expected)
            )
            else []
        )
    return {"wrong": wrong, "why_not": peers_of(group, device)[1]}
