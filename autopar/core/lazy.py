"""Lazy imports of packages (PEP 562): a name is imported when it is first accessed, so that code
that needs no torch does not wait for it."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any


def import_in_thread(name: str) -> ModuleType:
    """Import a module in a thread of its own, unless it is imported already.

    Some libraries keep exceptions that they catch while they are imported (pulp keeps one per
    solver that is not installed). An exception holds the frames of its traceback, and each frame
    its callers. In the caller's thread these frames would keep the user's model alive forever.

    Args:
        name: full name of the module.

    Returns:
        The module.

    Raises:
        Exception: whatever the import raises.
    """
    if name in sys.modules:
        return importlib.import_module(name)  # waits where another thread imports it
    state = random.getstate()
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(importlib.import_module, name).result()
    finally:
        random.setstate(state)


def lazily(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose names are imported lazily.

    Submodules can be accessed as attributes, too, but `dir` does not list them.

    Args:
        package: full name of the package.
        modules: name → full name of the module that defines it.
    """

    def get(name: str) -> Any:
        """Import `name`, or the submodule of that name."""
        if name in modules:
            return getattr(import_in_thread(modules[name]), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return import_in_thread(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        """List `__all__`, the lazy names and the special attributes."""
        here = sys.modules[package]
        module_names = (name for name in vars(here) if name.startswith("__"))
        return sorted({*module_names, *here.__all__, *modules})

    return get, names
