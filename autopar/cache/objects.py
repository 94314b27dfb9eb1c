"""The contents of objects, classes and modules as (name, value) pairs, for `autopar.cache.walk`."""

from __future__ import annotations

import dis
import logging
import pathlib
import re
import struct
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

HEAP = 1 << 9  # flag of classes that Python code defined
_POINTER_BYTES = struct.calcsize("P")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_NAMED = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)
_WRITTEN = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    range,
    slice,
    pathlib.PurePath,
    types.GenericAlias,
    types.UnionType,
    typing.TypeVar,
    type(typing.Any),
    type(list[int]),
    type(typing.Union[int, str]),  # noqa: UP007  # the class of such objects before Python 3.14
    type(typing.Callable),
)
# attributes of classes that are derived from others, or only document the class
_OF_CLASSES = frozenset(
    (
        "__doc__",
        "__module__",
        "__dict__",
        "__weakref__",
        "__slotnames__",  # set by copyreg when an instance is copied
        "__annotations__",
        "__annotate_func__",
        "__annotations_cache__",
        "__abstractmethods__",
        "__firstlineno__",
        "__static_attributes__",
        "__parameters__",
        "__orig_bases__",
        "_abc_impl",
        "__type_params__",
    )
)
# attributes of modules that are used for saving and loading
_OF_MODULES = frozenset(
    (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
)
_HOOKS = frozenset(
    (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_always_called",
    )
)
# attributes of objects of libraries that are not hashed: a hash of transformers' configurations
# that differs between processes, and an attribute that a capture adds to tensors and that does not
# affect the graph
_LEFT_OUT = {
    "transformers": frozenset(("_original_object_hash",)),
    "torch": frozenset(("_dynamo_static_input_type",)),
}


def is_atom(value: Any) -> bool:
    """Return whether the `repr` of a value determines it in every process."""
    return type(value) in _ATOMS


def is_hashed_by_name(value: Any) -> bool:
    """Return whether the name of a value determines it in every process."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    return isinstance(value, (*_NAMED, *_WRITTEN, logging.Logger, re.Pattern)) or (
        isinstance(value, type) and value in _BUILT_IN
    )


_BUILT_IN = frozenset(
    each for each in vars(sys.modules["builtins"]).values() if isinstance(each, type)
)


def text_of_name(value: Any) -> str:
    """Return the name of a class, or of a value for which `is_hashed_by_name` is true."""
    if isinstance(value, logging.Logger):
        return f"logger {value.name}"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if isinstance(value, _WRITTEN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, _NAMED[-3:]):
        return f"op {value}"
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    place = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", "")
    return f"{type(value).__name__} {place}.{value.__name__}"


def c_base(kind: type) -> type:
    """Return the nearest base of a class, including the class, that is not defined in Python.
    Objects of such a class may have data that Python code cannot access.

    A class that is defined in Python adds to the size of its base only its slots, and a dictionary
    and weak references if its base has none.
    """
    while kind.__flags__ & HEAP and kind.__base__ is not None:
        own, base = vars(kind), kind.__base__
        num_parts = len(slots_of(kind))
        num_parts += "__dict__" in own and kind.__dictoffset__ > 0
        num_parts += "__weakref__" in own and kind.__weakrefoffset__ > 0
        size = base.__basicsize__ + num_parts * _POINTER_BYTES
        if kind.__basicsize__ > size or kind.__itemsize__ != base.__itemsize__:
            return kind
        kind = base
    return kind


def slots_of(kind: type) -> list[str]:
    """Return the names of the slots that a class defines, without those of its bases."""
    slots = vars(kind).get("__slots__", ()) if kind.__flags__ & HEAP else ()
    names = []
    for name in (slots,) if isinstance(slots, str) else slots:
        hidden = name.startswith("__") and not name.endswith("__")
        if name not in ("__dict__", "__weakref__"):
            names.append(f"_{kind.__name__.lstrip('_')}{name}" if hidden else name)
    return names


def class_items(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class that Python code may read, in order."""
    for name, item in sorted(vars(kind).items()):
        if name not in _OF_CLASSES:
            yield name, item


def object_state(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, in the order in which they were set, then its slots."""
    left_out = _LEFT_OUT.get(type(value).__module__.partition(".")[0], frozenset())
    for name, item in getattr(value, "__dict__", {}).items():
        if name not in left_out:
            yield name, item
    for kind in type(value).__mro__:
        for name in slots_of(kind):
            if hasattr(value, name):
                yield name, getattr(value, name)


def module_state(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes, parameters, buffers, submodules and hooks of a module. Hooks are keyed
    by numbers that differ between processes, so the numbers are left out."""
    for name, item in vars(module).items():
        if name in _HOOKS:
            yield name, list(item.values())
        elif name not in _OF_MODULES:
            yield name, item


# --------------------------------------------------------------------------------------------------
# The names that code uses.

_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_CONSTANT = frozenset(("LOAD_CONST", "LOAD_SMALL_INT"))


@dataclass(frozen=True, slots=True)
class Names:
    """The names that code uses.

    Attributes:
        globals: the names of global variables and built-in functions.
        imports: the modules that the code imports, with the level of relative imports.
        attributes: all names, including those of attributes.
    """

    globals: frozenset[str]
    imports: frozenset[tuple[str, int]]
    attributes: frozenset[str]


def names_in(code: types.CodeType) -> Names:
    """Return the names that code uses, including the code of functions and classes inside it."""
    codes, found = [code], set[str]()
    imports, attributes = set[tuple[str, int]](), set[str]()
    for each in codes:
        codes.extend(inner for inner in each.co_consts if isinstance(inner, types.CodeType))
        attributes.update(each.co_names)
        constants: list[Any] = [0, 0]
        for step in dis.get_instructions(each):
            if step.opname in _GLOBAL:
                found.add(step.argval)
            elif step.opname in _CONSTANT:
                constants = [constants[-1], step.argval]
            elif step.opname == "IMPORT_NAME":  # the level and the names were loaded before
                imports.add((step.argval, int(constants[0])))
    return Names(frozenset(found), frozenset(imports), frozenset(attributes))
