"""`StagedModule`: the stages of a pipeline on this rank, or one stage with microbatches, as an
ordinary `nn.Module`.

A call takes the whole batch and runs the schedule, forward and backward of all microbatches. It
returns the model's result for the batch on every rank. With ``outputs="full"``, or with one stage
and one microbatch, the result has every output. Otherwise it has the loss and None for the other
outputs, since parts of microbatches do not form a whole tensor. `loss.backward()` then publishes
the gradients, which are known already. The loss is the only differentiable output, and functions of
it must be linear. If the user multiplies the loss, as gradient scalers do, and the graph computes
in float16, the step runs again when the factor changes (`autopar.runtime.loss_scaling`). Setting
`loss_scale` to the factor before the call avoids that.

If the model returns no loss, a call runs all forwards and returns whole outputs. `backward` of a
loss that the user computes from them runs all backwards (`autopar.program.transfers`) on every
rank. `loss_scale` is not used then.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from autopar.errors import RuntimeStateError
from autopar.kernels.bind import bind
from autopar.ops import random
from autopar.program.executor import Executor
from autopar.program.program import Program, ProgramTensor, StageProgram
from autopar.program.stage_work import StageWork, outputs_kept
from autopar.request import Backend, Batch, Outputs
from autopar.runtime.backward import clip_over_stages
from autopar.runtime.call_arguments import Arguments, CallResults, defaults_of
from autopar.runtime.device_mesh import agree, check_shape, groups_of, stage_devices
from autopar.runtime.guarded_module import Compiled
from autopar.runtime.guarded_outputs import refuse_backward, refuse_reads
from autopar.runtime.guards import Misfit, ProgramVariant
from autopar.runtime.loss_scaling import LossScale, share_overflows
from autopar.runtime.module_shell import Standing
from autopar.runtime.outer_loss import Answered, Published, ScaledStep
from autopar.runtime.parameters import Storage
from autopar.runtime.pipeline_runtime import StageCalls, StageExchange
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import rank

log = logging.getLogger("autopar")
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StagedModule(Compiled):
    """The stages of a program that this rank runs, usually one. The module holds only the
    parameters of these stages.

    Args:
        program: the program of all stages.
        devices: the whole mesh.
        model: the source of values, names and the train/eval flag. It may be on the meta device,
            and is not kept.
        batch, outputs, backend, both_modes, shared: the arguments of `ParallelModule`.

    Attributes:
        rank: this rank's index on the pipeline axis.

    Raises:
        MeshError: if the program was made for another mesh.
        RuntimeStateError: if ranks hold different plans, or with ``batch="local"``.
    """

    def __init__(
        self,
        program: Program,
        devices: DeviceMesh,
        model: nn.Module,
        *,
        batch: Batch = "global",
        outputs: Outputs = "full",
        backend: Backend = "eager",
        both_modes: bool = False,
        shared: Compiled | None = None,
    ) -> None:
        check_shape(devices, program.mesh)
        if batch != "global":
            what = (
                f"batch={batch!r}: a plan with microbatches takes whole batches, of which each"
                " stage takes its parts"
            )
            raise RuntimeStateError(what, remedy='pass batch="global"')
        agree(program.plan_hash, "plan", devices)
        own, group, self.rank = stage_devices(devices, program.axis)
        num_ranks = 1 if group is None else group.size()
        stages = {n: program.stages[n] for n in range(self.rank, len(program.stages), num_ranks)}
        held = {t.name: t for stage in stages.values() for t in (*stage.parameters, *stage.buffers)}
        self._draws = random.STATE in held
        held |= _on_all_ranks(program)
        tensors = (t for s in program.stages for t in (*s.parameters, *s.buffers))
        elsewhere = _all_names(tensors) - _all_names(held.values())
        super().__init__(
            tuple(held.values()),
            own,
            model,
            elsewhere=elsewhere,
            world=devices,
            both_modes=both_modes,
            shared=shared,
        )
        self.program, self._scale = program, LossScale()
        groups = groups_of(own)
        num = program.microbatches.num
        of_stages = [t for stage in program.stages for t in outputs_kept(stage, outputs, num)]
        names = {t.name for t in of_stages}
        kept = [t for t in program.outputs if t.name in names]
        self._presented = {
            t.name: Storage.of(t, own) for t in of_stages if outputs == "dtensor" and not t.is_loss
        }
        works: dict[int, StageWork] = {}
        for number, stage in stages.items():
            executor = Executor(
                stage,
                groups,
                backend=backend,
                batch=batch,
                outputs=outputs,
                device=devices.device_type,
            )
            works[number] = StageWork(stage, executor, executor.device)
        trained = {t.name for s in program.stages for t in s.parameters if t.has_gradient}
        self._is_trained = bool(trained)
        # in another mode, outputs of a trained model may have no gradient
        self._may_train = shared is None or self._is_trained
        signature, defaults = inspect.signature(model.forward), defaults_of(model)
        self._arguments = Arguments(
            program, signature, batch, groups, devices.device_type, defaults
        )
        self._results = CallResults(program)
        how = program.microbatches.bound(lambda graph: bind(graph, groups, devices.device_type))
        if outputs not in ("full", "loss"):
            _tell_of_missing(program, [t.name for t in program.outputs if t not in kept])
        exchange = StageExchange.of(program, group, self.rank, devices.device_type)
        trainable = _held_by(stages.values(), trained)
        self._calls = StageCalls(exchange, works, how, kept, trainable, self._storages, devices)
        if group is not None:
            share_overflows(group, devices.device_type)
        self._stand_for_all(model, program.attributes, shared)

    @property
    def world_mesh(self) -> DeviceMesh:
        """The whole mesh."""
        return self._calls.world

    def __deepcopy__(self, memo: dict[int, Any]) -> Standing:
        """Copy the module, with the same process group."""
        group = self._calls.exchange.group
        memo[id(group)] = group
        return super().__deepcopy__(memo)

    @torch.compiler.disable  # what runs is compiled already, and Dynamo cannot trace it
    def _run_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and return the model's result for the whole batch. If gradients are enabled
        and the model returns a loss, backward has run.

        Raises:
            RuntimeStateError: if neither the program nor one of `variants` was made for the
                arguments, mode or parameters.
        """
        values = self._program_inputs(args, kwargs, self.world_mesh)
        if isinstance(values, Misfit):
            return self._elsewhere(values, args, kwargs)
        parts = self._calls.how.parts(
            {t.name: x for t, x in zip(self.program.inputs, values, strict=True)},
            self._local_buffers(),
        )
        parameters = [self.get_parameter(t.name) for t in self._calls.held]
        # a rank whose stages train nothing takes part, too
        trained = torch.is_grad_enabled() and self._is_trained
        if torch.is_grad_enabled() and self._may_train:
            self._trains(parameters, self._calls.held)
        outputs = (
            self._run_forwards(parts, parameters)
            if trained and self._calls.how.loss is None
            else self._run_step(parts, parameters, keep=trained)
        )
        self._count_draws()
        for name, storage in self._presented.items():
            outputs[name] = storage.wrap(outputs[name])
        if self._calls.how.loss is not None:
            refused = [t.name for t in self._calls.kept if t.requires_grad and not t.is_loss]
            outputs |= {
                name: refuse_backward(name, outputs[name], outputs[self._calls.how.loss])
                for name in refused
            }
        return self._results.build(
            [
                refuse_reads(x) if (x := outputs.get(t.name)) is not None else None
                for t in self.program.outputs
            ]
        )

    def _count_draws(self) -> None:
        """Advance the random state if no stage of this rank draws, so that it stays equal on all
        ranks."""
        if not self._draws and random.STATE in self._buffers:
            with torch.no_grad():
                self.get_buffer(random.STATE).add_(self._calls.how.num)

    def _run_step(
        self, parts: list[dict[str, Tensor]], parameters: Sequence[Tensor], *, keep: bool
    ) -> dict[str, Tensor]:
        """Run forward, with `keep` also backward, and return the outputs by name."""
        buffers, loss = self._local_buffers(), self._calls.how.loss
        with torch.autocast(self.device_mesh.device_type, enabled=False):
            if not keep:
                return self._calls.step(parts, buffers, parameters, scale=1.0, keep=False)[0]
            step = ScaledStep(self._calls, self._scale, parts, buffers, parameters)
            outputs, gradients = step.run()
        if loss is not None:
            # with it, backward also runs on a rank whose parameters are all frozen
            anchor = torch.empty(0, requires_grad=True)
            outputs[loss] = Published.apply(
                self._calls, step, [outputs[loss]], gradients, anchor, *parameters
            )
        return outputs

    def _run_forwards(
        self, parts: list[dict[str, Tensor]], parameters: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Run all forwards, and return the outputs by name. Backward through them runs all
        backwards."""
        anchor = torch.empty(0, device=self.device_mesh.device_type, requires_grad=True)
        found = Answered.apply(self._calls, parts, self._local_buffers(), anchor, *parameters)
        return dict(zip((t.name for t in self._calls.kept), found, strict=True))

    def _local_buffers(self) -> dict[str, Tensor]:
        """Return the local buffers of this rank's stages, by name."""
        named = {
            t.name
            for stage in self.program.stages
            for t in stage.buffers
            if t.name in self._storages
        }
        return {name: self._storages[name].local(self.get_buffer(name)) for name in sorted(named)}

    @property
    def loss_scale(self) -> float:
        """The factor by which the user multiplies losses before backward, by default 1.

        Raises:
            RuntimeStateError: if it is set to a value that is no positive number.
        """
        return self._scale.user_factor

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        """Set the factor; see `LossScale.user_factor`."""
        self._scale.user_factor = value

    def _set_up(self, variant: ProgramVariant) -> None:
        super()._set_up(variant)
        if isinstance(variant, StagedModule):
            variant._scale = self._scale

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients in place so that their norm over all stages is at most `max_norm`;
        every rank calls it. A parameter that several stages hold counts once.

        Returns:
            The norm before scaling.
        """
        elsewhere = self._calls.exchange.counted_elsewhere()
        parameters = [
            (p, self._names[name] not in elsewhere) for name, p in self.named_parameters()
        ]
        with announced(f"clips the gradients of {self._title}", self.world_mesh):
            return clip_over_stages(
                parameters, max_norm, norm_type, self._calls.exchange.group, self.device_mesh
            )


def _on_all_ranks(program: Program) -> dict[str, ProgramTensor]:
    """Return the buffers that every rank holds, by name: the state of random draws, and counts."""
    names = {random.STATE, *program.microbatches.count_buffers}
    return {t.name: t for stage in program.stages for t in stage.buffers if t.name in names}


def _all_names(tensors: Iterable[ProgramTensor]) -> set[str]:
    """Return the names of tensors, with those of tied ones."""
    return {name for t in tensors for name in (t.name, *t.aliases)}


def _tell_of_missing(program: Program, names: Sequence[str]) -> None:
    """Warn, on one rank, that a call returns None for outputs of the model."""
    if not names or rank() != 0:
        return
    num = program.microbatches.num
    why = f"the batch runs in {num} microbatches" if num > 1 else "the last stage makes it"
    log.warning(
        '%s, because %s; outputs="full" returns it, and outputs="loss" says that it is not wanted',
        _describe_missing(program, names),
        why,
    )


def _describe_missing(program: Program, names: Sequence[str]) -> str:
    """Describe by position and path which outputs are None."""
    places = {t.name: number for number, t in enumerate(program.outputs)}
    shown = ", ".join(
        f"output {places[name]} ({name})" if not name.isdecimal() else f"output {name}"
        for name in names[:3]
    )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'comes' if len(names) == 1 else 'come'} as None"


def _held_by(stages: Iterable[StageProgram], trained: Collection[str]) -> tuple[ProgramTensor, ...]:
    """Return the parameters of stages, each once. A parameter has a gradient if it has one in any
    stage of the model."""
    found = {t.name: t for stage in stages for t in stage.parameters}
    return tuple(replace(t, has_gradient=t.name in trained) for t in found.values())
