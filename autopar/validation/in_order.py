"""`check_order`: a step of all stages and microbatches, as ranks run it, on symbols in place of
tensors.

`StageWork` does what a schedule asks of a stage; here it does so in the order of the schedule,
with an executor that knows no numbers. Each call has to get what it is for: the parts of the batch
of its microbatch, what the neighbours made of the same microbatch under the same names, the values
that its own forward saved, and one and the same sums, which the first backward writes and each
later one adds to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import ValidationError
from autopar.run.orders import Action, orders
from autopar.run.program import Program, ProgramTensor, StagedProgram
from autopar.run.stage_work import StageWork
from autopar.validation.states import invalid

_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Symbol:
    """A tensor: what it is called, and of which microbatch; −1 of what all have."""

    name: str
    microbatch: int = -1

    def contiguous(self) -> _Symbol:
        """Itself: where it lies makes no difference."""
        return self


class _Buffer:
    """What a tensor is received into, and what came."""

    came: _Symbol | None = None

    def __init__(self, name: str) -> None:
        self.name = name


def check_order(program: StagedProgram, schedule: str, num_ranks: int) -> None:
    """Run a step of forwards and, where anything is trained, backwards.

    Args:
        schedule: its name. num_ranks: in the pipeline, each with as many stages.

    Raises:
        ValidationError: naming the stage, the microbatch and what it got; or the ranks that wait
            for each other.
    """
    trained = any(t.has_gradient for stage in program.stages for t in stage.parameters)
    kinds = ("forward", "backward") if trained else ("forward",)
    stages = [_Stage(stage, number, program, kinds) for number, stage in enumerate(program.stages)]
    num, num_stages = program.microbatches.num, len(stages)
    lists = orders(schedule, num_stages, num, num_stages // num_ranks)
    left = [[action for action in actions if action.kind in kinds] for actions in lists]
    while any(left):
        ready = [actions for actions in left if actions and _is_ready(stages, actions[0])]
        if not ready:
            waiting = ", ".join(f"{a[0].kind} of stage {a[0].stage}" for a in left if a)
            raise invalid(f"ranks wait for each other: {waiting}")
        for actions in ready:
            _run(stages, actions.pop(0))
    for stage in stages:
        stage.finish()


def _is_ready(stages: Sequence[_Stage], action: Action) -> bool:
    """Whether what a stage receives was made, and backward has what forward saves."""
    ahead, number = action.kind == "forward", action.microbatch
    source = action.stage - 1 if ahead else action.stage + 1
    came = not 0 <= source < len(stages) or (action.kind, number) in stages[source].sent
    return came and (ahead or stages[action.stage].runs["forward", number] > 0)


def _run(stages: Sequence[_Stage], action: Action) -> None:
    """One forward or backward, with what it receives before and sends after: one tensor after the
    other, as ranks do.
    """
    stage, number = stages[action.stage], action.microbatch
    ahead = action.kind == "forward"
    source = action.stage - 1 if ahead else action.stage + 1
    buffers = stage.work.arriving(number) if ahead else stage.work.arriving_back(number)
    sent = stages[source].sent.pop((action.kind, number)) if 0 <= source < len(stages) else []
    if len(sent) != len(buffers):
        raise stage.error(number, f"{len(sent)} tensors come, and it takes {len(buffers)}")
    for buffer, each in zip(buffers, sent, strict=True):
        buffer.came = each  # type: ignore[attr-defined]
    stage.number = number
    (stage.work.forward if ahead else stage.work.backward)(number)
    leaving = stage.work.leaving(number) if ahead else stage.work.leaving_back(number)
    stage.sent[action.kind, number] = list(leaving)


class _Work(StageWork):
    """A stage's work, whose tensors are symbols."""

    def _empty(self, tensor: ProgramTensor) -> Any:
        return _Buffer(tensor.name)

    def _tangent(self, output: ProgramTensor, number: int) -> Any:
        if output.is_loss:
            return super()._tangent(output, number)
        return _Symbol(f"answer {output.name}", number)


