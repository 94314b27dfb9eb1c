"""The time line of a step for display: one bar per stretch of equal (layer, phase, kind), in
sequence.

As in the emitted program, a collective that reduces the size of its operand follows the op that
computes it. Other collectives precede their first reader. The recomputation of a layer precedes its
first backward op. The bars add up to compute and communication. If communication overlaps with
compute or shares buckets, the bars of forward and backward are those of the simulated program: bars
of compute have their simulated length, and a bucket is one stretch of communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from autopar.capture.trace import Trace
from autopar.core.problem import OpStrategy
from autopar.core.solution import Solution
from autopar.cost.priced import Priced
from autopar.emit.simulation import simulate_program
from autopar.plans import Plan, Prediction, beyond_shares_s
from autopar.program.program import StageProgram
from autopar.solve import Evaluation

Event = tuple[str, str, str, float]  # layer, phase, kind, seconds
Bar = tuple[str, str, str, float, float]  # layer, phase, kind, start, seconds
_Both = tuple[float, float]  # seconds of compute, and of own collectives
INPUTS, BEFORE, BEHIND, PARAMETERS, OPTIMIZER = (
    "inputs",
    "from the stage before",
    "from the stage behind",
    "parameters",
    "optimizer",
)
NOT_RUN = "priced, and not run"  # ops whose results have no reader in the program
OUTSIDE = (INPUTS, BEFORE, BEHIND, PARAMETERS, OPTIMIZER)  # bars outside the graphs


def timeline(
    trace: Trace, priced: Priced, choices: Solution, evaluation: Evaluation
) -> tuple[Bar, ...]:
    """List all bars of a step, in order.

    Args:
        trace: the trace of the model.
        priced: the problem.
        choices: its solution.
        evaluation: the evaluation of the solution.
    """
    return _stretches(_events(trace, priced, choices, evaluation))


def with_simulated_overlap(serial: Prediction, program: StageProgram, plan: Plan) -> Prediction:
    """Update a prediction from the simulated program: the time hidden by overlap, the time saved by
    buckets, and the time line.

    Args:
        serial: the prediction without overlap and buckets. It is returned unchanged if the plan has
            none.
        program: the emitted program of the plan.
        plan: the plan with its buckets and overlap.
    """
    if plan.overlap.slowdown >= 1.0 and not plan.buckets and not serial.beyond_shares_s:
        return serial
    once_s = beyond_shares_s(c for c in plan.communications if c.phase == "step")
    once_s -= sum(bucket.saved_s for bucket in plan.buckets if bucket.phase == "step")
    more_s = {(PARAMETERS, "communication"): once_s}
    bars: list[Bar] = []
    phases = dict(zip(("forward", "backward"), simulate_program(program, plan), strict=True))
    around = {
        phase: [bar for bar in serial.timeline if bar[0] in OUTSIDE and bar[1] == phase]
        for phase in (*phases, "step")
    }
    for phase, rest in around.items():
        for label, _, kind, _, duration_s in rest:
            duration_s += more_s.get((label, kind), 0.0)
            bars.append((label, phase, kind, _end(bars), duration_s))
        if phase in phases:
            bars += _bars_of_spans(phase, phases[phase].spans, _end(bars))
            if phases[phase].missing_s:
                bars.append((NOT_RUN, phase, "compute", _end(bars), phases[phase].missing_s))
    hidden_s = sum(phase.hidden_s for phase in phases.values())
    saved_s = sum(bucket.saved_s for bucket in plan.buckets)
    return replace(
        serial,
        timeline=tuple(bars),
        hidden_s=hidden_s,
        simulated_s=_without(serial, plan, hidden_s),
        in_buckets_s=saved_s,
    )


def _bars_of_spans(
    phase: str, spans: Iterable[tuple[str, str, float, float]], start_s: float
) -> list[Bar]:
    """Make the bars of a simulated phase, by layer on both streams, sorted by start."""
    lanes: dict[str, list[Bar]] = {"compute": [], "communication": []}
    for key, kind, at_s, duration_s in spans:
        layer = _layer(key.partition("/")[0])
        _stretch(lanes[kind], (layer, phase, kind, start_s + at_s, duration_s))
    return sorted((*lanes["compute"], *lanes["communication"]), key=lambda bar: bar[3])


def simulated_s(program: StageProgram, plan: Plan) -> float:
    """Return the seconds of the simulated step, or of a stage's microbatch, as in
    `with_simulated_overlap`."""
    return _without(
        plan.prediction, plan, sum(phase.hidden_s for phase in simulate_program(program, plan))
    )


def _without(serial: Prediction, plan: Plan, hidden_s: float) -> float:
    saved_s = serial.in_kernels_s + sum(bucket.saved_s for bucket in plan.buckets)
    return (
        serial.serial_s
        + serial.beyond_shares_s
        - saved_s
        - (1.0 - plan.overlap.slowdown) * hidden_s
    )


def _end(bars: Sequence[Bar]) -> float:
    return max((start + duration for *_, start, duration in bars), default=0.0)


def _stretch(lane: list[Bar], bar: Bar) -> None:
    """Add a bar, or extend the last bar if it has the same label and ends where the bar starts."""
    label, phase, kind, start_s, duration_s = bar
    if (
        lane
        and lane[-1][:3] == bar[:3]
        and abs(lane[-1][3] + lane[-1][4] - start_s) <= 1e-9 * start_s
    ):
        lane[-1] = (label, phase, kind, lane[-1][3], lane[-1][4] + duration_s)
    else:
        lane.append(bar)


def _events(
    trace: Trace, priced: Priced, choices: Solution, evaluation: Evaluation
) -> Iterator[Event]:
    compute, again = _compute(trace, priced, choices)
    moves = _moves(priced, evaluation)
    arrives, returns = crossing_times(trace, priced, choices)
    yield INPUTS, "forward", "compute", _seconds_resting(priced, choices, "input") - sum(arrives)
    yield BEFORE, "forward", "communication", sum(arrives)
    for node in trace.graph.nodes:
        label, phase = _label(node)
        if (
            phase == "backward" and returns and node.op == "call_function"
        ):  # tangents are placeholders before the first op
            yield BEHIND, phase, "communication", sum(returns)
            returns = ()
        if phase == "backward" and label in again:
            yield from _bars_of(label, phase, again.pop(label))
        for operand in node.all_input_nodes:
            operand_label = _label(operand)[0] if node.op == "output" else label
            yield (
                operand_label,
                phase,
                "communication",
                moves.pop((operand.name, phase, False), 0.0),
            )
        yield from _bars_of(label, phase, compute.get(node.name, (0.0, 0.0)))
        yield label, phase, "communication", moves.pop((node.name, phase, True), 0.0)
    if returns:  # a stage without ops in backward
        yield BEHIND, "backward", "communication", sum(returns)
    for label, both in again.items():  # layers without a backward op
        yield from _bars_of(label, "backward", both)
    nodes = trace.nodes_by_name()
    for (
        (name, phase, _),
        seconds,
    ) in moves.items():  # read under another label, such as gradients of tied weights
        yield _label(nodes[name])[0], phase, "communication", seconds
    moved_s = step_time(priced, choices)
    yield PARAMETERS, "step", "communication", moved_s
    yield OPTIMIZER, "step", "compute", _seconds_resting(priced, choices, "parameter") - moved_s


def crossing_times(
    trace: Trace, priced: Priced, choices: Solution
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the seconds that a stage waits for values from other stages.

    Args:
        trace: the trace of the stage.
        priced: the problem.
        choices: its solution.

    Returns:
        Seconds of each value from the previous stage, and of each gradient from the next stage.
    """
    arriving, leaving = (
        {i.path for i in trace.inputs if i.crosses},
        {o.path for o in trace.outputs if o.crosses},
    )
    times: dict[str, list[float]] = {"input": [], "output": []}
    for op, source, s in zip(priced.problem.ops, priced.sources, choices.strategies, strict=True):
        if (op.kind == "input" and source.names[0] in arriving) or (
            op.kind == "output" and source.names[0] in leaving
        ):
            times[op.kind].append(op.strategies[s].time_s)
    return tuple(times["input"]), tuple(times["output"])


