"""Plain attributes of the model that a program has as constants: what they were when the model was captured, and whether they still are."""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from autopar.capture.trace import ModuleAttribute
from autopar.errors import RuntimeStateError
from autopar.run.part import Standing

_STEP = re.compile(r"\.?(\w+)|\[([^\[\]]+)\]")
_GONE = object()


class Frozen:
    """Those of one model, which is not kept alive for them."""

    def __init__(self, model: nn.Module, attributes: Iterable[ModuleAttribute]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        held = [(each, modules[each.path]) for each in attributes if each.path in modules]
        steps = [(each, weakref.ref(module), _steps(each.name)) for each, module in held]
        # What is not there as it was captured is not the user's to set: a value that a capture puts there for a while.
        self._attributes = [(each, module, names) for each, module, names in steps if _same(_value(module(), names), each.value)]

    def check(self, part: Callable[[str], Standing]) -> None:
        """Raises RuntimeStateError where the user has set one since, on the model or, where that is gone, on what the compiled one shows.

        Args:
            part: what stands for a module in the compiled one.
        """
        for each, module, names in self._attributes:
            now = _value(module(), names) if module() is not None else _value(part(each.path).shown, (("", names[0][0]), *names[1:]))
            if now is not _GONE and not _same(now, each.value):
                name = f"{each.path}.{each.name}".lstrip(".")
                raise RuntimeStateError(
                    f"the model's {name} is {now!r}, and was {each.value!r} when the model was captured: the program has it as a constant",
                    remedy=f"let forward read it from a buffer or an argument that is a tensor; or set it back to {each.value!r}",
                )


def _steps(name: str) -> tuple[tuple[str, Any], ...]:
    """``config.sizes[0]`` as attributes to get and keys to look up."""
    return tuple(("", ast.literal_eval(step[2])) if step[2] else (step[1], None) for step in _STEP.finditer(name))


def _value(found: Any, steps: Iterable[tuple[str, Any]]) -> Any:
    for attribute, key in steps:
        try:
            found = getattr(found, attribute) if attribute else found[key]
        except (AttributeError, LookupError, TypeError):
            return _GONE
    return found


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and (one == other or one != one))
