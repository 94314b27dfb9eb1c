"""Run by three gloo processes: dispatch and combine by an all_to_all."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.kernels import routed


def run(rank: int) -> list[str]:
    """Return the differences from the reference."""
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(count, 4, generator=generator) for count in (0, 5, 3)]
    experts = [torch.randint(0, 6, (len(x), 2), generator=generator) for x in xs]
    weights = [torch.rand(len(x), 2, generator=generator) for x in xs]
    expected = routed.moe_dispatch_reference(xs, experts, 6, 10)
    back = routed.moe_combine_reference(
        [part[0] for part in expected], expected[0][1], [part[2] for part in expected], weights
    )
    group = 3, dist.group.WORLD.group_name, rank
    found = torch.ops.autopar.moe_dispatch(xs[rank], experts[rank], 6, 10, *group)
    combined = torch.ops.autopar.moe_combine(*found, weights[rank], *group)
    named = zip(
        ("rows", "table", "position", "y", "returned"),
        (*found, *combined),
        (*expected[rank], *back[rank]),
        strict=True,
    )
    return [name for name, a, b in named if not torch.equal(a, b)]
