"""Detection of changes to the plain model after it was compiled. Such changes do not affect the
program, so they are reported.

The plain model is not kept alive: its modules are referenced weakly, and the identity and version
counter of each tensor are recorded. If the model no longer exists, or its weights are on the meta
device, nothing is compared.

The next call raises an error if hooks were registered, the mode was changed, or parameters were
frozen or unfrozen, unless the compiled module was changed in the same way. The first call also
raises an error if parameters were written, for example by `load_state_dict`, but those of the
compiled module were not. After the first call, or if the plain model has gradients, the plain model
may be used separately, so written values only cause one warning.

Writes that do not change version counters, such as `parameter.data.copy_(...)`, are detected by
checksums (`autopar.runtime.tensor_guards`). The checksum of a large tensor covers a sample of its
values; that of a small tensor covers all values. Checksums are compared until the first call has
succeeded, and then in calls 2, 4, 8 and so on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError
from autopar.runtime.rank_comm import rank
from autopar.runtime.tensor_guards import sample_checksum

log = logging.getLogger("autopar")


class CompiledModule(Protocol):
    """The attributes of a compiled module that this file reads."""

    training: bool

    def named_parameters(self) -> Any:
        """Return pairs of a name in the model and a parameter."""


@dataclass(frozen=True, slots=True)
class NotedTensor:
    """The state of a parameter or buffer of the plain model when it was compiled.

    Attributes:
        name: its name in the model.
        module: a weak reference to the module that holds it.
        leaf: its name in that module.
        is_parameter: whether it is a parameter.
        trains: whether it requires a gradient.
        number: the id of the object.
        version: its version counter.
        pointer: the address of its data.
        place: its device and dtype.
        values: a checksum of its values; None if it has no values.
    """

    name: str
    module: Callable[[], nn.Module | None]
    leaf: str
    is_parameter: bool
    trains: bool
    number: int
    version: int
    pointer: int
    place: tuple[Any, Any]
    values: int | None

    def now(self) -> Tensor | None:
        """Return the tensor that currently has this name; None if there is none."""
        module = self.module()
        if module is None:
            return None
        return (module._parameters if self.is_parameter else module._buffers).get(self.leaf)

    def is_written(self, now: Tensor) -> bool:
        """Return whether the tensor was replaced, or its version counter shows a write."""
        return (id(now), _version(now), _pointer(now)) != (self.number, self.version, self.pointer)

    def has_other_values(self, now: Tensor) -> bool:
        """Return whether the checksum of the current tensor differs. This also detects writes that
        the version counter does not show."""
        return self.values is not None and sample_checksum(now) not in (self.values, None)

    def is_moved(self, now: Tensor) -> bool:
        """Return whether the tensor was moved to another device, including the meta device."""
        device, dtype = self.place
        return now.is_meta or (
            now.dtype == dtype and now.device != device and device.type != "meta"
        )


def note_tensors(model: nn.Module) -> tuple[NotedTensor, ...]:
    """Record the state of the parameters and buffers of a model. Tied tensors are recorded under
    their first name."""
    return tuple(_note_each(model))


def _note_each(model: nn.Module) -> Iterator[NotedTensor]:
    known_ids: set[int] = set()
    for path, module in model.named_modules():
        module_ref, prefix = weakref.ref(module), f"{path}." if path else ""
        for tensors, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for leaf, x in tensors.items():
                if x is None or id(x) in known_ids:
                    continue
                known_ids.add(id(x))
                place = (x.device, x.dtype)
                yield NotedTensor(
                    prefix + leaf,
                    module_ref,
                    leaf,
                    is_parameter,
                    x.requires_grad,
                    id(x),
                    _version(x),
                    _pointer(x),
                    place,
                    sample_checksum(x),
                )


class PlainModel:
    """The state of a plain model when it was compiled.

    Args:
        model: the plain model.
        compiled: the parameters of the compiled module, by name, before any change.
    """

    def __init__(self, model: nn.Module, compiled: Mapping[str, Tensor]) -> None:
        self._modes = tuple(
            (path, weakref.ref(module), module.training) for path, module in model.named_modules()
        )
        self._hooks = tuple(_num_hooks(module) for module in model.modules())
        self._tensors = note_tensors(model)
        self._unwritten: Mapping[str, Any] | None = _marks(compiled)
        self._num_checks = 0
        self._is_watched = True  # whether writes are detected
        self._checked: list[Any] = []

    def check(self, compiled: CompiledModule) -> None:
        """Check for changes of the plain model that do not affect the compiled module, and warn
        about written values; see the docstring of this file.

        Raises:
            RuntimeStateError: if there is such a change.
        """
        self._num_checks += 1
        compares_values = self._compares_values()
        state = [
            compiled.training,
            *(_state_of(module) for _, ref, _ in self._modes if (module := ref()) is not None),
        ]
        if state == self._checked and not compares_values:
            return
        self._check_mode(compiled)
        self._check_hooks()
        written: list[NotedTensor] = []
        for plain_tensor in self._tensors:
            now = plain_tensor.now()
            if now is None:
                continue
            if now._backward_hooks and plain_tensor.is_parameter:
                message = (
                    f"a hook was registered on the plain model's parameter {plain_tensor.name!r}, "
                    "but the compiled module trains its own parameter"
                )
                raise RuntimeStateError(
                    message, remedy=f"register it on pm.get_parameter({plain_tensor.name!r})"
                )
            if now.requires_grad != plain_tensor.trains and plain_tensor.is_parameter:
                self._check_frozen(plain_tensor, now, compiled)
            if self._is_written(plain_tensor, now, compares_values=compares_values):
                written.append(plain_tensor)
        if written:
            self._report_written(written, compiled)
        self._unwritten, self._checked = None, state

    def _compares_values(self) -> bool:
        """Return whether this check compares checksums: until the first call has succeeded, and
        then in checks 2, 4, 8 and so on."""
        return self._is_watched and (
            self._unwritten is not None or self._num_checks & (self._num_checks - 1) == 0
        )

    def _is_written(self, each: NotedTensor, now: Tensor, *, compares_values: bool) -> bool:
        """Return whether a tensor was written after the model was compiled.

        Args:
            each: the recorded state.
            now: the current tensor.
            compares_values: whether checksums are also compared.
        """
        if not self._is_watched:
            return False
        has_changed = each.is_written(now) or (compares_values and each.has_other_values(now))
        return has_changed and not each.is_moved(now)

    def _check_mode(self, compiled: CompiledModule) -> None:
        changed = next(
            (
                path
                for path, ref, mode in self._modes
                if (module := ref()) is not None and module.training != mode
            ),
            None,
        )
        if changed is None:
            return
        modes = {module.training for _, ref, _ in self._modes if (module := ref()) is not None}
        if modes == {compiled.training}:
            return
        now = "train" if not compiled.training else "eval"
        module_text = f"the plain model's {changed!r}" if changed else "the plain model"
        message = (
            f"{module_text} was set to another mode after it was compiled, but the compiled module "
            "did not change"
        )
        way = (
            f"call pm.{now}(), or set the plain model back"
            if not changed
            else "set it back, or set the modes of submodules before compiling"
        )
        raise RuntimeStateError(message, remedy=f"{way}: the compiled module has its own mode")

    def _check_hooks(self) -> None:
        for (path, ref, _), before in zip(self._modes, self._hooks, strict=True):
            module = ref()
            if module is not None and _num_hooks(module) > before:
                message = (
                    f"a hook was registered on the plain model's {path!r}"
                    if path
                    else "a hook was registered on the plain model"
                )
                remedy = (
                    "remove it; return the values it should see from forward, or register it before"
                    " compiling; register a hook on the whole model on pm"
                )
                raise RuntimeStateError(
                    f"{message} after it was compiled; it is never called, because the program does"
                    " not contain it",
                    remedy=remedy,
                )

    def _check_frozen(self, each: NotedTensor, now: Tensor, compiled: CompiledModule) -> None:
        mine: Tensor | None = dict(compiled.named_parameters()).get(each.name)
        if mine is None or mine.requires_grad == now.requires_grad:
            return
        message = (
            f"the plain model's parameter {each.name!r} was"
            f" {'frozen' if each.trains else 'unfrozen'} after it was compiled"
        )
        remedy = (
            "freeze it before autopar.compile, which then skips its gradient, or call"
            f" pm.get_parameter({each.name!r}).requires_grad_(False)"
            if each.trains
            else "set requires_grad before autopar.compile, or call"
            f" pm.get_parameter({each.name!r}).requires_grad_(True)"
        )
        raise RuntimeStateError(
            (f"{message}: the compiled module has its own parameters"), remedy=remedy
        )

    def _report_written(self, written: list[NotedTensor], compiled: CompiledModule) -> None:
        """Raise an error for written values at the first call; later, log one warning."""
        self._is_watched = False
        name = next((each.name for each in written if each.is_parameter), "")
        if self._unwritten is not None and name and not self._is_trained():
            marks_now = _marks(dict(compiled.named_parameters()))
            if any(
                marks_now.get(name, before) != before for name, before in self._unwritten.items()
            ):
                return  # the parameters of the compiled module were also written
            self._is_watched = True
            message = (
                f"the plain model's parameter {name!r} was written after it was compiled: the"
                " compiled module has its own parameters"
            )
            raise RuntimeStateError(
                message,
                remedy=(
                    "call load_state_dict of the compiled module, or load the weights before"
                    " compiling"
                ),
            )
        if rank() == 0:
            log.warning(
                "%r of the plain model was written after it was compiled: the compiled module has"
                " its own values",
                name or written[0].name,
            )

    def _is_trained(self) -> bool:
        return any(
            now is not None and now.grad is not None
            for now in (each.now() for each in self._tensors)
        )


def _state_of(module: nn.Module) -> tuple[Any, ...]:
    """Return values that are equal as long as a module is unchanged. Every call runs this function,
    so it must be fast."""
    attributes = module.__dict__
    tensors = [
        x
        for kind in ("_parameters", "_buffers")
        for x in attributes[kind].values()
        if x is not None
    ]
    try:
        tensor_states = [
            (id(x), x._version, x.data_ptr(), x.requires_grad, x._backward_hooks is None)
            for x in tensors
        ]
    except RuntimeError:  # a tensor was created in inference mode, or its class has no data
        tensor_states = [
            (id(x), _version(x), _pointer(x), x.requires_grad, x._backward_hooks is None)
            for x in tensors
        ]
    return attributes["training"], _num_hooks(module), tensor_states


def _marks(compiled: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a value for each parameter, by name, that changes if the parameter is written."""
    return {
        name: (id(p), _version(p), sample_checksum(p.to_local() if isinstance(p, DTensor) else p))
        for name, p in compiled.items()
    }


def _num_hooks(module: nn.Module) -> int:
    attributes = module.__dict__
    return sum(
        map(
            len,
            (
                attributes["_forward_hooks"],
                attributes["_forward_pre_hooks"],
                attributes["_backward_hooks"],
                attributes["_backward_pre_hooks"],
            ),
        )
    )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _pointer(x: Tensor) -> int:
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) else 0  # other classes may have none
