"""The model's own methods on a compiled module: they run with the compiled module, or a part of it,
in the place of ``self``.

So what they read is what is trained: parameters, which torch's functions take as whole tensors,
buffers, and plain attributes. What they call of modules is refused, but for the whole
(``self(x)``): a program has no parts that run by themselves. Methods of libraries' classes, which
rely on much more than the model's modules, do not run.
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
    "on a plain copy that has the values trained here: on every rank plain = copy.deepcopy(model)"
    " of the plain model, then plain.load_state_dict(pm.full_state_dict(), assign=True)"
)
_OF_LIBRARIES: Mapping[str, str] = {
    "save_pretrained": "autopar.save_pretrained(pm, model, folder) writes the weights trained here",
    "reset_running_stats": (
        "torch's update_bn sets momentum, which the program has as it was: run it "
        + ON_A_COPY
        + ", then pm.load_state_dict(plain.state_dict()); of AveragedModel(pm), which is `average`,"
        " take average.module for pm"
    ),
}


@dataclass
class Reading:
    """Code of the model's that runs on a compiled module, and may look at private attributes.

    Attributes:
        is_of_some: whether it has gone through parameters or buffers where this rank lacks those of
            other stages.
    """

    is_of_some: bool = False


reading: ContextVar[Reading | None] = ContextVar("reading", default=None)


@contextmanager
def model_code() -> Iterator[Reading]:
    """Code of the model's runs."""
    own = Reading()
    token = reading.set(own)
    try:
        yield own
    finally:
        reading.reset(token)


class NoSuchMethod(RuntimeStateError, AttributeError):
    """What the plain model can do by itself and a compiled one cannot."""


def method_of(standing: nn.Module, cls: type, name: str) -> Any:
    """A method of the model's class, bound to what stands for the model.

    Args:
        standing: the compiled module, or a part. cls: the class that it stands for. name: of an
            attribute of that class.

    Raises:
        NoSuchMethod: if the method is a library's, or something else that is no function.
    """
    owner = next((each for each in cls.__mro__ if name in vars(each)), type)
    found = vars(owner).get(name)
    if owner.__module__.partition(".")[0] in _LIBRARIES or not isinstance(
        found, FunctionType | classmethod | staticmethod
    ):
        what = (
            f"a compiled module does not have {name!r} of {owner.__module__}.{owner.__qualname__}:"
            " it is one program, of forward"
        )
        raise NoSuchMethod(what, remedy=_OF_LIBRARIES.get(name, f"call it {ON_A_COPY}"))
    return (
        _bound(standing, found, name)
        if isinstance(found, FunctionType)
        else found.__get__(None, cls)
    )


def check_whole(name: str, result: Any, own: Reading) -> None:
    """Raises NoSuchMethod where `result` follows from the parameters of this rank's stage alone,
    and is more than an optimizer of these."""
    if own.is_of_some and not _is_of_own_parameters(result):
        _refuse(
            name,
            "it goes through parameters or buffers, of which this rank has those of its own stage"
            " alone",
        )


def _bound(standing: nn.Module, function: FunctionType, name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with model_code() as own:
            try:
                result = function(standing, *args, **kwargs)
            except (AttributeError, TypeError) as error:
                if isinstance(error, RuntimeStateError) or not _is_of_standing(error):
                    raise
                _refuse(name, str(error), error)
        check_whole(name, result, own)
        return result

    return run


def _is_of_standing(error: Exception) -> bool:
    """Whether it says that an attribute is not there, or that ``super()`` is of another class."""
    return isinstance(error, AttributeError) or str(error).startswith("super(")


def _is_of_own_parameters(result: Any) -> bool:
    """Whether what a method returned is right where a rank has the parameters of its own stage:
    optimizers of these, and groups of them."""
    leaves = tree_leaves(list(result) if isinstance(result, set | frozenset) else result)
    has_some = any(isinstance(leaf, nn.Parameter | Optimizer) for leaf in leaves)
    return has_some or all(
        leaf is None or isinstance(leaf, torch.device | torch.dtype) for leaf in leaves
    )


def _refuse(name: str, why: str, error: Exception | None = None) -> NoReturn:
    what = f"the model's {name!r} does not run on a compiled module: {why}"
    raise NoSuchMethod(what, remedy=f"call it {ON_A_COPY}") from error
