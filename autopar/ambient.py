"""What torch does around the caller: the autocast that ops are under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


def autocast_of(device_type: str) -> str:
    """What `torch.autocast` does here to ops on a device of that type, in words."""
    if not torch.is_autocast_enabled(device_type):
        return "no autocast"
    return f"autocast to {torch.get_autocast_dtype(device_type)}"


@contextmanager
def as_written() -> Iterator[None]:
    """Nodes of a graph compute what they say: no gradients are recorded, and no autocast of the caller's casts what they read, since
    all casts of a graph are nodes of it."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
