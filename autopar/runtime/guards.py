"""Guards of a compiled module: constants of its program, buffers whose values it depends on, the
choice between its programs, and tensors that have no values yet.

Constants are plain attributes of the model's modules, including tensors that are not buffers, and
the global and closure variables that forward reads. A plain value may be replaced by an equal
value. A tensor must remain the same object and must not change, since its values are not stored.
"""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.capture.module_values import path_of
from autopar.capture.outside_values import follow, steps_of, value_at
from autopar.capture.stamps import FunctionStamp, Trait, renewed
from autopar.capture.trace import ArrayStamp, KnownBuffer, ModuleAttribute, OutsideValue, Stamp
from autopar.core.same_values import is_same
from autopar.core.terminal import progress_of_long
from autopar.errors import RuntimeStateError
from autopar.runtime.module_modes import FollowedModes
from autopar.runtime.module_shell import Standing
from autopar.runtime.rank_comm import rank

_GONE = object()
Steps = tuple[tuple[str, Any], ...]


class Frozen:
    """The constants of one program. This object does not keep the model alive.

    Args:
        model: the model that was captured.
        attributes: the values at capture.
        original: the constants of the user's model, if `model` is a copy of it.
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
        self._forwards: Forwards = Forwards(model) if original is None else original._forwards
        self._classes: Mapping[str, Callable[[], type[nn.Module] | None]] = (
            {path: weakref.ref(type(module)) for path, module in modules.items()}
            if original is None
            else original._classes
        )
        self._outside, self._attributes = (
            list[OutsideValue](),
            list[tuple[ModuleAttribute, Steps]](),
        )
        for constant in attributes:
            if isinstance(constant, OutsideValue):
                # A variable that differs from its captured value was set temporarily during
                # capture, not by the user.
                if _same(_outside(constant), constant.value):
                    self._outside.append(constant)
            elif constant.path in modules and constant.path in self.modules:
                steps = steps_of(path_of(constant.name))
                there = _value(modules[constant.path], steps)
                if _same(there, constant.value):
                    self._attributes.append(
                        (
                            constant
                            if original is None
                            else self._of_original(constant, steps, there),
                            steps,
                        )
                    )

    def _of_original(self, each: ModuleAttribute, steps: Steps, copied: Any) -> ModuleAttribute:
        """Return the attribute of the user's model from which a tensor was copied, if both had the
        same values at capture, or the function of which the copy has another; otherwise return
        `each`."""
        module = self.modules[each.path]()
        original_value = None if module is None else _value(module, steps)
        if (
            isinstance(each.value, Stamp)
            and isinstance(original_value, torch.Tensor)
            and (original_value.is_meta or torch.equal(original_value, copied))
        ):
            return ModuleAttribute(each.path, each.name, Stamp.of(original_value))
        if isinstance(each.value, FunctionStamp):
            return ModuleAttribute(each.path, each.name, renewed(each.value, original_value))
        return each

    def check(self, part: Callable[[str], Standing]) -> None:
        """Check that the constants have not changed on the model, or on the compiled module if the
        model no longer exists.

        Args:
            part: returns the part of the compiled module for the path of a module.

        Raises:
            RuntimeStateError: if the user has changed a constant.
        """
        self._forwards.check()
        for constant, steps in self._attributes:
            self._check_attribute(constant, steps, part)
        for variable in self._outside:
            now = _outside(variable)
            if now is not _GONE and not _same(now, variable.value):
                raise _changed_error(f"the {variable.name}", now, variable.value)

    def _check_attribute(
        self, each: ModuleAttribute, steps: Steps, part: Callable[[str], Standing]
    ) -> None:
        module = self.modules[each.path]()
        if module is not None:
            now = _value(module, steps)
        else:
            now = self._value_without_module(each, steps, part)
        if isinstance(each.value, Trait) and not steps:
            self._check_own_attribute(each, part)
        if now is not _GONE and not _same(now, each.value):
            place = f"{each.path}.{each.name}".strip(".")
            raise _changed_error(f"the model's {place}" if place else "the model", now, each.value)

    def _check_own_attribute(self, each: ModuleAttribute, part: Callable[[str], Standing]) -> None:
        """Raise RuntimeStateError if the user set an attribute of the compiled module that forward
        looks for and the model does not have."""
        trait: Trait = each.value
        if trait.kind == "has" and not trait.value and trait.of in vars(part(each.path)):
            where = f"{each.path}.{trait.of}".lstrip(".")
            raise RuntimeStateError(
                f"{where} was set on the compiled module, but forward looked for it when the model"
                " was captured, and the model did not have it",
                remedy="set it on the plain model, and compile that model",
            )

    def _value_without_module(
        self, each: ModuleAttribute, steps: Steps, part: Callable[[str], Standing]
    ) -> Any:
        """Return the current value of an attribute of a module that no longer exists: the value
        that its stand-in shows, the tensor itself, or the value that its class has."""
        if not steps:
            return _GONE
        shown = _value(part(each.path).shown, (("", steps[0][0] or steps[0][1]), *steps[1:]))
        if shown is not _GONE:
            return shown
        if isinstance(each.value, Stamp):
            return each.value.tensor() if each.value.tensor() is not None else _GONE
        kind = self._classes[each.path]()
        return _GONE if kind is None else _value(kind, steps)


class Forwards:
    """The `forward` methods of a model's classes and modules, and the submodules of each module.
    They are part of the program.

    Args:
        model: the model that was captured. It is not kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        # torch's parametrizations create a class whose properties refer to the module
        self._of_classes = tuple(
            (weakref.ref(kind), _reference(_forward_of(kind)))
            for kind in dict.fromkeys(map(type, model.modules()))
        )
        self._of_modules = tuple(
            (path, weakref.ref(module), _own_forward(module))
            for path, module in model.named_modules()
        )
        self._submodules = tuple(
            (path, weakref.ref(module), {n: _reference(x) for n, x in module._modules.items()})
            for path, module in model.named_modules()
        )

    def __deepcopy__(self, memo: Any) -> Forwards:
        return self  # a copy of the compiled module has the same plain model

    def check(self) -> None:
        """Check that no `forward` and no submodule was replaced, and no submodule was added.

        Raises:
            RuntimeStateError: if a class or a module of the plain model has another `forward`, or
                a module has other submodules. Submodules may be removed, which frees memory.
        """
        self._check_submodules()
        kinds = ((ref(), was) for ref, was in self._of_classes)
        changed = next(
            (
                f"class {kind.__name__}"
                for kind, was in kinds
                if kind is not None and _forward_of(kind) is not was()
            ),
            "",
        )
        for path, ref, was in () if changed else self._of_modules:
            module = ref()
            current = None if module is None else module.__dict__.get("forward")
            if module is not None and current is not (None if was is None else was()):
                changed = f"model's {path!r}" if path else "plain model"
                break
        if changed:
            raise RuntimeStateError(
                f"forward of the {changed} was replaced since the model was captured: the program"
                " has the previous one",
                remedy="set it back, or compile the model again",
            )

    def _check_submodules(self) -> None:
        for path, ref, were in self._submodules:
            module = ref()
            for name, now in () if module is None else module._modules.items():
                if name not in were or now is not were[name]():
                    where = f"{path}.{name}".lstrip(".")
                    how = "replaced" if name in were else "added"
                    raise RuntimeStateError(
                        f"the model's {where} was {how} since the model was captured: the program"
                        " has the previous modules",
                        remedy="set it back, or compile the model again",
                    )


