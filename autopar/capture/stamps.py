"""What a program assumes about the values that forward reads, by the guards of Dynamo."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from autopar.capture.trace import ArrayStamp, Stamp
from autopar.core.same_values import is_plain, is_same

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


@dataclass(frozen=True, slots=True)
class FunctionStamp:
    """A function that forward calls, with its code. This object does not keep the function alive,
    whose closure may contain the model."""

    function: Callable[[], Any]
    code: types.CodeType | None = field(repr=False)

    def __deepcopy__(self, memo: Any) -> FunctionStamp:
        return self

    @staticmethod
    def of(function: Any) -> FunctionStamp:
        """Return the stamp of a function or a bound method."""
        own = _unbound(function)
        code = getattr(own, "__code__", None)
        return FunctionStamp(_reference(own), code)

    def is_of(self, now: object) -> bool:
        """Return whether `now` is the same function with the same code."""
        was, own = self.function(), _unbound(now)
        return was is own and getattr(own, "__code__", None) is self.code


Kind = Literal["length", "keys", "contains", "has"]


@dataclass(frozen=True, slots=True)
class Trait:
    """A property of a container or an object that decides a branch of forward.

    Attributes:
        kind: ``"length"`` of a container, ``"keys"`` of a dict, whether a container ``"contains"``
            a key, or whether an object ``"has"`` an attribute.
        of: the key or the name of the attribute; None for the other kinds.
        value: the property.
    """

    kind: Kind
    of: Any
    value: Any

    @staticmethod
    def read(kind: Kind, of: Any, holder: Any) -> Trait:
        """Return the current property of a holder.

        Args:
            kind: the attribute of the same name.
            of: the attribute of the same name.
            holder: the container or object.

        Raises:
            TypeError: if the holder is no container.
        """
        if kind == "length":
            return Trait(kind, of, len(holder))
        if kind == "keys":
            return Trait(kind, of, tuple(holder))
        return Trait(kind, of, of in holder if kind == "contains" else hasattr(holder, of))

    def is_of(self, now: Any) -> bool:
        """Return whether the property of `now` is the same."""
        try:
            found = Trait.read(self.kind, self.of, now).value
        except TypeError:
            return False
        if self.kind != "keys":
            return bool(found == self.value)
        return len(found) == len(self.value) and all(map(_is_same_key, found, self.value))

    def text(self) -> str:
        """Return the property as the end of a sentence."""
        if self.kind == "length":
            return f"had {self.value} items"
        if self.kind == "keys":
            return f"had the keys {list(self.value)}"
        if self.kind == "contains":
            return f"contained {self.of!r}" if self.value else f"did not contain {self.of!r}"
        return f"had {'an' if self.value else 'no'} attribute {self.of!r}"


# --------------------------------------------------------------------------------------------------
# Guards of Dynamo.

_TRAITS: dict[str, Kind] = {
    "SEQUENCE_LENGTH": "length",
    "DICT_KEYS_MATCH": "keys",
    "MAPPING_KEYS_CHECK": "keys",
    "DICT_CONTAINS": "contains",
    "DICT_NOT_CONTAINS": "contains",
    "SET_CONTAINS": "contains",
    "SET_NOT_CONTAINS": "contains",
    "HASATTR": "has",
}
_OF_FUNCTIONS = frozenset(("CLOSURE_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "ID_MATCH"))
_METHOD = "NOT_PRESENT_IN_GENERIC_DICT"
UNWATCHED = object()  # a value of which a program assumes nothing that could be checked


@dataclass(frozen=True, slots=True)
class Check:
    """What a guard checks of a value.

    Attributes:
        source: Dynamo source name of the value.
        kind: the kind of a `Trait`; ``"function"``, ``"method"`` of a class, or ``"value"``.
        of: the key or the name of an attribute of a `Trait`.
    """

    source: str
    kind: Kind | Literal["function", "method", "value"] = "value"
    of: Any = None

    @property
    def is_trait(self) -> bool:
        """Whether it is about a `Trait`."""
        return self.kind in _TRAITS.values()

    @staticmethod
    def by(guard: Any, source: str) -> Check:
        """Return what a guard checks.

        Args:
            guard: the guard.
            source: its source name.
        """
        name = getattr(guard.create_fn, "func", guard.create_fn).__name__
        given = getattr(guard.create_fn, "keywords", {})
        if name == _METHOD and given.get("attr", "forward") != "forward":
            return Check(f"{source}.{given['attr']}", "method")
        if name in _TRAITS and ("key" in given or "attr" in given or not given):
            return Check(source, _TRAITS[name], given.get("key", given.get("attr")))
        return Check(source, "function" if name in _OF_FUNCTIONS else "value")

    def stamp(self, value: Any, *, is_tensor: bool) -> Any:
        """Return what a program assumes about a value: the value itself if it is plain, or a stamp;
        `UNWATCHED` if it assumes nothing.

        Args:
            value: the value.
            is_tensor: whether the graph reads it as a tensor.
        """
        if self.kind in ("length", "keys", "contains", "has"):
            return _trait(self.kind, self.of, value)
        if self.kind in ("function", "method") and isinstance(value, _FUNCTIONS):
            is_known = self.kind == "method" and _is_of_torch(value)
            return UNWATCHED if is_known else FunctionStamp.of(value)
        if is_plain(value):
            return value
        return _stamp_of_tensor(value) if is_tensor else UNWATCHED


def _trait(kind: Kind, of: Any, value: Any) -> Any:
    if isinstance(value, nn.Module) and kind != "has":
        return UNWATCHED
    try:
        return Trait.read(kind, of, value)
    except TypeError:
        return UNWATCHED


def _stamp_of_tensor(value: Any) -> Any:
    if type(value) in (torch.Tensor, nn.Parameter):
        return Stamp.of(value)
    return ArrayStamp.of(value) if isinstance(value, np.ndarray) else UNWATCHED


def renewed(was: Any, value: Any) -> Any:
    """Return the stamp of a value with the same meaning as a previous stamp.

    Args:
        was: the previous stamp, or a plain value.
        value: the current value.
    """
    if isinstance(was, Trait):
        try:
            return Trait.read(was.kind, was.of, value)
        except TypeError:
            return was
    if isinstance(was, FunctionStamp):
        return FunctionStamp.of(value) if isinstance(value, _FUNCTIONS) else was
    if isinstance(value, torch.Tensor):
        return Stamp.of(value)
    return value if is_plain(value) else was


def _is_same_key(now: Any, was: Any) -> bool:
    return is_same(now, was) or (not is_plain(was) and bool(now == was))


def _unbound(function: Any) -> Any:
    found = getattr(function, "__func__", function)
    return found.func if isinstance(found, functools.partialmethod) else found


def _reference(function: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(function)
    except TypeError:  # a function of C code, which refers to no model
        return lambda: function


def _is_of_torch(function: Any) -> bool:
    module = getattr(_unbound(function), "__module__", None) or ""
    return module.partition(".")[0] == torch.__name__
