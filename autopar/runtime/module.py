"""`ParallelModule`: an emitted program as an ordinary `nn.Module`.

Parameters are DTensors under their original names. A call runs the forward graph and returns what
the model returns; backward goes through its loss alone, or, where it has none, through all outputs
that have a gradient. `backward()` runs the backward graph once and puts each gradient, a DTensor in
the storage layout, where autograd puts gradients. No autograd runs inside the graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, DistributedSampler

from autopar.core.layout import Layout
from autopar.errors import RuntimeStateError
from autopar.program.executor import Executor
from autopar.program.program import Program
from autopar.program.splitting import local_part
from autopar.request import Backend, Batch, Outputs
from autopar.runtime.backward import (
    as_given,
    clip_grad_norm_,
    first_derivatives_only,
    ran_twice,
    which_are_plain,
)
from autopar.runtime.call_arguments import Arguments, CallResults, defaults_of
from autopar.runtime.device_mesh import agree, check_shape, groups_of
from autopar.runtime.dtensor import hold_value
from autopar.runtime.guarded_module import Compiled
from autopar.runtime.guarded_outputs import refuse_backward, refuse_reads
from autopar.runtime.guards import Misfit
from autopar.runtime.parameters import Storage
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_consistency import check_tangents
from autopar.runtime.tensor_guards import Watched


class ParallelModule(Compiled):
    """A compiled module without pipeline stages.

    Args:
        program: a program with one stage and one microbatch.
        devices: the mesh.
        model: the source of parameter and buffer values, names and the train/eval flag. It may be
            on the meta device, and is not kept.
        batch: ``"global"`` if every rank passes the same batch and uses its part, ``"local"`` if
            each rank passes its part.
        outputs: ``"full"`` gathers outputs, ``"local"`` returns this rank's part, ``"dtensor"``
            returns a DTensor, which refuses to be read in part (`autopar.runtime.guarded_outputs`).
            The loss is always whole.
        backend: the backend that runs the graphs.
        both_modes: whether the graph serves both train and eval mode; otherwise a call in the other
            mode is an error.
        shared: a module of the same model whose parameters and buffers this module shares.

    Raises:
        MeshError: if the program was made for another mesh, or a parameter is on a device of
            another type.
        RuntimeStateError: if ranks hold different plans.
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
        agree(program.plan_hash, "plan", devices)
        groups = groups_of(devices)
        (stage,) = program.stages
        super().__init__(
            (*stage.parameters, *stage.buffers),
            devices,
            model,
            both_modes=both_modes,
            shared=shared,
        )
        self.program, self._stage, self._outputs = program, stage, outputs
        self._presented = [Storage.of(t, devices) for t in stage.outputs]
        self._executor = Executor(
            stage,
            groups,
            backend=backend,
            batch=batch,
            outputs=outputs,
            device=devices.device_type,
        )
        signature, defaults = inspect.signature(model.forward), defaults_of(model)
        self._arguments = Arguments(
            program, signature, batch, groups, devices.device_type, defaults
        )
        self._results = CallResults(program)
        # in another mode what a trained model returns may have no gradient
        self._may_train = shared is None or any(
            t.has_gradient for t in (*stage.parameters, *stage.inputs)
        )
        self._num_backwards = 0
        self._loss = next(
            (i for i, t in enumerate(stage.outputs) if t.is_loss and t.has_gradient), None
        )
        self._stand_for_all(model, program.attributes, shared)

    @torch.compiler.disable  # what runs is compiled already, and Dynamo cannot trace it
    def _run_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and return the result of the model's forward.

        Raises:
            RuntimeStateError: if neither the program nor one of `variants` was made for the
                arguments, mode or parameters.
        """
        inputs = self._program_inputs(args, kwargs, self.device_mesh)
        if isinstance(inputs, Misfit):
            return self._elsewhere(inputs, args, kwargs)
        parameters = [self.get_parameter(t.name) for t in self._stage.parameters]
        asking = [x for x, t in zip(inputs, self._stage.inputs, strict=True) if t.has_gradient]
        may_train = torch.is_grad_enabled() and self._may_train
        trained = may_train and (
            self._trains(parameters, self._stage.parameters) or any(x.requires_grad for x in asking)
        )
        watched = Watched()
        shown: Sequence[Tensor] = (
            _Step.apply(self, watched, inputs, *asking, *parameters)
            if trained
            else self._run(inputs, parameters, watched, keep=False)[0]
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
        return self._results.build([refuse_reads(x) for x in shown])

    def _find_unfrozen(self) -> str:
        if not torch.is_grad_enabled() or not self._may_train or self.is_for_inference:
            return ""
        frozen = (t.name for t in self._stage.parameters if not t.requires_grad)
        return next((name for name in frozen if self.get_parameter(name).requires_grad), "")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients in place so that their norm over the whole model is at most
        `max_norm`; every rank calls it.

        Returns:
            The norm before scaling.
        """
        with announced(f"clips the gradients of {self._title}", self._world):
            return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @property
    def input_layouts(self) -> Mapping[str, Layout]:
        """The layout of each whole input over the mesh, by the path of the input."""
        return {tensor.name: tensor.layout for tensor in self._stage.inputs}

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """Make a sampler of this rank's samples for ``batch="local"``. Ranks that need the same
        part of the batch get the same samples.

        Args:
            dataset: the dataset to sample from.
            shuffle, seed, drop_last: arguments of `torch.utils.data.DistributedSampler`.

        Raises:
            RuntimeStateError: if inputs split their first dim in different ways, or unevenly.
        """
        splitters = {tensor.layout.splitters(0) for tensor in self._stage.inputs if tensor.shape}
        if len(splitters) != 1:
            raise self._no_sampler("inputs split their first dim differently")
        num_parts, part, coordinate = 1, 0, self.device_mesh.get_coordinate() or ()
        for axis in splitters.pop():
            size = self.device_mesh.size(axis)
            num_parts, part = num_parts * size, part * size + coordinate[axis]
        if any(tensor.shape[0] % num_parts for tensor in self._stage.inputs if tensor.shape):
            raise self._no_sampler(f"the batch is split unevenly over {num_parts} ranks")
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

    def _run(
        self, inputs: list[Tensor], parameters: Sequence[Tensor], watched: Watched, *, keep: bool
    ) -> tuple[list[Tensor], list[Any]]:
        """Run forward, and return the outputs in the form for the user and the values that backward
        needs. Tensors of the user among these values are watched for changes."""
        program, buffers = self._stage, [self.get_buffer(t.name) for t in self._stage.buffers]
        with torch.no_grad(), torch.autocast(self.device_mesh.device_type, enabled=False):
            with DisableTorchFunctionSubclass():
                locals = [
                    self._storages[t.name].local(p)
                    for p, t in zip(parameters, program.parameters, strict=True)
                ]
                local_buffers = [
                    self._storages[t.name].local(b)
                    for b, t in zip(buffers, program.buffers, strict=True)
                ]
            outputs, saved = self._executor.forward(locals, local_buffers, inputs, keep=keep)
        if keep:
            names = self._names_of("parameter", "buffer", "input", "output")
            watched.watch(
                zip(names, (*locals, *local_buffers, *inputs, *outputs), strict=True), saved
            )
            watched.follow(zip(names, (*parameters, *buffers), strict=False))
        with torch.no_grad():
            return [
                self._present(output, storage)
                for output, storage in zip(outputs, self._presented, strict=True)
            ], saved

    def _gradients(
        self, saved: list[Any], tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Run backward. A tangent is None if the output has no part in the loss.

        Returns:
            The gradient of each input that has one, whole or in part like the input, then one per
            parameter of the program.
        """
        pairs = [
            (s, x) for s, x in zip(self._presented, tangents, strict=True) if s.tensor.has_gradient
        ]
        absent = frozenset(place for place, (_, tangent) in enumerate(pairs) if tangent is None)
        # the caller may have enabled autocast
        autocast = torch.autocast(self.device_mesh.device_type, enabled=False)
        with announced(f"runs backward of {self._title}", self._world):
            self._check_returned(pairs)
            returning = [self._part_of_tangent(tangent, storage) for storage, tangent in pairs]
            with autocast:
                gradients = iter(self._executor.backward(saved, returning, absent=absent))
        found = [next(gradients) if t.has_gradient else None for t in self._stage.parameters]
        named = zip(self._stage.parameters, found, strict=True)
        wrapped = [
            None if gradient is None else hold_value(self._storages[t.name].wrap(gradient))
            for t, gradient in named
        ]
        asking = (t for t in self._stage.inputs if t.has_gradient)
        return (
            *(
                self._executor.as_given(gradient, t)
                for t, gradient in zip(asking, gradients, strict=True)
            ),
            *wrapped,
        )

    def _check_returned(self, returned: Sequence[tuple[Storage, Tensor | None]]) -> None:
        """Check in backwards 1, 2, 4, 8 and so on that every rank computed the same loss from the
        outputs."""
        if self._loss is not None:
            return
        self._num_backwards += 1
        if self._num_backwards & (self._num_backwards - 1) == 0:
            whole = self._outputs == "full"
            check_tangents(
                [(s.tensor.name, x if whole or x is None else torch.empty(0)) for s, x in returned],
                self.device_mesh,
            )

    def _names_of(self, *kinds: str) -> list[str]:
        """Return the names of the tensors of these kinds in errors."""
        named = (
            (kind, tensor.name) for kind in kinds for tensor in getattr(self._stage, f"{kind}s")
        )
        return [f"{kind} {name!r}" if name else "what the call returned" for kind, name in named]

    def _present(self, result: Tensor, storage: Storage) -> Tensor:
        return (
            storage.wrap(result)
            if self._outputs == "dtensor" and not storage.tensor.is_loss
            else result
        )

    def _part_of_tangent(self, tangent: Tensor | None, storage: Storage) -> Tensor:
        """Return the tangent of an output in the form of the backward graph: this rank's part,
        contiguous."""
        if tangent is None:
            return torch.zeros(
                storage.graph_shape, dtype=storage.tensor.dtype, device=self.device_mesh.device_type
            )
        if isinstance(tangent, DTensor):
            tangent = tangent.redistribute(storage.seen, storage.placements).to_local()
        elif self._outputs != "local":
            sizes, place = tuple(self.device_mesh.shape), self.device_mesh.get_coordinate() or ()
            tangent = local_part(tangent, storage.tensor.layout, sizes, storage.tensor.view, place)
        return tangent.contiguous()


class _Step(torch.autograd.Function):
    """The forward graph and, as its derivative, the backward graph."""

    @staticmethod
    def forward(
        ctx: Any, module: ParallelModule, watched: Watched, inputs: list[Tensor], *trained: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the forward graph.

        Args:
            module: the module.
            watched: receives the tensors to watch until backward.
            inputs: the program's inputs.
            trained: the inputs that have a gradient, then all parameters.
        """
        outputs, saved = module._run(
            inputs, trained[len(trained) - len(module._stage.parameters) :], watched, keep=True
        )
        # Not save_for_backward: backward takes the list and frees it value by value.
        ctx.module, ctx.saved, ctx.watched = module, saved, watched
        ctx.are_plain = which_are_plain(trained)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(
                x
                for x, border in zip(outputs, module._stage.outputs, strict=True)
                if not border.has_gradient
            )
        )
        return tuple(outputs)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        """Run the backward graph, and return the gradients of `trained`.

        Raises:
            RuntimeStateError: if backward has run before, or a tensor that it reads was changed.
        """
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise ran_twice()
        ctx.watched.check()
        return (None, None, None, *as_given(ctx.module._gradients(saved, tangents), ctx.are_plain))