def _own_forward(module: nn.Module) -> Callable[[], Any] | None:
    """Return a reference to the `forward` that a module has besides that of its class; None if it
    has none."""
    current = module.__dict__.get("forward")
    return None if current is None else _reference(current)


def _forward_of(kind: type[nn.Module]) -> Any:
    return inspect.getattr_static(kind, "forward", None)


def _reference(function: Any) -> Callable[[], Any]:
    """Return a reference to a function that does not keep the model in its closure alive."""
    try:
        return weakref.ref(function)
    except TypeError:  # an object of C code, which refers to no model
        return lambda: function


def _changed_error(name: str, now: Any, was: Any) -> RuntimeStateError:
    if isinstance(was, FunctionStamp):
        return RuntimeStateError(
            f"{name} was replaced since the model was captured: the program has the previous"
            " function",
            remedy="set it back, or compile the model again",
        )
    if isinstance(was, Trait):
        return RuntimeStateError(
            f"{name} {was.text()} when the model was captured, which decides what the program"
            " computes",
            remedy="restore it, or compile the model again",
        )
    if isinstance(was, Stamp | ArrayStamp):
        is_there = isinstance(was, ArrayStamp) or was.tensor() is now
        how = "was written since" if is_there else "was replaced since"
        message = f"{name} {how} the model was captured: the program has it as a constant"
        return RuntimeStateError(
            message,
            remedy=(
                "let forward read it from a buffer (register_buffer) or an argument; or compile the"
                " model again"
            ),
        )
    return RuntimeStateError(
        f"{name} is {now!r}, but was {was!r} when the model was captured: the program has it as"
        " a constant",
        remedy=(
            f"set it back to {was!r}; for the new value, compile the model again, or let forward"
            " read the value from a buffer or a tensor argument"
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
    if isinstance(was, Stamp | ArrayStamp | FunctionStamp | Trait):
        return was.is_of(now)
    return is_same(now, was)


# --------------------------------------------------------------------------------------------------
# Buffers whose values a program depends on. At each call they must have the values that they had at
# capture.


class KnownBuffers:
    """The known buffers of one program. Values are compared only if a buffer was written or
    replaced since the last call."""

    def __init__(self, buffers: Iterable[KnownBuffer]) -> None:
        self._known = {buffer.name: buffer.value for buffer in buffers}
        self._seen: dict[str, tuple[Stamp, int]] = {}

    def check(self, held: Callable[[str], Tensor | None]) -> None:
        """Compare the buffers that this rank holds. This is collective if a sharded buffer changed.

        Args:
            held: returns the compiled module's buffer with a name; None if only other ranks hold
                it.

        Raises:
            RuntimeStateError: if a buffer has different values.
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
                    f"the values of buffer {name!r}, which forward reads, changed after the model"
                    " was captured: shapes or branches of the program depend on them",
                    remedy=(
                        "compile the model again with these values; or let forward take the tensor"
                        " as an argument, so that each value has its own program"
                    ),
                )
            self._seen[name] = Stamp.of(buffer), _local_version(buffer)


def _local_version(buffer: Tensor) -> int:
    local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
    return 0 if local.is_inference() else local._version


def _is_equal(buffer: Tensor, value: Tensor) -> bool:
    with torch.no_grad():
        full_buffer = buffer.full_tensor() if isinstance(buffer, DTensor) else buffer
        return (
            full_buffer.shape == value.shape
            and full_buffer.dtype == value.dtype
            and torch.equal(full_buffer.cpu(), value)
        )


# --------------------------------------------------------------------------------------------------
# Further programs of one module with the same parameters: for the other mode, other batch shapes
# and other plain arguments.
#
# A program is compiled for one mode, one set of shapes, and one value of each argument that is not
# a tensor. The first call that does not match, such as the last batch of an epoch, is planned with
# the storage layouts that the parameters already have. Its program is kept for later calls.

log = logging.getLogger("autopar")

MOST = 16  # programs per module; each costs a search and memory


class Misfit(RuntimeStateError):
    """A call that the program was not compiled for, but another program can be."""


class OtherMode(Misfit):
    """A call in train mode of a program for eval mode, or the reverse."""


class UnsupportedGradient(Misfit):
    """A call with an input that requires a gradient that the program does not compute."""


class Unfrozen(Misfit):
    """A call that trains a parameter that was frozen at compilation."""


class ProgramVariant(Protocol):
    """A module with its own program."""

    training: bool
    modes: FollowedModes

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> bool:
        """Return whether the program was compiled for such a call in that mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Call = tuple[tuple[Any, ...], dict[str, Any]]
Make = Callable[[Any, bool, tuple[Any, ...], dict[str, Any]], ProgramVariant]
"""Compiles a variant from the main module, the mode and the arguments of a call with the global
batch. All ranks call it with the same arguments."""


class Variants:
    """The variants of one module.

    Args:
        make: compiles a variant.

    Attributes:
        known: the variants compiled so far.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self.known: list[ProgramVariant] = []

    def find(
        self,
        module: Any,
        training: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        whole: Callable[[], Call],
        misfit: Misfit,
    ) -> ProgramVariant:
        """Return the variant for a call. Compile it if it does not exist.

        Args:
            module: the main module. Variants do not refer to it, so it is freed with its last
                user.
            training: the mode.
            args, kwargs: the arguments of the call.
            whole: returns the arguments with the global batch.
            misfit: the reason why the main module does not accept the call.

        Raises:
            RuntimeStateError: if `MOST` variants already exist.
        """
        for known in self.known:
            if known.modes.captured == module.modes.now and known.takes(
                args, kwargs, training=training
            ):
                return known
        if len(self.known) >= MOST:
            message = (
                f"{misfit.what}; programs for {MOST} other modes, shapes and values already exist,"
                " and each required planning"
            )
            remedy = (
                "pad batches to a few shapes, or drop the last batch (drop_last=True); pass a"
                " number that changes as a tensor"
            )
            raise RuntimeStateError(message, remedy=remedy)
        message = (
            f"{misfit.what}: planning again for this call; the new program is kept for later calls"
        )
        with _progress(message, is_expected=isinstance(misfit, OtherMode)):
            variant = self._make(module, training, *whole())
        self.known.append(variant)
        return variant


@contextmanager
def _progress(what: str, *, is_expected: bool) -> Iterator[None]:
    """Log on rank 0 that a variant is compiled, and show progress if this takes long.

    Args:
        what: the message: what is done, and why.
        is_expected: whether most users expect it. If True, the message is a warning only if the
            compilation takes long.
    """
    if rank() != 0:
        yield
        return
    log.log(logging.INFO if is_expected else logging.WARNING, "%s", what)
    with progress_of_long(what, level=logging.WARNING if is_expected else logging.INFO):
        yield


# --------------------------------------------------------------------------------------------------
# Tensors of a model on the meta device, which have no values until they are written.
#
# They are filled with a value that no weight has: NaN or the smallest integer. The first call
# checks whether all of them were written. Version counters are not sufficient, since some writers,
# such as torch.distributed.checkpoint, do not change them. Booleans have no such value, so the
# version counters of non-persistent booleans are compared.

_REMEDY = (
    "autopar.load_weights(pm, folder) loads them from safetensors files, pm.load_state_dict(...)"
    " takes full tensors; for buffers that no file has, build the model under"
    " autopar.weights_on_meta(), which computes buffers as usual"
)


def fill_missing(tensor: Tensor) -> Tensor:
    """Fill a tensor with the value that marks missing values, and return it."""
    value = _mark(tensor.dtype)
    return tensor if value is None else tensor.fill_(value)


class Unset:
    """Tensors that may not have values yet.

    Args:
        tensors: the tensors by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: (tensor, tensor._version) for name, tensor in tensors.items()}

    def check(self, held: Callable[[str], Tensor]) -> None:
        """Check that all tensors now have values. Tensors that have values are not checked again.

        Args:
            held: returns the current tensor with a name. A tensor that was replaced has values.

        Raises:
            RuntimeStateError: if a tensor has no values. The message names the first.
        """
        unchanged = ((name, of) for name, of in self._tensors.items() if held(name) is of[0])
        self._tensors = {
            name: (tensor, changes)
            for name, (tensor, changes) in unchanged
            if _is_blank(tensor, changes)
        }
        if self._tensors:
            name, *others = self._tensors
            more = f"; so were {len(others)} others" if others else ""
            raise RuntimeStateError(
                f"{name!r} was on the meta device and has no values{more}", remedy=_REMEDY
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
    blank = local.isnan() if isinstance(mark, float) else local == mark
    return local.numel() > 0 and bool(blank.all())
