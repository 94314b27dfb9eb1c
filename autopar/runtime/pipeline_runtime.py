"""What a rank of a pipeline does in a call, apart from the module that the user sees, whose
names are the model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from autopar.program.executor import Unused
from autopar.program.program import Microbatches, ProgramTensor, StagedProgram
from autopar.program.stage_work import StageWork
from autopar.program.transfers import ForwardsFirst, Interleaving, Transfers
from autopar.runtime.dtensor import hold_value
from autopar.runtime.loss_scaling import computes_in_fp16
from autopar.runtime.parameters import Storage
from autopar.runtime.rank_comm import by_all
from autopar.runtime.rank_consistency import check_tangents
from autopar.runtime.tensor_guards import Watched

# --------------------------------------------------------------------------------------------------
# What ranks of a pipeline give each other once a step: parts of the gradients of parameters that
# several hold, and outputs.


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of one rank.

    Attributes:
        group: the ranks of the pipeline; None where there is one. rank: this one's place in it.
            device: type of the tensors' devices.
        shared: parameter that this rank and others hold → the ranks that do.
    """

    program: StagedProgram
    group: dist.ProcessGroup | None
    rank: int
    device: str
    shared: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(
        program: StagedProgram, group: dist.ProcessGroup | None, rank: int, device: str
    ) -> Exchange:
        """The exchange of trained parameters, whose stages lie on ranks in turns."""
        num_ranks = 1 if group is None else group.size()
        trained = {t.name for s in program.stages for t in s.parameters if t.has_gradient}
        holders = {
            name: tuple(dict.fromkeys(s % num_ranks for s in held_by))
            for name, held_by in program.shared.items()
        }
        shared = {
            name: ranks
            for name, ranks in holders.items()
            if rank in ranks and len(ranks) > 1 and name in trained
        }
        return Exchange(program, group, rank, device, shared)

    def counted_elsewhere(self) -> set[str]:
        """Parameters that an earlier rank holds, too."""
        return {name for name, ranks in self.shared.items() if ranks[0] != self.rank}

    def add_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """The first rank that holds a parameter adds up all parts of its gradient, in order, and
        sends the sum back."""
        for name, ranks in sorted(self.shared.items()):
            assert self.group is not None, "several ranks have a group"
            there = gradients[name]
            mine = there.to(self.device)  # a gradient on the host does not go to others from there
            owner, others = dist.get_global_rank(self.group, ranks[0]), ranks[1:]
            if self.rank != ranks[0]:
                dist.send(mine, owner, self.group)
                dist.recv(mine, owner, self.group)
                _write_back(there, mine)
                continue
            for other in others:
                part = torch.empty_like(mine)
                dist.recv(part, dist.get_global_rank(self.group, other), self.group)
                mine.add_(part)
            for other in others:
                dist.send(mine, dist.get_global_rank(self.group, other), self.group)
            _write_back(there, mine)

    def spread(
        self, outputs: Sequence[ProgramTensor], own: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """These outputs on all ranks, from the ranks whose stages make them, where they are
        contiguous."""
        if self.group is None:
            return dict(own)
        found = {}
        for tensor in outputs:
            stages = enumerate(self.program.stages)
            made_by = next(
                i
                for i, s in stages
                if any(t.name == tensor.name for t in s.outputs if not t.crosses)
            )
            here = tensor.name in own
            value = (
                own[tensor.name]
                if here
                else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            )
            dist.broadcast(
                value, dist.get_global_rank(self.group, made_by % self.group.size()), self.group
            )
            found[tensor.name] = value
        return found


def _write_back(there: Tensor, mine: Tensor) -> None:
    """What was exchanged on the device, into the gradient that lies elsewhere."""
    if there is not mine:
        there.copy_(mine)


# --------------------------------------------------------------------------------------------------
# `StageWorker`: a stage's work under the schedules of torch.distributed.pipelining.


class StageWorker(PipelineStage):
    """What schedules call; the work is `work`.

    Args:
        number, num_stages: which stage of how many. group: the ranks of the pipeline, one per stage
            in order.
    """

    def __init__(
        self, work: StageWork, number: int, num_stages: int, group: dist.ProcessGroup
    ) -> None:
        nothing = torch.empty(
            0, device=work.device
        )  # shapes are the program's own; the schedule needs no inference of them
        super().__init__(
            nn.Module(),
            number,
            num_stages,
            work.device,
            input_args=(nothing,),
            output_args=(nothing,),
            group=group,
        )
        self.work, self._transfers = work, Transfers(group)

    def clear_runtime_states(self) -> None:
        """The work's `begin` and `finish` do."""

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Weights of losses do."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what crosses from the stage before."""
        return (
            []
            if self.is_first
            else self._moves("receive forward", self.work.arriving_inputs(fwd_chunk_id))
        )

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what crosses to the stage after."""
        return self._moves("send forward", self.work.leaving_outputs(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what was sent."""
        return (
            []
            if self.is_last
            else self._moves("receive backward", self.work.arriving_gradients(bwd_chunk_id))
        )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what was received."""
        return self._moves("send backward", self.work.leaving_gradients(bwd_chunk_id))

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Tensor:
        """Run forward on one microbatch. What is returned is only for the schedule to hand back."""
        self.work.forward(fwd_chunk_id)
        return torch.empty(0)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run backward on one microbatch and add up its gradients."""
        self.work.backward(bwd_chunk_id)

    def _moves(self, kind: str, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        return self._transfers.moves(kind, tensors, self.stage_index)


_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StageCalls:
    """Of one rank.

    Args:
        works: stage → its work, of this rank's. how: how microbatches make the batch, with what
            weighs them bound to this rank.
        kept: the batch's outputs that a call returns. held: the parameters here. storages: how
            parameters and buffers rest.
        group, rank: the ranks of the pipeline, None for one, and this one's place among them.
            world: all devices.

    Attributes:
        is_fp16: whether a value of any stage is in float16. mutates: whether any stage changes
            buffers. mutated: the buffers that are changed here. world: all devices.
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
        self.is_fp16, self.mutates = (
            computes_in_fp16(program.trace),
            any(stage.mutated for stage in program.stages),
        )
        self.mutated = tuple(
            dict.fromkeys(name for work in works.values() for name in work.program.mutated)
        )
        self._num_backwards = 0
        self._unused: dict[frozenset[str], Unused] = {}

    @property
    def device_type(self) -> str:
        """Of all devices."""
        return self.world.device_type

    def _make_schedule(self) -> Any:
        """None for a single stage, whose microbatches come one after another, and for one a rank
        where no backward runs among forwards."""
        if self._group is None:
            return None
        if len(self._works) > 1:
            return Interleaving(self._works, Transfers(self._group), self.how.num)
        if not self.program.begins_backward:
            return None
        worker = StageWorker(
            self._works[self.rank], self.rank, len(self.program.stages), self._group
        )
        return _SCHEDULES[self.program.schedule](
            worker, self.how.num, loss_fn=lambda output, _: output, scale_grads=False
        )

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
        """The batch's outputs by path, and this rank's gradients, both the same on all ranks that
        should have them.

        Args:
            parts: the inputs of each microbatch. buffers: local ones by name. parameters: those
                held. scale: of losses in backward.
            keep: whether backward runs, too. returns: whether outputs are collected; else there are
                none.
        """
        kept = self.kept if returns else ()
        self.begin(
            self._works, parts, self.how.weight * scale, buffers, parameters, keep=keep, kept=kept
        )
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
        return {
            number: StageWork(work.program, work.executor, work.device)
            for number, work in self._works.items()
        }

    def runner(self, works: Mapping[int, StageWork]) -> ForwardsFirst:
        """Runs the one stage of this rank: all forwards, then all backwards."""
        transfers = None if self._group is None else Transfers(self._group)
        return ForwardsFirst(works[self.rank], self.rank, transfers, self.how.num)

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
        """Of each stage. A buffer that several change, each once per microbatch, is changed in a
        copy by all but the first.

        Args:
            kept: the outputs that are collected; by default those that a call returns.
        """
        with (
            torch.no_grad()
        ):  # as they are, without autograd; `detach` fails under torch.inference_mode
            locals = {
                t.name: self._storages[t.name].local(p)
                for p, t in zip(parameters, self.held, strict=True)
            }
        changed: set[str] = set()
        for work in works.values():
            program = work.program
            mine = {
                t.name: buffers[t.name].clone()
                if t.name in changed & {*program.mutated}
                else buffers[t.name]
                for t in program.buffers
            }
            changed |= {*program.mutated}
            wanted = [t.name for t in (self.kept if kept is None else kept)]
            work.begin(
                wanted,
                [locals[t.name] for t in program.parameters],
                list(mine.values()),
                parts,
                weight,
                keep=keep,
            )

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

    def finish(
        self, works: Mapping[int, StageWork], parameters: Sequence[Tensor], *, keep: bool
    ) -> list[Tensor | None]:
        """After all backwards, if there were any: this rank's gradients; None where nothing that
        has a part in the loss reaches one."""
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
            if (
                t.name in self.exchange.shared and t.name not in found
            ):  # another stage has all of it
                with torch.no_grad():
                    found[t.name] = torch.zeros_like(self._storages[t.name].local(parameter))
        self.exchange.add_shared(found)
        return [found.get(t.name) for t in self.held if t.has_gradient]

    def wrapped(
        self, gradients: Sequence[Tensor | None], without: frozenset[str] = frozenset()
    ) -> list[DTensor | None]:
        """One per parameter that is held; None for those `without` one."""
        named = zip((t.name for t in self.held if t.has_gradient), gradients, strict=True)
        found = {name: gradient for name, gradient in named if name not in without}
        shown = [(t.name, found.get(t.name)) for t in self.held]
        return [
            None if gradient is None else hold_value(self._storages[name].wrap(gradient))
            for name, gradient in shown
        ]

    def unused(self, absent: frozenset[str]) -> Unused:
        """What follows from these outputs alone, which have no part in the loss."""
        if absent not in self._unused:
            self._unused[absent] = Unused.of(self.program, absent)
        return self._unused[absent]

    def watched_of(
        self,
        works: Mapping[int, StageWork],
        parameters: Sequence[Tensor],
        outputs: Mapping[str, Tensor],
    ) -> Watched:
        """What the user holds and backward reads."""
        watched = Watched()
        for work in works.values():
            watched.watch(
                [*work.named(), *((f"output {name!r}", x) for name, x in outputs.items())],
                work.saved_values(),
            )
        watched.follow(zip((f"parameter {t.name!r}" for t in self.held), parameters, strict=True))
        return watched

    def check_tangent(self, tangent: Tensor) -> None:
        """In backwards 1, 2, 4, 8 and so on: that every rank multiplied the loss by the same
        factor.

        Raises:
            RuntimeStateError: on all ranks, where they did not.
        """
        self._num_backwards += 1
        if self._num_backwards & (self._num_backwards - 1) == 0:
            check_tangents([("the loss", tangent)], self.world)

    def check_returned(self, tangents: Sequence[Tensor | None], watched: Watched) -> None:
        """That nothing which backward reads has changed, and, as `ParallelModule` does, that every
        rank computed the same loss.

        In backwards 1, 2, 4, 8 and so on all ranks are told of both; in others a rank whose
        parameters have changed is told alone.
        """
        self._num_backwards += 1
        if self._num_backwards & (self._num_backwards - 1):
            watched.check()
            return
        by_all(watched.check, "backward")
        check_tangents(
            [(t.name, x) for t, x in zip(self.kept, tangents, strict=True) if t.has_gradient],
            self.world,
        )
