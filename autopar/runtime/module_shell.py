"""Stand-ins for the model and its modules in a compiled module. They hold the parameters and show
the plain attributes of the modules.

A model may use any name for its modules, parameters and buffers. If these classes have an attribute
of the same name, `pm.name` is that attribute, and the model's object is available through
``pm.get_submodule(name)`` (or `get_parameter`, `get_buffer`) and state dicts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.core.same_values import is_same
from autopar.errors import RuntimeStateError
from autopar.runtime.dtensor import hold_value
from autopar.runtime.methods import (
    ON_A_COPY,
    NoSuchMethod,
    check_names,
    check_whole,
    is_of_library,
    method_of,
    model_code,
    reading,
)

_OF_MODULES = frozenset(vars(nn.Module()))  # names that every module uses
UNTIE = (
    "write into it under torch.no_grad(), which changes all its names: p.copy_(...); or untie the"
    " tensors of the plain model, and compile it again"
)
_KINDS = {"_modules": "module", "_parameters": "parameter", "_buffers": "buffer"}


class _NoComputing(TorchDispatchMode):
    """A mode that refuses all ops."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise NoSuchMethod(f"it computes with tensors ({func}), and each rank holds only shards")


class _Kept(dict[str, Any]):
    """The parameters or buffers of a module. They cannot be removed, since some functions of torch,
    such as `torch.nn.utils.weight_norm`, remove a parameter before they do what is refused."""

    def __delitem__(self, name: str) -> NoReturn:
        raise _of_another_model(f"{name!r} cannot be removed")

    def pop(self, name: str, *default: Any) -> Any:
        """Raise RuntimeStateError if there is a tensor of that name."""
        if name in self:
            del self[name]
        return super().pop(name, *default)

    def popitem(self) -> NoReturn:
        """Raise RuntimeStateError."""
        raise _of_another_model("parameters and buffers cannot be removed")

    def clear(self) -> NoReturn:
        """Raise RuntimeStateError."""
        self.popitem()


