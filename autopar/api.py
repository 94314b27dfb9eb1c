"""The public surface: one line turns a model into a distributed one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Trace, capture
from autopar.constraints import LayoutConstraint
from autopar.emit import emit
from autopar.errors import MeshError, PlanError, RuntimeStateError
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning import Planned, PlanOptions, make_plan
from autopar.plans import Plan
from autopar.run.device_mesh import device_mesh, mesh_of
from autopar.run.executor import Backend, Batch, Outputs
from autopar.run.module import ParallelModule
from autopar.run.program import Program
from autopar.verification import Verification, verify_program

log = logging.getLogger("autopar")
MeshLike = Mesh | DeviceMesh | int | Mapping[str, int]
Example = Mapping[str, Any] | Sequence[Any] | Tensor


def as_mesh(mesh: MeshLike) -> Mesh:
    """Read what users pass as a mesh: a `Mesh`, a torch DeviceMesh, axis sizes by name, or a device count.

    Raises:
        MeshError: where it is none of these.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return mesh_of(mesh)
    if isinstance(mesh, int | Mapping) and not isinstance(mesh, bool):
        return Mesh(mesh)
    raise MeshError(f"{mesh!r} is no mesh", remedy='pass autopar.Mesh({"node": 4, "gpu": 8}), a torch DeviceMesh or a device count')


def as_call(example_inputs: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call: a mapping is keywords, a list or tuple is positions, a tensor is the one argument."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    return tuple(example_inputs), {}


def default_hardware(device_type: str | None = None) -> str:
    """``local`` where this machine was measured, else the GPU that is there, else ``cpu-gloo``."""
    if "local" in HardwareProfile.names() and HardwareProfile.local_path().exists():
        return "local"
    if torch.cuda.is_available() and device_type != "cpu":
        name = torch.cuda.get_device_name().lower()
        known = {"h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-sxm-80gb"}
        return next((profile for chip, profile in known.items() if chip in name), "h100-sxm")
    return "cpu-gloo"


def plan_model(
    model: nn.Module, mesh: MeshLike, *, example_inputs: Example, hardware: str | Path | HardwareProfile | None = None, **options: Any
) -> tuple[Trace, Planned]:
    """Capture and plan; the trace and the plan with its program and phase times. Options as in `plan`."""
    profile = hardware if isinstance(hardware, HardwareProfile) else HardwareProfile.load(hardware or default_hardware())
    args, kwargs = as_call(example_inputs)
    trace = capture(model, args, kwargs)
    chosen = PlanOptions(**{**options, "constraints": tuple(options.get("constraints", ()))})
    return trace, make_plan(trace, as_mesh(mesh), profile, chosen, model_name=type(model).__name__)


def plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Example,
    hardware: str | Path | HardwareProfile | None = None,
    memory_bytes: int | None = None,
    optimizer: str = "adamw",
    constraints: Sequence[LayoutConstraint] = (),
    strict: bool = False,
    gap: float = 0.01,
    time_limit_s: float = 60.0,
    batch: Batch = "global",
    outputs: Outputs = "dtensor",
) -> Plan:
    """Plan a model for a mesh. Needs no GPU and no process group; the weights may be on meta.

    Args:
        example_inputs: the global batch: a mapping of keywords, a sequence of positions, or one tensor. Values are not read.
        hardware: name of a profile (`HardwareProfile.names`), path of one, ``"local"``, or a profile; by default ``local``
            where this machine was measured, else the GPU that is there, else ``cpu-gloo``.
        memory_bytes: budget per device; by default the profile's memory less 10 %.
        optimizer: whose state rests beside the parameters: ``adamw``, ``adam``, ``sgd``, ``momentum`` or ``none``.
        constraints: what is forced (`autopar.constraints`).
        strict: refuse ops that run replicated for want of a rule.
        gap: relative distance between plan and proven bound at which the search stops; time_limit_s: a safety net.
        batch, outputs: as in `compile`.

    Raises:
        CaptureError, ConstraintError, InfeasibleError, HardwareError, MeshError: see each.
    """
    return plan_model(
        model, mesh, example_inputs=example_inputs, hardware=hardware, memory_bytes=memory_bytes, optimizer=optimizer,
        constraints=constraints, strict=strict, gap=gap, time_limit_s=time_limit_s, batch=batch, outputs=outputs,
    )[1].plan  # fmt: skip


