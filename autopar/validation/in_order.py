"""Check the order of a pipeline's step: run all stages and microbatches in the order of the ranks,
on symbols instead of tensors.

`StageWork` runs the actions of a schedule on one stage. Here it runs them with an executor that
computes no numbers, and passes symbols where ranks pass tensors. If autopar itself runs a rank's
order, as for interleaved stages, the same code runs here, with transfers of symbols (`Wires`).

Each call must receive the right symbols: the slices of the batch for its microbatch, the
neighbours' results for the same microbatch under the same names, the values that its own forward
saved, and the same sums of gradients, which the first backward writes and each later one adds to.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from autopar.errors import ValidationError
from autopar.program import transfers
from autopar.program.program import Program, ProgramTensor, StageProgram
from autopar.program.schedule import Action, orders
from autopar.program.stage_work import StageWork
from autopar.program.transfers import ForwardsFirst, Interleaving
from autopar.validation.states import invalid

# --------------------------------------------------------------------------------------------------
# Transfers of symbols between ranks in one process.
#
# A transfer starts all tensors that a stage passes on at once. Between two ranks, the n-th start of
# one must meet the n-th start of the other, and one of them must send and the other receive:
# process groups pair them in this way. Received tensors are valid after the wait. Every started
# transfer must be waited for.

Steps = Iterator[list[Any]]
"""A rank's step as a generator. It yields each transfer that it waits for."""


@dataclass(eq=False)
class _Transfer:
    """One side of a transfer.

    Attributes:
        rank: the rank of this side.
        other: the rank that this side names as its peer.
        kind: see `autopar.program.transfers.peer`.
        stage: see `autopar.program.transfers.peer`.
        tensors: symbols to send, or buffers to receive them.
        is_done: whether the rank waited for it.
        meets: the other side, once it has started.
    """

    rank: int
    other: int
    kind: str
    stage: int
    tensors: list[Any]
    is_done: bool = False
    meets: _Transfer | None = None

    def __str__(self) -> str:
        way = "to" if self.sends else "from"
        return f"{self.kind} of stage {self.stage}, {way} rank {self.other}"

    @property
    def sends(self) -> bool:
        """Whether this side sends."""
        return self.kind.startswith("send")


