"""`StagedModule`: a pipeline's stages on this rank, or one stage that works through microbatches, as an ordinary `nn.Module`.

A call takes the whole batch and runs the schedule, forward and backward of all microbatches; what it returns is what the model returns for
the batch, on every rank: with ``outputs="full"``, or of one stage in one microbatch, every output, else the loss and None for the others,
since parts of microbatches have no place in a whole tensor. `loss.backward()` then publishes the gradients that are there already. The loss
is the one differentiable output, and what comes after it must be linear: `loss_scale` is what the losses are multiplied with before
backward, and ``(loss * pm.loss_scale).backward()`` publishes scaled gradients.

Of a model that returns no loss a call runs all forwards and returns whole outputs, and `backward` of whatever the user computes of them
runs all backwards (`autopar.run.forwards_first`), on every rank alike; `loss_scale` has no part in it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from autopar.errors import MeshError, RuntimeStateError
from autopar.kernels.binding import bind
from autopar.run.answered import Answered
from autopar.run.arguments import Arguments, Results
from autopar.run.clipping import clip_over_stages
from autopar.run.device_mesh import agree, groups_of, mesh_of, stage_devices
from autopar.run.equal import check_tangents
from autopar.run.executor import Backend, Batch, Executor, Outputs
from autopar.run.forwards_first import ForwardsFirst
from autopar.run.holder import Holder
from autopar.run.interleaving import Interleaving
from autopar.run.parameters import Storage
from autopar.run.program import Program, ProgramTensor, StagedProgram
from autopar.run.published import Published
from autopar.run.ranks import by_all, rank
from autopar.run.refused import refusing
from autopar.run.stage_exchange import Exchange
from autopar.run.stage_work import StageWork, outputs_kept
from autopar.run.stage_worker import StageWorker
from autopar.run.unused import Unused
from autopar.run.variants import Misfit, Variant
from autopar.run.watched import Watched

log = logging.getLogger("autopar")
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StagedModule(Holder):
    """The stages of `program` that this rank runs, mostly one; it holds the parameters of those only.

    Args:
        devices: the whole mesh. model: gives values, names and the train/eval flag; it may be on meta, and is not kept.

    Attributes:
        loss_scale: factor of the losses in backward (see the module docstring). rank: this one's place along the pipeline's axis.

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
        shared: Holder | None = None,
    ) -> None:
        if mesh_of(devices).shape != program.mesh.shape:
            raise MeshError(f"the program is for mesh {program.mesh}, not {mesh_of(devices)}", remedy="plan for the mesh that is there")
        if batch != "global":
            what = f"batch={batch!r}: a plan with microbatches takes whole batches, of which each stage takes its parts"
            raise RuntimeStateError(what, remedy='pass batch="global"')
        agree(program.plan_hash, "plan", devices)
        own, group, self.rank = stage_devices(devices, program.axis)
        self._num_ranks = 1 if group is None else group.size()
        stages = {n: program.stages[n] for n in range(self.rank, len(program.stages), self._num_ranks)}
        held = {t.name: t for stage in stages.values() for t in (*stage.parameters, *stage.buffers)}
        here = {name for t in held.values() for name in (t.name, *t.aliases)}
        every = {name for s in program.stages for t in (*s.parameters, *s.buffers) for name in (t.name, *t.aliases)}
        super().__init__(tuple(held.values()), own, model, elsewhere=every - here, world=devices, both_modes=both_modes, shared=shared)
        self.program, self.loss_scale = program, 1.0
        self.world_mesh, self._group = devices, group
        groups = groups_of(own)
        kept = [t for stage in program.stages for t in outputs_kept(stage, outputs, program.microbatches.num)]
        self.kept = [t for t in program.outputs if t.name in {each.name for each in kept}]
        self._presented = {t.name: Storage.of(t, own) for t in kept if outputs == "dtensor" and not t.is_loss}
        self._works: dict[int, StageWork] = {}
        for number, stage in stages.items():
            executor = Executor(stage, groups, backend=backend, batch=batch, outputs=outputs, device=devices.device_type)
            self._works[number] = StageWork(stage, executor, executor.device)
        trained = {t.name for s in program.stages for t in s.parameters if t.has_gradient}
        self._is_trained, self._num_backwards = bool(trained), 0
        self._unused: dict[frozenset[str], Unused] = {}
        self._may_train = shared is None or self._is_trained  # in another mode what a trained model returns may have no gradient
        self._held = _held_by(stages.values(), trained)
        self._schedule = self._make_schedule()
        self._arguments = Arguments(program, inspect.signature(model.forward), batch, groups, devices.device_type)
        self._results = Results(program)
        count = program.microbatches.count
        self._how = replace(program.microbatches, count=None if count is None else bind(count, groups, devices.device_type))
        left_out = [t.name for t in program.outputs if t not in self.kept]
        if outputs not in ("full", "loss") and left_out and rank() == 0:
            log.warning(
                "calls return the loss, and None for %s: they are made in %s, whose parts have no place in a distributed tensor; pass "
                'outputs="full" to have them put together, or outputs="loss" if they are not wanted', ", ".join(left_out[:3]),
                f"{program.microbatches.num} microbatches" if program.microbatches.num > 1 else "the last stage",
            )  # fmt: skip
        self._exchange = Exchange.of(program, group, self.rank, devices.device_type)
        self._stand_for_all(model, program.attributes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the whole batch; with gradients enabled, backward has run.

        Raises:
            RuntimeStateError: on arguments, a mode or parameters that the program was not made for.
        """
        values = self._taken(args, kwargs, self.world_mesh)
        if isinstance(values, Misfit):
            return self._elsewhere(values, args, kwargs)
        parts = self._how.split({t.name: x for t, x in zip(self.program.inputs, values, strict=True)})
        parameters = [self.get_parameter(t.name) for t in self._held]
        trained = torch.is_grad_enabled() and self._is_trained  # a stage that trains nothing takes part all the same
        if torch.is_grad_enabled() and self._may_train:
            self._trains(parameters, self._held)
        outputs = self._waiting(parts, parameters) if trained and self._how.loss is None else self._stepped(parts, parameters, keep=trained)
        for name, storage in self._presented.items():
            outputs[name] = storage.wrap(outputs[name])
        if self._how.loss is not None:
            refused = [t.name for t in self.kept if t.requires_grad and not t.is_loss]
            outputs |= {name: refusing(name, outputs[name], outputs[self._how.loss]) for name in refused}
        return self._results.build([outputs.get(t.name) for t in self.program.outputs])

    def _stepped(self, parts: list[dict[str, Tensor]], parameters: Sequence[Tensor], *, keep: bool) -> dict[str, Tensor]:
        """The outputs; with `keep`, backward has run, too."""
        with torch.autocast(self.device_mesh.device_type, enabled=False):
            outputs, gradients = self._step(parts, self._how.weights(parts), parameters, keep=keep)
        loss = self._how.loss
        if keep and loss is not None:
            anchor = torch.empty(0, requires_grad=True)  # a rank whose parameters are all frozen calls backward, too
            outputs[loss] = Published.apply(self, [outputs[loss]], gradients, anchor, *parameters)
        return outputs

    def _waiting(self, parts: list[dict[str, Tensor]], parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """The outputs, through which backward goes."""
        anchor = torch.empty(0, device=self.device_mesh.device_type, requires_grad=True)
        found = Answered.apply(self, parts, anchor, *parameters)
        return dict(zip((t.name for t in self.kept), found, strict=True))

    def _set_up(self, variant: Variant) -> None:
        super()._set_up(variant)
        if isinstance(variant, StagedModule):
            variant.loss_scale = self.loss_scale

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the whole model, all stages, is at most `max_norm`; returns the norm before.

        A parameter that several stages hold counts once.
        """
        elsewhere = self._exchange.counted_elsewhere()
        parameters = [(p, self._names[name] not in elsewhere) for name, p in self.named_parameters()]
        return clip_over_stages(parameters, max_norm, norm_type, self._group, self.device_mesh)

    def check_returned(self, tangents: Sequence[Tensor | None], watched: Watched) -> None:
        """That nothing which backward reads has changed, and, as `ParallelModule` does, that every rank computed the same loss.

        In backwards 1, 2, 4, 8 and so on all ranks are told of both; in others a rank whose parameters have changed is told alone.
        """
        self._num_backwards += 1
        if self._num_backwards & (self._num_backwards - 1):
            watched.check()
            return
        by_all(watched.check, "backward", remedy="run backward before what changes parameters, outputs or inputs")
        check_tangents([(t.name, x) for t, x in zip(self.kept, tangents, strict=True) if t.has_gradient], self.world_mesh)

    def unused(self, absent: frozenset[str]) -> Unused:
        """What follows from these outputs alone, which have no part in the loss."""
        if absent not in self._unused:
            self._unused[absent] = Unused.of(self.program, absent)
        return self._unused[absent]

    def watched_of(self, works: Mapping[int, StageWork], parameters: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> Watched:
        """What the user holds and backward reads."""
        watched = Watched()
        names = [f"parameter {t.name!r}" for t in self._held]
        for work in works.values():
            watched.watch([*work.named(), *((f"output {name!r}", x) for name, x in outputs.items())], work.saved())
        watched.follow(zip(names, parameters, strict=True))
        return watched

    def _make_schedule(self) -> Any:
        """None for a single stage, whose microbatches come one after another, and for one a rank where no backward runs among forwards."""
        if self._group is None:
            return None
        num = self.program.microbatches.num
        if len(self._works) > 1:
            return Interleaving(self._works, self._group, num)
        if not self.program.begins_backward:
            return None
        worker = StageWorker(self._works[self.rank], self.rank, len(self.program.stages), self._group)
        return _SCHEDULES[self.program.schedule](worker, num, loss_fn=lambda output, _: output, scale_grads=False)

    def _step(
        self, parts: list[dict[str, Tensor]], weights: list[float], parameters: Sequence[Tensor], *, keep: bool
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """The batch's outputs by path, and this rank's gradients, both the same on all ranks that should have them."""
        self.begin(self._works, parameters, parts, [weight * self.loss_scale for weight in weights], keep=keep)
        if isinstance(self._schedule, Interleaving):
            self._schedule.run(backward=keep)
        elif keep and self._schedule is not None:
            with torch.enable_grad():  # the schedule insists, though nothing runs through autograd
                self._schedule.step(target=torch.zeros(self._how.num), return_outputs=False)
        elif keep:
            for number in range(self._how.num):
                self._works[self.rank].forward(number)
                self._works[self.rank].backward(number)
        else:
            self.runner(self._works).forward()
        own = self.joined(self._works, weights)
        gradients = self.finish(self._works, parameters, keep=keep)
        return self.spread(own), gradients

    def new_works(self) -> dict[int, StageWork]:
        """Of one call, which may wait for its backward while others come."""
        return {number: StageWork(work.program, work.executor, work.device) for number, work in self._works.items()}

    def runner(self, works: Mapping[int, StageWork]) -> ForwardsFirst:
        """Runs the one stage of this rank: all forwards, then all backwards."""
        return ForwardsFirst(works[self.rank], self.rank, self._group, self._how.num)

    def joined(self, works: Mapping[int, StageWork], weights: list[float]) -> dict[str, Tensor]:
        """After all forwards: the batch's outputs that this rank's stages make. Lets go of microbatches'."""
        found = {
            path: self._how.join(path, values, weights).contiguous() for work in works.values() for path, values in work.outputs.items()
        }
        for work in works.values():
            work.outputs.clear()
        return found

    def finish(self, works: Mapping[int, StageWork], parameters: Sequence[Tensor], *, keep: bool) -> list[Tensor | None]:
        """After all backwards, if there were any: this rank's gradients; None where nothing that has a part in the loss reaches one."""
        found: dict[str, Tensor] = {}
        for work in works.values():
            named = [t.name for t in work.program.parameters if t.has_gradient]
            for name, gradient in zip(named, work.finish(), strict=False):  # none without backward
                if gradient is None:
                    continue
                found[name] = found[name].add_(gradient) if name in found else gradient
        if not keep:
            return []
        for t, parameter in zip(self._held, parameters, strict=True):
            if t.name in self._exchange.shared and t.name not in found:  # another stage has all of it
                with torch.no_grad():
                    found[t.name] = torch.zeros_like(self._storages[t.name].local(parameter))
        self._exchange.add_shared(found)
        return [found.get(t.name) for t in self._held if t.has_gradient]

    def begin(
        self,
        works: Mapping[int, StageWork],
        parameters: Sequence[Tensor],
        parts: list[dict[str, Tensor]],
        weights: list[float],
        *,
        keep: bool,
    ) -> None:
        """Of each stage. A buffer that several change, each once per microbatch, is changed in a copy by all but the first."""
        with torch.no_grad():  # as they are, without autograd; `detach` fails under torch.inference_mode
            locals = {t.name: self._storages[t.name].local(p) for p, t in zip(parameters, self._held, strict=True)}
        changed: set[str] = set()
        for work in works.values():
            program = work.program
            buffers = {t.name: self._storages[t.name].local(self.get_buffer(t.name)) for t in program.buffers}
            buffers |= {name: buffers[name].clone() for name in program.mutated if name in changed}
            changed |= {*program.mutated}
            mine = [locals[t.name] for t in program.parameters]
            work.begin([t.name for t in self.kept], mine, list(buffers.values()), parts, weights, keep=keep)

    def spread(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All outputs that a call returns, on all stages."""
        return self._exchange.spread(self.kept, own)

    def wrapped(self, gradients: Sequence[Tensor | None], without: frozenset[str] = frozenset()) -> list[DTensor | None]:
        """One per parameter that is held; None for those `without` one."""
        named = zip((t.name for t in self._held if t.has_gradient), gradients, strict=True)
        found = {name: gradient for name, gradient in named if name not in without}
        shown = [(t.name, found.get(t.name)) for t in self._held]
        return [None if gradient is None else self._storages[name].wrap(gradient) for name, gradient in shown]


def _held_by(stages: Iterable[Program], trained: Collection[str]) -> tuple[ProgramTensor, ...]:
    """The parameters of these stages, each once; one that has a gradient in any stage of the model has one here."""
    found = {t.name: t for stage in stages for t in stage.parameters}
    return tuple(replace(t, has_gradient=t.name in trained) for t in found.values())
