"""Values that a program has as constants: what they were when the model was captured, and whether
they still are.

They are plain attributes of the model's modules, tensors among these that are no buffers, and
global and closure variables that forward read. A plain value may be set to an equal one; of a
tensor, which is not kept, it has to be the same, unwritten.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.capture.side_effects import follow, steps_of, value_at
from autopar.capture.trace import KnownBuffer, ModuleAttribute, OutsideValue, Stamp
from autopar.errors import RuntimeStateError
from autopar.runtime.module_shell import Standing
from autopar.runtime.rank_comm import rank

_GONE = object()
Steps = tuple[tuple[str, Any], ...]


class Frozen:
    """Those of one program, whose model is not kept alive for them.

    Args:
        model: that was captured. original: the user's, where that was a copy of it.
    """

    def __init__(
        self,
        model: nn.Module,
        attributes: Iterable[ModuleAttribute | OutsideValue],
        original: Frozen | None = None,
    ) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self.modules: Mapping[str, Callable[[], nn.Module | None]] = (
            {path: weakref.ref(module) for path, module in modules.items()}
            if original is None
            else original.modules
        )
        self._outside, self._attributes = (
            list[OutsideValue](),
            list[tuple[ModuleAttribute, Steps]](),
        )
        for each in attributes:
            if isinstance(each, OutsideValue):
                # What is not there as it was captured is not the user's to set: a value that a
                # capture puts there for a while.
                if _same(_outside(each), each.value):
                    self._outside.append(each)
            elif each.path in modules and each.path in self.modules:
                steps = steps_of(each.name if each.name.startswith("[") else f".{each.name}")
                there = _value(modules[each.path], steps)
                if _same(there, each.value):
                    self._attributes.append(
                        (each if original is None else self._of_original(each, steps, there), steps)
                    )

    def _of_original(self, each: ModuleAttribute, steps: Steps, copied: Any) -> ModuleAttribute:
        """Of a tensor that was copied, the user's own, which was to be the same then."""
        module = self.modules[each.path]()
        own = None if module is None else _value(module, steps)
        if (
            isinstance(each.value, Stamp)
            and isinstance(own, torch.Tensor)
            and (own.is_meta or torch.equal(own, copied))
        ):
            return ModuleAttribute(each.path, each.name, Stamp.of(own))
        return each

    def check(self, part: Callable[[str], Standing]) -> None:
        """Raises RuntimeStateError where the user has set one since, on the model or, where that is
        gone, on what the compiled one shows.

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
                raise _changed_error(
                    f"the model's {f'{each.path}.{each.name}'.lstrip('.')}", now, each.value
                )
        for variable in self._outside:
            now = _outside(variable)
            if now is not _GONE and not _same(now, variable.value):
                raise _changed_error(f"the {variable.name}", now, variable.value)


def _changed_error(name: str, now: Any, was: Any) -> RuntimeStateError:
    if isinstance(was, Stamp):
        how = "was written since" if was.tensor() is now else "is another tensor than when"
        what = f"{name} {how} the model was captured: the program has it as a constant"
        return RuntimeStateError(
            what,
            remedy=(
                "let forward read it from a buffer (register_buffer) or an argument; or compile"
                " again"
            ),
        )
    return RuntimeStateError(
        f"{name} is {now!r}, and was {was!r} when the model was captured: the program has it as a"
        " constant",
        remedy=(
            "let forward read it from a buffer or an argument that is a tensor; or set it back to"
            f" {was!r}"
        ),
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


# --------------------------------------------------------------------------------------------------
# Buffers whose values a program follows from: they have to hold at each call what they held when
# the model was captured.


class KnownBuffers:
    """Those of one program. Values are compared when a buffer was written or replaced since the
    last call."""

    def __init__(self, buffers: Iterable[KnownBuffer]) -> None:
        self._known = {buffer.name: buffer.value for buffer in buffers}
        self._seen: dict[str, tuple[Stamp, int]] = {}

    def check(self, held: Callable[[str], Tensor | None]) -> None:
        """Compare the buffers that are here; a collective if one is sharded and was changed.

        Args:
            held: name → the compiled module's buffer; None if other ranks alone hold it.

        Raises:
            RuntimeStateError: one holds other values.
        """
        for name, value in self._known.items():
            buffer = held(name)
            if buffer is None or buffer.is_meta:
                continue
            stamp, version = self._seen.get(name, (None, -1))
            if stamp is not None and stamp.is_of(buffer) and version == _local_version(buffer):
                continue
            if not _is_equal(buffer, value):
                raise RuntimeStateError(
                    f"the buffer {name!r}, whose values forward reads, has changed since the model"
                    " was captured: shapes or branches of the program follow from them",
                    remedy=(
                        "compile the model again with these values; or let forward take the tensor"
                        " as an argument: each value then has a program of its own"
                    ),
                )
            self._seen[name] = Stamp.of(buffer), _local_version(buffer)


def _local_version(buffer: Tensor) -> int:
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return 0 if local.is_inference() else local._version


def _is_equal(buffer: Tensor, value: Tensor) -> bool:
    with torch.no_grad():
        whole = buffer.full_tensor() if isinstance(buffer, DTensor) else buffer
        return (
            whole.shape == value.shape
            and whole.dtype == value.dtype
            and torch.equal(whole.cpu(), value)
        )


# --------------------------------------------------------------------------------------------------
# Further programs of one module: for the other mode, for batches of other shapes, other plain
# arguments, over the same parameters.
#
# A program is of one mode, one set of shapes, and one value of each argument that is no tensor. A
# call that does not fit it, the last batch of an epoch among others, is planned and emitted when
# it first comes, with every parameter as it rests already; from then on its program is there,
# too.

log = logging.getLogger("autopar")

MOST = 16  # of a module: each takes a search, and is kept


class Misfit(RuntimeStateError):
    """A call that a program was not made for, and another could be."""


class OtherMode(Misfit):
    """A call in train mode of what was made in eval mode, or the other way round."""


class AsksForGradient(Misfit):
    """A call with an input that requires a gradient, of what was made without."""


class Unfrozen(Misfit):
    """A call that trains a parameter, of what was made while that was frozen."""


class Variant(Protocol):
    """A module with a program of its own."""

    training: bool

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> bool:
        """Whether its program was made for such a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Call = tuple[tuple[Any, ...], dict[str, Any]]
