"""autopar's plans for one device under budgets: of all bytes, as users set them, and of activations
only.

Gradients are as large as parameters, and all of them exist at the end of backward, so a budget of
all bytes cannot be below twice the parameters. The papers of the other methods compare activations
only. For this comparison, plans are also searched for under a budget without gradients: a storage
that becomes a gradient does not count from the op that creates it, as if memory for all gradients
were preallocated. A head whose loss is computed by rows creates its gradient in forward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from autopar.analysis.gradients import operand_written
from autopar.analysis.work import is_view
from autopar.api.compiling import compile
from autopar.capture import Trace, capture
from autopar.capture.chunked_loss import loss_by_rows
from autopar.capture.graphs import IN_PLACE
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Value
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.errors import InfeasibleError
from autopar.planner.candidates import Candidate
from autopar.planner.comm_schedule import Peaks
from autopar.program.peak_memory import NodePeak, node_peaks, trace_peak
from autopar.program.program import Program, StageProgram
from autopar.program.reorder import write_order
from autopar.request import Outputs, PlanOptions
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule
from autopar.sharding import Forced, Starts, classes_of, split_by_layers
from benchmarks.rivals.measuring import Variant
from benchmarks.searching import searched

MESH = Mesh({"d": 1})
METHOD = "autopar"
GAP = 0.002
ROWS = (128, 64)  # rows of logits at a time, if a plan of activations only may have fewer than all


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan that can be run.

    Attributes:
        variant: runs the plan.
        decisions: the strategies of its ops, and the kept and recomputed values.
        predicted_peak_bytes: predicted peak of all bytes.
        num_recomputed: number of nodes that backward recomputes.
        gap: gap to the proven bound.
    """

    variant: Variant
    decisions: object
    predicted_peak_bytes: int
    num_recomputed: int
    gap: float


