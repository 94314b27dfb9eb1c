"""`ParallelModule`: an emitted program as an ordinary `nn.Module`.

Parameters are DTensors under their original names. A call runs the program and returns the same
structure as the model. If the program has a loss, backward is supported through the loss only;
otherwise it is supported through all outputs that have a gradient. The graphs run without autograd.
With one stage and one microbatch, a call runs forward, and `backward()` runs backward
(`autopar.runtime.direct_calls`). With several stages or microbatches, a call runs forward and
backward (`autopar.runtime.scheduled_calls`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, DistributedSampler

from autopar.core.layout import Layout
from autopar.errors import RuntimeStateError
from autopar.ops import random
from autopar.program.executor import Executor
from autopar.program.program import Program, ProgramTensor
from autopar.request import Backend, Batch, Outputs
from autopar.runtime.call_arguments import Arguments, CallResults, defaults_of
from autopar.runtime.device_mesh import agree, check_shape, groups_of, stage_devices
from autopar.runtime.direct_calls import DirectCalls
from autopar.runtime.guarded_module import Compiled
from autopar.runtime.guarded_outputs import refuse_reads
from autopar.runtime.guards import Misfit, ProgramVariant
from autopar.runtime.loss_scaling import LossScale
from autopar.runtime.module_shell import ModuleShell
from autopar.runtime.part_classes import as_container
from autopar.runtime.pipeline_runtime import StageExchange
from autopar.runtime.rank_agreement import announced
from autopar.runtime.scheduled_calls import ScheduledCalls


class Calls(Protocol):
    """How calls run the program on this rank.

    Attributes:
        buffers: the names of the buffers that `run` reads and writes.
    """

    buffers: tuple[str, ...]

    @property
    def parameters(self) -> tuple[ProgramTensor, ...]:
        """The parameters of this rank, in the order in which `run` takes them."""

    def run(
        self,
        inputs: list[Tensor],
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        scale: LossScale,
        *,
        trains: bool,
    ) -> Sequence[Tensor | None]:
        """Run a call.

        Args:
            inputs: the program's inputs.
            parameters: the parameters, in the order of the property.
            buffers: the buffers, by name.
            scale: the factor by which the user multiplies the loss.
            trains: whether gradients are enabled and a parameter of this rank gets a gradient.

        Returns:
            The outputs of the program in the form that the user selected; None for outputs that the
            program does not return.
        """

    def clip_gradients(
        self, parameters: Iterable[tuple[str, Tensor]], max_norm: float, norm_type: float
    ) -> Tensor:
        """Scale all gradients in place, and return their norm before scaling.

        Args:
            parameters: the parameters of this rank with their names in the program.
            max_norm, norm_type: see `ParallelModule.clip_grad_norm_`.
        """


class ParallelModule(Compiled):
    """A compiled module. It holds the parameters of the stages that this rank runs.

    Args:
        program: the program of all ranks.
        devices: the whole mesh.
        model: the source of parameter and buffer values, names and the train/eval flag. It may be
            on the meta device, and is not kept.
        batch: ``"global"`` if every rank passes the same global batch, of which it uses its shard;
            ``"local"`` if each rank passes its shard only.
        outputs: ``"full"`` gathers outputs, ``"local"`` returns this rank's shard, ``"dtensor"``
            returns a DTensor, which refuses partial reads (`autopar.runtime.guarded_outputs`). The
            loss is always a full tensor. With several stages or microbatches, a call returns None
            for outputs other than the loss unless this is ``"full"``.
        backend: the backend that runs the graphs.
        both_modes: whether the program is valid in both train and eval mode; otherwise a call in
            the other mode raises an error.
        shared: a module of the same model whose parameters and buffers this module shares.

    Attributes:
        rank: this rank's index on the pipeline axis, if there is one.

    Raises:
        MeshError: if the program was compiled for another mesh, or a parameter is on a device of
            another type.
        RuntimeStateError: if ranks hold different plans, or with ``batch="local"`` if the program
            has several stages or microbatches.
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
        if batch != "global" and not program.is_single:
            message = (
                f"batch={batch!r}: a plan with microbatches takes the global batch on every rank"
                " and divides it"
            )
            raise RuntimeStateError(message, remedy='pass batch="global"')
        agree(program.plan_hash, "plan", devices)
        stage_mesh, group, index = stage_devices(devices, program.axis)
        num_ranks = 1 if group is None else group.size()
        here = range(index, len(program.stages), num_ranks)
        tensors = _tensors_of(program, here)
        elsewhere = _all_names(_tensors_of(program, range(len(program.stages))).values())
        super().__init__(
            tuple(tensors.values()),
            stage_mesh,
            model,
            elsewhere=elsewhere - _all_names(tensors.values()),
            world=devices,
            both_modes=both_modes,
            shared=shared,
        )
        self.program, self._stage_group, self._loss_scaling = program, group, LossScale()
        self._stage_rank = index
        groups = groups_of(stage_mesh)
        executors = {
            number: Executor(
                program.stages[number],
                groups,
                backend=backend,
                batch=batch,
                outputs=outputs,
                device=devices.device_type,
            )
            for number in here
        }
        signature, defaults = inspect.signature(model.forward), defaults_of(model)
        self._arguments = Arguments(
            program, signature, batch, groups, devices.device_type, defaults
        )
        self._results = CallResults(program)
        # the program for another mode may have no gradients, even if the model is trained
        self._may_train = shared is None or any(
            t.has_gradient for s in program.stages for t in (*s.parameters, *s.inputs)
        )
        self._program_calls: Calls = (
            DirectCalls(
                program.stages[0], executors[0], self._storages, devices, outputs, self._title
            )
            if program.is_single
            else ScheduledCalls(
                StageExchange.of(program, group, index, devices.device_type),
                executors,
                self._storages,
                stage_mesh,
                devices,
                outputs,
            )
        )
        as_container(self, type(model))
        self._mirror_attributes(model, program.trace.attributes, shared)

    @property
    def world_mesh(self) -> DeviceMesh:
        """The whole mesh."""
        return self._world

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleShell:
        """Copy the module, with the same process group."""
        memo[id(self._stage_group)] = self._stage_group
        return super().__deepcopy__(memo)

    @torch.compiler.disable  # the program is already compiled, and Dynamo cannot trace it
    def _run_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and return the result of the model's forward.

        Raises:
            RuntimeStateError: if neither the program nor one of `variants` was compiled for the
                arguments, mode and parameters.
        """
        inputs = self._program_inputs(args, kwargs, self._world)
        if isinstance(inputs, Misfit):
            return self._elsewhere(inputs, args, kwargs)
        tensors = self._program_calls.parameters
        parameters = [self.get_parameter(t.name) for t in tensors]
        buffers = {name: self.get_buffer(name) for name in self._program_calls.buffers}
        may_train = torch.is_grad_enabled() and self._may_train
        trains = may_train and self._trains(parameters, tensors)
        outputs = self._program_calls.run(
            inputs, parameters, buffers, self._loss_scaling, trains=trains
        )
        return self._results.build([None if x is None else refuse_reads(x) for x in outputs])

    def unfrozen_names(self) -> list[str]:
        """Return the names of the parameters that were frozen at compilation and train now; none
        with stages or microbatches, where there is only one program."""
        if not torch.is_grad_enabled() or not self._may_train or self.is_for_inference:
            return []
        if not self.program.is_single:  # with stages or microbatches there is only one program
            return []
        frozen = (t.name for t in self._program_calls.parameters if not t.requires_grad)
        return [name for name in frozen if self.get_parameter(name).requires_grad]

    def _set_up(self, variant: ProgramVariant) -> None:
        super()._set_up(variant)
        if isinstance(variant, ParallelModule):
            variant._loss_scaling = self._loss_scaling

    def _describe_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        scale = "" if self.loss_scale == 1.0 else f", with loss_scale={self.loss_scale!r}"
        return f"{super()._describe_call(args, kwargs)}{scale}{self._describe_training()}"

    def _describe_training(self) -> str:
        """Describe what else has to be equal on ranks that hold the same parameters, in training:
        the steps since the last call, frozen parameters, and whether gradients are accumulated.
        """
        steps = self._steps.before_call
        if self._stage_group is not None or steps is None:
            return ""
        parts = [f"after {steps}"] if steps else []
        if torch.is_grad_enabled():
            parameters = [*self.parameters()]
            num_frozen = sum(not p.requires_grad for p in parameters)
            parts += [f"with {num_frozen} frozen parameters"] if num_frozen else []
            parts += ["adding to gradients"] if any(p.grad is not None for p in parameters) else []
        return f", {', '.join(parts)}" if parts else ""

    @property
    def loss_scale(self) -> float:
        """The factor by which the user multiplies losses before backward, by default 1. It has an
        effect only if a call runs backward, which is the case with several stages or microbatches.

        Raises:
            RuntimeStateError: if it is set to a value that is not a positive number.
        """
        return self._loss_scaling.user_factor

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        """Set the factor; see `LossScale.user_factor`."""
        self._loss_scaling.user_factor = value

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients in place so that their norm over the whole model is at most
        `max_norm`. Every rank must call this. A parameter that several stages hold counts once.

        Args:
            max_norm: the largest norm.
            norm_type: the order of the norm; `math.inf` selects the largest element.

        Returns:
            The norm before scaling, a scalar that is equal on all ranks.
        """
        named = [(self._names[name], p) for name, p in self.named_parameters()]
        what = f"clips the gradients of {self._title}{_describe_clip(max_norm, norm_type)}"
        with announced(what, self._world):
            return self._program_calls.clip_gradients(named, max_norm, norm_type)

    @property
    def input_layouts(self) -> Mapping[str, Layout]:
        """The layout of each input on the mesh, by the path of the input."""
        return {tensor.name: tensor.layout for tensor in self.program.inputs}

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """Return a sampler of this rank's samples for ``batch="local"``. Ranks that need the same
        shard of the batch get the same samples.

        Args:
            dataset: the dataset to sample from.
            shuffle, seed, drop_last: arguments of `torch.utils.data.DistributedSampler`.

        Raises:
            RuntimeStateError: if the first dims of the inputs are sharded differently or unevenly.
        """
        splitters = {tensor.layout.splitters(0) for tensor in self.program.inputs if tensor.shape}
        if len(splitters) != 1:
            raise self._no_sampler("the first dims of the inputs are sharded differently")
        num_parts, part, coordinate = 1, 0, self.device_mesh.get_coordinate() or ()
        for axis in splitters.pop():
            size = self.device_mesh.size(axis)
            num_parts, part = num_parts * size, part * size + coordinate[axis]
        if any(tensor.shape[0] % num_parts for tensor in self.program.inputs if tensor.shape):
            raise self._no_sampler(f"the batch is sharded unevenly over {num_parts} ranks")
        return DistributedSampler(
            dataset,
            num_replicas=num_parts,
            rank=part,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def _no_sampler(self, why: str) -> RuntimeStateError:
        remedy = 'use batch="global", or slice by pm.input_layouts'
        return RuntimeStateError(f"{why}: {dict(self.input_layouts)}", remedy=remedy)


def _describe_clip(max_norm: Any, norm_type: Any) -> str:
    """Describe the arguments of clipping, which must be equal on all ranks. A number on a GPU is
    left out, since reading it waits for the GPU."""
    limit, order = (
        float(x) if not isinstance(x, Tensor) or x.device.type == "cpu" else None
        for x in (max_norm, norm_type)
    )
    shown = "" if limit is None else f" to a norm of {limit!r}"
    return shown if order in (2.0, None) else f"{shown} of order {order!r}"


def _tensors_of(program: Program, stages: Iterable[int]) -> dict[str, ProgramTensor]:
    """Return the parameters and buffers that a rank holds, by name. These are the tensors of its
    stages and the buffers that every rank holds: the random state and the buffers that counts read.

    Args:
        program: the program of all ranks.
        stages: the indices of the stages of the rank.
    """
    parameters = {
        t.name: t
        for number in stages
        for t in (*program.stages[number].parameters, *program.stages[number].buffers)
    }
    names = {random.STATE, *program.microbatches.count_buffers}
    return parameters | {t.name: t for s in program.stages for t in s.buffers if t.name in names}


def _all_names(tensors: Iterable[ProgramTensor]) -> set[str]:
    """Return the names of tensors, including those of tied tensors."""
    return {name for t in tensors for name in (t.name, *t.aliases)}
