"""`StagedModule`: a pipeline's stage on this rank, or one stage that works through microbatches, as an ordinary `nn.Module`.

A call takes the whole batch and runs the schedule, forward and backward of all microbatches; what it returns is what the model returns for
the batch, on every rank: with ``outputs="full"`` every output, else the loss and None for the others, since parts of microbatches
have no place in a whole tensor. `loss.backward()` then publishes the gradients that are there already. The loss is the one differentiable
output, and what comes after it must be linear: `loss_scale` is what the losses are multiplied with before backward, and
``(loss * pm.loss_scale).backward()`` publishes scaled gradients. Losses that are computed outside the model cannot be backpropagated.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from autopar.errors import MeshError, RuntimeStateError
from autopar.run.arguments import Arguments, Results
from autopar.run.clipping import clip_over_stages
from autopar.run.device_mesh import agree, groups_of, mesh_of, stage_devices
from autopar.run.executor import Backend, Batch, Executor, Outputs
from autopar.run.holder import Holder
from autopar.run.program import StagedProgram
from autopar.run.stage_work import StageWork
from autopar.run.stage_worker import StageWorker

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StagedModule(Holder):
    """The stage of `program` that this rank runs; it holds the parameters of that stage only.

    Args:
        devices: the whole mesh. model: gives values, names and the train/eval flag; it may be on meta, and is not kept.

    Attributes:
        loss_scale: factor of the losses in backward (see the module docstring).

    Raises:
        MeshError: where the program was made for another mesh. RuntimeStateError: where ranks hold different plans; on ``batch="local"``.
    """

    loss_scale: float

    def __init__(
        self,
        program: StagedProgram,
        devices: DeviceMesh,
        model: nn.Module,
        *,
        batch: Batch = "global",
        outputs: Outputs = "full",
        backend: Backend = "eager",
        both_modes: bool = False,
    ) -> None:
        if mesh_of(devices).shape != program.mesh.shape:
            raise MeshError(f"the program is for mesh {program.mesh}, not {mesh_of(devices)}", remedy="plan for the mesh that is there")
        if batch != "global":
            what = f"batch={batch!r}: a plan with microbatches takes whole batches, of which each stage takes its parts"
            raise RuntimeStateError(what, remedy='pass batch="global"')
        agree(program.plan_hash, "plan", devices)
        own, group, number = stage_devices(devices, program.axis)
        stage = program.stages[number]
        held = {name for t in (*stage.parameters, *stage.buffers) for name in (t.name, *t.aliases)}
        every = {name for s in program.stages for t in (*s.parameters, *s.buffers) for name in (t.name, *t.aliases)}
        super().__init__((*stage.parameters, *stage.buffers), own, model, elsewhere=every - held, world=devices)
        self.program, self.stage, self.stage_number, self.loss_scale = program, stage, number, 1.0
        self.world_mesh, self._group = devices, group
        groups = groups_of(own)
        executor = Executor(stage, groups, backend=backend, batch=batch, outputs=outputs, device=devices.device_type)
        self._kept = [t for t in program.outputs if outputs == "full" or t.is_loss]
        self._work = StageWork(stage, executor, executor.device)
        self._schedule = self._make_schedule()
        self._arguments = Arguments(program, inspect.signature(model.forward), batch, groups, devices.device_type)
        self._results = Results(program)
        self._captured_mode = None if both_modes else model.training
        self._shared = {name: held_by for name, held_by in program.shared.items() if number in held_by}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the whole batch; with gradients enabled, backward has run.

        Raises:
            RuntimeStateError: on arguments or a mode that the program was not made for.
        """
        if self._captured_mode is not None and self.training != self._captured_mode:
            raise RuntimeStateError(
                f"the program was made in {'train' if self._captured_mode else 'eval'} mode, which this model computes differently",
                remedy="compile the model once in each mode",
            )
        values = self._arguments.tensors(args, kwargs)
        how = self.program.microbatches
        parts = how.split({t.name: x for t, x in zip(self.program.inputs, values, strict=True)})
        weights = how.weights(parts)
        parameters = [self.get_parameter(t.name) for t in self.stage.parameters]
        trained = torch.is_grad_enabled()
        with torch.autocast(self.device_mesh.device_type, enabled=False):
            outputs, gradients = self._step(parts, weights, parameters, keep=trained)
        if trained:
            outputs[how.loss] = _Published.apply(self, outputs[how.loss], gradients, *parameters)
        return self._results.build([outputs.get(t.name) for t in self.program.outputs])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the whole model, all stages, is at most `max_norm`; returns the norm before.

        A parameter that several stages hold counts once.
        """
        counted = {name for name, held_by in self._shared.items() if held_by[0] != self.stage_number}
        parameters = [(p, self._names[name] not in counted) for name, p in self.named_parameters()]
        return clip_over_stages(parameters, max_norm, norm_type, self._group, self.device_mesh)

    def _make_schedule(self) -> Any:
        """None for a single stage, whose microbatches come one after another."""
        if self._group is None:
            return None
        num = self.program.microbatches.num
        worker = StageWorker(self._work, self.stage_number, len(self.program.stages), self._group)
        return _SCHEDULES[self.program.schedule](worker, num, loss_fn=lambda output, _: output, scale_grads=False)

    def _step(
        self, parts: list[dict[str, Tensor]], weights: list[float], parameters: Sequence[Tensor], *, keep: bool
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The batch's outputs by path, and this stage's gradients, both the same on all ranks that should have them."""
        work, how = self._work, self.program.microbatches
        locals = [self._storages[t.name].local(p.detach()) for p, t in zip(parameters, self.stage.parameters, strict=True)]
        buffers = [self._storages[t.name].local(self.get_buffer(t.name)) for t in self.stage.buffers]
        work.begin([t.name for t in self._kept], locals, buffers, parts, [weight * self.loss_scale for weight in weights], keep=keep)
        if keep and self._schedule is not None:
            with torch.enable_grad():  # the schedule insists, though nothing runs through autograd
                self._schedule.step(target=torch.zeros(how.num), return_outputs=False)
        else:
            for number in range(how.num):
                self._forward(number)
                if keep:
                    work.backward(number)
        own = {path: how.join(path, values, weights) for path, values in work.outputs.items()}
        gradients = work.finish()
        if keep:
            self._add_shared(gradients)
        return self._spread(own), gradients

    def _forward(self, number: int) -> None:
        """One microbatch forward, without a schedule."""
        self._pass(dist.irecv, self._work.arriving(number), -1)
        self._work.forward(number)
        self._pass(dist.isend, self._work.leaving(number), 1)

    def _pass(self, kind: Any, tensors: Sequence[Tensor], step: int) -> None:
        if tensors:
            assert self._group is not None, "several stages have a group"
            peer = dist.get_global_rank(self._group, self.stage_number + step)
            for work in dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer, self._group) for tensor in tensors]):
                work.wait()

    def _add_shared(self, gradients: list[Tensor]) -> None:
        """The first stage that holds a parameter adds up all parts of its gradient, in order, and sends the sum back."""
        names = [t.name for t in self.stage.parameters if t.has_gradient]
        for name, held_by in sorted(self._shared.items()):
            assert self._group is not None, "several stages have a group"
            mine = gradients[names.index(name)]
            owner, others = dist.get_global_rank(self._group, held_by[0]), held_by[1:]
            if self.stage_number != held_by[0]:
                dist.send(mine, owner, self._group)
                dist.recv(mine, owner, self._group)
                continue
            for other in others:
                part = torch.empty_like(mine)
                dist.recv(part, dist.get_global_rank(self._group, other), self._group)
                mine.add_(part)
            for other in others:
                dist.send(mine, dist.get_global_rank(self._group, other), self._group)

    def _spread(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs on all stages."""
        if self._group is None:
            return dict(own)
        found = {}
        for tensor in self._kept:
            made_by = next(i for i, s in enumerate(self.program.stages) if any(t.name == tensor.name for t in s.outputs if not t.crosses))
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device_mesh.device_type)
            value = own[tensor.name].contiguous() if tensor.name in own else empty
            dist.broadcast(value, dist.get_global_rank(self._group, made_by), self._group)
            found[tensor.name] = value
        return found

    def _wrapped(self, gradients: Sequence[Tensor]) -> list[DTensor | None]:
        """One per parameter of the stage."""
        remaining = iter(gradients)
        return [self._storages[t.name].wrap(next(remaining)) if t.has_gradient else None for t in self.stage.parameters]


class _Published(torch.autograd.Function):
    """The loss, whose backward hands out gradients that are known already."""

    @staticmethod
    def forward(ctx: Any, module: StagedModule, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.module, ctx.gradients, ctx.scale = module, gradients, module.loss_scale
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeStateError(
                "backward ran a second time through one call, and its gradients have been handed out",
                remedy="call the module again before each backward; one call gives one backward",
            )
        factor = float(tangent) / ctx.scale
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        return (None, None, None, *ctx.module._wrapped(gradients))
