"""`Compiled`: a module that checks whether its program was compiled for a call, and otherwise runs
another program."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture.trace import Constant, KnownBuffer, OutsideValue
from autopar.core.autocast_state import autocast_around
from autopar.errors import RuntimeStateError
from autopar.program.program import ProgramTensor
from autopar.runtime.backward import refuse_tracing, refuse_transforms
from autopar.runtime.call_arguments import Arguments
from autopar.runtime.guards import (
    FrozenConstants,
    KnownBuffers,
    Misfit,
    OtherMode,
    ProgramVariant,
    Unfrozen,
    UnsupportedGradient,
)
from autopar.runtime.module_shell import ModuleShell
from autopar.runtime.parameter_module import Holder
from autopar.runtime.plain_model import PlainModel
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_consistency import CopiedWeights

_GRADIENT_MODE = (
    "compile another module for the other mode: with inference=True for calls under"
    " torch.no_grad(), without it for calls with gradients"
)


@dataclass(frozen=True, slots=True)
class _TorchState:
    """The settings of torch under which a program was compiled.

    Attributes:
        autocast: the autocast state, in words.
        default_dtype: the dtype of new tensors.
        gradient_mode: whether gradients were enabled; None if forward does not read that.
    """

    autocast: str
    default_dtype: torch.dtype
    gradient_mode: bool | None = None


class Compiled(Holder):
    """A module that accepts the calls that its program was compiled for: in one mode, under one
    autocast state, of a model that has not changed.

    Args:
        tensors, devices, model, elsewhere, world: as for `Holder`.
        both_modes: whether the program is valid in both train and eval mode; otherwise a call in
            the other mode is an error.
        shared: a module of the same model with which this module shares parameters and buffers.

    Attributes:
        variants: the programs for other modes and shapes; None if none can be compiled.
        only_forward: whether memory was planned for forward only.
        is_for_inference: whether the user compiled for inference.

    Raises:
        MeshError, RuntimeStateError: as for `Holder`.
    """

    _arguments: Arguments

    def __init__(
        self,
        tensors: Sequence[ProgramTensor],
        devices: DeviceMesh,
        model: nn.Module,
        elsewhere: Collection[str] = (),
        world: DeviceMesh | None = None,
        *,
        both_modes: bool = False,
        shared: Compiled | None = None,
    ) -> None:
        super().__init__(tensors, devices, model, elsewhere, world, shared=shared)
        self.only_forward = self.is_for_inference = False
        self._is_variant, self._title = shared is not None, type(model).__name__
        self._captured_mode = None if both_modes else model.training
        self._made_under = _TorchState(
            autocast_around(devices.device_type), torch.get_default_dtype()
        )
        self._copied_weights = CopiedWeights()
        self._frozen: FrozenConstants | None = None
        self._known_buffers = KnownBuffers(())
        self._left: PlainModel | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get("training")
        super().__setattr__(name, value)
        if name == "training" and "_own" in self.__dict__ and value != before:
            self._follow_mode(value)

    def _follow_mode(self, mode: bool) -> None:
        """Set the modes of all parts after the mode of the whole module was assigned, as Lightning
        does after an evaluation, which then assigns those of the parts."""
        if mode != self.__dict__["_mode_of_model"] or self.modes.overrides is not None:
            self.train(mode)
            return
        for module in self.modules():
            if isinstance(module, ModuleShell):
                module.hold_mode_of_model()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, or another program that was compiled for the call.

        Returns:
            The result of the model's forward. A module with stages returns the result of the global
            batch, and has already run backward if gradients are enabled.

        Raises:
            RuntimeStateError: if neither the program nor one of `variants` was compiled for the
                arguments, mode or parameters, or the call is traced, or a transform of torch.func
                is active.
            RankError: on all ranks, if ranks make different calls.
        """
        refuse_tracing(args)
        if self._is_variant:  # the main module has announced the call
            return self._run_call(args, kwargs)
        with announced(
            lambda: self._describe_call(args, kwargs),
            self._world,
            self._steps.take(self.parameters()),
        ):
            self._copied_weights.check(self._held_parameters(), self.device_mesh)
            return self._run_call(args, kwargs)

    def _held_parameters(self) -> Iterator[tuple[ProgramTensor, Tensor]]:
        """Iterate over pairs of a program tensor and its local part, for this rank's parameters."""
        for name, parameter in self.named_parameters():
            stored = self._storages.get(self._names.get(name, ""))
            if stored is not None:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                yield stored.tensor, local

    def _describe_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Describe a call in words. The text is equal on all ranks that make the same call."""
        both = self._captured_mode is None  # the program is the same in both modes
        mode = "" if both else f" in {'training' if self.training else 'evaluation'} mode"
        gradients = "" if torch.is_grad_enabled() else " without gradients"
        return f"calls {self._title}{mode}{gradients} with {self._arguments.describe(args, kwargs)}"

    @abc.abstractmethod
    def _run_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and return the result."""

    def _mirror_attributes(
        self, model: nn.Module, attributes: Iterable[Constant], shared: Compiled | None
    ) -> None:
        """Copy the plain attributes of all modules, and watch the model for changes by the user.
        Subclasses call this last, since their own attributes take precedence."""
        attributes = tuple(attributes)
        constants = []
        for each in attributes:
            if isinstance(each, OutsideValue) and each.is_gradient_mode:
                self._made_under = replace(self._made_under, gradient_mode=bool(each.value))
            elif not isinstance(each, KnownBuffer):
                constants.append(each)
        self._frozen = FrozenConstants(model, constants, None if shared is None else shared._frozen)
        self._known_buffers = KnownBuffers(
            each for each in attributes if isinstance(each, KnownBuffer)
        )
        if shared is None:
            self._left = PlainModel(model, dict(self.named_parameters()))
        for path, module in model.named_modules(remove_duplicate=False):
            part = self._container(path)
            part.stand_for(module)
            part.hold_mode(module.training)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Raise an error when DistributedDataParallel wraps the module or torch.jit records it.
        Both read this attribute, and both would fail later with an unclear error.

        Raises:
            RuntimeStateError: always.
        """
        message = (
            "a compiled module cannot be wrapped in DistributedDataParallel or recorded by"
            " torch.jit: it shards batches and reduces gradients itself"
        )
        remedy = (
            "use the compiled module directly; with accelerate use autopar.Accelerator, and"
            " autopar.Trainer instead of transformers' Trainer"
        )
        raise RuntimeStateError(message, remedy=remedy)

    def matches_autocast(self) -> bool:
        """Return whether the program was compiled under the autocast state that is active now."""
        return autocast_around(self.device_mesh.device_type) == self._made_under.autocast

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> bool:
        """Return whether the program was compiled for such a call in that mode, including backward
        if gradients are enabled."""
        fits = self._captured_mode in (None, training) and self._arguments.fit(args, kwargs)
        return (
            fits
            and self._made_under.gradient_mode in (None, torch.is_grad_enabled())
            and not (self.only_forward and torch.is_grad_enabled())
            and not self.unfrozen_names()
        )

    def unfrozen_names(self) -> list[str]:
        """Return the names of the parameters that were frozen at compilation and train now, if
        another program could train them."""
        return []

    def _program_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], devices: DeviceMesh
    ) -> list[Tensor] | Misfit:
        """Return the program's inputs, or the Misfit if the program was not compiled for the call.

        Raises:
            RuntimeStateError: as for `_check_call` and `Arguments.tensors`, and if ranks have
                different random states.
        """
        self._compare_state()
        try:
            self._check_call()
            return self._arguments.tensors(args, kwargs, devices)
        except Misfit as misfit:
            if isinstance(misfit, UnsupportedGradient) and self.is_for_inference:
                message = f"{misfit.what}: the program was compiled for inference"
                raise RuntimeStateError(
                    message,
                    remedy="call it under torch.no_grad(), or compile without inference=True",
                ) from None
            return misfit

    def _elsewhere(self, misfit: Misfit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with another program, since this program was not compiled for it.

        Raises:
            RuntimeStateError: if there is no other program, or parameters were converted to another
                dtype, for which no program can be compiled.
        """
        for name, stored in self._names.items():
            if (stored_tensor := self.stored(name)).dtype != self._storages[stored].tensor.dtype:
                self._storages[stored].local(stored_tensor)  # raises the error
        if self.variants is None:
            raise misfit
        variant = self.variants.find(
            self,
            self.training,
            args,
            kwargs,
            lambda: self._arguments.as_whole(args, kwargs),
            misfit,
        )
        self._set_up(variant)
        return variant(*args, **kwargs)

    def _set_up(self, variant: ProgramVariant) -> None:
        """Copy tensors that the user replaced on this module, such as parameters, to a variant."""
        if not isinstance(variant, Compiled):
            return
        for path, there in variant.named_modules():
            here = self.get_submodule(path)
            for mine, theirs in (
                (here._parameters, there._parameters),
                (here._buffers, there._buffers),
            ):
                theirs.update(
                    {
                        name: mine[name]
                        for name in theirs
                        if name in mine and mine[name] is not theirs[name]
                    }
                )

    def _check_call(self) -> None:
        """Check that the program was compiled for the current state of the model and of torch.

        Raises:
            Misfit: if the mode differs, or a parameter that was frozen trains now.
            RuntimeStateError: if autocast or the default dtype differs, a transform of torch.func
                is active, or weights are missing.
        """
        refuse_transforms()
        self.check_values()
        self.check_ties()
        if self._frozen is not None:
            self._frozen.check(self._container)
            self._known_buffers.check(dict(self.named_buffers(remove_duplicate=False)).get)
        if self._left is not None:
            self._left.check(self)
        if (message := self._find_other_mode()) is not None:
            raise OtherMode(message, remedy="compile the model once for each mode")
        if self._made_under.gradient_mode not in (None, torch.is_grad_enabled()):
            message = (
                "forward reads torch.is_grad_enabled(), which was"
                f" {self._made_under.gradient_mode} when the program was compiled"
            )
            raise OtherMode(message, remedy=_GRADIENT_MODE)
        self._check_torch()
        if names := self.unfrozen_names():
            known = [] if self.variants is None else self.variants.known
            others = [v.unfrozen_names() for v in known if isinstance(v, Compiled)]
            new = [name for name in names if all(name in other for other in others)]
            raise _thawed_error(new or names, Unfrozen)

    def _check_torch(self) -> None:
        """Check that the settings of torch that decide dtypes are those of the compilation.

        Raises:
            RuntimeStateError: if autocast or the default dtype differs.
        """
        autocast, default_dtype = self._made_under.autocast, self._made_under.default_dtype
        now = autocast_around(self.device_mesh.device_type)
        if now != autocast:
            raise RuntimeStateError(
                f"called under {now}, but compiled under {autocast}: the casts are part of the"
                " program",
                remedy=(
                    "compile and call the model under the same torch.autocast, or use autocast"
                    " inside the model's forward"
                ),
            )
        if torch.get_default_dtype() != default_dtype:
            raise RuntimeStateError(
                f"torch's default dtype is {torch.get_default_dtype()}, but was {default_dtype}"
                " when the model was compiled: the dtypes of new tensors are part of the program",
                remedy=(
                    f"call torch.set_default_dtype({default_dtype}), or compile the model under the"
                    " other default dtype"
                ),
            )

    def _find_other_mode(self) -> str | None:
        """Return why the modes of modules are not those of the program; None if they are."""
        if self._captured_mode is not None and self.training != self._captured_mode:
            mode = "train" if self._captured_mode else "eval"
            return (
                f"the program was compiled in {mode} mode, and the model computes differently in"
                " the other mode"
            )
        if self.modes.now != self.modes.captured:
            way = "train" if self.training else "eval"
            return f"the program was compiled for other modes of submodules than {way}() sets"
        return None

    def _trains(self, parameters: Iterable[Tensor], tensors: Iterable[ProgramTensor]) -> bool:
        """Return whether one of the parameters receives a gradient.

        Raises:
            RuntimeStateError: if a parameter that was frozen at compilation trains now.
        """
        with DisableTorchFunctionSubclass():
            trained = [
                tensor
                for parameter, tensor in zip(parameters, tensors, strict=True)
                if parameter.requires_grad
            ]
        if thawed := [tensor.name for tensor in trained if not tensor.requires_grad]:
            raise _thawed_error(thawed)
        return any(tensor.has_gradient for tensor in trained)


_MOST_NAMES = 4  # in one message


def _thawed_error(
    names: list[str], kind: type[RuntimeStateError] = RuntimeStateError
) -> RuntimeStateError:
    """Return the error for parameters that train although the program computes no gradients for
    them."""
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    message = (
        f"parameter {shown} was frozen when the model was compiled, but now requires a gradient"
        if len(names) == 1
        else f"parameters {shown}{more} were frozen when the model was compiled, but now require"
        " gradients"
    )
    return kind(
        message,
        remedy=(
            "set requires_grad before autopar.compile, and compile for training (without"
            " inference=True)"
        ),
    )
