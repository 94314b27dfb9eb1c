"""A cache for equal stages, each of which is solved and measured once.

Two problems are equal if they differ only in names and in the number of microbatches in flight. The
same decisions, by index, then have the same cost in both. Two programs are equal if their graphs
are equal node by node, and so are the tensors at their borders. They then hold the same bytes at
each moment. The memory of the last programs is stored by object identity, since the search reads
the peak first, and all moments if the peak exceeds the budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from torch import fx

from autopar.core.problem import Problem
from autopar.core.solution import FractionalGroups, Multipliers, Solution
from autopar.program.peak_memory import NodePeak, PeakMemory
from autopar.program.program import ProgramTensor, StageProgram
from autopar.program.stage_memory import SIMULATED, ChunkMemory, StagePeak
from autopar.solve import evaluate_choices, fits
from autopar.solve.memory_rows import budget_rows

Form = tuple[object, ...]
Held = tuple[PeakMemory, tuple[NodePeak, ...]]
# Number of stored programs: a plan without overlap, and its candidates with overlap.
_LAST = 4


class Effort(IntEnum):
    """The extent of a search.

    MIXED: until it is known which layers decide separately. WHOLE: with the present groups of
    layers; it ends with the first plan if more would take long. END: until plan and bound are
    close, or a limit is reached.
    """

    MIXED = 0
    WHOLE = 1
    END = 2


@dataclass
class StageCache:
    """The solutions and measurements of earlier stages."""

    _answers: list[tuple[Problem, Problem, Effort, Solution]] = field(
        default_factory=list
    )  # the problem, the problem without names, the effort, the solution
    _separate_ops: list[tuple[Problem, int, FractionalGroups]] = field(
        default_factory=list
    )  # the problem without names, microbatches in flight, the ops that decide separately
    _peaks: dict[Form, tuple[int, StagePeak]] = field(
        default_factory=dict
    )  # the microbatches in flight, and the peak
    _memories: dict[Form, ChunkMemory] = field(default_factory=dict)
    _rehearsed: deque[tuple[StageProgram, Held]] = field(
        default_factory=lambda: deque(maxlen=_LAST)
    )

    def known(self, problem: Problem, effort: Effort) -> Solution | FractionalGroups | None:
        """Look up the solution of an equal problem: decisions that fit here and whose bound holds,
        or the ops that decide separately with as many microbatches in flight.

        Args:
            problem: the problem to be solved.
            effort: effort of the search; the result of a search with more effort is also used.
        """
        nameless = _nameless(problem)
        if (
            effort is Effort.MIXED
            and (separate_ops := self._known_separate_ops(nameless, problem)) is not None
        ):
            return separate_ops
        for other, form, spent, choices in self._answers:
            if effort > spent and (choices.mixed or choices.unfinished):
                continue
            same = other.num_in_flight == problem.num_in_flight
            # Without budget rows a solution does not depend on the microbatches in flight.
            holds = form == nameless and (same or not choices.stats.get("budget_rows"))
            if holds and fits(problem, evaluate_choices(problem, choices)):
                return _rename_rows(choices, other, problem)
        return None

    def _known_separate_ops(self, nameless: Problem, problem: Problem) -> FractionalGroups | None:
        """Look up the ops of a problem that decide separately."""
        for form, num, separate_ops in self._separate_ops:
            if num == problem.num_in_flight and form == nameless:
                return separate_ops
        return None

    def learn(self, problem: Problem, choices: Solution | FractionalGroups, effort: Effort) -> None:
        """Store a solution, unless the solver ran out of time.

        Args:
            problem: the solved problem.
            choices: its solution.
            effort: effort of the search.
        """
        if isinstance(choices, FractionalGroups):
            self._separate_ops.append((_nameless(problem), problem.num_in_flight, choices))
        elif not choices.stats.get("timed_out"):
            self._answers.append((problem, _nameless(problem), effort, choices))

    def measure_once(self, program: StageProgram, measure: Callable[[], Held]) -> Held:
        """Return the memory of a program, measured if it is not one of the last programs."""
        for other, memory in self._rehearsed:
            if other is program:
                return memory
        self._rehearsed.append((program, measure()))
        return self._rehearsed[-1][1]

    def peak(
        self, program: StageProgram, num_in_flight: int, measure: Callable[[], StagePeak]
    ) -> StagePeak:
        """Return the peak of a stage under one schedule, measured if no equal program is stored.

        Args:
            program: the program of the stage.
            num_in_flight: microbatches that wait for their backward.
            measure: measures the peak of the program.
        """
        flying = min(num_in_flight, SIMULATED)  # each further microbatch adds its held bytes
        form = (flying, *form_of(program))
        if form not in self._peaks:
            self._peaks[form] = (num_in_flight, measure())
        before, peak = self._peaks[form]
        return StagePeak(
            peak.peak_bytes + (num_in_flight - before) * peak.held_bytes, peak.held_bytes
        )

    def memory(self, program: StageProgram, measure: Callable[[], ChunkMemory]) -> ChunkMemory:
        """Return the memory of a stage on a rank with several stages, measured if no equal program
        is stored."""
        form = form_of(program)
        if form not in self._memories:
            self._memories[form] = measure()
        memory = self._memories[form]
        names = [
            t.name
            for t in (
                *program.parameters,
                *program.buffers,
                *(t for t in program.inputs if t.given),
            )
        ]
        return replace(
            memory,
            resting=dict(zip(names, memory.resting.values(), strict=True)),
            mutated=program.mutated,
        )


def _nameless(problem: Problem) -> Problem:
    return replace(
        problem,
        ops=tuple(replace(op, key="") for op in problem.ops),
        values=tuple(replace(value, key="") for value in problem.values),
        moments=tuple(replace(moment, key="") for moment in problem.moments),
        num_in_flight=1,
    )


def _rename_rows(choices: Solution, other: Problem, problem: Problem) -> Solution:
    """Rename the memory rows of a solution's multipliers to the rows of another problem."""
    proven = choices.multipliers
    if proven is None:
        return choices
    names = {
        old.name: new.name
        for old, new in zip(budget_rows(other), budget_rows(problem), strict=True)
    }

    def rename(found: Multipliers) -> Multipliers:
        """Return multipliers with renamed memory rows."""
        worths = {names[name]: worth for name, worth in found.memory_s.items()}
        cases = tuple(replace(case, multipliers=rename(case.multipliers)) for case in found.cases)
        return replace(found, memory_s=worths, cases=cases)

    return replace(choices, multipliers=rename(proven))


def form_of(program: StageProgram) -> Form:
    """Make a key of a program without its names."""
    tensors = (program.parameters, program.buffers, program.inputs, program.outputs, program.sums)
    modules = (program.forward, program.backward, program.begin, program.end)
    graphs = tuple(None if module is None else _graph(module) for module in modules)
    return (
        *graphs,
        *(tuple(map(_tensor, each)) for each in tensors),
        program.num_saved,
        len(program.mutated),
    )


def _tensor(tensor: ProgramTensor) -> Form:
    flags = tensor.requires_grad, tensor.has_gradient, tensor.is_loss, tensor.crosses, tensor.given
    return tensor.shape, tensor.view, str(tensor.dtype), str(tensor.layout), flags


def _graph(module: fx.GraphModule) -> Form:
    """Describe the nodes of a graph in order, with positions instead of names."""
    place = {node: f"%{number}" for number, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        target = {"placeholder": "", "get_attr": object()}.get(
            node.op, str(node.target)
        )  # attributes of equal names may differ, so they are never equal
        lines.append(
            (node.op, target, str(fx.map_arg((node.args, node.kwargs), place.__getitem__)))
        )
    return tuple(lines)
