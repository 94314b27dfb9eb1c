"""Build a `ParallelModule`: agree on a plan on all ranks, emit its program, and shard the
parameters.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from autopar.api.arguments import MeshLike, as_mesh, is_shape_of, kind_of, planned_for
from autopar.api.cached_captures import captures_cached
from autopar.api.options import PlanRequest
from autopar.api.plan_options import check_fits, recorded_options
from autopar.api.planning import Found, find_plan
from autopar.api.tracing import (
    as_planned,
    is_trace_for,
    program_of,
    refuse_parts,
    settle_outputs,
    trace_unplanned,
    traced_for,
    validate_before_run,
)
from autopar.cache.store import remove_entry
from autopar.capture import Trace
from autopar.constraints import (
    Constraint,
    Megatron,
    Offloaded,
    Pipelined,
    Resting,
    pipeline,
    rests_as,
)
from autopar.constraints.words import in_words
from autopar.core.layout import Layout
from autopar.core.mesh import HardwareLike, is_unshaped
from autopar.core.same_values import text_of
from autopar.core.terminal import progress_of_long
from autopar.cost.priced import OPTIMIZERS
from autopar.errors import ConstraintError, PlanError, RuntimeStateError
from autopar.explanation.summary import idle
from autopar.plans import Plan
from autopar.program.program import Program
from autopar.request import Backend, Outputs, PlanOptions
from autopar.runtime.closures import rebind_copy
from autopar.runtime.device_mesh import agree, device_mesh
from autopar.runtime.guarded_module import Compiled
from autopar.runtime.guards import Variants
from autopar.runtime.module import ParallelModule
from autopar.runtime.module_modes import (
    FollowedModes,
    ModeChange,
    mode_state_of,
    overrides_modes,
    set_own_mode,
)
from autopar.runtime.optimizers import PlannedState, note_planned
from autopar.runtime.rank_agreement import announced, failures_told
from autopar.runtime.rank_comm import rank

# --------------------------------------------------------------------------------------------------
# Prepare further programs of a compiled module: keep the structure of its model, the request of
# its plan, and the layouts in which its parameters are stored.


# Maximum number of elements of a buffer that keeps its values, such as a mask for 256 positions.
_KEPT = 1 << 16


@dataclass(frozen=True, slots=True)
class Structure:
    """A copy of a model without values, which can be set to training or eval mode.

    Attributes:
        modes: module path → whether the module was in training mode when the model was compiled.
        refusal: why there is no copy, if the model cannot be copied.
    """

    model: nn.Module | None
    modes: Mapping[str, bool]
    refusal: str = ""

    @staticmethod
    def of(model: nn.Module) -> Structure:
        """Copy a model, with parameters and large buffers on meta. Small buffers keep their values,
        which a capture may have to read.
        """
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )
        for buffer in model.buffers():
            buffer_copy = (
                buffer.detach().clone() if buffer.numel() <= _KEPT else buffer.detach().to("meta")
            )
            memo.setdefault(id(buffer), buffer_copy)
        modes = {path: module.training for path, module in model.named_modules()}
        try:
            copied = copy.deepcopy(model, memo)
            rebind_copy(model, copied, memo)
            return Structure(copied, modes)
        except Exception as error:  # modules may raise anything; reported when a copy is needed
            return Structure(None, modes, f"{type(error).__name__}: {error}")

    def as_called(self, training: bool, trained: Mapping[str, bool]) -> nn.Module:
        """Return the model in a mode. In the mode in which it was compiled, every module has its
        original mode.

        Args:
            training: the mode.
            trained: name → whether a parameter is now trained; other parameters are unchanged.

        Raises:
            RuntimeStateError: if there is no copy.
        """
        if self.model is None:
            message = (
                "cannot plan for another mode or other batch shapes, because the model cannot be "
                f"copied: {self.refusal}"
            )
            raise RuntimeStateError(
                message,
                remedy=(
                    "compile the model for that call and load its state with load_state_dict, or "
                    "pad the batch"
                ),
            )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        if overrides_modes(self.model):  # the copy has the modes of the compiled module
            if training != self.model.training:
                set_own_mode(self.model, training, trained)
            return self.model
        self.model.train(training)
        if training == self.modes[""]:
            for path, module in self.model.named_modules():
                module.training = self.modes[path]
        return self.model

    def set_mode(self, training: bool, trained: Mapping[str, bool]) -> ModeChange:
        """Run the model's own `train` or `eval` on the copy; see `OwnModes.set_mode`.

        Raises:
            RuntimeStateError: if there is no copy.
        """
        model = self.model or self.as_called(training, trained)  # raises the error
        return set_own_mode(model, training, trained)


def variant_options(plan: Plan, storage: Mapping[str, Layout]) -> tuple[PlanOptions, PlanOptions]:
    """Return the options of a further plan.

    The first options are those of the first plan. The second ones omit the constraints that name
    layouts, for calls in which one of them cannot hold.

    Args:
        plan: the first plan.
        storage: the layout in which each parameter is stored.
    """
    options = recorded_options(plan)
    constraints = [c for c in options.constraints if not isinstance(c, Pipelined | Resting)]
    stages = _stages(plan)
    constraints = [
        replace(c, microbatches=None) if isinstance(c, Megatron) else c for c in constraints
    ]
    few: tuple[Constraint, ...] = (
        rests_as(storage),
        *(c for c in constraints if isinstance(c, Offloaded)),
        *stages,
    )
    all_of_them = (
        rests_as(storage),
        *constraints,
        *(() if any(isinstance(c, Megatron) and c.pp != 1 for c in constraints) else stages),
    )
    free = replace(options, num_microbatches="auto", loss_rows="auto", constraints=())
    return replace(free, constraints=all_of_them), replace(free, constraints=few)


def storage_of(module: ParallelModule) -> dict[str, Layout]:
    """Return the layout in which each parameter of all stages is stored; replicated if no program
    reads it.
    """
    stages = module.program.stages
    layouts = {name: module.resting(name) for name, _ in module.named_parameters()}
    return layouts | {t.name: t.layout for stage in stages for t in stage.parameters}


def _stages(plan: Plan) -> tuple[Pipelined, ...]:
    """Return the pipeline of a plan as a constraint, with the same cuts."""
    stages = plan.as_pipeline
    if not stages.axis:
        return ()
    chunks = stages.num_chunks
    schedule = stages.schedule if chunks > 1 or stages.num_microbatches > 1 else "1f1b"
    cuts = stages.modules
    return (
        pipeline(
            stages.axis,
            schedule=schedule,
            cuts=cuts,
            independent=stages.independent,
            chunks=chunks if chunks > 1 else None,
        ),
    )


def beside_the_optimizer(plan: Plan, options: PlanOptions) -> PlanOptions:
    """Return the options of a plan for forward only, with the memory that the optimizer state
    leaves.
    """
    assert options.memory_bytes is not None, "a plan records its budget"
    state = plan.as_pipeline.num_chunks * max(
        stage.prediction.memory_bytes.get("optimizer", 0) for stage in plan.stages
    )  # the maximum over the stages of all ranks
    return replace(
        options,
        inference=True,
        memory_bytes=max(options.memory_bytes - state, 1),
        num_microbatches="auto",
    )


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Describe a call in a text on which all ranks have to agree."""
    leaves, spec = tree_flatten(tree_map(_shape, (args, dict(kwargs))))
    return f"{leaves} {spec}"