def step_time(priced: Priced, choices: Solution) -> float:
    """Compute the seconds per microbatch of the communication of parameters and gradients at the
    begin and the end of a step."""
    ops = zip(priced.problem.ops, choices.strategies, strict=True)
    return sum(
        op.count * op.strategies[s].communication_s for op, s in ops if op.kind == "parameter"
    )


def own_time(priced: Priced, choices: Solution) -> float:
    """Compute the seconds of the collectives inside ops."""
    ops, runs = priced.problem.ops, [*enumerate(choices.strategies), *choices.recomputed.items()]
    return sum(
        ops[n].count * ops[n].strategies[s].communication_s
        for n, s in runs
        if ops[n].kind == "compute"
    )


def _compute(
    trace: Trace, priced: Priced, choices: Solution
) -> tuple[dict[str, _Both], dict[str, _Both]]:
    """Compute the seconds of compute and of collectives inside ops: by first node of each cluster,
    and of recomputation by layer."""
    labels = {n.name: _label(n)[0] for n in trace.graph.nodes}
    compute: dict[str, _Both] = {}
    again: dict[str, _Both] = {}
    for index, (op, source) in enumerate(zip(priced.problem.ops, priced.sources, strict=True)):
        if source.cluster is None:
            continue
        for cluster in source.cluster.instances:
            first = cluster.members[0].node
            compute[first] = _both(op.strategies[choices.strategies[index]])
            if index in choices.recomputed:
                before, more = (
                    again.get(labels[first], (0.0, 0.0)),
                    _both(op.strategies[choices.recomputed[index]]),
                )
                again[labels[first]] = before[0] + more[0], before[1] + more[1]
    return compute, again


