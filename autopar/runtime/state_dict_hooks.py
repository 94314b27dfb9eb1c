"""The state dict hooks of a model, on full state dicts of its compiled module.

A full state dict has the names and values of the plain model's state dict, which hooks may change.
Parts do not have these hooks, since the compiled module's own state dict contains DTensors under
the names of parameters. A hook is called with the parts in place of the model's modules, and does
not keep the model alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

log = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True)
class _Place:
    """The path of a module of the model."""

    path: str

    def bind(self, root: nn.Module) -> nn.Module:
        return root.get_submodule(self.path)


@dataclass(frozen=True, slots=True)
class _Method:
    """A bound method of a module, or a function with the module as the first argument."""

    function: Any
    of: _Place

    def bind(self, root: nn.Module) -> Callable[..., Any]:
        return MethodType(_bind(self.function, root), self.of.bind(root))


@dataclass(frozen=True, slots=True)
class _Closure:
    """A function whose closure contains modules."""

    code: CodeType
    context: dict[str, Any]
    defaults: tuple[Any, ...] | None
    keywords: dict[str, Any] | None
    contents: tuple[Any, ...]

    def bind(self, root: nn.Module) -> Callable[..., Any]:
        cells = tuple(CellType(_bind(value, root)) for value in self.contents)
        function = FunctionType(
            self.code, self.context, argdefs=self.defaults, closure=cells or None
        )
        function.__kwdefaults__ = self.keywords
        return function


@dataclass(frozen=True, slots=True)
class _Hook:
    """A hook of the module at a path. If `replaces`, its result is the new state dict."""

    path: str
    function: Any
    version: int = 1
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class StateDictHooks:
    """The hooks of all modules of a model, in the order in which torch calls them.

    Attributes:
        saving: hooks that change the result of `state_dict`.
        loading: hooks that change the argument of `load_state_dict`.
    """

    saving: tuple[_Hook, ...]
    loading: tuple[_Hook, ...]

    @staticmethod
    def of(model: nn.Module) -> StateDictHooks:
        """Return the hooks of a model."""
        paths = {id(module): path for path, module in model.named_modules()}
        saving = tuple(
            _Hook(
                path,
                _without_model(hook, paths),
                module._version,
                not path and not getattr(hook, "_from_public_api", False),
            )
            for path, module in _children_first(model)
            for hook in module._state_dict_hooks.values()
        )
        loading = tuple(
            _Hook(
                path,
                _Method(_without_model(hook.hook, paths), _Place(path))
                if hook.with_module
                else _without_model(hook.hook, paths),
            )
            for path, module in model.named_modules(remove_duplicate=False)
            for hook in module._load_state_dict_pre_hooks.values()
        )
        return StateDictHooks(saving, loading)

    def log_not_run(self, action: str, *, saves: bool) -> None:
        """Log the hooks that an action does not run, since it transfers shards of parameters.

        Args:
            action: the name of the function.
            saves: whether the action saves; otherwise it loads.
        """
        if found := self.saving if saves else self.loading:
            paths = dict.fromkeys(hook.path or "the model" for hook in found)
            log.warning(
                "%s does not run the state dict hooks of %s: the files contain the values of"
                " parameters under their names; %s",
                action,
                ", ".join(paths),
                "pm.full_state_dict() runs the hooks"
                if saves
                else "pm.load_state_dict(state) runs the hooks",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictHooks:
        """Return the hooks themselves, which hold no modules of the model."""
        return self

    def after_saving(self, root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict that the plain model would return.

        Args:
            root: the compiled module.
            state: the values under the names of parameters and buffers; hooks may change it.
        """
        for hook in self.saving:
            module, prefix = root.get_submodule(hook.path), _prefix(hook.path)
            metadata = {"version": hook.version}
            result = _bind(hook.function, root)(module, state, prefix, metadata)
            if hook.replaces and result is not None:
                state = result
        return state

    def before_loading(
        self, root: nn.Module, state: dict[str, Any], prefix: str, rest: Sequence[Any]
    ) -> None:
        """Convert a state dict of the plain model, in place, to the names of parameters and
        buffers.

        Args:
            root: the compiled module.
            state: the state dict.
            prefix: the prefix of the compiled module's names.
            rest: the further arguments of a hook; the metadata of the compiled module first.
        """
        known: Mapping[str, Any] = getattr(state, "_metadata", None) or {}
        for hook in self.loading:
            function, place = _bind(hook.function, root), prefix + _prefix(hook.path)
            if not hook.path:
                function(state, place, *rest)
                continue
            values = {name: value for name, value in state.items() if name.startswith(place)}
            changed = dict(values)
            function(changed, place, known.get(place[:-1], {}), *rest[1:])
            for name in values.keys() - changed.keys():
                del state[name]
            state.update(changed)


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None:
            yield from _children_first(child, _prefix(path) + name)
    yield path, module


def _without_model(value: Any, paths: Mapping[int, str]) -> Any:
    """Return a hook, or a value in its closure, with paths in place of modules of the model.

    Args:
        value: the hook or value.
        paths: the path of each module of the model, by its id.
    """
    if id(value) in paths:
        return _Place(paths[id(value)])
    if isinstance(value, MethodType) and id(value.__self__) in paths:
        return _Method(value.__func__, _Place(paths[id(value.__self__)]))
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    try:
        contents = [cell.cell_contents for cell in value.__closure__]
    except ValueError:  # a variable without a value
        return value
    stripped = tuple(
        _without_model(x, paths) if isinstance(x, nn.Module | MethodType) else x for x in contents
    )
    if all(mine is its for mine, its in zip(stripped, contents, strict=True)):
        return value
    return _Closure(
        value.__code__, value.__globals__, value.__defaults__, value.__kwdefaults__, stripped
    )


def _bind(value: Any, root: nn.Module) -> Any:
    """Return a value with the modules of a compiled module in place of paths."""
    return value.bind(root) if isinstance(value, _Place | _Method | _Closure) else value
