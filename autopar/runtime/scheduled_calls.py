"""Calls of a program with several stages or microbatches.

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

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.kernels.bind import bind
from autopar.ops import random
from autopar.program.executor import Executor
from autopar.program.program import Program, ProgramTensor, StageProgram
from autopar.program.stage_work import StageWork, outputs_kept
from autopar.request import Outputs
from autopar.runtime.backward import clip_over_stages
from autopar.runtime.guarded_outputs import refuse_backward
from autopar.runtime.loss_scaling import LossScale, share_overflows
from autopar.runtime.outer_loss import Answered, Published, ScaledStep
from autopar.runtime.parameters import Storage
from autopar.runtime.pipeline_runtime import StageCalls, StageExchange
from autopar.runtime.rank_comm import rank

log = logging.getLogger("autopar")


class ScheduledCalls:
    """The calls of one rank; see `autopar.runtime.module.Calls`.

    Args:
        exchange: the exchange between the ranks of the pipeline, with the program of all stages.
        executors: stage of this rank → runs its graphs.
        storages: the storage of parameters and buffers, by name.
        devices: the mesh of a stage. world: the whole mesh.
        outputs: the form of outputs that the user asked for.
    """

    def __init__(
        self,
        exchange: StageExchange,
        executors: Mapping[int, Executor],
        storages: Mapping[str, Storage],
        devices: DeviceMesh,
        world: DeviceMesh,
        outputs: Outputs,
    ) -> None:
        program = exchange.program
        self._program, self._storages, self._devices = program, storages, devices
        stages = [program.stages[number] for number in executors]
        self.buffers = tuple(
            sorted({t.name for s in program.stages for t in s.buffers} & {*storages})
        )
        self._draws = any(t.name == random.STATE for s in stages for t in s.buffers)
        num = program.microbatches.num
        of_stages = [t for stage in program.stages for t in outputs_kept(stage, outputs, num)]
        names = {t.name for t in of_stages}
        kept = [t for t in program.outputs if t.name in names]
        self._presented = {
            t.name: Storage.of(t, devices)
            for t in of_stages
            if outputs == "dtensor" and not t.is_loss
        }
        if outputs not in ("full", "loss"):
            _tell_of_missing(program, [t.name for t in program.outputs if t not in kept])
        trained = {t.name for s in program.stages for t in s.parameters if t.has_gradient}
        self._is_trained = bool(trained)
        works = {
            number: StageWork(program.stages[number], executor, executor.device)
            for number, executor in executors.items()
        }
        groups = next(iter(executors.values())).groups
        how = program.microbatches.bound(lambda graph: bind(graph, groups, world.device_type))
        self.held = _held_by(stages, trained)
        self._calls = StageCalls(exchange, works, how, kept, self.held, storages, world)
        if exchange.group is not None:
            share_overflows(exchange.group, world.device_type)

    def run(
        self,
        inputs: list[Tensor],
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        scale: LossScale,
        *,
        trains: bool,
    ) -> list[Tensor | None]:
        """Run a step. A rank whose stages train nothing takes part in backward, too, so that
        `trains` is not used. If gradients are enabled and the model returns a loss, backward has
        run."""
        local = {name: self._storages[name].local(b) for name, b in buffers.items()}
        named = {t.name: x for t, x in zip(self._program.inputs, inputs, strict=True)}
        parts, loss = self._calls.how.parts(named, local), self._calls.how.loss
        keeps = torch.is_grad_enabled() and self._is_trained
        outputs = (
            self._run_forwards(parts, local, parameters)
            if keeps and loss is None
            else self._run_step(parts, local, parameters, scale, keep=keeps)
        )
        self._count_draws(buffers)
        for name, storage in self._presented.items():
            outputs[name] = storage.wrap(outputs[name])
        if loss is not None:
            refused = [t.name for t in self._calls.kept if t.requires_grad and not t.is_loss]
            outputs |= {
                name: refuse_backward(name, outputs[name], outputs[loss]) for name in refused
            }
        return [outputs.get(t.name) for t in self._program.outputs]

    def clip_gradients(
        self, parameters: Iterable[tuple[str, Tensor]], max_norm: float, norm_type: float
    ) -> Tensor:
        """Scale the gradients of parameters, with the norm over all stages; see
        `autopar.runtime.backward.clip_over_stages`. A parameter that several stages hold counts
        once."""
        elsewhere = self._calls.exchange.counted_elsewhere()
        counted = [(p, name not in elsewhere) for name, p in parameters]
        group = self._calls.exchange.group
        return clip_over_stages(counted, max_norm, norm_type, group, self._devices)

    def _count_draws(self, buffers: Mapping[str, Tensor]) -> None:
        """Advance the random state if no stage of this rank draws, so that it stays equal on all
        ranks."""
        if not self._draws and random.STATE in buffers:
            with torch.no_grad():
                buffers[random.STATE].add_(self._calls.how.num)

    def _run_step(
        self,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        scale: LossScale,
        *,
        keep: bool,
    ) -> dict[str, Tensor]:
        """Run forward, with `keep` also backward, and return the outputs by name."""
        loss = self._calls.how.loss
        with torch.autocast(self._devices.device_type, enabled=False):
            if not keep:
                return self._calls.step(parts, buffers, parameters, scale=1.0, keep=False)[0]
            step = ScaledStep(self._calls, scale, parts, buffers, parameters)
            outputs, gradients = step.run()
        if loss is not None:
            # with it, backward also runs on a rank whose parameters are all frozen
            anchor = torch.empty(0, requires_grad=True)
            outputs[loss] = Published.apply(
                self._calls, step, [outputs[loss]], gradients, anchor, *parameters
            )
        return outputs

    def _run_forwards(
        self,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        """Run all forwards, and return the outputs by name. Backward through them runs all
        backwards."""
        anchor = torch.empty(0, device=self._devices.device_type, requires_grad=True)
        found = Answered.apply(self._calls, parts, buffers, anchor, *parameters)
        return dict(zip((t.name for t in self._calls.kept), found, strict=True))


def _tell_of_missing(program: Program, names: Sequence[str]) -> None:
    """Warn, on one rank, that a call returns None for outputs of the model."""
    if not names or rank() != 0:
        return
    num = program.microbatches.num
    why = f"the batch runs in {num} microbatches" if num > 1 else "only the last stage computes it"
    log.warning(
        '%s, because %s; outputs="full" returns it, outputs="loss" silences this warning',
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
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'} None"


def _held_by(stages: Iterable[StageProgram], trained: Collection[str]) -> tuple[ProgramTensor, ...]:
    """Return the parameters of stages, each once. A parameter has a gradient if it has one in any
    stage of the model."""
    found = {t.name: t for stage in stages for t in stage.parameters}
    return tuple(replace(t, has_gradient=t.name in trained) for t in found.values())
