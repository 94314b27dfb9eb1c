"""Modes of the modules of models that override `nn.Module.train` or `nn.Module.eval`.

An override keeps batch norms in eval mode, for example.

The override runs on a copy of the model without values. The compiled module then gets the modes of
the copy. If they differ from the modes at capture, another program is compiled for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import nn

from autopar.core.same_values import is_plain as is_plain_value
from autopar.core.same_values import text_of

ModeState: TypeAlias = tuple[Any, ...]
"""The modes and plain attributes of all modules; equal for states that need no other program."""


@dataclass(frozen=True, slots=True)
class ModeChange:
    """The state of a model after its `train` or `eval` has run.

    Attributes:
        modes: the path of each module → whether it is in training mode.
        trained: the name of each parameter → whether it requires a gradient.
        state: the modes and attributes.
    """

    modes: Mapping[str, bool]
    trained: Mapping[str, bool]
    state: ModeState


class OwnModes(Protocol):
    """A copy of a model, without values, that runs its own `train` and `eval`."""

    def set_mode(self, training: bool, trained: Mapping[str, bool]) -> ModeChange:
        """Run `train` or `eval` of the copy.

        Args:
            training: the mode.
            trained: the name of each parameter → whether it requires a gradient before.
        """


@dataclass(slots=True)
class FollowedModes:
    """The modes of a compiled module.

    Attributes:
        overrides: runs the overrides of the model; None if there are none.
        captured: the state for which the program was compiled.
        now: the current state.
    """

    overrides: OwnModes | None = None
    captured: ModeState = ()
    now: ModeState = ()


def overrides_modes(model: nn.Module) -> bool:
    """Return whether `train` or `eval` of a model does not only set the mode of all modules."""
    return any(
        type(module).train is not nn.Module.train
        or type(module).eval is not nn.Module.eval
        or not vars(module).keys().isdisjoint(("train", "eval"))
        for module in model.modules()
    )


def mode_state_of(model: nn.Module) -> ModeState:
    """Return the modes and plain attributes of all modules."""
    return tuple(
        (path, name, text_of(x))
        for path, module in model.named_modules()
        for name, x in vars(module).items()
        if is_plain_value(x)
    )


def set_own_mode(model: nn.Module, training: bool, trained: Mapping[str, bool]) -> ModeChange:
    """Run `train` or `eval` of a model; see `OwnModes.set_mode`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))
    if training:
        model.train()
    else:
        model.eval()
    modes = {path: m.training for path, m in model.named_modules(remove_duplicate=False)}
    now = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return ModeChange(modes, now, mode_state_of(model))
