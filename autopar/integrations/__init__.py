"""Training with transformers' Trainer, Lightning, accelerate and peft. The libraries are imported
on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from autopar.integrations.libraries import library

# Name → its module, and the libraries that it needs.
_MODULES = {
    "Accelerator": ("accelerator", ("accelerate",)),
    "LightningStrategy": ("lightning_strategy", ("lightning",)),
    "Trainer": ("trainer", ("accelerate", "transformers")),
}


def __getattr__(name: str) -> Any:
    """Import an attribute on first use. Raise AutoparError if a library that it needs is not
    installed, or too old.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'autopar.integrations' has no attribute {name!r}")
    module, needed = _MODULES[name]
    for library_name in needed:
        library(library_name, f"autopar.{name}")
    return getattr(importlib.import_module(f"autopar.integrations.{module}"), name)
