"""Run by four gloo processes: dispatched experts compared with the unsharded op, their memory, and
torch.compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from least_peak import least_peak
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar import ops
from autopar.kernels import dispatched

NUM, TOKENS, EXPERTS, PICKS = 4, 13, 8, 3  # uneven: 4, 4, 4 and 1 token


class Said(logging.Handler):
    """A handler that stores log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def operands(how: str) -> tuple[Tensor, ...]:
    """Return grad, x, picks, gates, up and down with small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(3)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).double()

    ids = torch.randint(-1, EXPERTS + 1, (TOKENS, PICKS), generator=generator)
    ids = {
        "any": ids,
        "one": torch.full_like(ids, 5),
        "none": torch.full_like(ids, EXPERTS),
        "again": ids[:, :1].expand(-1, PICKS),
    }[how]
    return (
        whole(TOKENS, 4),
        whole(TOKENS, 3),
        ids.contiguous(),
        whole(TOKENS, PICKS),
        whole(EXPERTS, 2, 5, 3),
        whole(EXPERTS, 4, 5),
    )


def run(rank: int) -> dict[str, Any]:
    """Return the failures, the log messages, and the peak bytes (measured, predicted) of forward
    and backward."""
    group = NUM, dist.group.WORLD.group_name, rank, False
    routed = *group[:-1], True  # gloo processes cannot access the memory of each other
    starts = [i * EXPERTS // NUM for i in range(NUM)]
    wrong, said = [], Said()
    logging.getLogger("autopar.kernels").addHandler(said)
    for how in ("any", "one", "none", "again"):
        grad, x, ids, gates, up, down = operands(how)
        whole = ops.experts(x, ids, gates, up, down, "relu", EXPERTS)
        whole_grads = ops.experts_backward(grad, x, ids, gates, up, down, "relu", EXPERTS)
        mine = [t.tensor_split([4, 8, 12])[rank] for t in (grad, x, ids, gates)] + [
            t.chunk(NUM)[rank] for t in (up, down)
        ]
        ways = (("", lambda f: f, group), ("routed ", lambda f: f, routed))
        for name, call, settings in (
            *ways,
            ("compiled ", lambda f: torch.compile(f, backend="eager", fullgraph=True), routed),
        ):
            made = call(dispatched.experts_bound)(
                *mine[1:], "relu", EXPERTS, starts, 4 * PICKS, *settings
            )
            grads = call(dispatched.experts_backward_bound)(
                *mine, "relu", EXPERTS, starts, 4 * PICKS, *settings
            )
            parts = [whole, *whole_grads]
            expected = [t.tensor_split([4, 8, 12])[rank] for t in parts[:3]] + [
                t.chunk(NUM)[rank] for t in parts[3:]
            ]
            wrong += [
                f"{name}{how} {i}"
                for i, (a, b) in enumerate(zip((made, *grads), expected, strict=True))
                if not torch.equal(a, b)
            ]
    held_bytes = {
        phase: held(group, starts, backward=phase == "backward")
        for phase in ("forward", "backward")
    }
    return {"wrong": wrong, "said": said.messages, **held_bytes}


def held(
    group: tuple[int, str, int, bool], starts: list[int], *, backward: bool
) -> tuple[int, int]:
    """Return the peak bytes without the operands for balanced picks, measured and from a run on
    fake tensors in a fake group."""
    step: Callable[..., Any] = (
        dispatched.experts_backward_bound if backward else dispatched.experts_bound
    )

    def peak(name: str) -> int:
        ids = (torch.arange(16).view(16, 1) + torch.arange(2)) % EXPERTS
        tensors = [
            torch.ones(16, 32),
            torch.ones(16, 32),
            ids,
            torch.ones(16, 2),
            torch.ones(2, 2, 48, 32),
            torch.ones(2, 32, 48),
        ]
        own = tensors[0 if backward else 1 :]
        known = sum(t.untyped_storage().nbytes() for t in tensors)
        return (
            least_peak(
                tensors, lambda: step(*own, "silu", EXPERTS, starts, 32, group[0], name, *group[2:])
            )
            - known
        )

    measured = peak(group[1])
    with FakeTensorMode():
        return measured, peak("")
