"""Calls of a program with several stages or microbatches.

A call takes the global batch and runs the schedule: forward and backward of all microbatches. It
returns the model's result for the batch on every rank. With ``outputs="full"``, or with one stage
and one microbatch, the result contains every output. Otherwise, it contains the loss, and None for
the other outputs, since their shards cannot be joined across microbatches. `loss.backward()`
returns the gradients, which were computed in the call. The loss is the only differentiable output,
and functions of it must be linear. If the user multiplies the loss, as gradient scalers do, and the
graph computes in float16, the step runs again when the factor changes
(`autopar.runtime.loss_scaling`). Set `loss_scale` to the factor before the call to avoid this.

If the model returns no loss, a call runs forward of all microbatches and returns full outputs. The
user computes a loss from them. Its `backward` runs backward of all microbatches
(`autopar.program.transfers`) on every rank. In this case, `loss_scale` is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError
from autopar.kernels.bind import bind
from autopar.ops import random
from autopar.program.executor import Executor, parts_of
from autopar.program.program import Program, ProgramTensor, StageProgram
from autopar.program.stage_work import StageWork, outputs_kept
from autopar.request import Outputs
from autopar.runtime.backward import (
    as_given,
    clip_over_stages,
    first_derivatives_only,
    ran_twice,
    which_are_plain,
)
from autopar.runtime.guarded_outputs import refuse_backward
from autopar.runtime.loss_scaling import (
    LossScale,
    describe_factor,
    may_be_multiplied,
    share_overflows,
)
from autopar.runtime.parameters import Storage
from autopar.runtime.pipeline_runtime import StageCalls, StageExchange
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_comm import by_all, rank

# --------------------------------------------------------------------------------------------------
# Autograd functions of calls of programs with several stages or microbatches.
#
# If the model returns no loss, a call runs forward of all microbatches, and backward of the user's
# loss runs their backward. If the model returns a loss, a call runs forward and backward, and the
# step may run again for another factor of the loss.


class OuterLoss(torch.autograd.Function):
    """An autograd function whose forward and backward run those of all microbatches."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: StageCalls,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        anchor: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run forward of all microbatches. Return the outputs of the batch that a call returns.

        Args:
            calls: the pipeline of this rank.
            parts: the inputs of each microbatch, by name.
            buffers: the local buffers, by name.
            anchor: a tensor that requires a gradient, so that backward also runs on ranks whose
                parameters are all frozen.
            parameters: the parameters of this rank.
        """
        works = calls.new_works()
        with torch.autocast(anchor.device.type, enabled=False):
            calls.begin(works, parts, 1.0, buffers, parameters, keep=True)
            calls.runner(works).forward()
            outputs = calls.gather_outputs(works)
        ctx.calls, ctx.works, ctx.parameters = calls, works, parameters
        ctx.watched = calls.watched_of(works, parameters, outputs)
        ctx.are_plain = which_are_plain(parameters)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outputs[t.name] for t in calls.kept if not t.has_gradient))
        return tuple(outputs[t.name] for t in calls.kept)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        """Run backward of all microbatches. Return the gradients of this rank's parameters.

        Raises:
            RuntimeStateError: if backward has run before.
        """
        calls, works, parameters = ctx.calls, ctx.works, ctx.parameters
        ctx.works = ctx.parameters = None
        if works is None:
            raise ran_twice()
        with announced("runs backward", calls.world):
            return (
                None,
                None,
                None,
                None,
                *as_given(OuterLoss._gradients(ctx, works, parameters, tangents), ctx.are_plain),
            )

    @staticmethod
    def _gradients(
        ctx: Any,
        works: dict[int, StageWork],
        parameters: Sequence[Tensor],
        tangents: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        calls = ctx.calls
        calls.check_returned(tangents, ctx.watched)
        returned = {t.name: x for t, x in zip(calls.kept, tangents, strict=True) if t.has_gradient}
        absent = [name for name, x in returned.items() if x is None]
        (work,) = works.values()
        with torch.autocast(work.device.type, enabled=False):
            parts = parts_of(
                {name: x for name, x in returned.items() if x is not None},
                calls.program.microbatches,
            )
            unused = calls.find_unused(frozenset(absent))
            work.answer(parts, unused.tangents[calls.rank], unused.gradients[calls.rank])
            calls.runner(works).backward()
            wrapped: Sequence[Tensor | None] = calls.wrap_gradients(
                calls.finish(works, parameters, keep=True), unused.parameters
            )
        return wrapped


# --------------------------------------------------------------------------------------------------
# A step that runs again if its loss was multiplied by another factor than assumed.


class ScaledStep:
    """Forward and backward of one call, which can run again with another factor.

    Args:
        calls: the pipeline of this rank.
        scale: the factor of the loss that calls assume.
        parts: the inputs of each microbatch, by name.
        buffers: the local buffers before the call, by name.
        parameters: the parameters of this rank.
    """

    def __init__(
        self,
        calls: StageCalls,
        scale: LossScale,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        self._calls, self._scale, self._assumed = calls, scale, scale.assumed_factor
        self._operands: tuple[Any, ...] | None = (parts, buffers, parameters)
        self._before: dict[str, Tensor] | None = {}
        if calls.mutates:
            needs_copy = calls.is_fp16 or scale.assumed_factor != 1.0
            self._before = (
                {name: buffers[name].clone() for name in calls.mutated_buffers}
                if needs_copy
                else None
            )
        self._versions = [(name, x, _version(x)) for name, x in self._changeable_tensors()]

    def run(self) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Run the step. Return the batch's outputs by path and the gradients of this rank."""
        assert self._operands is not None, (
            "a step frees its operands when its gradients are returned"
        )
        parts, buffers, parameters = self._operands
        return self._calls.step(parts, buffers, parameters, scale=self._assumed, keep=True)

    def gradients(self, tangent: Tensor, made: list[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients for a tangent of the loss.

        Args:
            tangent: the tangent of the loss, a scalar.
            made: the gradients that `run` returned. The list is emptied.

        Raises:
            RuntimeStateError: if the step must run again, and a tensor that it reads was changed.
        """
        scaled, made[:] = [*made], []
        factor = float(tangent)
        assumed = float(torch.tensor(self._assumed, dtype=tangent.dtype))
        if may_be_multiplied(assumed, factor, is_fp16=self._calls.is_fp16):
            if assumed != factor:
                for gradient in scaled:
                    if gradient is not None:
                        gradient.mul_(factor / assumed)
            self._scale.confirm()
        else:
            scaled.clear()  # free the memory for the second run
            scaled = self._run_again(factor)
            self._scale.learn(factor)
        self._operands, self._before, self._versions = None, None, []
        return scaled

    def _run_again(self, tangent: float) -> list[Tensor | None]:
        """Return the gradients of a second run, which does not change buffers."""
        assert self._operands is not None, "gradients are returned once"
        parts, buffers, parameters = self._operands
        if self._before is None:
            message = (
                f"the loss was multiplied by {tangent:g}, backward ran inside the call with"
                f" {self._assumed:g}, and buffers changed meanwhile"
            )
            raise RuntimeStateError(
                message, remedy="set pm.loss_scale = scaler.get_scale() before the first call"
            )
        remedy = (
            "run backward before anything changes the tensor, or set pm.loss_scale to the factor"
            " of the loss before the call"
        )
        # either all ranks run again, or none
        by_all(lambda: self._check_unchanged(tangent, remedy), "backward", remedy)
        device = self._calls.device_type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return self._calls.step(
                parts,
                {**buffers, **self._before},
                parameters,
                scale=tangent,
                keep=True,
                returns=False,
            )[1]

    def _check_unchanged(self, tangent: float, remedy: str) -> None:
        changed = next(
            (
                (name, before)
                for name, x, before in self._versions
                if before is None or _version(x) != before
            ),
            None,
        )
        if changed is not None:
            name, before = changed
            unknown = "was created under torch.inference_mode, which does not record changes"
            why = unknown if before is None else "was changed after the call"
            raise RuntimeStateError(
                f"the loss was multiplied by {tangent:g}, backward ran inside the call with"
                f" {self._assumed:g}, and the step cannot run again: {name} {why}",
                remedy=remedy,
            )

    def _changeable_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that a second run reads and the user may change, with their names for
        error messages."""
        assert self._operands is not None, "the step has not run"
        parts, buffers, parameters = self._operands
        named = [
            (f"parameter {t.name!r}", x)
            for t, x in zip(self._calls.parameters, parameters, strict=True)
        ]
        named += [(name, x.to_local()) for name, x in named if isinstance(x, DTensor)]
        named += [
            (f"buffer {name!r}", x)
            for name, x in buffers.items()
            if name not in self._calls.mutated_buffers
        ]
        return named + [(f"input {name!r}", x) for part in parts for name, x in part.items()]


def _version(x: Tensor) -> int | None:
    """Return the version counter of a tensor; None for a tensor of inference mode, which has no
    counter."""
    return None if x.is_inference() else x._version


# --------------------------------------------------------------------------------------------------
# The loss of a step whose backward has already run. Its `backward` returns the gradients.


class PublishedLoss(torch.autograd.Function):
    """An autograd function that returns the loss. Its backward returns the gradients of the step,
    or runs the step again for another factor of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: StageCalls,
        step: ScaledStep,
        loss: list[Tensor],
        gradients: list[Tensor | None],
        anchor: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """Return the loss. It is passed in a list, so that autograd does not treat it as an input:
        autograd returns inputs as views, which cannot be changed in place.

        Args:
            calls: the pipeline of this rank.
            step: the step that computed the loss.
            loss: a list that contains only the loss.
            gradients: the gradients of the step.
            anchor: a tensor that requires a gradient, so that backward also runs on ranks whose
                parameters are all frozen.
            parameters: the parameters of this rank.
        """
        ctx.calls, ctx.gradients, ctx.step, ctx.are_plain = (
            calls,
            gradients,
            step,
            which_are_plain(parameters),
        )
        return loss[0]

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        """Return the gradients for a tangent of the loss.

        Raises:
            RuntimeStateError: if backward has run before, or the step cannot run again.
        """
        computed, step, ctx.gradients, ctx.step = ctx.gradients, ctx.step, None, None
        if computed is None:
            raise ran_twice()
        is_turn = ctx.calls.backwards.begin()
        operation = f"runs backward{describe_factor(tangent, is_turn=is_turn)}"
        with announced(operation, ctx.calls.world):
            gradients = ctx.calls.wrap_gradients(step.gradients(tangent, computed))
        return (None, None, None, None, None, *as_given(gradients, ctx.are_plain))


# --------------------------------------------------------------------------------------------------


log = logging.getLogger("autopar")


class ScheduledCalls:
    """The calls of one rank; see `autopar.runtime.module.Calls`.

    Args:
        exchange: the exchange between the ranks of the pipeline, with the program of all stages.
        executors: the executor of each stage of this rank, by the index of the stage.
        storages: the storage of parameters and buffers, by name.
        devices: the mesh of a stage.
        world: the whole mesh.
        outputs: the form of outputs that the user selected.
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
        returned = [t for t in program.outputs if t.name in names]
        self._presented = {
            t.name: Storage.of(t, devices)
            for t in of_stages
            if outputs == "dtensor" and not t.is_loss
        }
        if outputs not in ("full", "loss"):
            _warn_of_missing(program, [t.name for t in program.outputs if t not in returned])
        trained = {t.name for s in program.stages for t in s.parameters if t.has_gradient}
        self._is_trained = bool(trained)
        works = {
            number: StageWork(program.stages[number], executor, executor.device)
            for number, executor in executors.items()
        }
        groups = next(iter(executors.values())).groups
        how = program.microbatches.bound(lambda graph: bind(graph, groups, world.device_type))
        self.parameters = _parameters_of(stages, trained)
        self._calls = StageCalls(exchange, works, how, returned, self.parameters, storages, world)
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
        """Run a step. If gradients are enabled and the model returns a loss, this includes
        backward.

        Args:
            inputs: the local inputs of the batch, in the program's order.
            parameters: the DTensors of the parameters, in the order of the property.
            buffers: the DTensors of the buffers, by name.
            scale: the factor of the loss.
            trains: unused, since a rank whose stages have no trained parameters also takes part in
                backward.
        """
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
        `autopar.runtime.backward.clip_over_stages`.

        Args:
            parameters: pairs of the name and value of each parameter of this rank's stages. A
                parameter that several stages hold counts once.
            max_norm: the largest norm over all gradients.
            norm_type: the order of the norm.
        """
        elsewhere = self._calls.exchange.counted_elsewhere()
        counted = [(p, name not in elsewhere) for name, p in parameters]
        group = self._calls.exchange.group
        return clip_over_stages(counted, max_norm, norm_type, group, self._devices)

    def _count_draws(self, buffers: Mapping[str, Tensor]) -> None:
        """Advance the random state if no stage of this rank draws random numbers, so that the state
        stays equal on all ranks."""
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
        """Run forward and, with `keep`, also backward. Return the outputs, by name."""
        loss = self._calls.how.loss
        with torch.autocast(self._devices.device_type, enabled=False):
            if not keep:
                return self._calls.step(parts, buffers, parameters, scale=1.0, keep=False)[0]
            step = ScaledStep(self._calls, scale, parts, buffers, parameters)
            outputs, gradients = step.run()
        if loss is not None:
            # the anchor makes backward run also on a rank whose parameters are all frozen
            anchor = torch.empty(0, requires_grad=True)
            outputs[loss] = PublishedLoss.apply(
                self._calls, step, [outputs[loss]], gradients, anchor, *parameters
            )
        return outputs

    def _run_forwards(
        self,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        """Run forward of all microbatches. Return the outputs, by name. Their backward runs
        backward of all microbatches."""
        anchor = torch.empty(0, device=self._devices.device_type, requires_grad=True)
        values = OuterLoss.apply(self._calls, parts, buffers, anchor, *parameters)
        return dict(zip((t.name for t in self._calls.kept), values, strict=True))


def _warn_of_missing(program: Program, names: Sequence[str]) -> None:
    """Log a warning on the first rank that a call returns None for outputs of the model."""
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
    """Describe which outputs are None, by position and path."""
    places = {t.name: number for number, t in enumerate(program.outputs)}
    shown = ", ".join(
        f"output {places[name]} ({name})" if not name.isdecimal() else f"output {name}"
        for name in names[:3]
    )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'} None"


def _parameters_of(
    stages: Iterable[StageProgram], trained: Collection[str]
) -> tuple[ProgramTensor, ...]:
    """Return the parameters of stages without duplicates. A parameter has a gradient if it has one
    in any stage of the model."""
    parameters = {t.name: t for stage in stages for t in stage.parameters}
    return tuple(replace(t, has_gradient=t.name in trained) for t in parameters.values())
