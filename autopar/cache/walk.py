"""A hash of all objects to which a model and a call refer. It is equal in every process.

`Walk` hashes values one after another and follows their references: attributes, containers,
closures, globals that functions read, classes and their methods. It hashes

- modules by their class, mode, attributes, submodules, hooks, parameters and buffers,
- parameters, buffers and inputs by shape, strides, dtype, device type, storage and
  ``requires_grad``; other tensors also by their values,
- code of the user by its instructions, constants and source lines; this includes functions of the
  user that replace functions of libraries,
- code of torch and of installed libraries by its name and version (`autopar.cache.origin`),
- all other objects by their class and attributes.

When an object occurs again, it is hashed as a reference to its first occurrence, so that shared
objects affect the hash and reference cycles terminate. A value that cannot be hashed raises
`Opaque`, which names its location, since a wrong hash could lead to a wrong plan.

Objects of *libraries* are followed leniently: an object that cannot be hashed is hashed by its
type. The values that forward reads from them are compared separately (`autopar.cache.manifest`).
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib.util
import linecache
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.cache.objects import (
    HEAP,
    c_base,
    class_items,
    is_atom,
    is_hashed_by_name,
    module_state,
    names_in,
    object_state,
    text_of_name,
)
from autopar.cache.origin import (
    Origin,
    is_library,
    is_module_of,
    library_version,
    origin_of_file,
    origin_of_module,
)
from autopar.capture.tensor_kinds import unusual_kind

CodeName: TypeAlias = tuple[str, str, int]
"""The file, qualified name and first line of a function's code."""
MOST_BYTES = 1 << 28  # largest size of a tensor or array whose values are hashed


class Opaque(Exception):
    """Raised for a value that cannot be hashed. The message names the value and its location."""


