"""What a rank of a pipeline does in a call, apart from the module that the user sees, whose names are the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from autopar.run.equal import check_tangents
from autopar.run.forwards_first import ForwardsFirst
from autopar.run.held import held
from autopar.run.interleaving import Interleaving
from autopar.run.loss_scale import computes_in_fp16
from autopar.run.parameters import Storage
from autopar.run.program import Microbatches, ProgramTensor, StagedProgram
from autopar.run.ranks import by_all
from autopar.run.stage_exchange import Exchange
from autopar.run.stage_work import StageWork
from autopar.run.stage_worker import StageWorker
from autopar.run.unused import Unused
from autopar.run.watched import Watched

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StageCalls:
    """Of one rank.

    Args:
        works: stage → its work, of this rank's. how: how microbatches make the batch, with what weighs them bound to this rank.
        kept: the batch's outputs that a call returns. held: the parameters here. storages: how parameters and buffers rest.
        group, rank: the ranks of the pipeline, None for one, and this one's place among them. world: all devices.

    Attributes:
        is_fp16: whether a value of any stage is in float16. mutates: whether any stage changes buffers. mutated: the buffers that are
            changed here. world: all devices.
    """

    def __init__(
        self,
        program: StagedProgram,
        works: Mapping[int, StageWork],
        how: Microbatches,
        kept: Sequence[ProgramTensor],
        held: Sequence[ProgramTensor],
        storages: Mapping[str, Storage],
        group: dist.ProcessGroup | None,
        rank: int,
        world: DeviceMesh,
    ) -> None:
        self.program, self.how, self.kept, self.held, self.rank = program, how, kept, held, rank
        self.exchange = Exchange.of(program, group, rank, world.device_type)
        self._works, self._storages, self._group, self.world = works, storages, group, world
        self._schedule = self._make_schedule()
        self.is_fp16, self.mutates = computes_in_fp16(program.trace), any(stage.mutated for stage in program.stages)
        self.mutated = tuple(dict.fromkeys(name for work in works.values() for name in work.program.mutated))
        self._num_backwards = 0
        self._unused: dict[frozenset[str], Unused] = {}

    @property
    def device_type(self) -> str:
        """Of all devices."""
        return self.world.device_type

    def _make_schedule(self) -> Any:
        """None for a single stage, whose microbatches come one after another, and for one a rank where no backward runs among forwards."""
        if self._group is None:
            return None
        if len(self._works) > 1:
            return Interleaving(self._works, self._group, self.how.num)
        if not self.program.begins_backward:
            return None
        worker = StageWorker(self._works[self.rank], self.rank, len(self.program.stages), self._group)
        return _SCHEDULES[self.program.schedule](worker, self.how.num, loss_fn=lambda output, _: output, scale_grads=False)

    def step(
        self,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        *,
        scale: float,
        keep: bool,
        returns: bool = True,
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """The batch's outputs by path, and this rank's gradients, both the same on all ranks that should have them.

        Args:
            parts: the inputs of each microbatch. buffers: local ones by name. parameters: those held. scale: of losses in backward.
            keep: whether backward runs, too. returns: whether outputs are collected; else there are none.
        """
        kept = self.kept if returns else ()
        self.begin(self._works, parts, self.how.weight * scale, buffers, parameters, keep=keep, kept=kept)
        if isinstance(self._schedule, Interleaving):
            self._schedule.run(backward=keep)
        elif keep and self._schedule is not None:
            with torch.enable_grad():  # the schedule insists, though nothing runs through autograd
                self._schedule.step(target=torch.zeros(self.how.num), return_outputs=False)
        elif keep:
            for number in range(self.how.num):
                self._works[self.rank].forward(number)
                self._works[self.rank].backward(number)
        else:
            self.runner(self._works).forward()
        own = self._joined(self._works)
        gradients = self.finish(self._works, parameters, keep=keep)
        return self.exchange.spread(kept, own), gradients

    def new_works(self) -> dict[int, StageWork]:
        """Of one call, which may wait for its backward while others come."""
        return {number: StageWork(work.program, work.executor, work.device) for number, work in self._works.items()}

    def runner(self, works: Mapping[int, StageWork]) -> ForwardsFirst:
        """Runs the one stage of this rank: all forwards, then all backwards."""
        return ForwardsFirst(works[self.rank], self.rank, self._group, self.how.num)

    def begin(
        self,
        works: Mapping[int, StageWork],
        parts: list[dict[str, Tensor]],
        weight: float,
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        *,
        keep: bool,
        kept: Sequence[ProgramTensor] | None = None,
    ) -> None:
        """Of each stage. A buffer that several change, each once per microbatch, is changed in a copy by all but the first.

        Args:
            kept: the outputs that are collected; by default those that a call returns.
        """
        with torch.no_grad():  # as they are, without autograd; `detach` fails under torch.inference_mode
            locals = {t.name: self._storages[t.name].local(p) for p, t in zip(parameters, self.held, strict=True)}
        changed: set[str] = set()
        for work in works.values():
            program = work.program
            mine = {t.name: buffers[t.name].clone() if t.name in changed & {*program.mutated} else buffers[t.name] for t in program.buffers}
            changed |= {*program.mutated}
            wanted = [t.name for t in (self.kept if kept is None else kept)]
            work.begin(wanted, [locals[t.name] for t in program.parameters], list(mine.values()), parts, weight, keep=keep)

    def returned(self, works: Mapping[int, StageWork]) -> dict[str, Tensor]:
        """After all forwards of a model without a loss: the batch's outputs on all ranks."""
        return self.exchange.spread(self.kept, self._joined(works))

    def _joined(self, works: Mapping[int, StageWork]) -> dict[str, Tensor]:
        """The batch's outputs that this rank's stages make. Lets go of microbatches'."""
        made = [(path, values) for work in works.values() for path, values in work.outputs.items()]
        found = {path: self.how.join(path, values).contiguous() for path, values in made}
        del made
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
        for t, parameter in zip(self.held, parameters, strict=True):
            if t.name in self.exchange.shared and t.name not in found:  # another stage has all of it
                with torch.no_grad():
                    found[t.name] = torch.zeros_like(self._storages[t.name].local(parameter))
        self.exchange.add_shared(found)
        return [found.get(t.name) for t in self.held if t.has_gradient]

    def wrapped(self, gradients: Sequence[Tensor | None], without: frozenset[str] = frozenset()) -> list[DTensor | None]:
        """One per parameter that is held; None for those `without` one."""
        named = zip((t.name for t in self.held if t.has_gradient), gradients, strict=True)
        found = {name: gradient for name, gradient in named if name not in without}
        shown = [(t.name, found.get(t.name)) for t in self.held]
        return [None if gradient is None else held(self._storages[name].wrap(gradient)) for name, gradient in shown]

    def unused(self, absent: frozenset[str]) -> Unused:
        """What follows from these outputs alone, which have no part in the loss."""
        if absent not in self._unused:
            self._unused[absent] = Unused.of(self.program, absent)
        return self._unused[absent]

    def watched_of(self, works: Mapping[int, StageWork], parameters: Sequence[Tensor], outputs: Mapping[str, Tensor]) -> Watched:
        """What the user holds and backward reads."""
        watched = Watched()
        for work in works.values():
            watched.watch([*work.named(), *((f"output {name!r}", x) for name, x in outputs.items())], work.saved())
        watched.follow(zip((f"parameter {t.name!r}" for t in self.held), parameters, strict=True))
        return watched

    def check_tangent(self, tangent: Tensor) -> None:
        """In backwards 1, 2, 4, 8 and so on: that every rank multiplied the loss by the same factor.

        Raises:
            RuntimeStateError: on all ranks, where they did not.
        """
        self._num_backwards += 1
        if self._num_backwards & (self._num_backwards - 1) == 0:
            check_tangents([("the loss", tangent)], self.world)

    def check_returned(self, tangents: Sequence[Tensor | None], watched: Watched) -> None:
        """That nothing which backward reads has changed, and, as `ParallelModule` does, that every rank computed the same loss.

        In backwards 1, 2, 4, 8 and so on all ranks are told of both; in others a rank whose parameters have changed is told alone.
        """
        self._num_backwards += 1
        if self._num_backwards & (self._num_backwards - 1):
            watched.check()
            return
        by_all(watched.check, "backward")
        check_tangents([(t.name, x) for t, x in zip(self.kept, tangents, strict=True) if t.has_gradient], self.world)
