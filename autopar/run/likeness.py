"""A class of `Part` for each class of module, which it is a subclass of: ``isinstance(part, nn.Linear)`` is what it is of the plain model.

So `apply`, parameter groups by kind of layer and what else asks for classes find what they look for. Of the class properties alone run,
on what the part holds: its methods are hidden, its attributes shown as the plain module has them; torch's own containers can be walked as
ever.
"""

from __future__ import annotations

import abc
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.errors import RuntimeStateError
from autopar.run.part import Part, classes_of

_OF_EVERY_CLASS = frozenset(
    ("__module__", "__dict__", "__doc__", "__weakref__", "__qualname__", "__annotations__", "__annotate__", "__annotate_func__",
     "__annotations_cache__", "__init__", "__slots__", "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__",
     "__abstractmethods__", "__classcell__")
)  # fmt: skip


class _Hidden:
    """An attribute of a class that `Part.__getattr__` is asked for instead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._name)


class _Walked:
    """What torch's containers have in common."""

    _modules: dict[str, Any]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __getitem__(self, index: Any) -> Any:
        return self._modules[index] if isinstance(index, str) else list(self._modules.values())[index]


class _Named(_Walked):
    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def keys(self) -> Any:
        return self._modules.keys()

    def items(self) -> Any:
        return self._modules.items()

    def values(self) -> Any:
        return self._modules.values()


_CONTAINERS: tuple[tuple[type, type], ...] = ((nn.ModuleList, _Walked), (nn.Sequential, _Walked), (nn.ModuleDict, _Named))


def likeness(cls: type[nn.Module]) -> type[Part]:
    """The class of a part that stands for a module of this one; `Part` itself where there can be no subclass of both."""
    if type(cls) not in (type, abc.ABCMeta):
        return Part  # a metaclass of another kind does what it likes
    walked = next((how for container, how in _CONTAINERS if issubclass(cls, container)), None)
    namespace: dict[str, Any] = {
        name: x for each in classes_of(cls) for name, was in vars(each).items() if (x := _instead(name, was)) is not None
    }
    for each in () if walked is None else reversed(classes_of(walked)):
        namespace |= {name: x for name, x in vars(each).items() if callable(x)}
    namespace |= {"extra_repr": _described(cls), "__module__": Part.__module__, "__qualname__": cls.__qualname__, "__doc__": Part.__doc__}
    try:
        made = types.new_class(cls.__name__, (Part, cls), exec_body=lambda body: body.update(namespace))
    except TypeError:  # classes whose memory is laid out in another way
        return Part
    return made


def _instead(name: str, was: Any) -> Any:
    """What a part has for an attribute of a class; None where it needs none."""
    if name in _OF_EVERY_CLASS or name.startswith("_abc") or any(name in vars(each) for each in classes_of(Part)):
        return None
    for base in (nn.Module, object):
        if hasattr(base, name):
            return inspect.getattr_static(base, name)
    if name.startswith("__") and name.endswith("__"):
        return _refusing(name) if callable(was) else None
    return _Hidden(name)


def _refusing(name: str) -> Callable[..., Any]:
    """Of an operator, which Python looks for in the class alone."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = f"a part of a compiled module has no {name}, which its class defines: it is never run by itself"
        raise RuntimeStateError(what, remedy="use the plain model's")

    return refuse


def _described(cls: type[nn.Module]) -> Callable[[Any], str]:
    def extra_repr(self: Any) -> str:
        try:
            return cls.extra_repr(self)
        except (RuntimeStateError, AttributeError, TypeError, LookupError):  # it asks for what is not there
            return ""

    return extra_repr