def compile(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Example | None = None,
    plan: Plan | str | Path | None = None,
    backend: Backend = "eager",
    batch: Batch = "global",
    outputs: Outputs = "dtensor",
    hardware: str | Path | HardwareProfile | None = None,
    **options: Any,
) -> ParallelModule | Deferred:
    """Turn a model into a distributed one: plan (or take a plan), emit, and shard the parameters.

    Call it on every rank. Rank 0 plans, the others take its plan. With one device no launcher is needed.

    Args:
        example_inputs: the global batch. Without it, planning happens at the first call, and the parameters exist from then on.
        plan: a plan or its file, made by `plan` for this model and mesh.
        backend: ``"eager"`` or ``"inductor"``.
        batch: ``"global"``: every rank passes the same batch and takes its part; ``"local"``: each passes its part.
        outputs: what is not the loss comes detached, as ``"dtensor"`` (nothing is moved: ``.full_tensor()`` gathers),
            ``"full"`` (gathered at once) or ``"local"`` (this rank's part).
        hardware, options: as in `plan`.

    Raises:
        as `plan`; PlanError where the plan is for another model or mesh and says what differs.
    """
    build = {"backend": backend, "batch": batch, "outputs": outputs}
    if example_inputs is None:
        if batch == "local":
            raise RuntimeStateError('batch="local" needs example_inputs', remedy="pass the global batch's example_inputs, its values are not read")
        return Deferred(model, mesh, plan, hardware, build, options)
    return _build(model, mesh, example_inputs, plan, hardware, build, options)