class ModuleShell(nn.Module):
    """A stand-in for a module. It shows the plain attributes of the module, such as ``config``.
    These cannot be set, since the program contains their captured values as constants. If the
    module delegates missing attributes to one of its submodules, so does the stand-in."""

    def stand_for(self, module: nn.Module) -> None:
        """Show the plain attributes of a module and its class that `self` does not have. Callables
        and values that hold tensors or modules are not plain. After this call, new modules and
        parameters are refused, and so are methods of the model that read names used by `self`.
        """
        own_class = Part if isinstance(self, Part) else type(self)
        for kind in ("_parameters", "_buffers"):
            self.__dict__[kind] = _Kept(self.__dict__[kind])
        of_classes = {
            name: x for each in reversed(classes_of(type(module))) for name, x in vars(each).items()
        }
        attributes = {
            name: x for name, x in of_classes.items() if not hasattr(type(x), "__get__")
        } | vars(module)
        self.__dict__["_private"] = {
            n: x
            for n, x in vars(module).items()
            if n.startswith("_") and n not in self.__dict__ and is_plain(x)
        }
        self.__dict__["_asks"] = _delegate_of(module)
        self.__dict__["_hidden"] = self._names_in_use(own_class, vars(module))
        attributes = {
            name: x
            for name, x in attributes.items()
            if not name.startswith("_") and name != "training"
        }
        plain = {
            name: x
            for name, x in attributes.items()
            if is_plain(x) and not hasattr(own_class, name)
        }
        self.__dict__["_plain"] = {
            name: x for name, x in plain.items() if name not in self.__dict__
        }
        self.__dict__["_stands_for"] = self.__dict__.pop("_model_class", type(module))
        self.__dict__["_mode_of_model"] = module.training
        self.__dict__["_own"] = frozenset(self.__dict__)

    def _names_in_use(self, own: type, attributes: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of a module's plain attributes that `self` uses for other values.

        Args:
            own: the class whose attributes take precedence.
            attributes: the attributes of the module, by name.
        """
        plain = {n for n, x in attributes.items() if is_plain(x)} - _OF_MODULES
        public = {n for n in plain if not n.startswith("_") and hasattr(own, n)}
        return frozenset(public | (plain & self.__dict__.keys()))

    @property
    def shown(self) -> Mapping[str, Any]:
        """The plain attributes by name."""
        plain_attributes: Mapping[str, Any] = self.__dict__.get("_plain", {})
        return plain_attributes

    def __getattr__(self, name: str) -> Any:
        plain: Mapping[str, Any] = self.__dict__.get("_plain", {})
        if name in plain:
            return plain[name]
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name == "no_sync":
                message = (
                    "a compiled module has no no_sync: gradients accumulate over backward calls"
                    " without it"
                )
                raise NoSuchMethod(message, remedy="leave it out") from None
            of_class = inspect.getattr_static(self.__dict__.get("_stands_for"), name, None)
            if isinstance(of_class, property | cached_property):
                return self._read_property(name, of_class)
            if of_class is not None and not name.startswith("__"):
                return method_of(self, self.__dict__["_stands_for"], name)
            private: Mapping[str, Any] = self.__dict__.get("_private", {})
            if name in private and reading.get() is not None:
                return private[name]
            if delegate := self.__dict__.get("_asks"):
                return getattr(self._modules[delegate], name)
            raise

    def _read_property(self, name: str, of_class: property | cached_property[Any]) -> Any:
        """Evaluate a property of the model's class on this module, such as `device` and `dtype` of
        transformers models. A property that computes with tensors is refused, since this rank holds
        only shards of them."""
        try:
            check_names(self, name, of_class)
            with model_code() as method_reading, _NoComputing():
                result = (
                    of_class.func(self)
                    if isinstance(of_class, cached_property)
                    else of_class.__get__(self)
                )
            check_whole(name, result, method_reading)
        except AttributeError as error:
            why = error.what if isinstance(error, NoSuchMethod) else str(error)
            message = f"the model's property {name!r} cannot be read on a compiled module: {why}"
            raise NoSuchMethod(message, remedy=f"read it {ON_A_COPY}") from error
        return result

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over parameters like `nn.Module.named_parameters`."""
        self._note_reading()
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterate over buffers like `nn.Module.named_buffers`."""
        self._note_reading()
        return super().named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict like `nn.Module.state_dict`, with DTensors as values."""
        self._note_reading()
        return super().state_dict(*args, **kwargs)

    def _note_reading(self) -> None:
        method_reading = reading.get()
        if method_reading is not None and self.__dict__.get("_lacks_some"):
            method_reading.is_of_some = True

    def __setattr__(self, name: str, value: Any) -> None:
        is_state = isinstance(value, nn.Module | nn.Parameter)
        own_names = self.__dict__.get("_own")
        if own_names is None or (
            not is_state
            and (name in own_names or isinstance(getattr(type(self), name, None), property))
        ):
            object.__setattr__(self, name, value)  # an attribute of this class takes precedence
            return
        if name in self.shown and is_same(value, self.shown[name]):
            return
        if self._is_of_model(name):
            self._refuse_value(name)
        if is_state or any(name in self.__dict__[kind] for kind in _KINDS):
            self._check_held(name, value)
        if name in self._buffers:
            self._buffers[name] = hold_value(value)
        elif isinstance(value, nn.Parameter):
            self._parameters[name] = hold_value(value)
        else:
            nn.Module.__setattr__(self, name, value)

    def _is_of_model(self, name: str) -> bool:
        """Return whether a name is that of a plain attribute or a property of the model."""
        kind = self.__dict__.get("_stands_for")
        return name in self.shown or isinstance(inspect.getattr_static(kind, name, None), property)

    def _refuse_value(self, name: str) -> NoReturn:
        """Raise RuntimeStateError for a new value of an attribute of the model."""
        what = (
            f"{name!r} cannot be set: the model was captured with the previous value, which is"
            " part of the program"
        )
        kind = self.__dict__.get("_stands_for") or type(self)
        on_a_copy = f"set it {ON_A_COPY}, and compile that copy"
        if isinstance(self.shown.get(name), int | float) and not is_of_library(kind):
            remedy = (
                f"{on_a_copy}; or let forward read it from a buffer"
                f" (register_buffer({name!r}, torch.tensor(...)))"
            )
            raise RuntimeStateError(what, remedy=remedy)
        raise RuntimeStateError(what, remedy=on_a_copy)

    def hold_mode(self, mode: bool) -> None:
        """Set the mode of this module only.

        Args:
            mode: whether it is in training mode.
        """
        self.__dict__["training"] = mode

    def hold_mode_of_model(self) -> None:
        """Set the mode of this module to that of the model's module when it was compiled."""
        self.__dict__["training"] = self.__dict__["_mode_of_model"]

    def __delattr__(self, name: str) -> None:
        if any(name in self.__dict__[kind] for kind in _KINDS):
            raise _of_another_model(f"{name!r} cannot be removed")
        super().__delattr__(name)

    def _check_held(self, name: str, value: Any) -> None:
        """Raise RuntimeStateError if a value may not replace the tensor of that name."""
        current = self._parameters.get(name, self._buffers.get(name))
        if isinstance(value, nn.Module) or name in self._modules:
            raise _of_another_model(
                f"{name!r} cannot be set: modules of a compiled module cannot be replaced or added"
            )
        if current is None:
            raise _of_another_model(
                f"{name!r} cannot be set: a compiled module takes no parameters that the model"
                " did not have"
            )
        if value is not current and (other := self.__dict__.get("_tied", {}).get(name)):
            message = (
                f"{name!r} cannot be set: it is the same tensor as {other!r}, and the program"
                " reads both as one"
            )
            raise RuntimeStateError(message, remedy=UNTIE)
        if not isinstance(value, Tensor) or _form(value) != _form(current):
            message = (
                f"{name!r} cannot be set: the program expects {' '.join(map(str, _form(current)))}"
            )
            if isinstance(value, Tensor) and value.shape != current.shape:
                raise RuntimeStateError(message, remedy=f"do it {ON_A_COPY}, and compile that copy")
            remedy = (
                f"pass full tensors to pm.load_state_dict, or write into {name!r} under"
                " torch.no_grad(): p.copy_(...)"
            )
            raise RuntimeStateError(message, remedy=remedy)

    def add_module(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeStateError, since the program is compiled for the modules, parameters and
        buffers of the plain model. The other methods that register objects do the same."""
        raise _of_another_model(
            "a compiled module takes no modules, parameters or buffers that the model did not have"
        )

    register_module = add_module
    register_parameter = add_module
    register_buffer = add_module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleShell:
        """Apply a function to all tensors if it changes neither dtypes nor devices. `to`, `half`,
        `cuda`, `share_memory` and other methods call this.

        Raises:
            RuntimeStateError: if the function would convert, move or share a tensor. In that case,
                nothing is changed.
        """
        for name, tensor in (
            *self.named_parameters(recurse=recurse),
            *self.named_buffers(recurse=recurse),
        ):
            applied = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (applied.dtype, applied.device) != (tensor.dtype, tensor.device):
                message = (
                    f"{name!r} cannot become {applied.dtype} on {applied.device}: the program was"
                    f" compiled for {tensor.dtype} on {tensor.device}"
                )
                remedy = (
                    "convert or move the plain model and its batch, and compile that model;"
                    " precision='bf16' keeps fp32 parameters and computes in bf16"
                )
                raise RuntimeStateError(message, remedy=remedy)
            if applied.device.type == "cpu" and applied.is_shared():
                message = (
                    f"{name!r} cannot be put into shared memory: each process holds its own shard"
                    " of a compiled module"
                )
                raise RuntimeStateError(
                    message,
                    remedy=(
                        "remove the call to share_memory; `autopar run` starts the processes that"
                        " train a module together"
                    ),
                )
        super()._apply(fn, recurse)
        return self

    def hold_module(self, name: str, module: ModuleShell) -> None:
        """Add a module under any name, including the names of this class's attributes."""
        self._modules[name] = module

    def hold_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Add a parameter under any name; see `hold_module`."""
        self._parameters[name] = parameter

    def note_tie(self, name: str, other: str) -> None:
        """Record that a parameter or buffer has another name, so that it cannot be replaced.

        Args:
            name: the name in this module.
            other: the other name in the model.
        """
        self.__dict__.setdefault("_tied", {})[name] = other

    def hold_buffer(self, name: str, buffer: Tensor, *, persistent: bool) -> None:
        """Add a buffer under any name; see `hold_module`.

        Args:
            name: the name.
            buffer: the buffer.
            persistent: whether the state dict contains the buffer.
        """
        self._buffers[name] = buffer
        if not persistent:
            self._non_persistent_buffers_set.add(name)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module like `nn.Module.get_submodule`, but accept any name."""
        submodule: nn.Module = self
        for name in target.split(".") if target else ():
            submodule = _held_tensor(submodule, "_modules", name, target)
        return submodule

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter like `nn.Module.get_parameter`, but accept any name."""
        path, _, name = target.rpartition(".")
        parameter: nn.Parameter = _held_tensor(
            self.get_submodule(path), "_parameters", name, target
        )
        return parameter

    def get_buffer(self, target: str) -> Tensor:
        """Return a buffer like `nn.Module.get_buffer`, but accept any name."""
        path, _, name = target.rpartition(".")
        buffer: Tensor = _held_tensor(self.get_submodule(path), "_buffers", name, target)
        return buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleShell:
        copied: ModuleShell = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise RuntimeStateError, since the program depends on the running processes."""
        message = (
            "a compiled module cannot be pickled, by torch.save or otherwise: its program belongs"
            " to these processes"
        )
        remedy = (
            "save its values: use autopar.save_weights(pm, folder) or autopar.Checkpoints, or call"
            " state = pm.full_state_dict() on every rank and torch.save(state, file) on one"
        )
        raise RuntimeStateError(message, remedy=remedy)


class Part(ModuleShell):
    """The stand-in for a submodule of the model. The compiled module runs as one graph, so neither
    the part nor hooks on it are ever called."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def __init_subclass__(cls) -> None:
        """Do nothing, since subclass hooks of the model's class have already run for that class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise _of_another_model("forward of a part of a compiled module cannot be replaced")
        if name == "training" and "_own" in self.__dict__ and value != self.training:
            self.train(value)
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeStateError, since the program computes the whole model."""
        remedy = f"call the whole module, or compile this part; or call the part {ON_A_COPY}"
        raise RuntimeStateError("a part of a compiled module cannot be called alone", remedy=remedy)

    def train(self, mode: bool = True) -> NoReturn:
        """Raise RuntimeStateError, since the program was compiled for one mode of the part."""
        message = (
            "the mode of a part of a compiled module cannot be set: the whole program is in one"
            " mode"
        )
        raise RuntimeStateError(
            message,
            remedy=(
                "set it on the plain model before autopar.compile, which keeps it; or call"
                " pm.train() or pm.eval()"
            ),
        )

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeStateError, since the hook would never be called. The methods for other
        hooks do the same."""
        message = (
            "a hook on a part of a compiled module would never run: the whole module runs as one"
            " graph"
        )
        remedy = (
            "return from forward the values that the hook should see; a forward hook registered on"
            " the plain model before autopar.compile is part of the program, except what it stores"
        )
        raise RuntimeStateError(message, remedy=remedy)

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook
    register_backward_hook = register_forward_hook


def classes_of(cls: type) -> list[type]:
    """Return the classes in the MRO of a module's class that are not in the MRO of `nn.Module`."""
    return [each for each in cls.__mro__ if each not in nn.Module.__mro__]


def _delegate_of(module: nn.Module) -> str:
    """Return the name of the submodule to which a module delegates missing attributes, as peft
    models do; empty if there is none. To find it, this reads an attribute that only the submodule
    has."""
    if not any("__getattr__" in vars(each) for each in classes_of(type(module))):
        return ""
    for name, part in module._modules.items():
        if part is not None:
            mark = vars(part)["of_one_part_alone"] = object()
            try:
                if getattr(module, "of_one_part_alone", None) is mark:
                    return name
            except Exception:  # the model's class may raise anything for an unknown name
                continue
            finally:
                del vars(part)["of_one_part_alone"]
    return ""


def _held_tensor(module: nn.Module, kind: str, name: str, target: str) -> Any:
    tensor = module.__dict__[kind].get(name)
    if tensor is None:
        raise AttributeError(f"{target!r}: {type(module).__name__} has no {_KINDS[kind]} {name!r}")
    return tensor


def _of_another_model(what: str) -> RuntimeStateError:
    return RuntimeStateError(
        f"{what}: the program was compiled from the plain model",
        remedy="change the plain model, and compile it again",
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties that a replacement must share with a tensor."""
    if isinstance(tensor, DTensor):
        return "a DTensor", tuple(tensor.shape), tensor.dtype, tensor.placements
    return "a tensor", tuple(tensor.shape), tensor.dtype


def is_plain(value: Any, depth: int = 3) -> bool:
    """Return whether a value is not callable and holds no tensor or module.

    Args:
        value: the value.
        depth: how many levels of containers and attributes are searched.
    """
    if isinstance(value, Tensor | nn.Module) or (callable(value) and not isinstance(value, type)):
        return False
    if depth == 0 or isinstance(value, str | bytes | type):
        return True
    inner = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple | set | frozenset)
        else ()
    )
    inner = (*inner, *getattr(value, "__dict__", {}).values())
    return all(is_plain(each, depth - 1) for each in inner if each is not value)
