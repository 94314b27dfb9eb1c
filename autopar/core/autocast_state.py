"""The state of `torch.autocast` around the caller, and a context without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

KINDS = ("cpu", "cuda")  # of devices: where programs run


def autocast_around(device_type: str) -> str:
    """Describe the active `torch.autocast`, for all kinds of devices: capture follows autocast of
    any kind, not of `device_type` alone.

    Args:
        device_type: kind of device that the description need not name.
    """
    settings = [
        f"autocast to {torch.get_autocast_dtype(k)}" + f" of {k}" * (k != device_type)
        for k in KINDS
        if torch.is_autocast_enabled(k)
    ]
    return " and ".join(settings) or "no autocast"


@contextmanager
def as_written() -> Iterator[None]:
    """Run nodes of a graph without recording gradients and without the caller's autocast: all casts
    of a graph are nodes of it."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