def name_of_code(code: types.CodeType) -> CodeName:
    """Return the name of code, which is unique for each function of a program."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


@dataclass(slots=True)
class Followed:
    """The objects that a walk has followed.

    Attributes:
        code: the code of the user that was hashed.
        cells: the closure variables, by id, in the order of the walk. The order is equal for equal
            hashes.
        tensors: the tensors whose values were hashed, by id.
        namespaces: the globals of the user's functions, by id.
    """

    code: set[CodeName] = field(default_factory=set)
    cells: dict[int, types.CellType] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    namespaces: dict[int, dict[str, Any]] = field(default_factory=dict)


class Walk:
    """A hash of values that are added in order.

    Attributes:
        followed: the objects that were reached from the values.
    """

    def __init__(self) -> None:
        self.followed = Followed()
        self._digest = hashlib.sha256()
        self._seen: dict[tuple[int, bool], int] = {}
        self._storages: dict[int, int] = {}
        self._by_metadata: set[int] = set()
        self._read: dict[int, set[str]] = {}  # hashed names of modules of the user, by module id
        self._waiting: deque[tuple[Any, bool, str]] = deque()
        self._kept: list[Any] = []  # keeps objects alive, so that no id is used twice
        self._where = ""

    def add(self, what: str, value: Any, *, values: bool = True) -> None:
        """Hash a value and all objects to which it refers.

        Args:
            what: the name of the value, for the message of `Opaque`.
            value: the value.
            values: whether the values of tensors are hashed. Those of parameters and buffers are
                never hashed.

        Raises:
            Opaque: if a part cannot be hashed.
        """
        self._where = what
        if not values or isinstance(value, nn.Module):
            self._note_metadata(value)
        self._token(what)
        self._value(value, False)
        while self._waiting:
            item, lenient, self._where = self._waiting.popleft()
            self._content(item, lenient)

    @property
    def hexdigest(self) -> str:
        """The hash of all values that were added so far."""
        return self._digest.hexdigest()

    def _note_metadata(self, value: Any) -> None:
        """Exclude the values of the tensors of a model, or of nested inputs, from the hash."""
        tensors = (
            (*value.parameters(), *value.buffers())
            if isinstance(value, nn.Module)
            else (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        )
        self._by_metadata.update(map(id, tensors))

    # ----------------------------------------------------------------------------------------------
    # Tokens, references and atoms.

    def _token(self, *texts: object) -> None:
        for text in texts:
            data = str(text).encode("utf-8", "surrogatepass")
            self._digest.update(b"%d:" % len(data))
            self._digest.update(data)

    def _opaque(self, what: str) -> Opaque:
        return Opaque(f"{self._where}: {what}")

    def _value(self, value: Any, lenient: bool, at: str = "") -> None:
        """Hash an atom or a tuple. For any other value, hash a reference, and queue its content."""
        if is_atom(value):
            self._token(type(value).__name__, repr(value))
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif type(value) is tuple:
            self._token("tuple", len(value))
            for number, item in enumerate(value):
                self._value(item, lenient, f"{at}[{number}]")
        elif is_hashed_by_name(value):
            self._token("named", text_of_name(value))
        else:
            key = id(value), lenient
            if key not in self._seen:
                self._seen[key] = len(self._seen)
                self._kept.append(value)
                self._waiting.append((value, lenient, f"{self._where}{at}"))
            self._token("ref", self._seen[key])

    def _items(self, items: Iterable[tuple[str, Any]], lenient: bool) -> None:
        for name, item in items:
            self._token(name)
            self._value(item, lenient, f".{name}")
        self._token("end")

    def _content(self, value: Any, lenient: bool) -> None:
        """Hash the content of an object at its first occurrence."""
        for kinds, handle in _HANDLERS:
            if isinstance(value, kinds):
                handle(self, value, lenient)
                return
        handle = _BASES.get(c_base(type(value)))
        if handle is not None:
            handle(self, value, lenient)
        elif lenient:
            self._token("of type", text_of_name(type(value)))
        else:
            raise self._opaque(f"{type(value).__name__} objects cannot be compared")

    # ----------------------------------------------------------------------------------------------
    # Containers and objects.

    def _sequence(self, value: Any, lenient: bool) -> None:
        self._class_of(value)
        self._token(len(value))
        for number, item in enumerate(value):
            self._value(item, lenient, f"[{number}]")
        self._attributes(value, lenient)

    def _mapping(self, value: Any, lenient: bool) -> None:
        self._class_of(value)
        own = isinstance(value, dict) and type(value).items is not dict.items
        items = dict.items(value) if own and not isinstance(value, OrderedDict) else value.items()
        self._token(len(items))
        for key, item in items:
            self._value(key, lenient, " key")
            self._value(item, lenient, f"[{key!r:.40}]")
        self._attributes(value, lenient)

    def _default_mapping(self, value: defaultdict[Any, Any], lenient: bool) -> None:
        self._value(value.default_factory, lenient, " default")
        self._mapping(value, lenient)

    def _set(self, value: Any, lenient: bool) -> None:
        self._class_of(value)
        if not all(is_atom(item) or is_hashed_by_name(item) for item in value):
            if not lenient:
                raise self._opaque("a set whose order differs between processes")
            self._token("set", len(value))
            return
        for text in sorted(
            f"{type(item).__name__} {item!r}" if is_atom(item) else text_of_name(item)
            for item in value
        ):
            self._token(text)
        self._attributes(value, lenient)

    def _class_of(self, value: Any) -> None:
        self._value(type(value), False, " class")

    def _attributes(self, value: Any, lenient: bool) -> None:
        if type(value).__flags__ & HEAP:
            self._items(object_state(value), lenient)

    def _object(self, value: Any, lenient: bool) -> None:
        self._class_of(value)
        self._items(object_state(value), lenient)

    def _derived_atom(self, value: Any, lenient: bool) -> None:
        """Hash a string or number of a derived class that is defined in Python."""
        self._class_of(value)
        base = next(kind for kind in (str, bytes, int, float) if isinstance(value, kind))
        self._token(base.__repr__(value))
        self._attributes(value, lenient)

    def _enum(self, value: Enum, lenient: bool) -> None:
        self._class_of(value)
        self._token(value.name)
        self._value(value.value, lenient)

    def _array(self, value: Any, lenient: bool) -> None:
        self._class_of(value)
        self._token(value.dtype.str, value.shape)
        if value.dtype.hasobject or value.nbytes > MOST_BYTES:
            raise self._opaque("an array of objects, or one that is too large to hash")
        self._digest.update(value.tobytes())

    # ----------------------------------------------------------------------------------------------
    # Modules and tensors.

    def _nn_module(self, module: nn.Module, lenient: bool) -> None:
        self._class_of(module)
        held = (*module._parameters.values(), *module._buffers.values())
        self._by_metadata.update(id(tensor) for tensor in held if tensor is not None)
        self._items(module_state(module), False)

    def _tensor(self, tensor: Tensor, lenient: bool) -> None:
        if reason := _why_opaque(tensor):
            raise self._opaque(reason)
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        look = type(tensor).__name__, tensor.dtype, tuple(tensor.shape), tensor.stride()
        place = tensor.storage_offset(), number, storage.nbytes(), tensor.device.type
        flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
        self._token("tensor", *look, *place, *flags)
        self._items(object_state(tensor), lenient)
        if id(tensor) not in self._by_metadata:
            self._tensor_values(tensor)

    def _tensor_values(self, tensor: Tensor) -> None:
        self.followed.tensors[id(tensor)] = tensor
        if tensor.is_meta:
            return
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise self._opaque("a tensor whose memory was freed")
        if tensor.numel() * tensor.element_size() > MOST_BYTES:
            raise self._opaque("a tensor that is too large to hash")
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        self._digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())

    # ----------------------------------------------------------------------------------------------
    # Functions, code and classes.

    def _function(self, function: types.FunctionType, lenient: bool) -> None:
        code = function.__code__
        origin = origin_of_file(code.co_filename)
        is_users = origin == "user"
        if is_users:
            self._token("function", function.__module__, function.__qualname__)
            self._code(code)
            self.followed.namespaces[id(function.__globals__)] = function.__globals__
            self._globals(function)
        else:
            self._library("function", function.__module__, function.__qualname__, origin)
            self._token(code.co_firstlineno)
        lenient = not is_users
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(name, cell, lenient)
        self._value(function.__defaults__, lenient, " defaults")
        self._items(sorted((function.__kwdefaults__ or {}).items()), lenient)
        self._items(sorted(function.__dict__.items()), lenient)

    def _cell(self, name: str, cell: types.CellType, lenient: bool) -> None:
        self.followed.cells[id(cell)] = cell
        self._token("cell", name)
        try:
            self._value(cell.cell_contents, lenient, f" variable {name}")
        except ValueError:
            self._token("empty")

    def _library(self, kind: str, module: str | None, name: str, origin: Origin) -> None:
        version = library_version(module or "") if origin == "library" else ""
        self._token(f"{origin} {kind}", module, name, version)

    def _code(self, code: types.CodeType) -> None:
        """Hash code and its source lines, since plans quote source lines."""
        self.followed.code.add(name_of_code(code))
        self._token("code", *name_of_code(code), code.co_flags, code.co_argcount)
        self._token(code.co_posonlyargcount, code.co_kwonlyargcount)
        for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
            self._token(len(names), *names)
        for data in (code.co_code, code.co_linetable, code.co_exceptiontable):
            self._token(data.hex())
        for constant in code.co_consts:
            if isinstance(constant, frozenset):
                self._token(*sorted(map(repr, constant)))
            else:
                self._value(constant, False)
        lines = [line for _, _, line in code.co_lines() if line]
        if origin_of_file(code.co_filename) == "user" and lines:
            linecache.checkcache(code.co_filename)
            text = linecache.getlines(code.co_filename)
            self._token("".join(text[min(lines) - 1 : max(lines)]))

    def _globals(self, function: types.FunctionType) -> None:
        """Hash the values of the globals that a function, or a function inside it, reads."""
        names = names_in(function.__code__)
        for name in sorted(names.globals):
            self._token("global", name)
            if name in function.__globals__:
                self._global(name, function.__globals__[name], names.attributes)
            else:
                self._token("builtin" if hasattr(builtins, name) else "missing")
        for name, level in sorted(names.imports):
            self._import(function, name, level, names.attributes)

    def _global(self, name: str, value: Any, attributes: frozenset[str]) -> None:
        if isinstance(value, types.ModuleType):
            self._module(value, attributes)
        else:
            self._value(value, False, f" global {name}")

    def _import(
        self, function: types.FunctionType, name: str, level: int, attributes: frozenset[str]
    ) -> None:
        """Hash the module that a function imports."""
        package = function.__globals__.get("__package__") or ""
        full = importlib.util.resolve_name("." * level + name, package) if level else name
        self._token("import", full)
        if full in sys.modules:
            self._module(sys.modules[full], attributes)
        elif not is_library(full):
            raise self._opaque(f"imports {full}, which is not loaded yet")

    def _module(self, module: types.ModuleType, attributes: frozenset[str]) -> None:
        """Hash a Python module. For a module of the user, hash the variables that functions may
        read."""
        if not is_module_of(module, "user"):
            origin = origin_of_module(module.__name__)
            self._library("module", module.__name__, "", origin)
            return
        self._token("module", module.__name__)
        done = self._read.setdefault(id(module), set())
        for name in sorted(attributes & vars(module).keys() - done):
            done.add(name)
            self._token(name)
            self._global(name, vars(module)[name], attributes)

    def _class(self, kind: type, lenient: bool) -> None:
        origin = origin_of_module(kind.__module__)
        if origin == "user":
            self._token("class", kind.__module__, kind.__qualname__)
            self._value(type(kind), False, " metaclass")
        else:
            self._library("class", kind.__module__, kind.__qualname__, origin)
        if kind.__flags__ & HEAP:
            self._value(kind.__bases__, origin != "user", " bases")
        if origin == "user":
            self._items(class_items(kind), False)
        elif origin in ("library", "torch") and kind.__flags__ & HEAP:
            self._changes(kind)

    def _changes(self, kind: type) -> None:
        """Hash the parts of a library's class that users may change: plain values, containers, and
        functions of the user."""
        for name, item in class_items(kind):
            code = getattr(item, "__code__", None)
            is_users = isinstance(code, types.CodeType) and (
                origin_of_file(code.co_filename) == "user"
            )
            if is_users or is_atom(item) or type(item) in (dict, list, tuple, set):
                self._token(name)
                self._value(item, True, f".{name}")
        self._token("end")

    def _method(self, method: types.MethodType, lenient: bool) -> None:
        self._token("method")
        self._value(method.__func__, lenient)
        self._value(method.__self__, lenient)

    def _wrapped_function(self, value: Any, lenient: bool) -> None:
        self._token(type(value).__name__)
        self._value(value.__func__, lenient)

    def _property(self, value: property, lenient: bool) -> None:
        self._token("property")
        self._value((value.fget, value.fset, value.fdel), lenient)

    def _partial(self, value: functools.partial[Any], lenient: bool) -> None:
        self._token("partial")
        self._value((value.func, value.args, tuple(value.keywords.items())), lenient)

    def _python_module(self, module: types.ModuleType, lenient: bool) -> None:
        if is_module_of(module, "user") and not lenient:
            raise self._opaque(f"contains the module {module.__name__}")
        self._library("module", module.__name__, "", origin_of_module(module.__name__))

    def _wrapper_of_cache(self, value: Any, lenient: bool) -> None:
        self._token("cached function")
        self._value(value.__wrapped__, lenient)


def _why_opaque(tensor: Tensor) -> str:
    """Return why a tensor cannot be hashed; an empty string if it can."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"a tensor of the class {type(tensor).__name__}"
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return "a tensor with hooks"
    if (kind := unusual_kind(tensor)) is not None:
        return kind.name
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside a transform of torch.func"
    if tensor._is_zerotensor():
        return "a tensor of zeros with no elements in memory"
    return ""


def _array_types() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy")
    return (numpy.ndarray, numpy.generic) if numpy is not None else ()


_HANDLERS: tuple[tuple[Any, Any], ...] = (
    (nn.Module, Walk._nn_module),
    (Tensor, Walk._tensor),
    (types.FunctionType, Walk._function),
    (type, Walk._class),
    (Enum, Walk._enum),
    (types.MethodType, Walk._method),
    ((staticmethod, classmethod), Walk._wrapped_function),
    (property, Walk._property),
    (functools.partial, Walk._partial),
    (types.ModuleType, Walk._python_module),
    (type(functools.lru_cache(lambda: None)), Walk._wrapper_of_cache),
    (_array_types(), Walk._array),
)
_BASES: dict[type, Any] = {
    object: Walk._object,
    **dict.fromkeys((str, bytes, int, float), Walk._derived_atom),
    **dict.fromkeys((dict, OrderedDict, types.MappingProxyType), Walk._mapping),
    **dict.fromkeys((list, tuple), Walk._sequence),
    **dict.fromkeys((set, frozenset), Walk._set),
    defaultdict: Walk._default_mapping,
}
"""Classes that are not defined in Python and whose objects are hashed completely."""
