"""Packages whose names are imported when they are first asked for (PEP 562): what needs no torch
does not wait for it."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any


def imported_apart(name: str) -> ModuleType:
    """The module of that name, imported in a thread of its own where it is not imported yet.

    Libraries keep exceptions that they catch while they are imported (pulp one per solver that is
    not installed). An exception holds the frames below which it was raised, and each frame those
    that called it: in the caller's thread the user's model among their variables, for ever.

    Args:
        name: full name of the module.

    Returns:
        The module.

    Raises:
        Exception: as the import does.
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
    """`__getattr__` and `__dir__` of a package. `dir` shows `__all__` and all that is imported so;
    other modules are names of it, too.

    Args:
        package: its full name.
        modules: name → full name of the module that it is taken from.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(imported_apart(modules[name]), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return imported_apart(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        here = sys.modules[package]
        own = (name for name in vars(here) if name.startswith("__"))
        return sorted({*own, *here.__all__, *modules})

    return get, names
