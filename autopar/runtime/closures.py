"""Functions and classes whose closures refer to modules of a model.

A function in an attribute of a module may have modules in its closure. So have the properties of
the classes that `torch.nn.utils.parametrize` creates for single modules. `copy.deepcopy` copies
neither functions nor classes. A copy of the model would run modules of the original, and keep the
original alive. `Rebound` creates the same functions and classes with other modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

_T = TypeVar("_T", bound=type)


class Rebound:
    """Copies of functions and classes. Their closures are empty until `fill` is called.

    Args:
        model: the model whose modules are replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module) for module in model.modules()}
        self._made: dict[int, Any] = {}
        self._open: list[tuple[CellType, Any]] = []

    def function(self, function: Any) -> Any:
        """Return a copy of a function if its closure leads to a module, and otherwise the value
        itself."""
        return self._copy(function) if self._leads_to_module(function, set()) else function

    def class_of(self, module: nn.Module) -> type[nn.Module]:
        """Return a copy of a module's class if functions that the class defines lead to a module,
        and otherwise the class itself."""
        cls = type(module)
        if id(cls) in self._made:
            copied: type[nn.Module] = self._made[id(cls)]
            return copied
        if not any(
            self._leads_to_module(function, set())
            for value in vars(cls).values()
            for function in _functions_of(value)
        ):
            return cls
        class_copy = _empty_copy(cls)
        self._made[id(cls)] = class_copy
        for name, value in vars(cls).items():
            if name not in ("__dict__", "__weakref__"):
                setattr(class_copy, name, self._attribute(value))
        return class_copy

    def fill(self, replacement: Callable[[nn.Module], Any]) -> None:
        """Fill the closures.

        Args:
            replacement: returns the module that takes the place of a module of the model.
        """
        for cell, value in self._open:
            if isinstance(value, MethodType):
                cell.cell_contents = MethodType(value.__func__, replacement(value.__self__))
            elif id(value) in self._made:
                cell.cell_contents = self._made[id(value)]
            else:
                cell.cell_contents = replacement(value)
        self._open.clear()

    def _attribute(self, value: Any) -> Any:
        """Return a copy of an attribute of a class."""
        if isinstance(value, property):
            get, put, remove = map(self._copy, _functions_of(value))
            return property(get, put, remove, value.__doc__)
        if isinstance(value, classmethod | staticmethod):
            return type(value)(self._copy(value.__func__))
        return self._copy(value)

    def _copy(self, function: Any) -> Any:
        if not isinstance(function, FunctionType) or not function.__closure__:
            return function
        if id(function) in self._made:
            return self._made[id(function)]
        contents = [_contents_of(cell) for cell in function.__closure__]
        cells = tuple(
            CellType() if self._is_replaced(value) else cell
            for cell, value in zip(function.__closure__, contents, strict=True)
        )
        copied = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            cells,
        )
        copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
        copied.__dict__.update(vars(function))
        copied.__module__, copied.__doc__ = function.__module__, function.__doc__
        self._made[id(function)] = copied
        for cell, value in zip(cells, contents, strict=True):
            if self._is_replaced(value):
                self._copy(value)
                self._open.append((cell, value))
        return copied

    def _is_replaced(self, value: Any) -> bool:
        return (
            self._is_of_model(value)
            or (isinstance(value, type) and id(value) in self._made)  # the cell of ``super()``
            or self._leads_to_module(value, set())
        )

    def _is_of_model(self, value: Any) -> bool:
        return id(value.__self__ if isinstance(value, MethodType) else value) in self._modules

    def _leads_to_module(self, function: Any, seen: set[int]) -> bool:
        if not isinstance(function, FunctionType) or id(function) in seen:
            return False
        seen.add(id(function))
        return any(
            self._is_of_model(value) or self._leads_to_module(value, seen)
            for value in map(_contents_of, function.__closure__ or ())
        )


def rebind_copy(model: nn.Module, copied: nn.Module, copies: Mapping[int, Any]) -> None:
    """Replace functions and classes of a copied model that refer to modules of the original.

    Args:
        model: the original.
        copied: the result of `copy.deepcopy`; it is changed in place.
        copies: the copy of each module, by the id of the original.
    """
    rebound = Rebound(model)
    for module in copied.modules():
        attributes = vars(module)
        for name, value in attributes.items():
            if isinstance(value, FunctionType):
                attributes[name] = rebound.function(value)
            elif isinstance(value, dict):
                value.update({key: rebound.function(each) for key, each in value.items()})
            elif isinstance(value, list):
                value[:] = map(rebound.function, value)
        module.__class__ = rebound.class_of(module)
    rebound.fill(lambda module: copies[id(module)])


def _contents_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return None


def _functions_of(value: Any) -> tuple[Any, ...]:
    """Return the functions of an attribute of a class."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    return (getattr(value, "__func__", value),)


def _empty_copy(cls: _T) -> _T:
    """Return a class with the name and bases of a class."""
    empty: _T = type(cls)(cls.__name__, cls.__bases__, {"__qualname__": cls.__qualname__})
    return empty