@dataclass
class Wires:
    """All transfers of a step.

    Attributes:
        size: number of ranks.
        in_one_order: whether sends and receives between two ranks are paired in a single order. If
            not, each direction has its own order, as for transfers started as a batch.
        started: all sides started so far.
    """

    size: int
    in_one_order: bool
    started: list[_Transfer] = field(default_factory=list)
    _open: dict[tuple[int, int, bool | None], deque[_Transfer]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def of(self, rank: int) -> _Transfers:
        """Return the object with which a rank starts its transfers."""
        return _Transfers(self, rank)

    def start(self, rank: int, kind: str, tensors: list[Any], stage: int) -> list[_Transfer]:
        """Start one side of a transfer. Pair it with the other side if that has started.

        Args:
            rank: the rank that starts it.
            kind: see `autopar.program.transfers.peer`.
            tensors: symbols to send, or buffers to receive them.
            stage: see `autopar.program.transfers.peer`.

        Returns:
            The side; no side if there are no tensors.
        """
        if not tensors:
            return []
        transfer = _Transfer(rank, transfers.peer(kind, stage) % self.size, kind, stage, tensors)
        self.started.append(transfer)
        facing = self._open[transfer.other, rank, self._way(not transfer.sends)]
        if facing:
            self._pair(facing.popleft(), transfer)
        else:
            self._open[rank, transfer.other, self._way(transfer.sends)].append(transfer)
        return [transfer]

    def _way(self, sends: bool) -> bool | None:
        return None if self.in_one_order else sends

    def _pair(self, one: _Transfer, made: _Transfer) -> None:
        if one.sends == made.sends:
            message = f"rank {one.rank} starts {one} while rank {made.rank} starts {made}"
            raise invalid(f"ranks wait for each other: {message}")
        if len(one.tensors) != len(made.tensors):
            sent, receiver = (one, made) if one.sends else (made, one)
            message = f"it receives {len(sent.tensors)} tensors, expected {len(receiver.tensors)}"
            raise invalid(f"stage {receiver.stage}: {message}")
        one.meets, made.meets = made, one


@dataclass(frozen=True)
class _Transfers:
    """`autopar.program.transfers.Transfers` of one rank, on symbols."""

    wires: Wires
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.wires.size

    def start(self, kind: str, tensors: Sequence[Any], stage: int) -> list[_Transfer]:
        """Start a transfer; see `autopar.program.transfers.Transfers.start`.

        Args:
            kind, tensors, stage: see there.
        """
        return self.wires.start(self.rank, kind, list(tensors), stage)

    start_together = start


def run_ranks(wires: Wires, steps: Mapping[int, Callable[[], Steps]]) -> None:
    """Run all ranks. Each rank runs until it waits for a transfer that its peer has not started.

    Args:
        wires: the transfers of all ranks.
        steps: rank → function that starts its step.

    Raises:
        ValidationError: if ranks wait for each other, or if a rank does not wait for a transfer.
    """
    running = {rank: make() for rank, make in steps.items()}
    pending: dict[int, list[_Transfer]] = {rank: [] for rank in running}
    while running:
        ready = [rank for rank in running if all(t.meets for t in pending[rank])]
        if not ready:
            waiting = (f"rank {rank} for {pending[rank][0]}" for rank in running)
            message = f"ranks wait for each other: {'; '.join(waiting)}"
            raise invalid(message)
        for rank in ready:
            _advance(rank, running, pending)
    for transfer in wires.started:
        if not transfer.is_done or transfer.meets is None:
            raise invalid(f"rank {transfer.rank} does not wait for {transfer}")


def _advance(rank: int, running: dict[int, Steps], pending: dict[int, list[_Transfer]]) -> None:
    for transfer in pending[rank]:
        transfer.is_done = True
        if not transfer.sends and transfer.meets is not None:
            for buffer, symbol in zip(transfer.tensors, transfer.meets.tensors, strict=True):
                buffer.symbol = symbol
    try:
        pending[rank] = next(running[rank])
    except StopIteration:
        running.pop(rank)


_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Symbol:
    """A tensor's name and its microbatch; −1 if all microbatches share the tensor."""

    name: str
    microbatch: int = -1

    def __str__(self) -> str:
        return self.name if self.microbatch < 0 else f"{self.name} of microbatch {self.microbatch}"

    def contiguous(self) -> _Symbol:
        """Return the symbol itself."""
        return self


class _Buffer:
    """A buffer that receives a symbol."""

    symbol: _Symbol | None = None

    def __init__(self, name: str) -> None:
        self.name = name


def check_order(program: Program, schedule: str, num_ranks: int) -> None:
    """Check the order of a step: all forwards and, if anything is trained, all backwards.

    Args:
        program: the program with all stages.
        schedule: name of the schedule.
        num_ranks: number of ranks of the pipeline. All have equally many stages.

    Raises:
        ValidationError: with the stage, the microbatch and the wrong operand; or with the ranks
            that wait for each other.
    """
    trained = any(t.has_gradient for stage in program.stages for t in stage.parameters)
    kinds = ("forward", "backward") if trained else ("forward",)
    stages = [_Stage(stage, number, program, kinds) for number, stage in enumerate(program.stages)]
    if len(stages) > num_ranks:
        _check_interleaved(stages, num_ranks, trained=trained)
    elif trained and program.begins_backward:
        _check_scheduled(stages, orders(schedule, len(stages), program.microbatches.num), kinds)
    else:
        for kind in kinds:
            _forwards_first(stages, kind)
    for stage in stages:
        stage.finish()


def _check_interleaved(stages: Sequence[_Stage], num_ranks: int, *, trained: bool) -> None:
    """Run several stages per rank, as `Interleaving` does."""
    wires, num = Wires(num_ranks, in_one_order=True), stages[0].num
    steps = {}
    for rank in range(num_ranks):
        works: dict[int, Any] = {stage.stage: stage.work for stage in stages[rank::num_ranks]}
        running = Interleaving(works, wires.of(rank), num)  # type: ignore[arg-type]
        steps[rank] = partial(running.steps, backward=trained)
    run_ranks(wires, steps)


def _forwards_first(stages: Sequence[_Stage], kind: str) -> None:
    """Run one stage per rank, as `ForwardsFirst` does: no backward runs between forwards."""
    wires, steps = Wires(len(stages), in_one_order=False), {}
    for stage in stages:
        between: Any = wires.of(stage.stage)
        running = ForwardsFirst(stage.work, stage.stage, between, stage.num)
        steps[stage.stage] = partial(running.steps, kind)
    run_ranks(wires, steps)


_Sent = dict[tuple[int, int], deque[list[Any]]]
"""(source stage, target stage) → symbols sent and not yet received."""


def _check_scheduled(
    stages: Sequence[_Stage], lists: Sequence[Sequence[Action]], kinds: Sequence[str]
) -> None:
    """Run one stage per rank in the order of torch's schedules, which call `StageWorker`."""
    sent: _Sent = defaultdict(deque)
    remaining = [[action for action in actions if action.kind in kinds] for actions in lists]
    while any(remaining):
        ready = [
            actions for actions in remaining if actions and _is_ready(stages, actions[0], sent)
        ]
        if not ready:
            waiting = ", ".join(f"{a[0].kind} of stage {a[0].stage}" for a in remaining if a)
            raise invalid(f"ranks wait for each other: {waiting}")
        for actions in ready:
            _run(stages, actions.pop(0), sent)
    for (source, target), waiting_there in sent.items():
        if waiting_there:
            message = f"stage {target} receives less than stage {source} sends"
            raise invalid(message)


def _source(stages: Sequence[_Stage], action: Action) -> int | None:
    """Return the stage that an action receives from; None at an end of the pipeline."""
    is_end = action.stage == (0 if action.kind == "forward" else len(stages) - 1)
    return None if is_end else transfers.peer(f"receive {action.kind}", action.stage)


def _is_ready(stages: Sequence[_Stage], action: Action, sent: _Sent) -> bool:
    """Return whether a stage's operands were sent and, for a backward, whether its forward has
    run."""
    source, ahead = _source(stages, action), action.kind == "forward"
    came = source is None or bool(sent[source, action.stage])
    return came and (ahead or stages[action.stage].runs["forward", action.microbatch] > 0)


def _run(stages: Sequence[_Stage], action: Action, sent: _Sent) -> None:
    """Run one forward or backward. Receive before it and send after it, one tensor after the other,
    as ranks do."""
    stage, number = stages[action.stage], action.microbatch
    source, ahead = _source(stages, action), action.kind == "forward"
    buffers = stage.work.arriving_inputs(number) if ahead else stage.work.arriving_gradients(number)
    come = sent[source, action.stage].popleft() if source is not None else []
    if len(come) != len(buffers):
        raise stage.error(number, f"it receives {len(come)} tensors, expected {len(buffers)}")
    for buffer, symbol in zip(buffers, come, strict=True):
        buffer.symbol = symbol
    (stage.work.forward if ahead else stage.work.backward)(number)
    leaving = stage.work.leaving_outputs(number) if ahead else stage.work.leaving_gradients(number)
    if leaving or (stage.stage < len(stages) - 1 if ahead else stage.stage > 0):
        sent[action.stage, transfers.peer(f"send {action.kind}", action.stage)].append(
            list(leaving)
        )


class _Work(StageWork):
    """The work of a stage, on symbols."""

    def _empty(self, tensor: ProgramTensor) -> Any:
        return _Buffer(tensor.name)

    def _tangent(self, output: ProgramTensor, number: int) -> Any:
        if output.is_loss:
            return super()._tangent(output, number)
        return _Symbol(f"the tangent of {output.name}", number)

    def forward(self, number: int) -> None:
        """Run a forward; see `StageWork.forward`."""
        self._run(super().forward, "forward", number)

    def backward(self, number: int) -> None:
        """Run a backward; see `StageWork.backward`."""
        self._run(super().backward, "backward", number)

    def _run(self, run: Callable[[int], None], kind: str, number: int) -> None:
        stage: Any = self.executor  # it checks operands against this microbatch
        stage.number = number
        try:
            run(number)
        except (StopIteration, KeyError):  # an operand does not exist yet
            raise stage.error(number, f"{kind} runs before its operands were received") from None


class _Stage:
    """One stage of the pipeline; the executor of its own work."""

    groups = ()

    def __init__(
        self, program: StageProgram, stage: int, whole: Program, kinds: Sequence[str]
    ) -> None:
        self.program, self.stage, self.kinds = program, stage, kinds
        self.num, keep = whole.microbatches.num, "backward" in kinds
        self.weight, self.number = whole.microbatches.weight, -1
        self.runs: Counter[tuple[str, int]] = Counter()
        self.sums = [_Symbol(f"the sum of {t.name}") for t in program.sums]
        self.ended = False
        self.work = _Work(program, self, _DEVICE)  # type: ignore[arg-type]
        batch_inputs = [t for t in program.inputs if not t.crosses]
        parts = [
            {t.name: _Symbol(t.name, number) for t in batch_inputs} for number in range(self.num)
        ]
        parameters = [_Symbol(t.name) for t in program.parameters]
        self.work.begin((), parameters, (), parts, self.weight, keep=keep)

    def error(self, number: int, why: str) -> ValidationError:
        """Return an error of this stage."""
        message = f"stage {self.stage} at microbatch {number} of {self.num}: {why}"
        return invalid(message)

    def _check(self, what: str, found: Sequence[Any], due: Sequence[Any]) -> None:
        for one, other in zip(found, due, strict=True):
            came = one.symbol if isinstance(one, _Buffer) else one
            if came != other:
                came = "nothing" if came is None else came
                raise self.error(self.number, f"{what} reads {came}, expected {other}")

    def finish(self) -> None:
        """Check, after a step, that each microbatch ran forward and backward once, and that the
        sums were used."""
        for number in range(self.num):
            for kind in self.kinds:
                if self.runs[kind, number] != 1:
                    raise self.error(number, f"{kind} runs {self.runs[kind, number]} times")
        self.work.finish()
        if self.sums and "backward" in self.kinds and not self.ended:
            raise self.error(self.num - 1, "the sums of gradients are never read")

    # The interface of `Executor`.

    def begin(self, parameters: Sequence[Any]) -> list[Any]:
        """Return symbols for the parameters as microbatches read them."""
        return [_Symbol(f"the gathered {p.name}") for p in parameters]

    def new_sums(self) -> list[Any]:
        """Return symbols for the sums of gradients."""
        return list(self.sums)

    def forward(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        inputs: Sequence[Any],
        *,
        keep: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Check the operands of one microbatch's forward, and return symbols for its results.

        Args:
            parameters, buffers, inputs, keep: see `autopar.program.executor.Executor.forward`.
        """
        number = self.number
        self.runs["forward", number] += 1
        due = [_Symbol(t.name, number) for t in self.program.inputs]
        self._check("forward", inputs, due)
        gathered = [_Symbol(f"the gathered {t.name}") for t in self.program.parameters]
        self._check("forward", parameters, gathered)
        results = [_Symbol(t.name, number) for t in self.program.outputs]
        return results, [_Symbol(f"the tensors saved by stage {self.stage}", number)]

    def backward(
        self,
        saved: list[Any],
        tangents: list[Any],
        sums: Sequence[Any] = (),
        *,
        first: bool = False,
        absent: frozenset[int] = frozenset(),
    ) -> list[Any]:
        """Check the operands of one microbatch's backward, and return symbols for its gradients.

        Args:
            saved, tangents, sums, first, absent: see `autopar.program.executor.Executor.backward`.
        """
        number, before = (
            self.number,
            sum(n for (kind, _), n in self.runs.items() if kind == "backward"),
        )
        self.runs["backward", number] += 1
        self._check(
            "backward", saved, [_Symbol(f"the tensors saved by stage {self.stage}", number)]
        )
        self._check("backward", sums, self.sums)
        if first != (before == 0 and bool(self.sums)):
            action = "writes over" if first else "adds to"
            raise self.error(number, f"backward {action} sums of {before} microbatches")
        ends = [t for t in self.program.outputs if t.has_gradient]
        for t, tangent in zip(ends, tangents, strict=True):
            self._check_tangent(t, tangent)
        returned = [t for t in self.program.inputs if t.has_gradient]
        trained = [t for t in self.program.parameters if t.has_gradient]
        gradients = self.sums or [torch.zeros(1) for _ in trained]
        return [*gradients, *(_Symbol(f"the gradient of {t.name}", number) for t in returned)]

    def _check_tangent(self, output: ProgramTensor, tangent: Any) -> None:
        if output.is_loss:
            weight = float(tangent)
            if weight != float(torch.tensor(self.weight, dtype=output.dtype)):
                raise self.error(
                    self.number, f"the weight of the loss is {weight}, expected {self.weight}"
                )
            return
        name = "the gradient of" if output.crosses else "the tangent of"
        self._check("backward", [tangent], [_Symbol(f"{name} {output.name}", self.number)])

    def end(self, sums: Sequence[Any]) -> list[Any]:
        """Check the sums, and return the gradients in the layouts in which parameters are
        stored."""
        self._check("the end of a step", sums, self.sums)
        self.ended = True
        return [torch.zeros(1) for _ in sums]
