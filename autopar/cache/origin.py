"""The origin of code: torch, the standard library, autopar, an installed library, or the user.

Code of the user is identified by its content. All other code is identified by the version of its
library. Files of libraries whose code ran in a capture are also identified by their content
(`autopar.cache.manifest`).
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
    """Return the folders as given and with symbolic links resolved, followed by a separator."""
    return {name + os.sep for each in folders for name in (each, os.path.realpath(each))}


@functools.lru_cache(maxsize=65536)
def origin_of_file(file: str) -> Origin:
    """Return the origin of a source file.

    Args:
        file: the file name of a code object. Names such as ``<string>`` belong to the user.
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
    """Return the origin of a module.

    Args:
        name: the full name of the module. Unknown modules belong to the user, so that they are
            identified by their content.
    """
    first = (name or "").partition(".")[0]
    if first == "autopar":
        return "autopar"
    if first in ("torch", "torchgen", "functorch"):
        return "torch"
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if file is None:  # a built-in module, a namespace, or a module that is not loaded
        return "standard" if first in sys.stdlib_module_names - {"__main__"} else "user"
    return origin_of_file(file)


def library_version(module: str) -> str:
    """Return the version of the library of a module; a placeholder if the library has none."""
    first: Any = sys.modules.get(module.partition(".")[0])
    return str(getattr(first, "__version__", "no version"))


def is_library(name: str) -> bool:
    """Return whether a module that is not loaded belongs to a library, torch, autopar or the
    standard library."""
    first = name.partition(".")[0]
    if first in sys.stdlib_module_names or first in ("torch", "autopar"):
        return True
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return False
    if spec is None:  # importing it fails until it is installed
        return True
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return all(origin_of_file(str(place)) != "user" for place in places)


def is_module_of(value: object, *origins: Origin) -> bool:
    """Return whether a value is a module of one of these origins."""
    return isinstance(value, ModuleType) and origin_of_module(value.__name__) in origins


# --------------------------------------------------------------------------------------------------
# Content of files.


@functools.cache
def source_digest() -> str:
    """Return a hash of all source files of autopar."""
    digest = hashlib.sha256()
    for path in sorted(Path(_PACKAGE).rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def changed_package() -> bool:
    """Return whether autopar's code was modified after this process started."""
    return any(path.stat().st_mtime >= _STARTED for path in Path(_PACKAGE).rglob("*.py"))


def file_digest(file: str) -> str:
    """Return a hash of the content of a file.

    Raises:
        OSError: if the file cannot be read.
    """
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def changed_since_start(file: str) -> bool:
    """Return whether a file was modified after this process started, so that the code that was
    loaded from it may differ.

    Raises:
        OSError: if the file does not exist.
    """
    return os.stat(file).st_mtime >= _STARTED
