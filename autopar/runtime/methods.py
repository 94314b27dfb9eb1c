"""The model's own methods on a compiled module. They run with the compiled module, or a part of it,
as ``self``.

Methods can read the trained parameters, which torch's functions treat as full tensors, and buffers
and plain attributes. They may call the whole module (``self(x)``) but not its parts, since parts of
a program cannot run separately. Methods of library classes do not run, since they rely on more than
the model's modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autopar.errors import RuntimeStateError

_LIBRARIES = frozenset(
    {
        "torch",
        "transformers",
        "peft",
        "diffusers",
        "timm",
        "lightning",
        "pytorch_lightning",
        "accelerate",
    }
)
ON_A_COPY = (
    "on a plain copy with the trained values: on every rank call plain = copy.deepcopy(model) of"
    " the plain model, then plain.load_state_dict(pm.full_state_dict(), assign=True)"
)
_RECOMPUTES = (
    "leave it out: the plan decides what backward recomputes, within the memory_bytes of"
    " autopar.compile"
)
_OF_LIBRARIES: Mapping[str, str] = {
    "gradient_checkpointing_enable": _RECOMPUTES,
    "gradient_checkpointing_disable": _RECOMPUTES,
    "set_grad_checkpointing": _RECOMPUTES,
    "enable_gradient_checkpointing": _RECOMPUTES,
    "disable_gradient_checkpointing": _RECOMPUTES,
    "enable_input_require_grads": (
        "leave it out: checkpointing of a frozen embedding needs it, and a program has none"
    ),
    "save_pretrained": "autopar.save_pretrained(pm, model, folder) writes the weights trained here",
    "reset_running_stats": (
        "torch's update_bn sets momentum, but the program contains the previous value: run it "
        + ON_A_COPY
        + ", then pm.load_state_dict(plain.state_dict()); of AveragedModel(pm), which is `average`,"
        " take average.module for pm"
    ),
}


@dataclass
class MethodReading:
    """A run of the model's code on a compiled module. The code may read private attributes.

    Attributes:
        is_of_some: whether the code iterated over parameters or buffers although this rank lacks
            those of other stages.
    """

    is_of_some: bool = False


reading: ContextVar[MethodReading | None] = ContextVar("reading", default=None)


@contextmanager
def model_code() -> Iterator[MethodReading]:
    """Return a context in which the model's code runs."""
    method_reading = MethodReading()
    token = reading.set(method_reading)
    try:
        yield method_reading
    finally:
        reading.reset(token)


class NoSuchMethod(RuntimeStateError, AttributeError):
    """The error for a method or property of the plain model that a compiled module does not
    have."""


def method_of(standing: nn.Module, cls: type, name: str) -> Any:
    """Return a method of the model's class, bound to a compiled module.

    Args:
        standing: the compiled module, or a part of it.
        cls: the class of the plain module.
        name: the name of an attribute of the class.

    Raises:
        NoSuchMethod: if the method belongs to a library, or the attribute is not a function.
    """
    owner = next((each for each in cls.__mro__ if name in vars(each)), type)
    attribute = vars(owner).get(name)
    if is_of_library(owner) or not isinstance(attribute, FunctionType | classmethod | staticmethod):
        message = (
            f"a compiled module does not have {name!r} of {owner.__module__}.{owner.__qualname__}:"
            " it is a program of forward only"
        )
        raise NoSuchMethod(message, remedy=_OF_LIBRARIES.get(name, f"call it {ON_A_COPY}"))
    return (
        _bound(standing, attribute, name)
        if isinstance(attribute, FunctionType)
        else attribute.__get__(None, cls)
    )


def is_of_library(kind: type) -> bool:
    """Return whether a class belongs to a library, whose code relies on more than the model's
    modules."""
    return kind.__module__.partition(".")[0] in _LIBRARIES


def check_whole(name: str, result: Any, own: MethodReading) -> None:
    """Raise an error if a result depends on the parameters of this rank's stage only. Optimizers
    over them are allowed.

    Args:
        name: the name of the method or property, for error messages.
        result: its result.
        own: the run that computed it.

    Raises:
        NoSuchMethod: if the result is not allowed.
    """
    if own.is_of_some and not _is_of_own_parameters(result):
        _refuse(
            name,
            "it iterates over parameters or buffers, and this rank holds only those of its own"
            " stage",
        )


def check_names(standing: nn.Module, name: str, found: object) -> None:
    """Raise an error if a method or property reads an attribute whose name compiled modules use.

    Args:
        standing: the compiled module, or a part of it.
        name: the name of the method or property, for error messages.
        found: the function, `property` or `cached_property`.

    Raises:
        NoSuchMethod: if it reads such an attribute.
    """
    function = found.fget if isinstance(found, property) else getattr(found, "func", found)
    code = getattr(function, "__code__", None)
    hidden: frozenset[str] = standing.__dict__.get("_hidden", frozenset())
    for read in sorted(hidden.intersection(code.co_names if code else ())):
        _refuse(name, f"it reads {read!r}, a name that compiled modules reserve")


def _bound(standing: nn.Module, function: FunctionType, name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the method on the compiled module, and check its result."""
        check_names(standing, name, function)
        with model_code() as method_reading:
            try:
                result = function(standing, *args, **kwargs)
            except (AttributeError, TypeError) as error:
                if isinstance(error, RuntimeStateError) or not _is_of_standing(error):
                    raise
                _refuse(name, str(error), error)
        check_whole(name, result, method_reading)
        return result

    return run


def _is_of_standing(error: Exception) -> bool:
    """Return whether a missing attribute, or ``super()`` of another class, caused an error."""
    return isinstance(error, AttributeError) or str(error).startswith("super(")


def _is_of_own_parameters(result: Any) -> bool:
    """Return whether a result is correct with the parameters of this rank's stage only. This holds
    for optimizers and groups of parameters."""
    leaves = tree_leaves(list(result) if isinstance(result, set | frozenset) else result)
    has_some = any(isinstance(leaf, nn.Parameter | Optimizer) for leaf in leaves)
    return has_some or all(
        leaf is None or isinstance(leaf, torch.device | torch.dtype) for leaf in leaves
    )


def _refuse(name: str, why: str, error: Exception | None = None) -> NoReturn:
    message = f"the model's {name!r} does not run on a compiled module: {why}"
    raise NoSuchMethod(message, remedy=f"call it {ON_A_COPY}") from error
