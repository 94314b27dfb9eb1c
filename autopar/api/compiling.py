"""Compile a model into a `ParallelModule`, at once or at its first call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack, get_args

from torch import Tensor, nn

from autopar.api.arguments import (
    Example,
    Launched,
    as_call,
    as_mesh,
    check_model,
    launched_processes,
)
from autopar.api.building import Order, parallel_module
from autopar.api.options import PlanRequest, takes_options
from autopar.api.tracing import refuse_wrapped
from autopar.core.keywords import named
from autopar.core.mesh import HardwareLike, is_unshaped
from autopar.errors import PlanError, RuntimeStateError
from autopar.plans import Plan
from autopar.request import Backend, CompileKeywords, PlanOptions, check_choice
from autopar.runtime.backward import refuse_tracing, refuse_transforms
from autopar.runtime.module import ParallelModule
from autopar.runtime.module_modes import overrides_modes
from autopar.runtime.module_shell import is_plain
from autopar.runtime.part_classes import as_container
from autopar.runtime.rank_agreement import failures_told


@failures_told()
@named("autopar.compile", "docs/planning.md")
@takes_options("compile")
def compile(
    model: nn.Module,
    mesh: Launched = None,
    *,
    example_inputs: Example | None = None,
    plan: Plan | str | Path | None = None,
    backend: Backend = "eager",
    hardware: HardwareLike | None = None,
    **options: Unpack[CompileKeywords],
) -> ParallelModule | Deferred:
    """Turn a model into a distributed module: plan (or use a plan), emit the program, and shard the
    parameters.

    Call it on every rank. Rank 0 plans; the others use its plan. With one device, no launcher is
    needed. The model runs on the device type of a torch mesh, otherwise on that of its batch. Its
    weights may be on the CPU; each GPU receives only its shards. With weights on meta, the model
    runs on GPUs if there are any.

    Args:
        mesh: by default all processes of the job (nodes × processes per node), from which the
            planner chooses the axes.
        example_inputs: the global batch. Without it, planning happens at the first call, and the
            distributed parameters do not exist before.
        plan: a plan or its file, made by `plan` for this model and mesh. `hardware` then applies to
            further programs.
        backend: ``"eager"`` or ``"inductor"``, which may need more memory than planned.
        hardware: as in `plan`.
        options: the options that `autopar.request.PlanOptions` declares; `help` lists them.

    Raises:
        PlanError: if the plan is for another model or mesh (the text lists the differences), or
            options are passed together with a plan.
        AutoparError: see `plan`.
    """
    check_model(model)
    refuse_wrapped(model)
    check_choice("backend", backend, get_args(Backend))
    chosen = PlanOptions(**options)  # type: ignore[arg-type]  # any sequence of constraints
    _check_options_with_plan(plan, options)
    if example_inputs is None and chosen.batch == "local":
        raise RuntimeStateError(
            'batch="local" needs example_inputs',
            remedy="pass the global batch; its values are not read",
        )
    if mesh is not None and not is_unshaped(mesh):
        as_mesh(mesh)  # rejects anything that is not a batch at once
    order = Order(
        PlanRequest(model, launched_processes() if mesh is None else mesh, hardware, chosen),
        plan,
        backend,
    )
    return (
        Deferred(order)
        if example_inputs is None
        else parallel_module(order, *as_call(example_inputs))
    )


def _check_options_with_plan(plan: object, options: Mapping[str, Any]) -> None:
    """Reject options that the plan already determines.

    Raises:
        PlanError: if an option other than `batch` and `outputs` is passed together with a plan.
    """
    passed = [
        name for name in options if name not in ("batch", "outputs")
    ]  # these also affect how the plan is run
    if plan is not None and passed:
        message = (
            f"{' and '.join(passed)} passed together with plan=, which already has its options"
        )
        raise PlanError(message, remedy="omit these options, or omit the plan")


_OF_THE_MODULE = (
    "clip_grad_norm_",
    "full_state_dict",
    "loss_scale",
    "variants",
    "input_layouts",
    "sampler",
    "program",
    "plan",
    "device_mesh",
    "manual_seed",
    "random_state",
)


class NotPlannedYet(RuntimeStateError, AttributeError):
    """A compiled module has this attribute only after its first call."""


class Deferred(nn.Module):
    """A compiled model before its first call; afterwards it forwards to the distributed module."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        object.__setattr__(
            self, "_waiting", order
        )  # bypasses nn.Module, so that the plain model is not a child
        self.training, self._mode_is_set = order.request.model.training, False
        as_container(self, type(order.request.model), lambda deferred: deferred._ready("modules"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Plan at the first call, then run."""
        refuse_tracing(args)
        if self._waiting is not None:
            refuse_transforms()
            if not self._mode_is_set:  # nothing was captured, so the mode does not matter
                self.training = self._waiting.request.model.training
            elif self.training != self._waiting.request.model.training or overrides_modes(
                self._waiting.request.model
            ):
                self._waiting.request.model.train(self.training)
            with failures_told():
                self.module = parallel_module(self._waiting, args, kwargs)
            object.__setattr__(self, "_waiting", None)
        return self.module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the distributed parameters under the names of the model.

        Raises:
            RuntimeStateError: before the first call.
        """
        return self._ready("parameters").named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers under the names of the model; see `named_parameters`."""
        return self._ready("buffers").named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the distributed state under the names of the model; see `named_parameters`."""
        return self._ready("state_dict").state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the distributed parameters; see `named_parameters`."""
        return self._ready("load_state_dict").load_state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return the distributed module and its submodules under the names of the model; see
        `named_parameters`.
        """
        return self._ready("modules").named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the direct children of the distributed module; see `named_modules`."""
        return self._ready("modules").named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> Deferred:
        """Apply a function to the distributed module and its submodules; see `named_parameters`."""
        self._ready("apply").apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Deferred:
        """Convert the distributed module; torch calls this for `to`, `half` and `cuda`."""
        self._ready("a conversion")._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Deferred:
        """Set the mode, also of the distributed module if it exists."""
        self.training, self._mode_is_set = mode, True
        if self._waiting is None:
            self.module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _OF_THE_MODULE:
                return getattr(self._ready(name), name)
            order = self.__dict__.get("_waiting", self)
            if order is None:
                return getattr(self.module, name)
            if order is self or name.startswith("_") or not hasattr(order.request.model, name):
                raise
            if is_plain(
                value := getattr(order.request.model, name)
            ):  # `config`, `device`: attributes of the plain model
                return value
            return self._ready(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("training", "module"):
            super().__setattr__(name, value)
        else:
            setattr(self._ready(name), name, value)

    def __dir__(self) -> list[str]:
        order = self.__dict__.get("_waiting")
        shown = dir(self.module) if order is None else []
        return sorted({*super().__dir__(), *shown})

    def _ready(self, pipelined: str) -> ParallelModule:
        if self._waiting is not None:
            raise NotPlannedYet(
                f"{pipelined} is not available before the first call: the model is not planned yet",
                remedy=(
                    "call the model once first, or pass example_inputs=batch to autopar.compile "
                    "to plan at once"
                ),
            )
        module = self.module
        assert isinstance(module, ParallelModule)
        return module
