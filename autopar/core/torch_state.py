"""State of torch that forward may read, as a variable of this module: captures then record it as
they record global variables, and read its current value in the same way."""

from __future__ import annotations

import torch

GRADIENT_MODE = "gradient_mode"  # whether gradients are enabled


def __getattr__(name: str) -> bool:
    """Return the current value of `gradient_mode`."""
    if name == GRADIENT_MODE:
        return torch.is_grad_enabled()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
