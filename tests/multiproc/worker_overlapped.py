"""Run by three gloo processes: overlapped products without shared memory, and their log
messages."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from norm_cases import EPS, ranks_of, same
from overlap_cases import whole_numbers

from autopar import ops
from autopar.kernels import normed, overlapped
from autopar.kernels import overlapped as overlapped_references
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.fused import shards_of
from autopar.ops.norms import RmsNorm


def run(rank: int) -> dict[str, Any]:
    """Return whether results and gradients match the reference, and the log messages."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autopar.kernels").addHandler(handler)
    group = AxisGroup(dist.group.WORLD.group_name, 3, rank)
    over = overlapped.ChunkedDim.of(0, group, 2)
    x, w = whole_numbers((8, 3), 1), whole_numbers((3, 4), 2)
    pairs = [(x + other, w - other) for other in range(3)]
    wrong = []
    for _ in range(2):
        shards = shards_of(x, 0, 3)
        gathered, y = overlapped.all_gather_dot("mk,kn->mn", (shards[rank], w), 0, over, 8)
        part = overlapped.dot_reduce_scatter("mk,kn->mn", pairs[rank], over)
        addends = [y * other for other in range(3)]
        added = overlapped.dot_reduce_scatter("mk,kn->mn", pairs[rank], over, addends[rank])
        expected = overlapped_references.matmul_reduce_scatter_reference("mk,kn->mn", pairs, 0)[
            rank
        ]
        with_addends = overlapped_references.matmul_reduce_scatter_reference(
            "mk,kn->mn", pairs, 0, addends
        )[rank]
        for name, found, wanted in (
            ("gathered", gathered, x),
            ("product", y, x @ w),
            ("sum", part, expected),
            ("with addends", added, with_addends),
        ):
            wrong += [] if torch.equal(found, wanted) else [name]
    ranks = ranks_of("mk,kn->mn", (8, 3), (3, 16), 0, 3)
    a, b, residual, weight = ranks.of(rank)
    norm = RmsNorm(16, EPS, torch.float32, torch.float32, torch.float32)
    made = normed.dot_reduce_add_rmsnorm("mk,kn->mn", (a, b), residual, weight, over, norm)
    total = overlapped_references.matmul_reduce_scatter_reference("mk,kn->mn", ranks.pairs, 0)[rank]
    squares = ops.square_sum(residual + total, torch.float32)
    wanted = residual + total, squares, ops.rms_norm(residual + total, squares, weight, *norm)
    wrong += [] if same([made], [wanted]) else ["norm"]
    shard = shards_of(x, 0, 3)[rank].requires_grad_()
    _, y = torch.ops.autopar.all_gather_matmul(
        shard, w, "mk,kn->mn", 0, 0, 8, 3, group.name, rank, 2
    )
    (gradient,) = torch.autograd.grad((y * (rank + 1)).sum(), shard)
    wrong += [] if torch.equal(gradient, 6 * torch.ones(len(shard), 4) @ w.t()) else ["gradient"]
    return {"wrong": wrong, "messages": messages}