def told_trained(trained: Mapping[str, bool]) -> str:
    """Describe in a short text which parameters are trained; all ranks have to agree on it."""
    names = sorted(name for name, trains in trained.items() if trains)
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f", {len(names)} parameters trained ({digest})" if trained else ""


def _shape(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}{' with a gradient' if leaf.requires_grad else ''}"
    return text_of(leaf)


# --------------------------------------------------------------------------------------------------


log = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True)
class Order:
    """The arguments of `autopar.compile`.

    Attributes:
        request: arguments of the planner, used if no plan is passed.
        otherwise: options for further programs if a constraint of the request cannot hold.
    """

    request: PlanRequest
    plan: Plan | str | Path | None = None
    backend: Backend = "eager"
    otherwise: PlanOptions | None = None

    @property
    def build(self) -> dict[str, Any]:
        """The keyword arguments of `ParallelModule`."""
        return {
            "backend": self.backend,
            "batch": self.request.options.batch,
            "outputs": self.request.options.outputs,
        }


@torch.inference_mode(mode=False)  # parameters created in inference mode could never be trained
def parallel_module(
    order: Order, args: tuple[Any, ...], kwargs: Mapping[str, Any], shared: Compiled | None = None
) -> ParallelModule:
    """Plan a model for a call, unless a plan is passed, and build the distributed module.

    Args:
        order: the arguments of `autopar.compile`.
        args, kwargs: the call that is captured.
        shared: another module of the same model whose parameters and buffers are shared.

    Raises:
        as `autopar.compile`.
    """
    model, mesh, options = order.request.model, order.request.mesh, order.request.options
    kind = _device_type(model, (args, kwargs))
    if shared is None and not isinstance(mesh, DeviceMesh):
        _tell_of_gpus(kind, mesh)
    devices = mesh if isinstance(mesh, DeviceMesh) else device_mesh(as_mesh(mesh), kind)
    plan, program = _plan_together(order, args, kwargs)
    if is_unshaped(mesh):  # the mesh then has the shape of the plan
        devices = device_mesh(plan.mesh, kind)
    as_planned = options.outputs in (
        "auto",
        "loss",
    )  # a call without labels returns no loss, so "loss" is not possible
    outputs = plan.options.get("outputs", "dtensor") if as_planned else options.outputs
    module = ParallelModule(
        program, devices, model, **{**order.build, "outputs": outputs}, shared=shared
    )
    object.__setattr__(module, "plan", plan)
    if shared is None:
        _note_optimizer(module, plan)
        module.is_for_inference = (
            options.inference if order.plan is None else bool(plan.options.get("inference", False))
        )
        for line in idle(plan) if rank() == 0 else ():
            log.warning(line)
        usual = outputs == settle_outputs(
            "auto", any(t.is_loss for t in program.outputs), plan.options.get("inference", False)
        )
        further = options if usual else replace(options, outputs=outputs)
        structure = Structure.of(model)
        module.modes = _modes_followed(model, structure)
        builder = _VariantBuilder(
            further, order.request.hardware, order.backend, structure, devices
        )
        module.variants = Variants(builder)
    return module


