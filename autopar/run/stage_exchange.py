"""What ranks of a pipeline give each other once a step: parts of the gradients of parameters that several hold, and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.run.program import ProgramTensor, StagedProgram


@dataclass(frozen=True, slots=True)
class Exchange:
    """Of one rank.

    Attributes:
        group: the ranks of the pipeline; None where there is one. rank: this one's place in it. device: type of the tensors' devices.
        shared: parameter that this rank and others hold → the ranks that do.
    """

    program: StagedProgram
    group: dist.ProcessGroup | None
    rank: int
    device: str
    shared: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(program: StagedProgram, group: dist.ProcessGroup | None, rank: int, device: str) -> Exchange:
        """The exchange of trained parameters, whose stages lie on ranks in turns."""
        num_ranks = 1 if group is None else group.size()
        trained = {t.name for s in program.stages for t in s.parameters if t.has_gradient}
        holders = {name: tuple(dict.fromkeys(s % num_ranks for s in held_by)) for name, held_by in program.shared.items()}
        shared = {name: ranks for name, ranks in holders.items() if rank in ranks and len(ranks) > 1 and name in trained}
        return Exchange(program, group, rank, device, shared)

    def counted_elsewhere(self) -> set[str]:
        """Parameters that an earlier rank holds, too."""
        return {name for name, ranks in self.shared.items() if ranks[0] != self.rank}

    def add_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """The first rank that holds a parameter adds up all parts of its gradient, in order, and sends the sum back."""
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

    def spread(self, outputs: Sequence[ProgramTensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These outputs on all ranks, from the ranks whose stages make them, where they are contiguous."""
        if self.group is None:
            return dict(own)
        found = {}
        for tensor in outputs:
            stages = enumerate(self.program.stages)
            made_by = next(i for i, s in stages if any(t.name == tensor.name for t in s.outputs if not t.crosses))
            here = tensor.name in own
            value = own[tensor.name] if here else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            dist.broadcast(value, dist.get_global_rank(self.group, made_by % self.group.size()), self.group)
            found[tensor.name] = value
        return found


def _write_back(there: Tensor, mine: Tensor) -> None:
    """What was exchanged on the device, into the gradient that lies elsewhere."""
    if there is not mine:
        there.copy_(mine)