class _Stage:
    """One stage, and the executor of its work."""

    groups = ()

    def __init__(
        self, program: Program, stage: int, whole: StagedProgram, kinds: Sequence[str]
    ) -> None:
        self.program, self.stage, self.kinds = program, stage, kinds
        self.num, keep = whole.microbatches.num, "backward" in kinds
        self.weight, self.number = whole.microbatches.weight, -1
        self.sent: dict[tuple[str, int], list[Any]] = {}
        self.runs: Counter[tuple[str, int]] = Counter()
        self.sums = [_Symbol(f"sum of {t.name}") for t in program.sums]
        self.ended = False
        self.work = _Work(program, self, _DEVICE)  # type: ignore[arg-type]
        own = [t for t in program.inputs if not t.crosses]
        parts = [{t.name: _Symbol(t.name, number) for t in own} for number in range(self.num)]
        parameters = [_Symbol(t.name) for t in program.parameters]
        self.work.begin((), parameters, (), parts, self.weight, keep=keep)  # type: ignore[arg-type]

    def error(self, number: int, why: str) -> ValidationError:
        """Of this stage."""
        what = f"stage {self.stage} at microbatch {number} of {self.num}: {why}"
        return invalid(what)

    def _check(self, what: str, found: Sequence[Any], due: Sequence[Any]) -> None:
        for one, other in zip(found, due, strict=True):
            came = one.came if isinstance(one, _Buffer) else one
            if came != other:
                raise self.error(self.number, f"{what} gets {came}, where {other} is due")

    def finish(self) -> None:
        """After a step: each microbatch went forward and backward, and the sums were made use of."""
        for number in range(self.num):
            for kind in self.kinds:
                if self.runs[kind, number] != 1:
                    raise self.error(number, f"{kind} runs {self.runs[kind, number]} times")
        self.work.finish()
        if self.sums and "backward" in self.kinds and not self.ended:
            raise self.error(self.num - 1, "nothing is made of the sums of gradients")

    # What an executor does.

    def begin(self, parameters: Sequence[Any]) -> list[Any]:
        """Parameters as microbatches read them."""
        return [_Symbol(f"gathered {p.name}") for p in parameters]

    def new_sums(self) -> list[Any]:
        """What gradients are added to."""
        return list(self.sums)

    def forward(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        *,
        keep: bool,
    ) -> tuple[list[Any], list[Any]]:
        """One microbatch."""
        number = self.number
        self.runs["forward", number] += 1
        due = [_Symbol(t.name, number) for t in self.program.inputs]
        self._check("forward", inputs, due)
        gathered = [_Symbol(f"gathered {t.name}") for t in self.program.parameters]
        self._check("forward", parameters, gathered)
        made = [_Symbol(t.name, number) for t in self.program.outputs]
        return made, [_Symbol(f"saved by stage {self.stage}", number)]

    def backward(
        self, saved: list[Any], tangents: list[Any], sums: Sequence[Any] = (), *,
        first: bool = False, absent: frozenset[int] = frozenset(),
    ) -> list[Any]:  # fmt: skip
        """One microbatch's gradients."""
        number, before = (
            self.number,
            sum(n for (kind, _), n in self.runs.items() if kind == "backward"),
        )
        self.runs["backward", number] += 1
        self._check("backward", saved, [_Symbol(f"saved by stage {self.stage}", number)])
        self._check("backward", sums, self.sums)
        if first != (before == 0 and bool(self.sums)):
            done = "writes over" if first else "adds to"
            raise self.error(
                number, f"backward {done} sums to which {before} microbatches were added"
            )
        ends = [t for t in self.program.outputs if t.has_gradient]
        for t, tangent in zip(ends, tangents, strict=True):
            self._check_tangent(t, tangent)
        returned = [t for t in self.program.inputs if t.has_gradient]
        trained = [t for t in self.program.parameters if t.has_gradient]
        gradients = self.sums or [torch.zeros(1) for _ in trained]
        return [*gradients, *(_Symbol(f"gradient of {t.name}", number) for t in returned)]

    def _check_tangent(self, output: ProgramTensor, tangent: Any) -> None:
        if output.is_loss:
            weight = float(tangent)
            if weight != float(torch.tensor(self.weight, dtype=output.dtype)):
                raise self.error(
                    self.number, f"the loss weighs {weight}, where {self.weight} is due"
                )
            return
        name = "gradient of" if output.crosses else "answer"
        self._check("backward", [tangent], [_Symbol(f"{name} {output.name}", self.number)])

    def end(self, sums: Sequence[Any]) -> list[Any]:
        """Gradients as parameters rest."""
        self._check("the end of a step", sums, self.sums)
        self.ended = True
        return [torch.zeros(1) for _ in sums]
