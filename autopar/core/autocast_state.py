"""What torch does around the caller: the autocast that ops are under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

KINDS = ("cpu", "cuda")  # of devices: where programs run


def autocast_around(device_type: str) -> str:
    """The `torch.autocast` that the caller is under, in words: capture follows that of any kind
    of device, not of this type alone."""
    found = [
        f"autocast to {torch.get_autocast_dtype(k)}" + f" of {k}" * (k != device_type)
        for k in KINDS
        if torch.is_autocast_enabled(k)
    ]
    return " and ".join(found) or "no autocast"


@contextmanager
def as_written() -> Iterator[None]:
    """Nodes of a graph compute what they say: no gradients are recorded, and no autocast of the
    caller's casts what they read, since all casts of a graph are nodes of it."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
