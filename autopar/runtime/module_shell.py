"""What stands for the model and its modules in the compiled one: it holds their parameters and
shows their plain attributes.

Under which names the model has modules, parameters and buffers is the model's choice: they are held
under any, those too that these classes have for something of their own, which `pm.name` is then; by
``pm.get_submodule(name)`` and in state dicts the model's is found.
"""

from __future__ import annotations

import abc
import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import RuntimeStateError
from autopar.runtime.methods import (
    ON_A_COPY,
    NoSuchMethod,
    check_whole,
    method_of,
    model_code,
    reading,
)

_KINDS = {"_modules": "module", "_parameters": "parameter", "_buffers": "buffer"}


class _NoComputing(TorchDispatchMode):
    """Refuses all ops."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise NoSuchMethod(f"it computes with tensors ({func}), of which each rank has its part")


class Standing(nn.Module):
    """Shows the plain attributes of a module, such as ``config``, and refuses to set them: the
    program has what they were. Where the module asks a part of its for what it has not, so does
    this."""

    def stand_for(self, module: nn.Module) -> None:
        """Show what this module and its class have and `self` has not; what holds tensors or
        modules is no plain attribute, nor is what can
        be called. From now on nothing else is held."""
        own = Part if isinstance(self, Part) else type(self)
        of_classes = {
            name: x for each in reversed(classes_of(type(module))) for name, x in vars(each).items()
        }
        found = {
            name: x for name, x in of_classes.items() if not hasattr(type(x), "__get__")
        } | vars(module)
        self.__dict__["_private"] = {
            n: x
            for n, x in vars(module).items()
            if n.startswith("_") and n not in self.__dict__ and is_plain(x)
        }
        self.__dict__["_asks"] = _asked_by(module)
        found = {
            name: x for name, x in found.items() if not name.startswith("_") and name != "training"
        }
        plain = {name: x for name, x in found.items() if is_plain(x) and not hasattr(own, name)}
        self.__dict__["_plain"] = {
            name: x for name, x in plain.items() if name not in self.__dict__
        }
        self.__dict__["_stands_for"], self.__dict__["_own"] = type(module), frozenset(self.__dict__)

    @property
    def shown(self) -> Mapping[str, Any]:
        """The plain attributes by name."""
        found: Mapping[str, Any] = self.__dict__.get("_plain", {})
        return found

    def __getattr__(self, name: str) -> Any:
        plain: Mapping[str, Any] = self.__dict__.get("_plain", {})
        if name in plain:
            return plain[name]
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name == "no_sync":
                what = (
                    "a compiled module has no no_sync: gradients add up over calls of backward, as"
                    " they do without it"
                )
                raise NoSuchMethod(what, remedy="leave it out") from None
            of_class = inspect.getattr_static(self.__dict__.get("_stands_for"), name, None)
            if isinstance(of_class, property | cached_property):
                return self._read(name, of_class)
            if of_class is not None and not name.startswith("__"):
                return method_of(self, self.__dict__["_stands_for"], name)
            private: Mapping[str, Any] = self.__dict__.get("_private", {})
            if name in private and reading.get() is not None:
                return private[name]
            if asked := self.__dict__.get("_asks"):
                return getattr(self._modules[asked], name)
            raise

    def _read(self, name: str, of_class: property | cached_property[Any]) -> Any:
        """A property of the model's class, of what is held here: `device` and `dtype` of models of
        transformers among them. One that computes with tensors, of which there are parts here, is
        refused."""
        try:
            with model_code() as own, _NoComputing():
                found = (
                    of_class.func(self)
                    if isinstance(of_class, cached_property)
                    else of_class.__get__(self)
                )
            check_whole(name, found, own)
        except AttributeError as error:
            why = error.what if isinstance(error, NoSuchMethod) else str(error)
            what = f"the model's property {name!r} cannot be read on a compiled module: {why}"
            raise NoSuchMethod(what, remedy=f"read it {ON_A_COPY}") from error
        return found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of every module."""
        self._note_reading()
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of every module."""
        self._note_reading()
        return super().named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module."""
        self._note_reading()
        return super().state_dict(*args, **kwargs)

    def _note_reading(self) -> None:
        own = reading.get()
        if own is not None and self.__dict__.get("_lacks_some"):
            own.is_of_some = True

    def __setattr__(self, name: str, value: Any) -> None:
        held = isinstance(value, nn.Module | nn.Parameter)
        own = self.__dict__.get("_own")
        if own is None or (
            not held and (name in own or isinstance(getattr(type(self), name, None), property))
        ):
            object.__setattr__(self, name, value)  # its own, whatever the model has under that name
            return
        if name in self.shown or isinstance(
            inspect.getattr_static(self.__dict__.get("_stands_for"), name, None), property
        ):
            what = (
                f"{name!r} cannot be set: what the model computes was captured with the value that"
                " it had then"
            )
            raise RuntimeStateError(
                what,
                remedy=(
                    f"let forward read it from a buffer (register_buffer({name!r},"
                    " torch.tensor(...)))"
                ),
            )
        if held or any(name in self.__dict__[kind] for kind in _KINDS):
            self._check_held(name, value)
        if name in self._buffers:
            self._buffers[name] = value
        elif isinstance(value, nn.Parameter):
            self._parameters[name] = value
        else:
            nn.Module.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if any(name in self.__dict__[kind] for kind in _KINDS):
            raise _of_another_model(f"{name!r} cannot be taken out")
        super().__delattr__(name)

    def _check_held(self, name: str, value: Any) -> None:
        """Raises RuntimeStateError where that is no tensor that may stand in the place of the
        one that is held under the name."""
        held = self._parameters.get(name, self._buffers.get(name))
        if isinstance(value, nn.Module) or name in self._modules:
            raise _of_another_model(
                f"{name!r} cannot be set: modules of a compiled module are neither replaced nor"
                " added"
            )
        if held is None:
            raise _of_another_model(
                f"{name!r} cannot be set: a compiled module takes no parameters that the model"
                " had not"
            )
        if not isinstance(value, Tensor) or _form(value) != _form(held):
            what = f"{name!r} cannot be set: the program takes {' '.join(map(str, _form(held)))}"
            if isinstance(value, Tensor) and value.shape != held.shape:
                raise RuntimeStateError(what, remedy=f"do it {ON_A_COPY}; and compile that")
            remedy = (
                f"pass whole tensors to pm.load_state_dict, or write into {name!r} under"
                " torch.no_grad(): p.copy_(...)"
            )
            raise RuntimeStateError(what, remedy=remedy)

    def add_module(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeStateError: the program is of the modules, parameters and buffers that
        there were; so do the others."""
        raise _of_another_model(
            "a compiled module takes no modules, parameters or buffers that the model had not"
        )

    register_module = add_module
    register_parameter = add_module
    register_buffer = add_module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Standing:
        """What `to`, `half`, `cuda`, `share_memory` and others do, where it leaves tensors of one
        kind where they are.

        Raises:
            RuntimeStateError: where it would convert or move one, before it does.
        """
        for name, held in (
            *self.named_parameters(recurse=recurse),
            *self.named_buffers(recurse=recurse),
        ):
            made = fn(torch.empty(0, dtype=held.dtype, device=held.device))
            if (made.dtype, made.device) != (held.dtype, held.device):
                what = (
                    f"{name!r} cannot become {made.dtype} on {made.device}: the program was made"
                    f" for {held.dtype} on {held.device}"
                )
                remedy = (
                    "convert or move the plain model and its batch, and compile that;"
                    " precision='bf16' reads fp32 parameters in bf16"
                )
                raise RuntimeStateError(what, remedy=remedy)
            if made.device.type == "cpu" and made.is_shared():
                what = (
                    f"{name!r} cannot be put into shared memory: each process has its own part of a"
                    " compiled module"
                )
                raise RuntimeStateError(
                    what,
                    remedy=(
                        "leave share_memory out; `autopar run` starts the processes that train one"
                        " together"
                    ),
                )
        super()._apply(fn, recurse)
        return self

    def hold_module(self, name: str, module: Standing) -> None:
        """Under any name, one that this class itself has for something else, too; so do the
        others."""
        self._modules[name] = module

    def hold_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """As `hold_module`."""
        self._parameters[name] = parameter

    def hold_buffer(self, name: str, buffer: Tensor, *, persistent: bool) -> None:
        """As `hold_module`."""
        self._buffers[name] = buffer
        if not persistent:
            self._non_persistent_buffers_set.add(name)

    def get_submodule(self, target: str) -> nn.Module:
        """As of every module, whatever its name."""
        found: nn.Module = self
        for name in target.split(".") if target else ():
            found = _held_tensor(found, "_modules", name, target)
        return found

    def get_parameter(self, target: str) -> nn.Parameter:
        """As of every module, whatever its name."""
        path, _, name = target.rpartition(".")
        found: nn.Parameter = _held_tensor(self.get_submodule(path), "_parameters", name, target)
        return found

    def get_buffer(self, target: str) -> Tensor:
        """As of every module, whatever its name."""
        path, _, name = target.rpartition(".")
        found: Tensor = _held_tensor(self.get_submodule(path), "_buffers", name, target)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Standing:
        copied: Standing = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises RuntimeStateError: what it is made of is this process' own."""
        what = (
            "a compiled module is not pickled, by torch.save or otherwise: its program is of these"
            " processes"
        )
        remedy = (
            "save its values: autopar.save_weights(pm, folder), autopar.Checkpoints, or on every"
            " rank state = pm.full_state_dict() and on one torch.save(state, file)"
        )
        raise RuntimeStateError(what, remedy=remedy)


class Part(Standing):
    """A module of the model in the compiled one, which runs as one graph: it is never called,
    and so hooks on it would not be."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def __init_subclass__(cls) -> None:
        """Nothing: a class whose likeness is made has registered itself."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeStateError: the program is of the whole model."""
        remedy = f"call the whole, or compile this part; or call the part {ON_A_COPY}"
        raise RuntimeStateError(
            "a part of a compiled module is not called by itself", remedy=remedy
        )

    def train(self, mode: bool = True) -> NoReturn:
        """Raises RuntimeStateError: the program was made of a part in one mode."""
        what = (
            "the mode of a part of a compiled module cannot be set: the whole is one program, in"
            " one mode or the other"
        )
        raise RuntimeStateError(
            what,
            remedy=(
                "set it on the plain model before autopar.compile, which keeps it; or pm.train(),"
                " pm.eval()"
            ),
        )

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeStateError: it would never be called; so do the others."""
        what = (
            "a hook on a part of a compiled module would never be called: the whole runs as one"
            " graph"
        )
        remedy = (
            "return from forward what it is to see; of a forward hook that the plain model has"
            " before autopar.compile the program has what it computes, and not what it stores"
        )
        raise RuntimeStateError(what, remedy=remedy)

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook
    register_backward_hook = register_forward_hook


def classes_of(cls: type) -> list[type]:
    """Those that a module's class has of its own, beside torch's `nn.Module`."""
    return [each for each in cls.__mro__ if each not in nn.Module.__mro__]


def _asked_by(module: nn.Module) -> str:
    """The name of the part that a module's class asks for what it has not itself, as peft's models
    do; found out by asking for what that part alone has. Empty where there is none."""
    if not any("__getattr__" in vars(each) for each in classes_of(type(module))):
        return ""
    for name, part in module._modules.items():
        if part is not None:
            mark = vars(part)["of_one_part_alone"] = object()
            try:
                if getattr(module, "of_one_part_alone", None) is mark:
                    return name
            except Exception:  # whatever it raises where it does not know a name
                continue
            finally:
                del vars(part)["of_one_part_alone"]
    return ""


def _held_tensor(module: nn.Module, kind: str, name: str, target: str) -> Any:
    found = module.__dict__[kind].get(name)
    if found is None:
        raise AttributeError(f"{target!r}: {type(module).__name__} has no {_KINDS[kind]} {name!r}")
    return found


def _of_another_model(what: str) -> RuntimeStateError:
    return RuntimeStateError(
        f"{what}: its program was made of the plain model",
        remedy="change the plain model, and compile it again",
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor has to share with one in whose place it is put."""
    if isinstance(tensor, DTensor):
        return "a DTensor", tuple(tensor.shape), tensor.dtype, tensor.placements
    return "a tensor", tuple(tensor.shape), tensor.dtype


def is_plain(value: Any, depth: int = 3) -> bool:
    """Whether it holds no tensor and no module, as far as that is looked for, and cannot be
    called."""
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


# --------------------------------------------------------------------------------------------------
# A class of `Part` for each class of module, which it is a subclass of: ``isinstance(part,
# nn.Linear)`` is what it is of the plain model.
#
# So `apply`, parameter groups by kind of layer and what else asks for classes find what they look
# for. Of the class properties alone run, on what the part holds: its methods are hidden, its
# attributes shown as the plain module has them; torch's own containers can be walked as ever.

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
        return (
            self._modules[index] if isinstance(index, str) else list(self._modules.values())[index]
        )


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


_CONTAINERS: tuple[tuple[type, type], ...] = (
    (nn.ModuleList, _Walked),
    (nn.Sequential, _Walked),
    (nn.ModuleDict, _Named),
)


def likeness(cls: type[nn.Module]) -> type[Part]:
    """The class of a part that stands for a module of this one; `Part` itself where there can be
    no subclass of both."""
    if type(cls) not in (type, abc.ABCMeta):
        return Part  # a metaclass of another kind does what it likes
    walked = next((how for container, how in _CONTAINERS if issubclass(cls, container)), None)
    namespace: dict[str, Any] = {
        name: x
        for each in classes_of(cls)
        for name, was in vars(each).items()
        if (x := _instead(name, was)) is not None
    }
    for each in () if walked is None else reversed(classes_of(walked)):
        namespace |= {name: x for name, x in vars(each).items() if callable(x)}
    namespace |= {
        "extra_repr": _describe_class(cls),
        "__module__": Part.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": Part.__doc__,
    }
    try:
        made = types.new_class(
            cls.__name__, (Part, cls), exec_body=lambda body: body.update(namespace)
        )
    except TypeError:  # classes whose memory is laid out in another way
        return Part
    return made


def _instead(name: str, was: Any) -> Any:
    """What a part has for an attribute of a class; None where it needs none."""
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
    """Of an operator, which Python looks for in the class alone."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = (
            f"a part of a compiled module has no {name}, which its class defines: it is never run"
            " by itself"
        )
        raise RuntimeStateError(what, remedy="use the plain model's")

    return refuse


def _describe_class(cls: type[nn.Module]) -> Callable[[Any], str]:
    def extra_repr(self: Any) -> str:
        try:
            return cls.extra_repr(self)
        except (
            RuntimeStateError,
            AttributeError,
            TypeError,
            LookupError,
        ):  # it asks for what is not there
            return ""

    return extra_repr
