"""Packages whose names are imported when they are first asked for (PEP 562): what needs no torch does not wait for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. `dir` shows `__all__` and all that is imported so; other modules are names of it, too.

    Args:
        package: its full name.
        modules: name → full name of the module that it is taken from.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        here = sys.modules[package]
        own = (name for name in vars(here) if name.startswith("__"))
        return sorted({*own, *here.__all__, *modules})

    return get, names
