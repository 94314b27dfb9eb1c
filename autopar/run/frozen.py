"""Values that a program has as constants: what they were when the model was captured, and whether they still are.

They are plain attributes of the model's modules, tensors among these that are no buffers, and global and closure variables that forward
read. A plain value may be set to an equal one; of a tensor, which is not kept, it has to be the same, unwritten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.capture.outside import follow, steps_of, value_at
from autopar.capture.trace import ModuleAttribute, OutsideValue, Stamp
from autopar.errors import RuntimeStateError
from autopar.run.part import Standing

_GONE = object()
Steps = tuple[tuple[str, Any], ...]


class Frozen:
    """Those of one program, whose model is not kept alive for them.

    Args:
        model: that was captured. original: the user's, where that was a copy of it.
    """

    def __init__(
        self, model: nn.Module, attributes: Iterable[ModuleAttribute | OutsideValue], original: Frozen | None = None
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.modules: Mapping[str, Callable[[], nn.Module | None]] = (
            {path: weakref.ref(module) for path, module in modules.items()} if original is None else original.modules
        )
        self._outside, self._attributes = list[OutsideValue](), list[tuple[ModuleAttribute, Steps]]()
        for each in attributes:
            if isinstance(each, OutsideValue):
                # What is not there as it was captured is not the user's to set: a value that a capture puts there for a while.
                if _same(_outside(each), each.value):
                    self._outside.append(each)
            elif each.path in modules and each.path in self.modules:
                steps = steps_of(each.name if each.name.startswith("[") else f".{each.name}")
                there = _value(modules[each.path], steps)
                if _same(there, each.value):
                    self._attributes.append((each if original is None else self._of_original(each, steps, there), steps))

    def _of_original(self, each: ModuleAttribute, steps: Steps, copied: Any) -> ModuleAttribute:
        """Of a tensor that was copied, the user's own, which was to be the same then."""
        module = self.modules[each.path]()
        own = None if module is None else _value(module, steps)
        if isinstance(each.value, Stamp) and isinstance(own, torch.Tensor) and (own.is_meta or torch.equal(own, copied)):
            return ModuleAttribute(each.path, each.name, Stamp.of(own))
        return each

    def check(self, part: Callable[[str], Standing]) -> None:
        """Raises RuntimeStateError where the user has set one since, on the model or, where that is gone, on what the compiled one shows.

        Args:
            part: what stands for a module in the compiled one.
        """
        for each, steps in self._attributes:
            module = self.modules[each.path]()
            if module is not None:
                now = _value(module, steps)
            else:
                now = _value(part(each.path).shown, (("", steps[0][0] or steps[0][1]), *steps[1:]))
            if now is not _GONE and not _same(now, each.value):
                raise _changed(f"the model's {f'{each.path}.{each.name}'.lstrip('.')}", now, each.value)
        for variable in self._outside:
            now = _outside(variable)
            if now is not _GONE and not _same(now, variable.value):
                raise _changed(f"the {variable.name}", now, variable.value)


def _changed(name: str, now: Any, was: Any) -> RuntimeStateError:
    if isinstance(was, Stamp):
        how = "was written since" if was.tensor() is now else "is another tensor than when"
        what = f"{name} {how} the model was captured: the program has it as a constant"
        return RuntimeStateError(what, remedy="let forward read it from a buffer (register_buffer) or an argument; or compile again")
    return RuntimeStateError(
        f"{name} is {now!r}, and was {was!r} when the model was captured: the program has it as a constant",
        remedy=f"let forward read it from a buffer or an argument that is a tensor; or set it back to {was!r}",
    )


def _value(found: Any, steps: Steps) -> Any:
    try:
        return follow(found, steps)
    except (AttributeError, LookupError, TypeError):
        return _GONE


def _outside(each: OutsideValue) -> Any:
    try:
        return value_at(each.holder, each.steps)
    except (AttributeError, LookupError, TypeError):
        return _GONE


def _same(now: Any, was: Any) -> bool:
    if isinstance(was, Stamp):
        return was.is_of(now)
    return now is was or (type(now) is type(was) and (now == was or now != now))
