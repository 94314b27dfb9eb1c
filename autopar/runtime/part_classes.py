"""The classes of the parts of a compiled module.

Each class of module gets a subclass of `Part` and of that class, so that
``isinstance(part, nn.Linear)`` has the same result as for the plain module. Code that depends on
classes, such as `apply` and parameter groups by kind of layer, works with such parts. Of the code
of the class, only properties run; they read the tensors of the part. The methods are hidden, the
attributes are those of the plain module, and torch's containers can be iterated over.
"""

from __future__ import annotations

import abc
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.errors import RuntimeStateError
from autopar.runtime.module_shell import Part, classes_of

_OF_EVERY_CLASS = frozenset(
    (
        "__module__",
        "__dict__",
        "__doc__",
        "__weakref__",
        "__qualname__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__init__",
        "__slots__",
        "__static_attributes__",
        "__firstlineno__",
        "__parameters__",
        "__orig_bases__",
        "__abstractmethods__",
        "__classcell__",
    )
)


class _Hidden:
    """A descriptor that hides an attribute of a class, so that `Part.__getattr__` is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._name)


class _SequenceMethods:
    """The methods that torch's containers have in common."""

    _modules: dict[str, Any]
    _sliced: type[nn.Module] = nn.ModuleList

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._modules[index]
        if not isinstance(index, slice):
            return list(self._modules.values())[index]
        sliced = nn.Module.__new__(self._sliced)
        nn.Module.__init__(sliced)
        for number, (name, module) in enumerate(list(self._modules.items())[index]):
            key = str(number) if self._sliced is nn.ModuleList else name  # as torch does
            sliced._modules[key] = module
        return sliced


class _SequentialMethods(_SequenceMethods):
    _sliced = nn.Sequential


class _MappingMethods(_SequenceMethods):
    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def keys(self) -> Any:
        """Return the names of the modules."""
        return self._modules.keys()

    def items(self) -> Any:
        """Return the names and modules."""
        return self._modules.items()

    def values(self) -> Any:
        """Return the modules."""
        return self._modules.values()


_CONTAINERS: tuple[tuple[type, type], ...] = (
    (nn.ModuleList, _SequenceMethods),
    (nn.Sequential, _SequentialMethods),
    (nn.ModuleDict, _MappingMethods),
)


def part_class(cls: type[nn.Module]) -> type[Part]:
    """Return the class of the parts for modules of a class. It is a subclass of `Part` and of that
    class, or `Part` if such a subclass cannot be created."""
    if type(cls) not in (type, abc.ABCMeta):
        return Part  # another metaclass may run arbitrary code
    namespace: dict[str, Any] = {
        name: x
        for each in classes_of(cls)
        for name, was in vars(each).items()
        if (x := _replacement_of(name, was)) is not None
    }
    namespace |= _methods_of_container(cls)
    namespace |= {
        "extra_repr": _describe_class(cls),
        "__module__": Part.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": Part.__doc__,
    }
    try:
        new_class = types.new_class(
            cls.__name__, (Part, cls), exec_body=lambda body: body.update(namespace)
        )
    except TypeError:  # classes with an incompatible memory layout
        return Part
    return new_class


def _methods_of_container(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the methods that stand for those of torch's container of which a class is a subclass;
    none if it is no container."""
    walked = next((how for container, how in _CONTAINERS if issubclass(cls, container)), object)
    return {
        name: x
        for each in reversed(walked.__mro__[:-1])
        for name, x in vars(each).items()
        if callable(x) or name == "_sliced"
    }


def as_container(
    module: nn.Module, cls: type[nn.Module], whole: Callable[[Any], Any] | None = None
) -> None:
    """Let a compiled module be indexed and iterated over if the model is one of torch's containers.
    Python looks these methods up in the class, so the module gets a subclass of its class.

    Args:
        module: the compiled module.
        cls: the class of the model.
        whole: returns the module that has the modules, by default `module`.
    """
    methods = _methods_of_container(cls)
    if whole is not None:
        methods = {
            name: _of_another(whole, name) for name, x in methods.items() if name != "_sliced"
        }
    if methods:
        module_class = type(module)
        names = {"__module__": module_class.__module__, "__qualname__": module_class.__qualname__}
        new_class = types.new_class(
            module_class.__name__, (module_class,), exec_body=lambda x: x.update(methods | names)
        )
        object.__setattr__(module, "__class__", new_class)


def _of_another(whole: Callable[[Any], Any], name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        """Call the method of the whole module."""
        return getattr(whole(self), name)(*args)

    return method


def _replacement_of(name: str, was: Any) -> Any:
    """Return the replacement of a class's attribute in the class of a part; None if no replacement
    is needed."""
    if (
        name in _OF_EVERY_CLASS
        or name.startswith("_abc")
        or any(name in vars(each) for each in classes_of(Part))
    ):
        return None
    for base in (nn.Module, object):
        if hasattr(base, name):
            return inspect.getattr_static(base, name)
    if name.startswith("__") and name.endswith("__"):
        return _refuse_operator(name) if callable(was) else None
    return _Hidden(name)


def _refuse_operator(name: str) -> Callable[..., Any]:
    """Return a method that refuses an operator. Operators cannot be hidden, since Python looks them
    up in the class only."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeStateError."""
        message = (
            f"a part of a compiled module does not have {name}, which its class defines: parts"
            " cannot be called alone"
        )
        raise RuntimeStateError(message, remedy="use the operator of the plain model's module")

    return refuse


def _describe_class(cls: type[nn.Module]) -> Callable[[Any], str]:
    def extra_repr(self: Any) -> str:
        """Return the description of the class; empty if it needs attributes that are missing."""
        try:
            return cls.extra_repr(self)
        except (RuntimeStateError, AttributeError, TypeError, LookupError):
            return ""

    return extra_repr
