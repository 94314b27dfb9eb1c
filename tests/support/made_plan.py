"""A handwritten plan with all kinds of parallelism, ZeRO-2 and ZeRO-3, recomputation, a runner-up,
and an op without a rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.core.collective import Collective
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.planner.pipeline.step_schedule import step_of
from autopar.plans import (
    Communication,
    Crossed,
    Entry,
    Fallback,
    Fingerprint,
    Kept,
    NodeChoice,
    Pipeline,
    Plan,
    Potential,
    Prediction,
    Proof,
    RunnerUp,
)

MIB = 2**20
ALL = ((0,), (1,), (2,))
ONE: tuple[tuple[int, ...], ...] = ((),)


def strategy(text: str) -> Strategy:
    """Parse a strategy such as ``"S(0) R, R R -> S(0) R"``."""
    reads, _, makes = text.partition("->")
    sides = ([part.strip() for part in side.split(",") if part.strip()] for side in (reads, makes))
    inputs, outputs = (tuple(map(Layout.parse, side)) for side in sides)
    return Strategy(inputs, outputs)


def entry(
    nodes: Sequence[tuple[str, str]],
    *,
    kind: str = "compute",
    instances: tuple[tuple[int, ...], ...] = ONE,
    time_s: float = 0.0,
    again: bool = False,
    runner_up: RunnerUp | None = None,
    replicated: bool = False,
    source: str = "",
) -> Entry:
    choices = tuple(NodeChoice(node, strategy(text)) for node, text in nodes)
    key = choices[0].node.replace("{0}", "*")
    module, op, *rest = key.split("/")
    phase = rest[0] if rest else "forward"
    again_s = time_s if again else 0.0
    record = Entry(
        key,
        kind,
        module,
        op,
        phase,
        instances,
        choices,
        choices if again else (),
        time_s,
        runner_up,
        replicated,
        source,
    )
    return replace(record, again_s=again_s)


def weight(name: str, storage: str, instances: tuple[tuple[int, ...], ...] = ONE) -> Entry:
    return entry(
        [(f"{name}/parameter", f"{storage} -> {storage}")], kind="parameter", instances=instances
    )


def move(
    node: str,
    phase: str,
    kind: str,
    axis: int,
    source: str,
    target: str,
    instances: tuple[tuple[int, ...], ...],
) -> Communication:
    collective = Collective(kind, axis, 0, -1, "sum" if "reduce" in kind else "", "float32", MIB)  # type: ignore[arg-type]
    ends = Layout.parse(source), Layout.parse(target)
    return Communication(
        node,
        0,
        instances,
        node.partition("/")[0].replace("{0}", "*"),
        phase,
        collective,
        *ends,
        1e-3,
    )


def made_plan(*, recompute: bool = True) -> Plan:
    """Return the plan. Without `recompute`, it recomputes nothing and keeps more activations."""
    up, attention, head = "net.layers.{0}.up", "net.layers.{0}.attention", "net.head"
    entries = (
        weight("net.embed.weight", "R S(0)"),
        weight(f"{up}.weight", "S(0) S(1)", ALL),
        weight(f"{head}.weight", "S(0) R"),
        entry([("ids/input", "-> R R")], kind="input"),
        entry([("net.embed/embedding/forward/0", "R S(0), S(0) R -> S(0) P")], time_s=1e-3),
        replace(
            entry(
                [("net.layers.{0}.norm/odd_norm/forward/0", "R R -> R R")],
                instances=ALL,
                time_s=1e-3,
                replicated=True,
                source="net.py:3: return odd_norm(x)",
            ),
            fallbacks=(Fallback("net.odd_norm.default", "it draws random numbers"),),
        ),
        entry(
            [
                (f"{up}/dot/forward/0", "S(0) R, R S(1) -> S(0) S(2)"),
                (f"{up}/relu/forward/0", "S(0) S(2) -> S(0) S(2)"),
            ],
            instances=ALL,
            time_s=2e-3,
            again=recompute,
            runner_up=RunnerUp("S(0) R, R R -> S(0) R", 4e-3),
            source="net.py:5: return relu(self.up(x))",
        ),
        entry(
            [
                (f"{attention}/transpose/forward/0", "S(0) S(2) -> S(0) S(1)"),
                (
                    f"{attention}/attention/forward/0",
                    "S(0) S(1), S(0) S(1), S(0) S(1) -> S(0) S(1), S(0) S(1)",
                ),
                (f"{attention}/transpose/forward/1", "S(0) S(1) -> S(0) S(2)"),
            ],
            instances=ALL,
            time_s=3e-3,
        ),
        entry([(f"{head}/dot/forward/0", "S(0) S(1), R R -> S(0) S(1)")], time_s=1e-3),
        entry([(f"{head}/dot/backward/0", "S(0) S(1), S(0) S(1) -> P P")], time_s=1e-3),
    )
    communications = (
        move(f"{up}.weight/parameter", "forward", "all_gather", 0, "S(0) S(1)", "R S(1)", ALL),
        move(f"{head}.weight/parameter", "forward", "all_gather", 0, "S(0) R", "R R", ONE),
        move(f"{head}.weight/parameter", "backward", "all_gather", 0, "S(0) R", "R R", ONE),
        move(f"{head}/dot/backward/0", "backward", "reduce_scatter", 0, "P R", "S(0) R", ONE),
    )
    kept_layouts = [
        Kept(f"{up}.weight/parameter", 0, ALL, (Layout.parse("R S(1)"),), 2 * MIB),
        Kept("ids/input", 0, ONE, (Layout.parse("R R"),), MIB),
    ]
    if not recompute:
        kept_layouts.append(
            Kept(f"{up}/relu/forward/0", 0, ALL, (Layout.parse("S(0) S(2)"),), 4 * MIB)
        )
    compute_s, communication_s = 21e-3 + (6e-3 if recompute else 0.0), 6e-3
    activations = (6 if recompute else 18) * MIB
    memory = {
        "parameters": 8 * MIB,
        "optimizer": 16 * MIB,
        "buffers": 0,
        "inputs": MIB,
        "gradients": 8 * MIB,
        "activations": activations,
    }
    peak = sum(memory.values()) - min(activations, 8 * MIB) + MIB
    step_s = compute_s + communication_s
    return Plan(
        mesh=Mesh({"node": 2, "gpu": 4}),
        fingerprint=Fingerprint("0" * 16, "Net", "h100-sxm", "1" * 16, "0.1.0", "2.13.0"),
        options={"memory_bytes": (34 if recompute else 64) * MIB, "optimizer": "adamw"},
        entries=entries,
        kept=tuple(kept_layouts),
        communications=communications,
        prediction=Prediction(
            step_s,
            compute_s,
            communication_s,
            peak,
            {**memory, "transient": MIB},
            _bars(_work(recompute)),
            0.0,
            step_s,
        ),
        proof=Proof(
            step_s,
            step_s * 0.99,
            0.01,
            1200,
            640,
            "highs",
            2e-3 if recompute else 0.0,
            ("everything that matters", "one microbatch"),
            step_s * 0.98,
            step_s * 0.99,
            (
                Potential(
                    "ids/input",
                    0,
                    "net.embed/embedding/forward/0",
                    1,
                    "forward",
                    {"R R": 2e-3, "S(0) R": 1e-3},
                ),
            ),
            {"start of backward": 3e-3},
        ),
        capture="in full: no list of modules is long enough to fold",
    )


WIRE_S = 2e-3
Work = tuple[str, str, str, float]  # a bar of the timeline without its start time


def _work(recompute: bool) -> list[Work]:
    """Return all work of a step in order."""
    forward: list[Work] = [("net.embed", "forward", "compute", 1e-3)]
    backward: list[Work] = [
        ("net.head", "backward", "communication", 2e-3),
        ("net.head", "backward", "compute", 1e-3),
    ]
    for layer in range(3):
        forward += [
            (f"net.layers.{layer}", "forward", "communication", 1e-3),
            (f"net.layers.{layer}", "forward", "compute", 6e-3),
        ]
        backward += [(f"net.layers.{2 - layer}", "backward", "compute", 2e-3)] if recompute else []
    forward += [
        ("net.head", "forward", "communication", 1e-3),
        ("net.head", "forward", "compute", 1e-3),
    ]
    return [*forward, *backward]


def _bars(works: Sequence[Work]) -> tuple[tuple[str, str, str, float, float], ...]:
    """Return the bars of consecutive work."""
    starts = itertools.accumulate((work[3] for work in works), initial=0.0)
    return tuple(
        (*work[:3], start_s, work[3]) for work, start_s in zip(works, starts, strict=False)
    )


def made_staged_plan(*, schedule: str = "1f1b", microbatches: int = 8) -> Plan:
    """Return a plan of four stages with three layers each. The stages in the middle are equal, and
    the last stage recomputes nothing. An interleaved schedule has two stages per device."""
    stages = tuple(_stage(number) for number in range(4))
    times = [stage.prediction.step_s for stage in stages]
    crossed = tuple(
        (Crossed(f"net.layers.{3 * n + 2}/add/forward/0", Layout.parse("S(0) R"), MIB, True),)
        for n in range(3)
    )
    flying = (microbatches,) * 4 if schedule == "gpipe" else (4, 3, 2, 1)
    num_ranks = 2 if schedule == "interleaved_1f1b" else 4
    peaks = (
        tuple(sum(stage.prediction.peak_bytes for stage in stages[rank::2]) for rank in range(2))
        if num_ranks == 2
        else ()
    )
    budgets = (20 * MIB,) * 4 if num_ranks == 2 else ()
    pipeline = Pipeline(
        "stage",
        (10, 20, 30),
        ("net.layers.3", "net.layers.6", "net.layers.9"),
        microbatches,
        schedule,
        flying,
        False,
        stages,
        crossed,
        True,
        peaks,
        budgets,
    )
    step_s = (microbatches - 1) * max(times) + sum(times)
    if num_ranks == 2:
        step_s = step_of(schedule, stages, microbatches, 2)
    slowest, fullest = stages[times.index(max(times))].prediction, stages[-1].prediction
    compute_s, communication_s = (
        microbatches * part_s for part_s in (slowest.compute_s, slowest.communication_s)
    )
    prediction = Prediction(
        step_s,
        compute_s,
        communication_s,
        fullest.peak_bytes,
        fullest.memory_bytes,
        (),
        0.0,
        step_s,
    )
    bounds = {"bound_s": step_s * 0.9, "certified_bound_s": step_s * 0.9, "searched_bound_s": 0.0}
    proof = replace(stages[0].proof, objective_s=step_s, gap=0.1, **bounds)
    nothing: dict[str, Any] = {"entries": (), "kept": (), "communications": ()}
    mesh = Mesh(
        {"stage": num_ranks, "node": 2, "gpu": 4}, devices_per_node=4, links={"stage": "inter"}
    )
    return replace(
        stages[0], mesh=mesh, prediction=prediction, proof=proof, pipeline=pipeline, **nothing
    )


def _stage(number: int) -> Plan:
    """Return the handwritten plan as stage `number`, with the next three layers and the tensors
    that it receives from its neighbours."""
    plan = made_plan(recompute=number < 3)
    mesh = Mesh({"node": 2, "gpu": 4}, devices_per_node=4, links={"node": "inter", "gpu": "intra"})
    layers = tuple((3 * number + i,) for i in range(3))
    entries = tuple(replace(e, instances=layers) if e.instances == ALL else e for e in plan.entries)
    kept_layouts = tuple(
        replace(k, instances=layers) if k.instances == ALL else k for k in plan.kept
    )
    communications = tuple(
        replace(c, instances=layers) if c.instances == ALL else c for c in plan.communications
    )
    arrives: list[Entry] = []
    works = _work(recompute=number < 3)
    if number > 0:
        arrives.append(_arrives("input", 3 * number - 1))
        works.insert(0, ("from the stage before", "forward", "communication", WIRE_S))
    if number < 3:
        arrives.append(_arrives("output", 3 * number + 2))
        works.insert(_turn(works), ("from the stage behind", "backward", "communication", WIRE_S))
    p, wire_s = plan.prediction, WIRE_S * len(arrives)
    whole_s = p.step_s + wire_s
    prediction = replace(
        p,
        step_s=whole_s,
        communication_s=p.communication_s + wire_s,
        timeline=_bars(works),
        simulated_s=whole_s,
    )
    return replace(
        plan,
        mesh=mesh,
        entries=(*entries, *arrives),
        kept=kept_layouts,
        communications=communications,
        prediction=prediction,
    )


def _turn(works: Sequence[Work]) -> int:
    """Return the time at which backward starts."""
    return next(place for place, work in enumerate(works) if work[1] == "backward")


def _arrives(kind: str, layer: int) -> Entry:
    node = f"net.layers.{{0}}/add/forward/0/{kind}"
    return entry([(node, "S(0) R -> S(0) R")], kind=kind, instances=((layer,),), time_s=WIRE_S)
