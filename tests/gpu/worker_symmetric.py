"""Run by two processes with a GPU each: the overlapped products over torch's symmetric memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from overlap_cases import whole_numbers

from autopar.kernels import overlapped, overlapped_references
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.providers import peers_of
from autopar.kernels.together import shards_of
from autopar.ops.products import dot


def run(rank: int) -> dict[str, Any]:
    """What is wrong in 50 epochs, and why there are no kernels if there are none."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = AxisGroup(dist.new_group(backend="nccl", device_id=device).group_name, 2, rank)
    x, w = whole_numbers((67, 16), 1).to(device), whole_numbers((16, 24), 2).to(device)
    wrong = []
    for epoch in range(50):
        whole, pairs = x + epoch % 7, [(x + epoch % 7 + other, w) for other in range(2)]
        gathered, y = overlapped.all_gather_dot("mk,kn->mn", (shards_of(whole, 0, 2)[rank], w), 0, 0, group, 2, dot, 67)
        part = overlapped.dot_reduce_scatter("mk,kn->mn", pairs[rank], 0, group, 2, dot)
        expected = overlapped_references.matmul_reduce_scatter_reference("mk,kn->mn", pairs, 0)[rank]
        wrong += [epoch] if not (torch.equal(gathered, whole) and torch.equal(y, whole @ w) and torch.equal(part, expected)) else []
    return {"wrong": wrong, "why_not": peers_of(group, device)[1]}
