"""Compiling: a model becomes a `ParallelModule`, at once or at its first call."""

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
from autopar.runtime.module_shell import is_plain


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
    """Turn a model into a distributed one: plan (or take a plan), emit, and shard the parameters.

    Call it on every rank. Rank 0 plans, the others take its plan. With one device no launcher is
    needed. The model runs where a torch mesh says, else where its batch is: its weights may lie on
    the CPU, and each GPU gets its part of them alone. With weights on meta it runs on GPUs where
    there is one.

    Args:
        mesh: by default all processes of the job, nodes × processes of each, which the planner
            shapes.
        example_inputs: the global batch. Without it, planning happens at the first call, and the
            parameters exist from then on.
        plan: a plan or its file, made by `plan` for this model and mesh. `hardware` beside it is
            what further calls are planned for.
        backend: ``"eager"`` or ``"inductor"``, which may need more memory than the plan says.
        hardware: as in `plan`.
        options: as `autopar.request.PlanOptions` declares them; `help` lists them here.

    Raises:
        PlanError: if the plan is for another model or mesh, with what differs, or options are
            passed beside it.
        AutoparError: as `plan`.
    """
    check_model(model)
    refuse_wrapped(model)
    check_choice("backend", backend, get_args(Backend))
    chosen = PlanOptions(**options)  # type: ignore[arg-type]  # any sequence of constraints
    _check_beside(plan, options)
    if example_inputs is None and chosen.batch == "local":
        raise RuntimeStateError(
            'batch="local" needs example_inputs',
            remedy="pass the global batch; its values are not read",
        )
    if mesh is not None and not is_unshaped(mesh):
        as_mesh(mesh)  # what is none is refused at once
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


def _check_beside(plan: object, options: Mapping[str, Any]) -> None:
    """Refuse options that the plan already determines.

    Raises:
        PlanError: if an option other than `batch` and `outputs` is passed together with a plan.
    """
    passed = [
        name for name in options if name not in ("batch", "outputs")
    ]  # which bear on how the plan is run, too
    if plan is not None and passed:
        what = f"{' and '.join(passed)} beside plan=: the plan was made with options of its own"
        raise PlanError(what, remedy="leave them out, or leave out the plan")


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
    """An attribute was read that a compiled module has from its first call on."""


class Deferred(nn.Module):
    """A compiled model before its first call; from then on it stands for the distributed one."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        object.__setattr__(
            self, "_waiting", order
        )  # not through nn.Module: the plain model is no child
        self.training, self._mode_is_set = order.request.model.training, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Plan at the first call, then run."""
        refuse_tracing(args)
        if self._waiting is not None:
            refuse_transforms()
            if not self._mode_is_set:  # nothing was captured in the mode that the model had
                self.training = self._waiting.request.model.training
            elif self.training != self._waiting.request.model.training:
                self._waiting.request.model.train(self.training)
            self.module = parallel_module(self._waiting, args, kwargs)
            object.__setattr__(self, "_waiting", None)
        return self.module(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The distributed parameters, under the model's names.

        Raises:
            RuntimeStateError: before the first call.
        """
        return self._ready("parameters").named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers, under the model's names; as `named_parameters`."""
        return self._ready("buffers").named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The distributed state, under the model's names; as `named_parameters`."""
        return self._ready("state_dict").state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the distributed parameters; as `named_parameters`."""
        return self._ready("load_state_dict").load_state_dict(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The distributed module and its parts, under the model's names; as `named_parameters`."""
        return self._ready("modules").named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the direct parts of the distributed module; as `named_modules`."""
        return self._ready("modules").named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> Deferred:
        """Apply a function to the distributed module and its parts; as `named_parameters`."""
        self._ready("apply").apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Deferred:
        """Convert the distributed module; torch calls this for `to`, `half` and `cuda`."""
        self._ready("a conversion")._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Deferred:
        """Set the mode, also of the distributed module once it is there."""
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
            ):  # `config`, `device`: the plain model's, which it is made of
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

    def _ready(self, wish: str) -> ParallelModule:
        if self._waiting is not None:
            raise NotPlannedYet(
                f"{wish} asked for before the first call: the model is not planned yet",
                remedy=(
                    "call the model once first, or pass example_inputs=batch to autopar.compile and"
                    " it is planned at once"
                ),
            )
        module = self.module
        assert isinstance(module, ParallelModule)
        return module
