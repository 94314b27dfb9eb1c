"""Training with transformers' Trainer, accelerate and peft, which are imported when something of this is first used, and not before."""

from __future__ import annotations

import importlib
from typing import Any

from autopar.training.libraries import library

_MODULES = {"Trainer": "autopar.training.trainer", "Accelerator": "autopar.training.whole_batches"}


def __getattr__(name: str) -> Any:
    """Raises AutoparError where a library that it needs is not installed, or too old."""
    if name not in _MODULES:
        raise AttributeError(f"module 'autopar.training' has no attribute {name!r}")
    library("accelerate", f"autopar.{name}")
    if name == "Trainer":
        library("transformers", f"autopar.{name}")
    return getattr(importlib.import_module(_MODULES[name]), name)