def _modes_followed(model: nn.Module, structure: Structure) -> FollowedModes:
    if not overrides_modes(model):
        return FollowedModes()
    state = mode_state_of(model if structure.model is None else structure.model)
    return FollowedModes(structure, state, state)


def _note_optimizer(module: nn.Module, plan: Plan) -> None:
    num_copies = {name: num for name, (num, _) in OPTIMIZERS.items()}
    planned = str(plan.options.get("optimizer", "none"))
    note_planned(module.parameters(), PlannedState(planned, num_copies.get(planned, 0), num_copies))


@dataclass(frozen=True, slots=True)
class _VariantBuilder:
    """Plans and builds further programs of a module, for another mode or a batch of other shapes.

    It holds no reference to the `Order` of the module, which would keep the plain model alive.

    Attributes:
        options: the options of the module, with outputs as further calls have them.
        hardware: the hardware that the module was compiled for; None for the default.
        backend: what runs the graphs.
        structure: the model without its parameters.
        devices: the torch mesh of the module.
    """

    options: PlanOptions
    hardware: HardwareLike | None
    backend: Backend
    structure: Structure
    devices: DeviceMesh

    def __call__(
        self, module: ParallelModule, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ParallelModule:
        """Build a program for a call, over the parameters of the module.

        Args:
            module: the main module. training: the mode. args, kwargs: the call.
        """
        # each rank holds the parameters of its stages only
        shares_parameters = torch.is_grad_enabled() and module.program.is_single
        trained = (
            {name: p.requires_grad for name, p in module.named_parameters()}
            if shares_parameters
            else {}
        )
        mode = "train" if training else "eval"
        call = f"{mode} mode, {shapes_of(args, kwargs)}{told_trained(trained)}"
        agree(call, "batch or mode", self.devices)
        plan: Plan = module.plan
        # read where it is planned, on one rank
        hardware = planned_for(plan) if self.hardware is None else self.hardware
        only_forward = not torch.is_grad_enabled()
        asks = any(trained.values()) or any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))
        )
        again, otherwise = (
            replace(
                options,
                batch=self.options.batch,
                outputs=self.options.outputs,
                inference=options.inference and not asks,
            )  # of a frozen model by itself
            for options in variant_options(plan, storage_of(module))
        )
        if only_forward:
            again, otherwise = (
                beside_the_optimizer(plan, again),
                beside_the_optimizer(plan, otherwise),
            )
        with torch.enable_grad():
            model = self.structure.as_called(training, trained)
            order = Order(
                PlanRequest(model, self.devices, hardware, again, is_further=True),
                None,
                self.backend,
                otherwise,
            )
            with failures_told():
                variant = parallel_module(order, args, kwargs, module)
        variant.train(training)
        variant.modes = FollowedModes(None, module.modes.now, module.modes.now)
        variant.only_forward = (
            only_forward
            and variant.plan.options["inference"]
            and not plan.options.get("inference", False)
        )
        return variant


