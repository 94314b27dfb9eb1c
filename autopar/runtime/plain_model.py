"""The plain model once it was compiled: what is done to it then reaches no program, and whoever
does it is told so.

It is not kept alive: its modules are held weakly, and of each tensor there is noted which it is and
how often it had been written. Where there is no plain model any more, or its weights are on meta,
there is nothing to compare.

Refused at the next call are hooks that were registered since, another mode and parameters that were
frozen or freed, unless the same was done to the compiled module; and at its first call parameters
that were written, such as by `load_state_dict`, when those of the compiled one were not. Later, or
where it has gradients, the plain model may well be one of its own: of values that are written then
there is one warning.

Writes past what counts changes, by `parameter.data.copy_(...)`, are seen by the values
(`autopar.runtime.tensor_guards`), which are looked at until a first call has passed, and then in
calls 2, 4, 8 and so on: some of large tensors, all of small ones.
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


class Compiled(Protocol):
    """What is asked of the compiled module."""

    training: bool

    def named_parameters(self) -> Any:
        """By the model's names."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A parameter or buffer of a plain model, as it was left.

    Attributes:
        module: that holds it, weakly. leaf: its name there. number: the object's identity. device,
            dtype, pointer: of its data.
        version: how often it had been changed in place. values: some of them, as a number; None
            where there are none.
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
        """What bears its name; None where nothing does."""
        module = self.module()
        if module is None:
            return None
        return (module._parameters if self.is_parameter else module._buffers).get(self.leaf)

    def is_written(self, now: Tensor) -> bool:
        """Whether what bears its name is another tensor, or was written."""
        return (id(now), _version(now), _pointer(now)) != (self.number, self.version, self.pointer)

    def has_other_values(self, now: Tensor) -> bool:
        """Whether it has, also where nothing counted the write."""
        return self.values is not None and sample_checksum(now) not in (self.values, None)

    def is_moved(self, now: Tensor) -> bool:
        """Whether it has the same values elsewhere, or none any more."""
        device, dtype = self.place
        return now.is_meta or (
            now.dtype == dtype and now.device != device and device.type != "meta"
        )


def note_tensors(model: nn.Module) -> tuple[Noted, ...]:
    """Its parameters and buffers, tied ones under their first name."""
    return tuple(_note_each(model))