def _both(strategy: OpStrategy) -> _Both:
    return strategy.time_s - strategy.communication_s, strategy.communication_s


def _bars_of(label: str, phase: str, both: _Both) -> Iterator[Event]:
    yield label, phase, "communication", both[1]
    yield label, phase, "compute", both[0]


def _moves(priced: Priced, evaluation: Evaluation) -> dict[tuple[str, str, bool], float]:
    """Map (node, phase, whether at once) to the seconds of its collectives."""
    moves: dict[tuple[str, str, bool], float] = {}
    for v, refs in enumerate(priced.refs):
        phase = priced.problem.values[priced.problem.variants[v].value].phase
        for when, redistribution in (
            (phase, evaluation.forward[v]),
            ("backward", evaluation.backward[v]),
        ):
            at_once = (
                bool(redistribution.arcs)
                and bool(redistribution.arcs[0].collective.reduce_op)
                and when == phase
            )
            for name, _ in refs:
                key = (name, when, at_once)
                moves[key] = moves.get(key, 0.0) + redistribution.time_s
    return moves


def _seconds_resting(priced: Priced, choices: Solution, kind: str) -> float:
    ops = zip(priced.problem.ops, choices.strategies, strict=True)
    return sum(op.count * op.strategies[s].time_s for op, s in ops if op.kind == kind)


def _label(node: fx.Node) -> tuple[str, str]:
    """Return the layer and phase of a node. The layer is the module path up to the first index, or
    its first two parts."""
    if node.op == "output":
        return "", "backward"
    return _layer(node.meta.get("module", "")), node.meta.get("phase", "forward")


def _layer(module: str) -> str:
    parts = module.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:2])


def _stretches(events: Iterable[Event]) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    clock = 0.0
    for label, phase, kind, duration in events:
        if duration <= 0.0:
            continue
        if bars and bars[-1][:3] == (label, phase, kind):
            bars[-1] = (*bars[-1][:4], bars[-1][4] + duration)
        else:
            bars.append((label, phase, kind, clock, duration))
        clock += duration
    return tuple(bars)
