"""Compiling: a model becomes a `ParallelModule`, at once or at its first call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api.arguments import Example, Launched, MeshLike, as_call, as_mesh, is_shape_of, is_unshaped, launched
from autopar.api.further import Structure, asked_of, beside_the_optimizer, shapes_of, storage_of
from autopar.api.hardware import HardwareLike, planned_for
from autopar.api.planning import check_fits, plan_told
from autopar.api.tracing import program_of, refuse_own_losses, refuse_wrapped, settled, traced_for
from autopar.capture import Trace
from autopar.errors import AutoparError, ConstraintError, PlanError, RuntimeStateError
from autopar.explanation.lines import idle
from autopar.planning import Planned, PlanOptions
from autopar.plans import Plan
from autopar.run.compiled import Compiled
from autopar.run.device_mesh import agree, device_mesh
from autopar.run.executor import Backend, Batch, Outputs
from autopar.run.module import ParallelModule
from autopar.run.program import Program, StagedProgram
from autopar.run.ranks import rank
from autopar.run.staged_module import StagedModule
from autopar.run.variants import Variants

log = logging.getLogger("autopar")


def compile(
    model: nn.Module,
    mesh: Launched = None,
    *,
    example_inputs: Example | None = None,
    plan: Plan | str | Path | None = None,
    backend: Backend = "eager",
    batch: Batch = "global",
    outputs: Outputs = "auto",
    hardware: HardwareLike | None = None,
    **options: Any,
) -> ParallelModule | StagedModule | Deferred:
    """Turn a model into a distributed one: plan (or take a plan), emit, and shard the parameters.

    Call it on every rank. Rank 0 plans, the others take its plan. With one device no launcher is needed.

    Args:
        mesh: by default all processes of the job, nodes × processes of each, which the planner shapes.
        example_inputs: the global batch. Without it, planning happens at the first call, and the parameters exist from then on.
        plan: a plan or its file, made by `plan` for this model and mesh. `hardware` beside it is what further calls are planned for.
        backend: ``"eager"`` or ``"inductor"``.
        batch: ``"global"``: every rank passes the same batch and takes its part; ``"local"``: each passes its part.
        outputs: what is not the loss comes as ``"dtensor"`` (``.full_tensor()`` gathers one; what would read this rank's part alone is
            refused), ``"full"`` (whole on every rank), ``"local"`` (this rank's part), or, with ``"loss"``, not at all (None): then the
            logits of a language model need not be there at once, and the planner may compute its loss some rows at a time. ``"auto"``:
            ``"dtensor"`` in training beside a loss, else ``"full"`` (evaluation and inference, models without a loss). In
            several microbatches, or stages, only ``"full"`` gives them: parts of these have no place in a whole tensor. Of a model that
            returns a loss, backward goes through that alone; else through whatever the user computes of the outputs, on every rank
            the same: with ``"local"`` the gradient that comes back is taken for this rank's part of the whole loss' gradient.
        hardware, options: as in `plan`; `time_limit_s` is there per solve, of which planning makes several.

    Raises:
        as `plan`; PlanError where the plan is for another model or mesh and says what differs, or options are passed beside it.
    """
    if isinstance(model, nn.Module):
        refuse_wrapped(model)
    _check_options(plan, hardware, {"backend": backend, "batch": batch, "outputs": outputs}, options)
    if example_inputs is None and batch == "local":
        raise RuntimeStateError('batch="local" needs example_inputs', remedy="pass the global batch; its values are not read")
    build = {"backend": backend, "batch": batch, "outputs": outputs}
    order = _Order(model, launched() if mesh is None else mesh, plan, hardware, build, options)
    return Deferred(order) if example_inputs is None else _build(order, *as_call(example_inputs))


_CHOICES: Mapping[str, Any] = {"backend": Backend, "batch": Batch, "outputs": Outputs}


def _check_options(plan: object, hardware: object, build: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """That options are known, and none is passed that a plan has already."""
    for name, value in build.items():
        if value not in get_args(_CHOICES[name]):
            raise AutoparError(f"{name}={value!r} is not known", remedy=f"pass one of {', '.join(get_args(_CHOICES[name]))}")
    known = [f.name for f in fields(PlanOptions) if f.name not in build]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise AutoparError(f"compile has no option {unknown[0]!r}", remedy=f"its options are {', '.join((*build, 'hardware', *known))}")
    if plan is not None and options:
        what = f"{' and '.join(options)} beside plan=: the plan was made with options of its own"
        raise PlanError(what, remedy="leave them out, or leave out the plan")


@dataclass(frozen=True, slots=True)
class _Order:
    """What `compile` was asked for; `build` goes to the `ParallelModule`, `options` to the planner."""

    model: nn.Module
    mesh: MeshLike
    plan: Plan | str | Path | None
    hardware: HardwareLike | None
    build: Mapping[str, Any]
    options: Mapping[str, Any]
    further: _Further | None = None


@dataclass(frozen=True, slots=True)
class _Further:
    """How a further program is planned, in place of `_Order.options`.

    Attributes:
        otherwise: options where a constraint cannot hold.
    """

    options: PlanOptions
    otherwise: PlanOptions


_OF_THE_MODULE = (
    "clip_grad_norm_", "loss_scale", "variants", "input_layouts", "sampler", "program", "plan", "device_mesh", "manual_seed",
    "random_state",
)  # fmt: skip


class Deferred(nn.Module):
    """A compiled model before its first call; from then on it stands for the distributed one."""

    def __init__(self, order: _Order) -> None:
        super().__init__()
        object.__setattr__(self, "_waiting", order)  # not through nn.Module: the plain model is no child
        self.training, self._mode_is_set = order.model.training, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Plan at the first call, then run."""
        if self._waiting is not None:
            if not self._mode_is_set:  # nothing was captured in the mode that the model had
                self.training = self._waiting.model.training
            elif self.training != self._waiting.model.training:
                self._waiting.model.train(self.training)
            self.module = _build(self._waiting, args, kwargs)
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

    def train(self, mode: bool = True) -> Deferred:
        """Set the mode, also of the distributed module once it is there."""
        super().train(mode)
        self._mode_is_set = True
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _OF_THE_MODULE:
                return getattr(self._ready(name), name)
            if self.__dict__.get("_waiting", self) is None:
                return getattr(self.module, name)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("random_state", "loss_scale"):
            setattr(self._ready(name), name, value)
        else:
            super().__setattr__(name, value)

    def _ready(self, wish: str) -> ParallelModule | StagedModule:
        if self._waiting is not None:
            raise RuntimeStateError(
                f"{wish} asked for before the first call: the model is not planned yet",
                remedy="call the model once first, or pass example_inputs=batch to autopar.compile and it is planned at once",
            )
        module = self.module
        assert isinstance(module, ParallelModule | StagedModule)
        return module


@torch.inference_mode(mode=False)  # parameters that are made in it could never be trained
def _build(
    order: _Order, args: tuple[Any, ...], kwargs: Mapping[str, Any], shared: Compiled | None = None
) -> ParallelModule | StagedModule:
    mesh = order.mesh
    kind = _device_type(order.model)
    devices = mesh if isinstance(mesh, DeviceMesh) else device_mesh(as_mesh(mesh), kind)
    plan, program = _plan_together(order, args, kwargs)
    if is_unshaped(mesh):  # its shape is the plan's
        devices = device_mesh(plan.mesh, kind)
    build: Callable[..., ParallelModule | StagedModule] = StagedModule if isinstance(program, StagedProgram) else ParallelModule
    as_planned = order.build["outputs"] in ("auto", "loss")  # a call without labels has no loss alone
    wanted = plan.options.get("outputs", "dtensor") if as_planned else order.build["outputs"]
    module = build(program, devices, order.model, **{**order.build, "outputs": wanted}, shared=shared)
    object.__setattr__(module, "plan", plan)
    if shared is None:
        for line in idle(plan) if rank() == 0 else ():
            log.warning(line)
        usual = wanted == settled("auto", any(t.is_loss for t in program.outputs), plan.options.get("inference", False))
        further = order.build if usual else {**order.build, "outputs": wanted}
        module.variants = Variants(partial(_variant, further, order.hardware, Structure.of(order.model), devices))
    return module


def _variant(
    build: Mapping[str, Any], asked: HardwareLike | None, structure: Structure, devices: DeviceMesh,
    module: ParallelModule | StagedModule, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> ParallelModule | StagedModule:  # fmt: skip
    """A program for another mode or a batch of other shapes, over the module's parameters."""
    agree(f"{'train' if training else 'eval'} mode, {shapes_of(args, kwargs)}", "batch or mode", devices)
    plan: Plan = module.plan
    hardware = planned_for(plan) if asked is None else asked  # read where it is planned, on one rank
    only_forward = not torch.is_grad_enabled()
    asked_again, otherwise = (replace(options, outputs=build["outputs"]) for options in asked_of(plan, storage_of(module)))
    further = _Further(asked_again, otherwise)
    if only_forward:
        further = _Further(*(beside_the_optimizer(plan, options) for options in (asked_again, otherwise)))
    with torch.enable_grad():
        made = _build(_Order(structure.in_mode(training), devices, None, hardware, build, {}, further), args, kwargs, module)
    made.train(training)
    made.only_forward = only_forward and made.plan.options["inference"] and not plan.options.get("inference", False)
    return made


def _device_type(model: nn.Module) -> str:
    types = {p.device.type for p in model.parameters()} - {"meta"}
    if len(types) > 1:
        raise RuntimeStateError(f"the model's parameters are on {sorted(types)}", remedy="move the model to one kind of device")
    return types.pop() if types else ("cuda" if torch.cuda.is_available() else "cpu")


def _plan_together(order: _Order, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Plan, Program | StagedProgram]:
    """Rank 0 plans and broadcasts the plan's text (or its error); every rank emits from it."""
    plan = Plan.load(order.plan) if isinstance(order.plan, str | Path) else order.plan
    if plan is not None:
        _check_outputs(plan, order.build["outputs"])
    if plan is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        _, planned = _plan_here(order, args, kwargs)
        return planned.plan, planned.program
    if plan is None:
        plan = _from_rank_zero(order, args, kwargs)
    trace = traced_for(plan, order.model, args, kwargs)
    refuse_own_losses(trace, order.build["batch"])
    check_fits(plan, trace, plan.mesh if is_unshaped(order.mesh) and is_shape_of(plan.mesh, order.mesh) else as_mesh(order.mesh))
    return plan, program_of(plan, order.model, trace, args, kwargs)


def _check_outputs(plan: Plan, outputs: Outputs) -> None:
    made_for = plan.options.get("outputs", "dtensor")
    if outputs not in (made_for, "auto") and "loss" in (outputs, made_for):
        what = f"the plan was made for outputs={made_for!r}, this is outputs={outputs!r}"
        raise PlanError(what, remedy=f"pass outputs={made_for!r}, or plan again")


def _plan_here(order: _Order, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Trace, Planned]:
    log.info("planning for mesh %s", as_mesh(order.mesh))
    further = order.further
    if further is None:
        chosen = {"batch": order.build["batch"], "outputs": order.build["outputs"], **order.options}
        return plan_told(order.model, order.mesh, args, kwargs, order.hardware, chosen)
    call = order.model, order.mesh, args, kwargs, order.hardware
    try:
        return plan_told(*call, further.options, another=True)
    except ConstraintError as error:
        found = plan_told(*call, further.otherwise, another=True)
        log.warning("for this call constraints on layouts are left out, since they cannot hold: %s", error.what)
        return found


def _from_rank_zero(order: _Order, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [("plan", _plan_here(order, args, kwargs)[1].plan.dumps())]
        except Exception as error:  # the others wait in the broadcast: they must learn of it, then every rank raises
            dist.broadcast_object_list([("error", f"{type(error).__name__}: {error}")], src=0)
            raise
    dist.broadcast_object_list(box, src=0)
    kind, text = box[0]
    if kind == "error":
        raise PlanError(f"rank 0 could not plan: {text}", remedy="see the error of rank 0")
    return Plan.loads(text, "broadcast from rank 0")