def _note_each(model: nn.Module) -> Iterator[Noted]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        held, prefix = weakref.ref(module), f"{path}." if path else ""
        for tensors, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for leaf, x in tensors.items():
                if x is None or id(x) in seen:
                    continue
                seen.add(id(x))
                place = (x.device, x.dtype)
                yield Noted(
                    prefix + leaf,
                    held,
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
    """One that was compiled, as it was left then.

    Args:
        compiled: its parameters by name, before anything was done to them.
    """

    def __init__(self, model: nn.Module, compiled: Mapping[str, Tensor]) -> None:
        self._modes = tuple(
            (path, weakref.ref(module), module.training) for path, module in model.named_modules()
        )
        self._hooks = tuple(_num_hooks(module) for module in model.modules())
        self._tensors = note_tensors(model)
        self._unwritten: Mapping[str, Any] | None = _marks(compiled)
        self._num_checks = 0
        self._is_watched = True  # for writes
        self._checked: list[Any] = []

    def check(self, compiled: Compiled) -> None:
        """Raises RuntimeStateError where something was done to the plain model that the compiled
        one does not do; warns as said above."""
        self._num_checks += 1
        looks = self._is_watched and (
            self._unwritten is not None or self._num_checks & (self._num_checks - 1) == 0
        )
        state = [
            compiled.training,
            *(_state_of(module) for _, ref, _ in self._modes if (module := ref()) is not None),
        ]
        if state == self._checked and not looks:
            return
        self._check_mode(compiled)
        self._check_hooks()
        written: list[Noted] = []
        for each in self._tensors:
            now = each.now()
            if now is None:
                continue
            if now._backward_hooks and each.is_parameter:
                what = (
                    f"a hook was registered on the plain model's parameter {each.name!r}, which the"
                    " compiled one does not train"
                )
                raise RuntimeStateError(
                    what, remedy=f"register it on pm.get_parameter({each.name!r})"
                )
            if now.requires_grad != each.trains and each.is_parameter:
                self._check_frozen(each, now, compiled)
            if (
                self._is_watched
                and (each.is_written(now) or (looks and each.has_other_values(now)))
                and not each.is_moved(now)
            ):
                written.append(each)
        if written:
            self._tell_of_written(written, compiled)
        self._unwritten, self._checked = None, state

    def _check_mode(self, compiled: Compiled) -> None:
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
        which = f"the plain model's {changed!r}" if changed else "the plain model"
        what = (
            f"{which} was set to another mode after it was compiled, and the compiled one is as"
            " it was"
        )
        way = (
            f"call pm.{now}(), or set the plain model back"
            if not changed
            else "set it back, or set modes of parts before compiling"
        )
        raise RuntimeStateError(what, remedy=f"{way}: the compiled module has a mode of its own")

    def _check_hooks(self) -> None:
        for (path, ref, _), before in zip(self._modes, self._hooks, strict=True):
            module = ref()
            if module is not None and _num_hooks(module) > before:
                what = (
                    f"a hook was registered on the plain model's {path!r}"
                    if path
                    else "a hook was registered on the plain model"
                )
                remedy = (
                    "remove it; return from forward what it is to see, or register it before"
                    " compiling; one on the whole goes on pm"
                )
                raise RuntimeStateError(
                    f"{what} after it was compiled, and is never called: the program is without it",
                    remedy=remedy,
                )

    def _check_frozen(self, each: Noted, now: Tensor, compiled: Compiled) -> None:
        mine: Tensor | None = dict(compiled.named_parameters()).get(each.name)
        if mine is None or mine.requires_grad == now.requires_grad:
            return
        what = (
            f"the plain model's parameter {each.name!r} was"
            f" {'frozen' if each.trains else 'unfrozen'} after it was compiled"
        )
        remedy = (
            "freeze before autopar.compile, which then spares the work, or"
            f" pm.get_parameter({each.name!r}).requires_grad_(False)"
            if each.trains
            else "set requires_grad before autopar.compile"
        )
        raise RuntimeStateError(f"{what}: those of the compiled one are others", remedy=remedy)

    def _tell_of_written(self, written: list[Noted], compiled: Compiled) -> None:
        """Once: of another write there is nothing new to say."""
        self._is_watched = False
        name = next((each.name for each in written if each.is_parameter), "")
        if self._unwritten is not None and name and not self._is_trained():
            held = _marks(dict(compiled.named_parameters()))
            if any(held.get(name, before) != before for name, before in self._unwritten.items()):
                return  # so were those of the compiled one
            self._is_watched = True
            what = (
                f"the plain model's parameter {name!r} was written after it was compiled: those of"
                " the compiled one are others"
            )
            raise RuntimeStateError(
                what,
                remedy=(
                    "load_state_dict into what autopar.compile returned, or load before compiling"
                ),
            )
        if rank() == 0:
            log.warning(
                "%r of the plain model was written after it was compiled: what is called is the"
                " compiled one, which has its own values",
                name or written[0].name,
            )

    def _is_trained(self) -> bool:
        return any(
            now is not None and now.grad is not None
            for now in (each.now() for each in self._tensors)
        )


def _state_of(module: nn.Module) -> tuple[Any, ...]:
    """What is the same as long as nothing is done to it; of every call, and so short."""
    held = module.__dict__
    tensors = [
        x for kind in ("_parameters", "_buffers") for x in held[kind].values() if x is not None
    ]
    try:
        each = [
            (id(x), x._version, x.data_ptr(), x.requires_grad, x._backward_hooks is None)
            for x in tensors
        ]
    except RuntimeError:  # of inference mode, or of a class without data
        each = [
            (id(x), _version(x), _pointer(x), x.requires_grad, x._backward_hooks is None)
            for x in tensors
        ]
    return held["training"], _num_hooks(module), each


def _marks(compiled: Mapping[str, Tensor]) -> dict[str, Any]:
    """By which a write to one is known."""
    return {
        name: (id(p), _version(p), sample_checksum(p.to_local() if isinstance(p, DTensor) else p))
        for name, p in compiled.items()
    }


def _num_hooks(module: nn.Module) -> int:
    held = module.__dict__
    return sum(
        map(
            len,
            (
                held["_forward_hooks"],
                held["_forward_pre_hooks"],
                held["_backward_hooks"],
                held["_backward_pre_hooks"],
            ),
        )
    )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _pointer(x: Tensor) -> int:
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) else 0  # other classes may have none
