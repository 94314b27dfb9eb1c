"""The minimum memory of plans: a proven lower bound, and emitted plans that need little memory.

    proven ≤ minimum memory of all plans ≤ found

Neither depends on the budget or on the plans of a search within a budget. So the same plan is found
again if its peak is passed as the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.capture.trace import Trace
from autopar.core.problem import MemoryPoint, Problem, Value
from autopar.core.solution import Solution
from autopar.cost.memory import Liveness, add, freeze_sizes
from autopar.cost.priced import Priced
from autopar.cost.spans import NEVER, Span
from autopar.errors import InfeasibleError, size_text
from autopar.planner.candidates import Candidate
from autopar.sharding import Cluster
from autopar.solve import Least, Lightest, shortage, within

# --------------------------------------------------------------------------------------------------
# Lower bound on memory: the bytes that any plan holds while an op runs, as moments without a
# reserve.
#
# `Liveness.certain` is the part of this bound that has rows in every search. The moments here also
# cover forward, and terms that add little or rarely bind:
#
#     results and operands of the op    operands in the layout in which the op reads them
#     a parameter that the op reads     bytes as read − bytes at rest: a second copy, if the layouts
#                                       differ
#     a value that waits for a reader   in forward a kept value, after its last reader there; any
#                                       other value in its fewest bytes in any layout
#     a complete gradient               its fewest bytes, if gradients are not added to sums
#     outputs that were returned        in the layout in which they are returned


def certain_moments(liveness: Liveness) -> tuple[MemoryPoint, ...]:
    """List moments whose memory any plan holds.

    There is one moment for each op whose position is the same in every plan, and one for each
    widening of sums. Only the first and the last of equal ops are used.
    """
    moments, last = [], _last_forward(liveness)
    for op, source in enumerate(liveness.priced.sources):
        if source.cluster is not None:
            instances = list(enumerate(source.cluster.instances))
            order = sorted(
                (liveness.positions[c.members[0].node], n)
                for n, c in instances
                if c.members[0].node in last
            )
            for now, instance in dict.fromkeys((*order[:1], *order[-1:])):
                moments.append(
                    _Now(liveness, op, source.cluster.instances[instance], now, last).moment()
                )
    return (*moments, *liveness.widenings())


def _last_forward(liveness: Liveness) -> dict[str, int]:
    """Map each node to the position of its last reader in forward, including readers of its views;
    `NEVER` if it has none.

    Only nodes and readers whose position is the same in every plan are counted. A node of forward
    that only backward needs is excluded, since backward may run it instead.
    """
    last_readers: dict[str, int] = {}
    for node in reversed(liveness.trace.graph.nodes):
        op, places = liveness.owner.get(node.name), liveness.positions
        is_backward = node.meta.get("phase") == "backward" or (
            op is not None and not liveness.priced.problem.ops[op].recomputable
        )
        running = [
            u
            for u in node.users
            if u.op == "output" or (u.meta.get("phase") == "forward" and u.name in last_readers)
        ]
        if is_backward or running or node.op == "placeholder":
            views = [
                last_readers[u.name]
                for u in running
                if u.op != "output" and liveness.spans[u.name].is_view
            ]
            last_readers[node.name] = max([NEVER, *(places[u.name] for u in running), *views])
    return last_readers


@dataclass(frozen=True, slots=True)
class _Now:
    """A running op: the first node of a cluster, at a position of the trace."""

    liveness: Liveness
    op: int
    cluster: Cluster
    now: int
    last_forward: dict[str, int]

    @property
    def is_backward(self) -> bool:
        """Whether the op belongs to backward."""
        return self.liveness.priced.problem.ops[self.op].phase == "backward"

    def moment(self) -> MemoryPoint:
        """Return the bytes that any plan holds while the op runs."""
        live = self.liveness.first_node_bytes(self.op, self.cluster.members[0].node)
        bytes_by_variant: dict[int, int] = {}
        self._add_waiting(live, bytes_by_variant)
        self._add_operands(live, bytes_by_variant)
        if self.is_backward:
            self.liveness.add_returned(live, self.now)
        return MemoryPoint(
            self.cluster.members[0].node,
            tuple((v, n) for v, n in bytes_by_variant.items() if n),
            freeze_sizes(live),
        )

    def _add_waiting(self, live: dict[int, list[int]], held: dict[int, int]) -> None:
        """Add the values that wait for later readers, and complete gradients."""
        problem, spans = self.liveness.priced.problem, self.liveness.spans
        for v, refs in enumerate(self.liveness.priced.refs):
            value = problem.values[problem.variants[v].value]
            here = [(name, spans[name]) for name, _ in refs]
            if value.phase == "backward":
                num = self._add_gradients(live, value, here) if self.is_backward else 0
            else:
                held[v] = sum(self._waits(s, value.num_versions) for _, s in here)
                num = 0 if self.is_backward or value.resident else self._num_waiting(here)
            sizes = [min(value.graph.bytes)] * len(problem.ops[value.op].strategies)
            add(live, sizes, value.op, num)

    def _add_gradients(
        self, live: dict[int, list[int]], value: Value, here: Sequence[tuple[str, Span]]
    ) -> int:
        """Add complete gradients, and count the tensors of backward that wait for a reader."""
        now, read = self.now, {name for name, _ in self.cluster.operands}
        for name, span in here:
            if span.is_gradient and span.producer < now and span.until < now:
                self.liveness.add_gradient(name, value, live)
        return sum(s.producer < now < s.until and s.has_memory and n not in read for n, s in here)

    def _waits(self, span: Span, num_versions: int) -> bool:
        """Whether a tensor of forward is kept for backward while the op runs."""
        if self.is_backward:
            return span.waits(self.now, num_versions)
        return 0 <= span.last_forward < self.now and span.until >= 0

    def _num_waiting(self, here: Sequence[tuple[str, Span]]) -> int:
        """Count the tensors of forward that wait for a later reader in forward."""
        now, read = self.now, {name for name, _ in self.cluster.operands}
        return sum(
            s.producer < now < self.last_forward.get(n, NEVER) and s.has_memory and n not in read
            for n, s in here
        )

    def _add_operands(self, live: dict[int, list[int]], held: dict[int, int]) -> None:
        """Add the operands of the op, in the layouts in which it reads them."""
        problem, first = self.liveness.priced.problem, self.cluster.members[0]
        for ref, operand in {
            ref: operand for operand, ref in enumerate(self.cluster.operands) if ref in first.reads
        }.items():
            v, span = self.liveness.variant[ref], self.liveness.spans[ref[0]]
            value = problem.values[problem.variants[v].value]
            if span.is_view:
                continue
            size = value.graph.bytes
            add(
                live,
                [
                    size[value.graph.index[s.layouts.inputs[operand]]]
                    for s in problem.ops[self.op].strategies
                ],
                self.op,
                1,
            )
            if value.resident:
                rests = [
                    size[value.graph.index[s.layouts.outputs[value.result]]]
                    for s in problem.ops[value.op].strategies
                ]
                add(live, [-rest for rest in rests], value.op, 1)
            if self.is_backward and value.phase == "forward":
                held[v] -= span.waits(self.now, value.num_versions)


# --------------------------------------------------------------------------------------------------
# Emitted plans that need little memory, and the proven bound.

T = TypeVar("T")
_WEIGHTS = (0.03, 0.003)  # weights of time against memory, see `autopar.solve.min_budget`


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a plan needs on the device that lacks most, and the budget of that device.

    Attributes:
        num_bytes: bytes that the plan needs.
        budget_bytes: the budget of the device.
        where: a description of the device, if devices have unequal budgets.
    """

    num_bytes: int
    budget_bytes: int
    where: str = ""

    @property
    def share(self) -> float:
        """The needed share of the budget."""
        return self.num_bytes / self.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether the bytes are within the budget."""
        return self.num_bytes <= self.budget_bytes


def proven_bytes(trace: Trace, priced: Priced, time_limit_s: float) -> int:
    """Prove a lower bound of the bytes that any plan of a problem needs.

    Args:
        trace: the trace of the model.
        priced: the problem; its budget is ignored.
        time_limit_s: time limit of the solver, in seconds.
    """
    return Lightest(_with_moments(trace, priced), time_limit_s).bound_bytes


def low_memory_plans(
    trace: Trace, priced: Priced, time_limit_s: float, emit: Callable[[Solution], Candidate]
) -> tuple[Candidate, ...]:
    """Find plans that need little memory, without kernels.

    Args:
        trace: the trace of the model.
        priced: the problem; its budget is ignored.
        time_limit_s: time limit of the solver, in seconds.
        emit: emits the plan of a solution.
    """
    lightest = Lightest(within(_with_moments(trace, priced), frozenset()), time_limit_s)
    solutions: list[Solution] = []
    for weight in _WEIGHTS:
        choices = lightest.choices(weight)
        if choices is not None and choices not in solutions:
            solutions.append(choices)
    return tuple(emit(replace(choices, regions=frozenset())) for choices in solutions)


def prefer_fastest(plans: Sequence[T], cost: Callable[[T], tuple[Need, float]]) -> T | None:
    """Choose the fastest plan that fits, or, if none fits, the plan that needs the smallest share
    of its budget.

    Args:
        plans: the plans. If there are none, None is returned.
        cost: returns the memory and the seconds of a plan.
    """

    def order(plan: T) -> tuple[bool, float]:
        """Sort plans that fit first, by time; then the others, by memory."""
        need, time_s = cost(plan)
        return not need.fits, time_s if need.fits else need.share

    return min(plans, key=order, default=None)


def _with_moments(trace: Trace, priced: Priced) -> Problem:
    return replace(priced.problem, moments=certain_moments(Liveness(trace, priced)))


def refusal(budget: int, last: Solution | Least, smallest: int) -> InfeasibleError:
    """Make the error for a budget that no plan fits into.

    Args:
        budget: bytes per device.
        last: the last answer of the solver.
        smallest: least peak of the emitted plans, in bytes; 0 if no plan was emitted.
    """
    if smallest or isinstance(last, Solution):
        tried = f"; the smallest plan tried needs {size_text(smallest)}"
        return shortage(
            f"no plan was found that fits into {size_text(budget)} per device{tried}", smallest
        )
    needed = f"at least {size_text(last.bound_bytes)} is needed, in addition to the transient peak"
    message = f"no plan fits into {size_text(budget)} per device: {needed}"
    return shortage(message, int(last.bound_bytes))
