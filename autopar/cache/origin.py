"""Where code comes from: torch, the standard library, autopar, an installed library, or the user.

Code of the user is identified by its content. All other code is identified by the version of its
library, and the files of a library that ran in a capture by their content (`manifest`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import site
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

Origin = Literal["torch", "standard", "autopar", "library", "user"]
_STARTED = time.time()
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of installed libraries and of the standard library."""
    paths = sysconfig.get_paths()
    users = site.getusersitepackages()
    libraries = {paths["purelib"], paths["platlib"], *site.getsitepackages(), users}
    standard = {paths["stdlib"], paths["platstdlib"]}
    return tuple(_variants(libraries)), tuple(_variants(standard))


def _variants(folders: set[str]) -> set[str]:
    """Return folders as they are named and without symbolic links, with a separator behind."""
    return {name + os.sep for each in folders for name in (each, os.path.realpath(each))}


@functools.lru_cache(maxsize=65536)
def origin_of_file(file: str) -> Origin:
    """Return where a source file comes from.

    Args:
        file: its name, as code objects have it. Names such as ``<string>`` are the user's.
    """
    libraries, standard = _folders()
    if file.startswith("<frozen "):
        return "standard"
    path = os.path.realpath(file)
    if path.startswith(_PACKAGE):
        return "autopar"
    if path.startswith(_TORCH) or file.startswith(_TORCH):
        return "torch"
    if file.startswith(libraries) or path.startswith(libraries):
        return "library"
    return "standard" if file.startswith(standard) or path.startswith(standard) else "user"


def origin_of_module(name: str | None) -> Origin:
    """Return where a module comes from.

    Args:
        name: its full name; unknown ones are the user's, since their content counts.
    """
    first = (name or "").partition(".")[0]
    if first == "autopar":
        return "autopar"
    if first in ("torch", "torchgen", "functorch"):
        return "torch"
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if file is None:  # built in, a namespace, or not loaded
        return "standard" if first in sys.stdlib_module_names - {"__main__"} else "user"
    return origin_of_file(file)


def library_version(module: str) -> str:
    """Return the version of the library of a module, or a placeholder if it does not name one."""
    first: Any = sys.modules.get(module.partition(".")[0])
    return str(getattr(first, "__version__", "no version"))


def is_library(name: str) -> bool:
    """Whether a module that is not loaded would be of a library, torch or the standard library."""
    first = name.partition(".")[0]
    if first in sys.stdlib_module_names or first in ("torch", "autopar"):
        return True
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return False
    if spec is None:  # importing it fails, until it is installed
        return True
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return all(origin_of_file(str(place)) != "user" for place in places)


def is_module_of(value: object, *origins: Origin) -> bool:
    """Whether a value is a module of one of these origins."""
    return isinstance(value, ModuleType) and origin_of_module(value.__name__) in origins


# --------------------------------------------------------------------------------------------------
# Content of files.


@functools.cache
def source_digest() -> str:
    """Return the hash of autopar's own source files, which any change of autopar changes."""
    digest = hashlib.sha256()
    for path in sorted(Path(_PACKAGE).rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def changed_package() -> bool:
    """Whether autopar's own code was written after this process began."""
    return any(path.stat().st_mtime >= _STARTED for path in Path(_PACKAGE).rglob("*.py"))


def file_digest(file: str) -> str:
    """Return the hash of a file's content.

    Raises:
        OSError: if it cannot be read.
    """
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def changed_since_start(file: str) -> bool:
    """Whether a file was written after this process began, so that the code that was loaded from it
    may be another.

    Raises:
        OSError: if it does not exist.
    """
    return os.stat(file).st_mtime >= _STARTED
