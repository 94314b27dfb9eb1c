"""What Dynamo does not take of Python as it is.

- `functools.cached_property` takes a lock before Python 3.12, which cannot be traced; a capture has one thread, and does without.
- How operators of tensors are called within a `TorchFunctionMode` is found once, by trying them, and for good: with fake tensors it fails.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any
from unittest import mock

from torch._dynamo.variables import builtin


def know_operators() -> None:
    """Has Dynamo find them, before there is a mode."""
    find = getattr(builtin, "populate_builtin_to_tensor_fn_map", None)
    if find is not None:
        find()


def unlocked_properties() -> contextlib.AbstractContextManager[object]:
    """`functools.cached_property` without its lock for a while."""
    if sys.version_info >= (3, 12):
        return contextlib.nullcontext()
    return mock.patch.object(functools.cached_property, "__get__", _get)


def _get(self: Any, instance: Any, owner: Any = None) -> Any:
    if instance is None:
        return self
    held = instance.__dict__
    if self.attrname not in held:
        held[self.attrname] = self.func(instance)
    return held[self.attrname]