class LossAlone(nn.Module):
    """A model with the loss as its only output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Return the loss only."""
        return {"loss": self.model(**batch)["loss"]}


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans for one model and batch on one device.

    Attributes:
        model: the model.
        batch: its batch.
        trace: the trace of the call.
        profile: the hardware.
        resident_bytes: bytes of parameters, buffers and the batch.
    """

    model: nn.Module
    batch: Mapping[str, Tensor]
    trace: Trace
    profile: HardwareProfile
    resident_bytes: int

    @staticmethod
    def of(model: nn.Module, batch: Mapping[str, Tensor], hardware: str) -> Planner:
        wrapped = LossAlone(model)
        held = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in (*model.parameters(), *model.buffers(), *batch.values())
        }
        return Planner(
            wrapped,
            batch,
            capture(wrapped, (), batch),
            HardwareProfile.load(hardware),
            sum(held.values()),
        )

    def within(self, budget_bytes: int) -> Compiled:
        """Call `autopar.compile` under a budget of all bytes, in addition to the resident ones.

        Raises:
            InfeasibleError: if no plan fits.
        """
        how: dict[str, Any] = {
            "memory_bytes": budget_bytes + self.resident_bytes,
            "optimizer": "none",
            "gap": GAP,
        }
        module = compile(
            self.model, MESH, example_inputs=dict(self.batch), hardware=self.profile, **how
        )
        assert isinstance(module, ParallelModule)
        return self._compiled(module, module.plan, module.plan.prediction.peak_bytes)

    def activations_within(self, budget_bytes: int) -> Compiled:
        """Plan under a budget without gradients (see the module docstring).

        Raises:
            InfeasibleError: if no plan is found.
        """
        tried = self._plan_fastest(budget_bytes)
        program = Program.of_one_stage(tried.draft.trace, tried.program)
        module = ParallelModule(program, device_mesh(MESH), self.model, outputs="dtensor")
        return self._compiled(
            module, tried.plan, trace_peak(tried.program, outputs="dtensor").peak_bytes
        )

    def _plan_fastest(self, budget_bytes: int) -> Candidate:
        """Return the fastest plan that fits, with the loss computed at once or, if that requires
        recomputation, by rows.

        Raises:
            InfeasibleError: if none fits.
        """
        options = PlanOptions(
            memory_bytes=budget_bytes + self.resident_bytes,
            optimizer="none",
            gap=GAP,
            outputs="dtensor",
        )
        best: Candidate | None = None
        refusal: InfeasibleError | None = None
        for rows in (0, *ROWS):
            try:
                found = self._by_rows(rows, options)
            except InfeasibleError as error:
                refusal = error
                continue
            best = found if best is None or found.time_s < best.time_s else best
            if not any(e.recompute for e in best.plan.entries):
                break
        if best is None:
            assert refusal is not None, "at least one plan was tried"
            raise refusal
        return best

    def _by_rows(self, rows: int, options: PlanOptions) -> Candidate:
        trace = loss_by_rows(self.trace, rows) if rows else self.trace
        classes, budget = classes_of(trace, MESH.shape), options.budget(self.profile)

        def pricing(starts: Starts) -> Priced:
            forced = replace(Forced.nothing(), starts=starts)
            priced = price(
                trace,
                split_by_layers(classes, starts),
                MESH,
                self.profile,
                budget_bytes=budget,
                optimizer="none",
                forced=forced,
            )
            return _without_gradients(priced, trace)

        tried = searched(
            trace, MESH, self.profile, pricing, options, peaks=_ActivationPeaks(options)
        )
        return replace(tried, plan=replace(tried.plan, loss_rows=rows))

    def _compiled(self, module: ParallelModule, plan: Any, peak_bytes: int) -> Compiled:
        def forward() -> Tensor:
            loss: Tensor = module(**self.batch)["loss"]
            return loss

        parameters = {name.removeprefix("model."): p for name, p in module.named_parameters()}
        variant = Variant(METHOD, parameters, [*module.buffers(), *self.batch.values()], forward)
        recomputed = sum(len(e.instances) * len(e.recompute) for e in plan.entries if e.recompute)
        decisions = (
            plan.loss_rows,
            tuple((e.key, e.nodes, e.recompute) for e in plan.entries),
            plan.kept,
        )
        return Compiled(variant, decisions, peak_bytes, recomputed, plan.proof.gap)


def _without_gradients(priced: Priced, trace: Trace) -> Priced:
    """Return the problem in which storages that become gradients have no bytes."""
    problem, uncounted = priced.problem, storages_of_gradients(trace)
    held = {
        v.value
        for v, refs in zip(problem.variants, priced.refs, strict=True)
        if any(name in uncounted for name, _ in refs)
    }
    values = tuple(
        _without_bytes(value) if number in held else value
        for number, value in enumerate(problem.values)
    )
    ops = tuple(
        replace(op, strategies=tuple(replace(s, gradient_bytes=0) for s in op.strategies))
        for op in problem.ops
    )
    return replace(priced, problem=replace(problem, values=values, ops=ops))


def _without_bytes(value: Value) -> Value:
    return replace(value, graph=replace(value.graph, bytes=(0,) * len(value.graph.bytes)))


def storages_of_gradients(trace: Trace) -> frozenset[str]:
    """Return the nodes whose results use memory that becomes a gradient."""
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    gradients = (results[p.gradient] for p in trace.parameters if p.gradient is not None)
    return frozenset(
        node.name for gradient in gradients for node in _lineage(gradient, operand_written)
    )


def _lineage(node: Any, written: Callable[[fx.Node], int | None]) -> Iterator[fx.Node]:
    """Yield a node, and the earlier nodes whose results use the same memory, as far as the graph
    shows it.

    Args:
        node: the node.
        written: function that returns the index of the argument that a node writes into, or None.
    """
    while isinstance(node, fx.Node):
        yield node
        computes = node.op == "call_function" and node.target is not operator.getitem
        place = 0 if computes and is_view(node.target) else written(node)
        node = None if place is None else node.args[place]


def activation_peaks(program: StageProgram, outputs: Outputs) -> tuple[NodePeak, ...]:
    """Return the peak while each node of a step on one device runs, without the storages that
    become gradients."""
    program = write_order(program)
    made: dict[fx.Node, int] = {}
    gradients = next(iter(reversed(program.backward.graph.nodes))).args[0]
    saved = next(iter(reversed(program.forward.graph.nodes))).args[0]
    saved = saved[len(saved) - program.num_saved :]
    given = [node for node in program.backward.graph.nodes if node.op == "placeholder"]
    for tensor, gradient in zip(
        (t for t in program.parameters if t.has_gradient), gradients, strict=False
    ):
        *_, first = _lineage(gradient, _written)
        if first in given[: program.num_saved]:
            *_, first = _lineage(saved[given.index(first)], _written)
        first = first.args[0] if first.target is operator.getitem else first
        made[first] = made.get(first, 0) + math.prod(tensor.view) * tensor.dtype.itemsize
    uncounted, found = 0, []
    for peak in node_peaks(program, outputs=outputs):
        uncounted += made.pop(peak.node, 0)
        found.append(peak._replace(peak_bytes=peak.peak_bytes - uncounted))
    return tuple(found)


def _written(node: fx.Node) -> int | None:
    """Return the index of the argument that a node of a program writes into, or None."""
    return node.meta.get(IN_PLACE)


class _ActivationPeaks(Peaks):
    """Peaks of programs in which gradients have no bytes."""

    def peak_bytes(self, program: StageProgram) -> int:
        """Return the largest peak."""
        return max(peak.peak_bytes for peak in self.by_node(program))

    def by_node(self, program: StageProgram) -> tuple[NodePeak, ...]:
        """Return the peak while each node runs."""
        return activation_peaks(program, self.options.outputs)


def least(planned: Any, low: int, high: int, share: float = 0.01) -> int:
    """Return the smallest budget in bytes under which a plan is found, up to a relative error of
    `share`. `low` must have no plan, and `high` one."""
    while high - low > share * high:
        middle = (low + high) // 2
        try:
            planned(middle)
        except InfeasibleError:
            low = middle
        else:
            high = middle
    return high