Make = Callable[[Any, bool, tuple[Any, ...], dict[str, Any]], Variant]
"""From a module, the mode and a call with the whole batch to the module that takes it; all ranks
call it alike."""


class Variants:
    """Those of one module, which `make` makes."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self.known: list[Variant] = []

    def find(
        self,
        module: Any,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: Callable[[], Call],
        misfit: Misfit,
    ) -> Variant:
        """The module that takes a call in that mode.

        Args:
            module: which these are variants of. They do not hold it, so that it goes with its last
                user.
            whole: the call with the whole batch. misfit: why the module itself does not take it.

        Raises:
            RuntimeStateError: where there are too many already.
        """
        for known in self.known:
            if known.takes(args, kwargs, training=training):
                return known
        if len(self.known) >= MOST:
            what = (
                f"{misfit.what}; and there are programs for {MOST} other modes, shapes and values"
                " already, each of which was planned"
            )
            remedy = (
                "pad batches to a few shapes, or leave the last one out (drop_last=True); pass a"
                " number that changes as a tensor"
            )
            raise RuntimeStateError(what, remedy=remedy)
        if rank() == 0:
            level = logging.INFO if isinstance(misfit, OtherMode) else logging.WARNING
            log.log(
                level, "%s: planning for this call, too; what is made for it is kept", misfit.what
            )
        made = self._make(module, training, *whole())
        self.known.append(made)
        return made


# --------------------------------------------------------------------------------------------------
# Tensors that a model on meta leaves without values, until something is written into them.
#
# They are filled with what no weight is, NaN or the least integer, by which it is known at the
# first call whether all were given values, however that was done: torch.distributed.checkpoint,
# among others, writes past what counts changes. Booleans have no such value: of those that no
# file holds, changes are counted.

_REMEDY = (
    "autopar.load_weights(pm, folder) reads them from safetensors, pm.load_state_dict(...) takes"
    " full ones; for buffers that no file holds build the model under autopar.weights_on_meta(),"
    " which makes buffers as ever"
)


def blank(tensor: Tensor) -> Tensor:
    """The same tensor, filled with what says that it has no values yet."""
    value = _mark(tensor.dtype)
    return tensor if value is None else tensor.fill_(value)


class Unset:
    """By name, each with how often it had been changed in place."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: (tensor, tensor._version) for name, tensor in tensors.items()}

    def check(self, held: Callable[[str], Tensor]) -> None:
        """That all of them have values by now; those are not looked at again.

        Args:
            held: what bears a name now; another tensor than at first has values.

        Raises:
            RuntimeStateError: naming the first that has none.
        """
        kept = ((name, of) for name, of in self._tensors.items() if held(name) is of[0])
        self._tensors = {
            name: (tensor, changes)
            for name, (tensor, changes) in kept
            if _is_blank(tensor, changes)
        }
        if self._tensors:
            name, *others = self._tensors
            more = f", nor have {len(others)} others" if others else ""
            raise RuntimeStateError(
                f"{name!r} was on meta, and has not been given values since{more}", remedy=_REMEDY
            )


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return None if dtype == torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max


def _is_blank(tensor: Tensor, changes: int) -> bool:
    local, mark = (
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach(),
        _mark(tensor.dtype),
    )
    if mark is None or tensor._version != changes:
        return tensor._version == changes
    found = local.isnan() if isinstance(mark, float) else local == mark
    return local.numel() > 0 and bool(found.all())