class Deferred(nn.Module):
    """A compiled model before its first call; from then on it stands for the distributed one."""

    def __init__(self, model: nn.Module, mesh: MeshLike, plan: Any, hardware: Any, build: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_waiting", (model, mesh, plan, hardware, dict(build), dict(options)))
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Plan at the first call, then run."""
        if self._waiting is not None:
            model, mesh, plan, hardware, build, options = self._waiting
            if args and kwargs:
                raise RuntimeStateError("the first call mixes positions and keywords", remedy="pass example_inputs to autopar.compile")
            model.train(self.training)
            self.module = _build(model, mesh, kwargs or args, plan, hardware, build, options)
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
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("clip_grad_norm_", "input_layouts", "sampler", "program", "plan", "device_mesh"):
                return getattr(self._ready(name), name)
            raise

    def _ready(self, wish: str) -> ParallelModule:
        if self._waiting is not None:
            raise RuntimeStateError(
                f"{wish} asked for before the first call: the model is not planned yet",
                remedy="call the model once first, or pass example_inputs=batch to autopar.compile and it is planned at once",
            )
        module = self.module
        assert isinstance(module, ParallelModule)
        return module


def _build(
    model: nn.Module, mesh: MeshLike, example_inputs: Example, plan: Any, hardware: Any, build: Mapping[str, Any], options: Mapping[str, Any]
) -> ParallelModule:
    devices = mesh if isinstance(mesh, DeviceMesh) else device_mesh(as_mesh(mesh), _device_type(model))
    chosen, program = _plan_together(model, mesh, example_inputs, plan, hardware, build, options)
    module = ParallelModule(program, devices, model, **build)
    object.__setattr__(module, "plan", chosen)
    return module


def _device_type(model: nn.Module) -> str:
    types = {p.device.type for p in model.parameters()} - {"meta"}
    if len(types) > 1:
        raise RuntimeStateError(f"the model's parameters are on {sorted(types)}", remedy="move the model to one kind of device")
    return types.pop() if types else ("cuda" if torch.cuda.is_available() else "cpu")


def _plan_together(
    model: nn.Module, mesh: MeshLike, example_inputs: Example, plan: Any, hardware: Any, build: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Plan, Program]:
    """Rank 0 plans and broadcasts the plan's text (or its error); every rank emits from it."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    if plan is None and alone:
        with _telling("planning"):
            _, planned = plan_model(
                model, mesh, example_inputs=example_inputs, hardware=hardware, batch=build["batch"], outputs=build["outputs"], **options
            )
        return planned.plan, planned.program
    if plan is None:
        plan = _from_rank_zero(model, mesh, example_inputs, hardware, build, options)
    trace = capture(model, *as_call(example_inputs))
    check_fits(plan, trace, as_mesh(mesh))
    return plan, emit(trace, plan)


def _from_rank_zero(
    model: nn.Module, mesh: MeshLike, example_inputs: Example, hardware: Any, build: Mapping[str, Any], options: Mapping[str, Any]
) -> Plan:
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with _telling("planning"):
                made = plan_model(
                    model, mesh, example_inputs=example_inputs, hardware=hardware, batch=build["batch"], outputs=build["outputs"], **options
                )
            box = [("plan", made[1].plan.dumps())]
        except Exception as error:  # the others wait in the broadcast: they must learn of it, then every rank raises
            box = [("error", f"{type(error).__name__}: {error}")]
            dist.broadcast_object_list(box, src=0)
            raise
    dist.broadcast_object_list(box, src=0)
    kind, text = box[0]
    if kind == "error":
        raise PlanError(f"rank 0 could not plan: {text}", remedy="see the error of rank 0")
    return Plan.loads(text, "broadcast from rank 0")


@contextmanager
def _telling(what: str) -> Iterator[None]:
    log.info("autopar: %s", what)
    yield


def check_fits(plan: Plan, trace: Trace, mesh: Mesh) -> None:
    """That a plan is for this model and mesh.

    Raises:
        PlanError: saying exactly what differs.
    """
    differs = []
    if plan.mesh.shape != mesh.shape or plan.mesh.names != mesh.names:
        differs.append(f"mesh: the plan is for {plan.mesh}, this is {mesh}")
    if plan.fingerprint.model != trace.fingerprint:
        differs += _model_differences(plan, trace)
    if plan.fingerprint.torch != torch.__version__.split("+")[0]:
        log.warning("the plan was made with torch %s, this is %s; entries are matched by key", plan.fingerprint.torch, torch.__version__)
    if differs:
        raise PlanError("the plan was made for something else: " + "; ".join(differs), remedy="plan again, or pass the plan of this model and mesh")


def _model_differences(plan: Plan, trace: Trace) -> list[str]:
    planned = {key.removesuffix("/parameter") for key in plan.node_choices() if key.endswith("/parameter")}
    here = {p.name for p in trace.parameters}
    lines = [f"parameter {name} is in the plan, not in the model" for name in sorted(planned - here)[:5]]
    lines += [f"parameter {name} is in the model, not in the plan" for name in sorted(here - planned)[:5]]
    nodes = {n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    entries = {c.node.format(*i) for e in plan.entries if e.kind == "compute" for c in e.nodes for i in e.instances}
    lines += [f"op {key} is in the plan, not in the model" for key in sorted(entries - nodes)[:5]]
    lines += [f"op {key} is in the model, not in the plan" for key in sorted(nodes - entries)[:5]]
    return lines or ["model: names agree, but shapes, dtypes or the batch's shape differ"]


def verify(plan: Plan, model: nn.Module, batch: Example, *, dtype: torch.dtype | None = torch.float64, tolerance: float | None = None) -> Verification:
    """Run all ranks of a plan in one process, in lockstep, and compare outputs and every gradient with the plain model.

    Args:
        dtype: all floating tensors are promoted to it, on both sides; None computes in the model's own.
        tolerance: largest relative error allowed; by default 1e-9 in fp64 (2e-6 where the model itself computes a part in
            fp32), 1e-4 in fp32, 5e-2 below.

    Raises:
        VerificationError: naming the first node that diverges, with its module path.
        PlanError: where the plan is for another model.
    """
    args, kwargs = as_call(batch)
    trace = capture(model, args, kwargs)
    check_fits(plan, trace, plan.mesh)
    return verify_program(trace, emit(trace, plan), model, args, kwargs, dtype=dtype, tolerance=tolerance)