def _tell_of_gpus(kind: str, mesh: MeshLike) -> None:
    """Warn if GPUs of this machine are unused, which may not be intended."""
    if kind == "cpu" and torch.cuda.is_available():
        log.warning(
            "the model and the batch are on the CPU, so the compiled model runs on the CPU; pass "
            'example_inputs on "cuda" to run on GPUs'
        )
    elif (
        kind == "cuda"
        and is_unshaped(mesh)
        and as_mesh(mesh).num_devices == 1 < torch.cuda.device_count()
    ):
        num = torch.cuda.device_count()
        log.warning(
            "only one process was started, so one of %d GPUs is used: `autopar run SCRIPT` "
            "starts one process per GPU",
            num,
        )


def _device_type(model: nn.Module, batch: object) -> str:
    """Return the type of device that a model runs on without a torch mesh: that of the batch or, if
    the batch is on the CPU, that of the parameters.
    """
    if (kind := kind_of(model, batch)) is not None:
        return kind
    types = {p.device.type for p in model.parameters()} - {"meta"}
    if len(types) > 1:
        raise RuntimeStateError(
            f"the model's parameters are on {sorted(types)}",
            remedy="move the model to one type of device",
        )
    return "cuda" if torch.cuda.is_available() else "cpu"


def _plan_together(
    order: Order, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Plan, Program]:
    """Plan on rank 0, or load the plan from its cache, and broadcast the text of the plan or of the
    error. Every rank emits the program from it. No rank captures the call twice: rank 0 emits from
    the trace of planning, and the others capture while rank 0 plans.
    """
    request, captured, key = order.request, None, ""
    plan = Plan.load(order.plan) if isinstance(order.plan, str | Path) else order.plan
    if plan is not None:
        _check_outputs(plan, request.options.outputs)
    if plan is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        result = _plan_here(order, args, kwargs)
        plan, key = result.plan, result.key
        if result.planned is not None and result.trace is not None:
            validate_before_run(as_planned(result.trace, plan), plan, result.planned.program)
            return plan, result.planned.program
    elif plan is None:
        with announced(f"compiles {type(request.model).__name__}{_describe_request(request)}"):
            plan, captured, key = _from_rank_zero(order, args, kwargs)
    with captures_cached(use=request.options.cache):
        trace = traced_for(plan, request.model, args, kwargs) if captured is None else captured
        refuse_parts(trace, request.options.batch)
        _check_found(request, plan, trace, key)
        with _progress_on_rank_zero("emitting and validating the program"):
            program = program_of(plan, request.model, trace, args, kwargs, request.captured)
    return plan, program


