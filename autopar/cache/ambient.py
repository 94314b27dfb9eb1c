"""What a plan depends on beside the request: versions, settings of torch, autopar's own code."""

from __future__ import annotations

import os
import platform
import sys
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import module as hooks

from autopar.cache.origin import changed_package, origin_of_file, source_digest
from autopar.cache.walk import Opaque, Walk
from autopar.capture.dynamo.preparing import changed_settings
from autopar.rules.table import REGISTERED
from autopar.version import VERSION

_LIBRARIES = ("highspy", "numpy", "transformers")
_DEVICES = ("cpu", "cuda")
_PATCHED = (torch, functional, torch.Tensor, torch.nn.Module, torch.autograd)
_NOT_READ = ("AUTOPAR_CACHE", "AUTOPAR_CACHE_DIR", "AUTOPAR_KERNEL_CACHE")


def add_ambient(walk: Walk) -> None:
    """Hash what a plan depends on beside the request.

    Raises:
        Opaque: if it depends on something that cannot be hashed.
    """
    if changed_package():
        raise Opaque("autopar's own code was written after this process began")
    for name, held in vars(hooks).items():
        if name.startswith("_global_") and name.endswith("hooks") and held:
            raise Opaque("hooks of all modules are registered")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise Opaque("a mode of torch functions is active")
    walk.add("versions", tuple(_versions()))
    walk.add("settings of torch", tuple(_settings()))
    walk.add("settings of captures", changed_settings())
    walk.add("environment", tuple(_environment()))
    walk.add("rules", tuple((op, repr(rule)) for op, rule in REGISTERED.items()))
    walk.add("changes of torch", tuple(_patches()))


def _versions() -> Iterator[str]:
    yield from (VERSION, source_digest(), platform.python_version(), platform.machine())
    yield from (str(torch.__version__), str(torch.version.git_version))
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"
    yield f"transformers {'is' if 'transformers' in sys.modules else 'is not'} loaded"


def _settings() -> Iterator[Any]:
    yield str(torch.get_default_dtype())
    yield str(torch.get_default_device())
    yield torch.are_deterministic_algorithms_enabled()
    yield (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    for kind in _DEVICES:
        yield (torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
    yield torch.is_autocast_cache_enabled()
    cuda = torch.backends.cuda
    yield (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    yield (torch.cuda.is_available(), torch.backends.mha.get_fastpath_enabled())


def _environment() -> Iterator[tuple[str, str]]:
    # the warnings of captures, which entries hold, are given on rank 0 alone
    yield "rank", "0" if os.environ.get("RANK", "0") == "0" else "another"
    for name, value in sorted(os.environ.items()):
        if name.startswith("AUTOPAR_") and name not in _NOT_READ:
            yield name, value


def _patches() -> Iterator[tuple[str, Any]]:
    """Yield the functions that the user put in the place of torch's."""
    for space in _PATCHED:
        for name, item in sorted(vars(space).items()):
            code = getattr(item, "__code__", None)
            if isinstance(code, types.CodeType) and origin_of_file(code.co_filename) == "user":
                yield f"{space.__name__}.{name}", item
