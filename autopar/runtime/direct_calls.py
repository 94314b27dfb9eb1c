"""Calls of a program with one stage and one microbatch.

A call runs the forward graph. `backward()` of its result runs the backward graph once and returns
each gradient to autograd as a DTensor in the storage layout. Autograd decides when backward runs.

With several stages or microbatches, `autopar.runtime.scheduled_calls` is used instead: the schedule
runs backward of one microbatch before forward of another, so a call with a loss includes backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.program.executor import Executor
from autopar.program.program import ProgramTensor, StageProgram
from autopar.program.splitting import local_part
from autopar.request import Outputs
from autopar.runtime.backward import (
    as_given,
    clip_grad_norm_,
    first_derivatives_only,
    ran_twice,
    which_are_plain,
)
from autopar.runtime.dtensor import hold_value
from autopar.runtime.guarded_outputs import refuse_backward
from autopar.runtime.loss_scaling import Backwards, LossScale, describe_factor
from autopar.runtime.parameters import Storage
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_consistency import check_tangents
from autopar.runtime.tensor_guards import WatchedTensors


class DirectCalls:
    """The calls of one rank; see `autopar.runtime.module.Calls`.

    Args:
        stage: the program of the only stage.
        executor: runs its graphs.
        storages: the storage of parameters and buffers, by name.
        devices: the mesh.
        outputs: the form of outputs that the user selected.
        title: the name of the model in messages.
    """

    def __init__(
        self,
        stage: StageProgram,
        executor: Executor,
        storages: Mapping[str, Storage],
        devices: DeviceMesh,
        outputs: Outputs,
        title: str,
    ) -> None:
        self.buffers = tuple(t.name for t in stage.buffers)
        self._stage, self._executor, self._storages = stage, executor, storages
        self._devices, self._outputs, self._title = devices, outputs, title
        self._presented = [Storage.of(t, devices) for t in stage.outputs]
        self._loss = next(
            (i for i, t in enumerate(stage.outputs) if t.is_loss and t.has_gradient), None
        )
        self._backwards = Backwards()

    @property
    def parameters(self) -> tuple[ProgramTensor, ...]:
        """The parameters, in the order in which `run` takes them."""
        return self._stage.parameters

    def run(
        self,
        inputs: list[Tensor],
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        scale: LossScale,
        *,
        trains: bool,
    ) -> Sequence[Tensor]:
        """Run forward. If a parameter trains or an input requires a gradient, autograd runs
        backward later.

        Args:
            inputs: the local inputs, in the program's order.
            parameters: the DTensors of the parameters, in the order of the property.
            buffers: the DTensors of the buffers, by name.
            scale: unused, since autograd passes the factor of the loss.
            trains: whether a parameter trains.
        """
        with_gradient = [
            x for x, t in zip(inputs, self._stage.inputs, strict=True) if t.has_gradient
        ]
        trains = trains or (torch.is_grad_enabled() and any(x.requires_grad for x in with_gradient))
        watched = WatchedTensors()
        shown: Sequence[Tensor] = (
            _Step.apply(self, watched, inputs, buffers, *with_gradient, *parameters)
            if trains
            else self.run_forward(inputs, parameters, buffers, watched, keep=False)[0]
        )
        if self._loss is not None:
            pairs = zip(self._stage.outputs, shown, strict=True)
            shown = [
                refuse_backward(t.name, x, shown[self._loss])
                if t.requires_grad and not t.is_loss
                else x
                for t, x in pairs
            ]
        watched.follow(zip(self._names_of("output"), shown, strict=True))
        return shown

    def run_forward(
        self,
        inputs: list[Tensor],
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        watched: WatchedTensors,
        *,
        keep: bool,
    ) -> tuple[list[Tensor], list[Any]]:
        """Run forward. Return the outputs in the form for the user, and the values that backward
        needs.

        Args:
            inputs, parameters, buffers: as for `run`.
            watched: watches tensors of the user that backward needs for in-place changes.
            keep: whether backward will run; if False, no values are kept for it.
        """
        stage, stored_buffers = self._stage, [buffers[t.name] for t in self._stage.buffers]
        with torch.no_grad(), torch.autocast(self._devices.device_type, enabled=False):
            with DisableTorchFunctionSubclass():
                locals = [
                    self._storages[t.name].local(p)
                    for p, t in zip(parameters, stage.parameters, strict=True)
                ]
                local_buffers = [
                    self._storages[t.name].local(b)
                    for b, t in zip(stored_buffers, stage.buffers, strict=True)
                ]
            outputs, saved = self._executor.forward(locals, local_buffers, inputs, keep=keep)
        if keep:
            names = self._names_of("parameter", "buffer", "input", "output")
            watched.watch(
                zip(names, (*locals, *local_buffers, *inputs, *outputs), strict=True), saved
            )
            watched.follow(zip(names, (*parameters, *stored_buffers), strict=False))
        with torch.no_grad():
            return [
                self._present(output, storage)
                for output, storage in zip(outputs, self._presented, strict=True)
            ], saved

    def gradients(
        self, saved: list[Any], tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Run backward. A tangent is None if the loss does not depend on the output.

        Returns:
            The gradient of each input that has one, in the form of the input (full or local), then
            one per parameter of the program.
        """
        pairs = [
            (s, x) for s, x in zip(self._presented, tangents, strict=True) if s.tensor.has_gradient
        ]
        absent = frozenset(place for place, (_, tangent) in enumerate(pairs) if tangent is None)
        # the caller may have enabled autocast
        autocast = torch.autocast(self._devices.device_type, enabled=False)
        loss = None if self._loss is None else tangents[self._loss]
        is_turn = self._backwards.begin()
        operation = f"runs backward of {self._title}{describe_factor(loss, is_turn=is_turn)}"
        with announced(operation, self._devices):
            if is_turn and self._loss is None:
                self._check_returned(pairs)
            returning = [self._part_of_tangent(tangent, storage) for storage, tangent in pairs]
            with autocast:
                gradients = iter(self._executor.backward(saved, returning, absent=absent))
        gradient_list = [
            next(gradients) if t.has_gradient else None for t in self._stage.parameters
        ]
        named = zip(self._stage.parameters, gradient_list, strict=True)
        wrapped = [
            None if gradient is None else hold_value(self._storages[t.name].wrap(gradient))
            for t, gradient in named
        ]
        with_gradient = (t for t in self._stage.inputs if t.has_gradient)
        return (
            *(
                self._executor.as_given(gradient, t)
                for t, gradient in zip(with_gradient, gradients, strict=True)
            ),
            *wrapped,
        )

    def clip_gradients(
        self, parameters: Iterable[tuple[str, Tensor]], max_norm: float, norm_type: float
    ) -> Tensor:
        """Scale the gradients of parameters; see `autopar.runtime.backward.clip_grad_norm_`.

        Args:
            parameters: the parameters, with their names.
            max_norm: the largest norm of all gradients together.
            norm_type: the order of the norm.
        """
        return clip_grad_norm_((p for _, p in parameters), max_norm, norm_type)

    def mark_constant(self, ctx: Any, outputs: Sequence[Tensor]) -> None:
        """Mark the outputs that have no gradient as non-differentiable."""
        pairs = zip(outputs, self._stage.outputs, strict=True)
        ctx.mark_non_differentiable(*(x for x, border in pairs if not border.has_gradient))

    def _check_returned(self, returned: Sequence[tuple[Storage, Tensor | None]]) -> None:
        """Check that every rank computed the same loss from the outputs. If the model computes its
        loss, ranks announce its factor instead."""
        is_full = self._outputs == "full"
        check_tangents(
            [(s.tensor.name, x if is_full or x is None else torch.empty(0)) for s, x in returned],
            self._devices,
        )

    def _names_of(self, *kinds: str) -> list[str]:
        """Return the names for error messages of the tensors of these kinds."""
        named = (
            (kind, tensor.name) for kind in kinds for tensor in getattr(self._stage, f"{kind}s")
        )
        return [
            f"{kind} {name!r}" if name else ("the value that the call returned")
            for kind, name in named
        ]

    def _present(self, result: Tensor, storage: Storage) -> Tensor:
        return (
            storage.wrap(result)
            if self._outputs == "dtensor" and not storage.tensor.is_loss
            else result
        )

    def _part_of_tangent(self, tangent: Tensor | None, storage: Storage) -> Tensor:
        """Return the tangent of an output in the form that the backward graph takes: this rank's
        shard, contiguous."""
        if tangent is None:
            return torch.zeros(
                storage.graph_shape, dtype=storage.tensor.dtype, device=self._devices.device_type
            )
        if isinstance(tangent, DTensor):
            tangent = tangent.redistribute(storage.dtensor_mesh, storage.placements).to_local()
        elif self._outputs != "local":
            sizes, place = tuple(self._devices.shape), self._devices.get_coordinate() or ()
            tangent = local_part(tangent, storage.tensor.layout, sizes, storage.tensor.view, place)
        return tangent.contiguous()


class _Step(torch.autograd.Function):
    """The forward graph with the backward graph as its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        calls: DirectCalls,
        watched: WatchedTensors,
        inputs: list[Tensor],
        buffers: Mapping[str, Tensor],
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the forward graph.

        Args:
            calls: the calls of this rank.
            watched: receives the tensors to watch until backward.
            inputs: the program's inputs.
            buffers: the buffers by name.
            trained: the inputs that have a gradient, then all parameters.
        """
        parameters = trained[len(trained) - len(calls.parameters) :]
        outputs, saved = calls.run_forward(inputs, parameters, buffers, watched, keep=True)
        # Not save_for_backward: backward takes the list and frees the values one by one.
        ctx.calls, ctx.saved, ctx.watched = calls, saved, watched
        ctx.are_plain = which_are_plain(trained)
        ctx.set_materialize_grads(False)
        calls.mark_constant(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        """Run the backward graph and return the gradients of `trained`.

        Raises:
            RuntimeStateError: if backward has already run, or a tensor that it reads was changed.
        """
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise ran_twice()
        ctx.watched.check()
        gradients = as_given(ctx.calls.gradients(saved, tangents), ctx.are_plain)
        return (None, None, None, None, *gradients)
