"""Import optional libraries."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from types import ModuleType

from autopar.errors import AutoparError

# The oldest versions that were tested.
LEAST = {"transformers": "5.23", "accelerate": "1.15", "peft": "0.21", "lightning": "2.6"}


def library(name: str, wish: str) -> ModuleType:
    """Import an optional library.

    Args:
        name: name of the library.
        wish: the function or class that needs it, as users call it.

    Raises:
        AutoparError: if it is not installed, or older than `LEAST`.
    """
    extra = "lightning" if name == "lightning" else "train"
    remedy = (
        f"pip install '{name}>={LEAST[name]}' (with all optional libraries: pip install "
        f"'autopar[{extra}]')"
    )
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise AutoparError(f"{wish} needs {name}, which is not installed", remedy=remedy) from None
    if _release(version) < _release(LEAST[name]):
        raise AutoparError(
            f"{wish} needs {name} {LEAST[name]} or newer, but {version} is installed", remedy=remedy
        )
    return importlib.import_module(name)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