_COMPARED = (
    "num_microbatches",
    "loss_rows",
    "precision",
    "batch",
    "outputs",
    "optimizer",
    "inference",
)
"""The options that every rank has to pass, next to the constraints. Budgets may differ."""


def _describe_request(request: PlanRequest) -> str:
    """Describe the options that differ from their defaults. The text is equal on ranks with equal
    requests."""
    options, usual = request.options, PlanOptions()
    values = {name: getattr(options, name) for name in _COMPARED}
    changed = [f"{k}={value!r}" for k, value in values.items() if value != getattr(usual, k)]
    if options.constraints:
        changed.append(f"constraints=[{', '.join(map(in_words, options.constraints))}]")
    return f" for mesh {as_mesh(request.mesh)}{''.join(f', {each}' for each in changed)}"


def _progress_on_rank_zero(what: str) -> AbstractContextManager[Any]:
    return progress_of_long(what) if rank() == 0 else nullcontext()


def _check_found(request: PlanRequest, plan: Plan, trace: Trace, key: str) -> None:
    """Check that a plan fits the captured call and the mesh. A plan from the cache that does not
    fit indicates an error in autopar and is removed.

    Args:
        key: key of the cache entry; empty if the plan is not from the cache.

    Raises:
        PlanError: with one line per difference.
    """
    mesh, model_name = request.mesh, type(request.model).__name__
    is_shaped_so = is_unshaped(mesh) and is_shape_of(plan.mesh, mesh)
    try:
        check_fits(plan, trace, plan.mesh if is_shaped_so else as_mesh(mesh), model_name)
    except PlanError:
        if key:
            remove_entry(key)
            log.warning(
                "the plan came from the cache and was removed from it: run the script again"
            )
        raise


def _check_outputs(plan: Plan, outputs: Outputs) -> None:
    made_for = plan.options.get("outputs", "dtensor")
    if outputs not in (made_for, "auto") and "loss" in (outputs, made_for):
        message = f"the plan was made for outputs={made_for!r}, but outputs={outputs!r} was passed"
        raise PlanError(message, remedy=f"pass outputs={made_for!r}, or plan again")


def _plan_here(order: Order, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
    log.info("planning for mesh %s", as_mesh(order.request.mesh))
    try:
        return find_plan(order.request, args, kwargs)
    except ConstraintError as error:
        if order.otherwise is None:
            raise
        result = find_plan(replace(order.request, options=order.otherwise), args, kwargs)
        log.warning(
            "dropping constraints on layouts that cannot hold for this call: %s",
            error.what,
        )
        return result


def _from_rank_zero(
    order: Order, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Plan, Trace | None, str]:
    """Return the plan of rank 0, the trace of the call if this rank has captured it, and on rank 0
    the cache key of the plan. Only rank 0 reads and writes the cache of plans.
    """
    box: list[Any] = [None]
    trace: Trace | None = None
    refusal: Exception | None = None
    key = ""
    if dist.get_rank() == 0:
        try:
            result = _plan_here(order, args, kwargs)
            box, trace, key = [("plan", result.plan.dumps())], result.trace, result.key
        # The other ranks wait in the broadcast. They receive the error, then every rank raises.
        except Exception as error:
            dist.broadcast_object_list([("error", f"{type(error).__name__}: {error}")], src=0)
            raise
    else:
        try:
            with captures_cached(use=order.request.options.cache):
                trace = trace_unplanned(order.request.model, args, kwargs, order.request.options)
        except (
            Exception
        ) as error:  # raised below: raising here would leave rank 0 waiting in the broadcast
            refusal = error
    dist.broadcast_object_list(box, src=0)
    kind, text = box[0]
    if kind == "error":
        raise PlanError(f"rank 0 could not plan: {text}")  # the text includes what to do
    if refusal is not None:
        raise refusal
    plan = Plan.loads(text, "broadcast from rank 0")
    return plan, trace if trace is not None and is_trace_for(plan, trace) else None, key
