"""Manifests, which record the dependencies of a capture that its key does not cover. An entry is
used only if all of them are unchanged.

The key of an entry hashes the model, the call and the user's code before the model is captured
(`autopar.cache.walk`). The capture then reports which functions ran and which values they read:

- code of the user must be covered by the key; otherwise the entry is not stored,
- functions of installed libraries are recorded, with the content of their files,
- plain values of global variables are recorded,
- a capture that depends on values of inputs or buffers, or on ops that are not part of torch, is
  not stored.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.cache.origin import (
    changed_since_start,
    file_digest,
    is_library,
    origin_of_file,
    origin_of_module,
)
from autopar.cache.walk import CodeName, Opaque, Walk
from autopar.capture import Trace
from autopar.capture.outside_values import value_at
from autopar.capture.stamps import FunctionStamp, Trait
from autopar.capture.trace import ArrayStamp, KnownBuffer, OutsideValue, Stamp

_OF_DATACLASSES = "__create_fn__.<locals>."  # prefix of generated methods of dataclasses
_NAMESPACES = frozenset(("aten", "prims", "prim", "autopar"))
_OWN_FUNCTIONS = ("torch", "autopar", "_operator", "math", "builtins", "operator")
_DEPTH = 3  # largest nesting of dicts, objects and classes
_KEYS = (str, int)  # types of container keys that JSON supports
_VALUES = (str, int, float, bool, type(None))  # types of values that JSON supports


@dataclass(frozen=True, slots=True)
class Manifest:
    """The dependencies of an entry that its key does not cover.

    Attributes:
        files: the hash of the content of source files of libraries, by file.
        functions: (module, qualified name, first line) of functions of libraries that ran.
        values: (module, steps, type, value) of global variables that were read.
    """

    files: Mapping[str, str]
    functions: tuple[tuple[str, str, int], ...]
    values: tuple[tuple[str, tuple[tuple[str, Any], ...], str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON data."""
        return {
            "files": dict(self.files),
            "functions": [list(each) for each in self.functions],
            "values": [
                [module, [list(step) for step in steps], kind, value]
                for module, steps, kind, value in self.values
            ],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        """Return the manifest that `to_json` converted.

        Raises:
            KeyError, TypeError, ValueError: if the data is malformed.
        """
        return Manifest(
            {str(file): str(digest) for file, digest in data["files"].items()},
            tuple((str(m), str(name), int(line)) for m, name, line in data["functions"]),
            tuple(
                (str(m), tuple((str(a), key) for a, key in steps), str(kind), value)
                for m, steps, kind, value in data["values"]
            ),
        )

    def difference(self) -> str:
        """Describe the first dependency that has changed; empty if there is none."""
        found = (*self._of_files(), *self._of_functions(), *self._of_values())
        return found[0] if found else ""

    def _of_files(self) -> Iterator[str]:
        modules = {getattr(m, "__file__", None): m for m in tuple(sys.modules.values())}
        for file, digest in self.files.items():
            try:
                if file_digest(file) != digest:
                    yield f"{file} has changed"
            except OSError as error:
                yield f"cannot read {file}: {error}"
            if file in modules and (name := user_code_in(modules[file])):
                yield f"{name} is code of the user"

    def _of_functions(self) -> Iterator[str]:
        for module, name, line in self.functions:
            if module in sys.modules and not _is_own(sys.modules[module], name, line):
                yield f"{module}.{name} was replaced"

    def _of_values(self) -> Iterator[str]:
        for module, steps, kind, value in self.values:
            try:
                if is_library(module):  # the capture imported it
                    importlib.import_module(module)
                now = value_at(module, steps)
            except (AttributeError, LookupError, TypeError, ImportError):
                now = Opaque  # no value
            if type(now).__name__ != kind or now != value:
                yield f"a global variable of {module} has changed"


def make_manifest(traces: Iterable[Trace], walk: Walk) -> Manifest:
    """Return the dependencies of captures that were not hashed.

    Args:
        traces: the captures.
        walk: the walk that hashed the model and the call.

    Raises:
        Opaque: if a dependency cannot be covered by a key or a manifest.
    """
    files, functions, values = dict[str, str](), set[tuple[str, str, int]](), dict[Any, Any]()
    for trace in traces:
        _refuse_values_of_tensors(trace)
        _refuse_foreign_ops(trace.graph)
        for name in trace.code:
            if (found := _library_file(name, walk)) and found not in files:
                files[found] = _digest_of_loaded(found)
        functions.update(_library_functions(trace.code))
        for each in trace.attributes:
            if isinstance(each, OutsideValue) and (read := _outside(each, walk)):
                values[read[:2]] = read
    manifest = Manifest(files, tuple(sorted(functions)), tuple(values.values()))
    if reason := manifest.difference():  # a library contains code of the user
        raise Opaque(reason)
    return manifest


def _refuse_values_of_tensors(trace: Trace) -> None:
    for each in trace.attributes:
        if isinstance(each, KnownBuffer):
            raise Opaque(f"forward reads the values of the buffer {each.name}")
    if any(isinstance(value, Tensor) for value in trace.settings.values()):
        raise Opaque("forward reads the values of an input")


def _refuse_foreign_ops(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function":
            continue
        if isinstance(target, torch._ops.OpOverload):
            is_known = target.namespace in _NAMESPACES
        else:
            module = getattr(target, "__module__", None) or ""
            is_known = module.partition(".")[0] in _OWN_FUNCTIONS
        if not is_known:
            raise Opaque(f"the model calls the operator {target}")


def _library_file(name: CodeName, walk: Walk) -> str:
    """Return the file of code of a library. Return an empty string for torch, the standard library,
    and code that was hashed.

    Raises:
        Opaque: if code of the user was not hashed.
    """
    file, qualified, _ = name
    origin = origin_of_file(file)
    if origin == "user" and name not in walk.followed.code:
        if file == "<string>" and qualified.startswith(_OF_DATACLASSES):
            return ""
        raise Opaque(f"forward calls {qualified} in {file}, which was not found before")
    return file if origin == "library" else ""


def _digest_of_loaded(file: str) -> str:
    try:
        if changed_since_start(file):
            raise Opaque(f"{file} was modified after this process started")
        return file_digest(file)
    except OSError as error:
        raise Opaque(f"cannot read {file}: {error}") from error


def _outside(each: OutsideValue, walk: Walk) -> Any:
    """Return the record of a value outside of the model; None if it was hashed.

    Raises:
        Opaque: if the value was not hashed and cannot be recorded.
    """
    if each.is_gradient_mode:
        return None  # the key covers whether a capture is for inference
    if isinstance(each.value, FunctionStamp | Trait):
        return None  # the key or `Manifest.functions` covers the code
    if isinstance(each.value, ArrayStamp):
        raise Opaque(f"forward reads the {each.name}, which is an array")
    if isinstance(each.value, Stamp):
        if id(each.value.tensor()) in walk.followed.tensors:
            return None
    elif isinstance(each.holder, str):
        if type(each.value) in _VALUES and all(
            attribute or isinstance(key, _KEYS) for attribute, key in each.steps
        ):
            return each.holder, each.steps, type(each.value).__name__, each.value
    elif id(each.holder) in walk.followed.cells or id(each.holder) in walk.followed.namespaces:
        return None
    raise Opaque(f"forward reads the {each.name}, which was not found before")


# --------------------------------------------------------------------------------------------------
# Functions of libraries. Users may replace them.


def _library_functions(code: Iterable[CodeName]) -> Iterator[tuple[str, str, int]]:
    """Yield (module, qualified name, first line) of those functions of libraries that can be found
    by these."""
    modules = {
        getattr(module, "__file__", None): name for name, module in tuple(sys.modules.items())
    }
    for file, name, line in code:
        module = modules.get(file)
        if (
            module
            and origin_of_file(file) == "library"
            and _is_own(sys.modules[module], name, line)
        ):
            yield module, name, line


def _is_own(module: types.ModuleType, name: str, line: int) -> bool:
    """Return whether a module has a function under its qualified name, and no code of the user
    wraps it."""
    found: Any = module
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    codes = [
        code
        for each in _wrapped_values(found)
        if isinstance(code := getattr(each, "__code__", None), types.CodeType)
    ]
    if any(origin_of_file(code.co_filename) == "user" for code in codes):
        return False
    return any((code.co_firstlineno, code.co_qualname) == (line, name) for code in codes)


def _wrapped_values(value: Any) -> Iterator[Any]:
    """Yield a value and the values that it wraps, from the outermost to the innermost."""
    while value is not None:
        yield value
        inner = (getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        value = next((each for each in inner if each is not None), None)


def user_code_in(module: types.ModuleType) -> str:
    """Return the name of a function or class of the user that a library's module contains, directly
    or inside the values of its variables. Return an empty string if there is none."""
    seen: set[int] = set()

    def find(name: str, value: Any, depth: int) -> str:
        if _is_user_code(value):
            return name
        if depth == 0 or id(value) in seen:
            return ""
        seen.add(id(value))
        for key, item in _contents_of(value):
            if found := find(f"{name}.{key}", item, depth - 1):
                return found
        return ""

    for name, value in tuple(vars(module).items()):
        if not name.startswith("__") and (found := find(name, value, _DEPTH)):
            return f"{module.__name__}.{found}"
    return ""


def _is_user_code(value: Any) -> bool:
    if isinstance(value, type):
        return origin_of_module(value.__module__) == "user"
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    if not isinstance(code, types.CodeType) or origin_of_file(code.co_filename) != "user":
        return False
    return not code.co_filename.startswith("<")  # generated code, such as that of dataclasses


def _contents_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from tuple(dict.items(value))  # subclasses may create items when they are accessed
    elif isinstance(value, type):
        if origin_of_module(value.__module__) == "library":
            yield from tuple(vars(value).items())
    elif origin_of_module(type(value).__module__) == "library":
        yield "class", type(value)
        yield from tuple(getattr(value, "__dict__", {}).items())
