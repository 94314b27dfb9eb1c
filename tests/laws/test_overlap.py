"""Overlap of communication and compute: steps start early and finish late, and nothing else of a
program changes.

The laws are tested on random legal plans, which have layouts and collectives that the planner
avoids.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from torch import fx

from autopar.capture import Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import Orders, apply_overlap, emit_stage, least_overlap, places, simulate_program
from autopar.emit.overlap import Room, follows
from autopar.errors import AutoparError
from autopar.kernels import collectives as steps
from autopar.kernels.bind import bind
from autopar.planner.timeline import with_simulated_overlap as timed_beside
from autopar.plans import Overlap, Piece, Plan, load_of
from autopar.program.lockstep import run_lockstep
from autopar.program.peak_memory import node_peaks, trace_peak
from autopar.program.program import Program, StageProgram
from autopar.program.reorder import write_order
from autopar.verification import verify_program

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.models import Batch, ModelSpec
from benchmarks.random_plans import Prepared, prepare, random_plan

AMPLE = 2**50
MESHES = ("a=2,b=2", "4", "2")
MODELS = ("tiny-gpt2", "tiny-llama", "tiny-bert", "tiny-vit")
FAST = [("tiny-gpt2", "a=2,b=2", seed) for seed in range(3)] + [
    ("tiny-llama", "4", 0),
    ("tiny-vit", "2", 1),
]
SLOW = [(model, mesh, seed) for model in MODELS for mesh in MESHES for seed in range(3, 7)]
CASES = [*(pytest.param(*case, id=" ".join(map(str, case))) for case in FAST)]
CASES += [pytest.param(*case, id=" ".join(map(str, case)), marks=pytest.mark.slow) for case in SLOW]


@cache
def prepared(model: str, mesh: str) -> tuple[Prepared, object, Batch]:
    built, batch = ModelSpec.known(model).build()
    return prepare(built, batch, Mesh.parse(mesh), HardwareProfile.load("h100-sxm")), built, batch


def beside(plan: Plan, slowdown: float = 0.4, num_bytes: int = AMPLE) -> Plan:
    return replace(plan, overlap=Overlap(slowdown, num_bytes, num_bytes))


def whole(ready: Prepared, stage: StageProgram) -> Program:
    return Program.of_one_stage(ready.trace, stage)


def graphs(program: StageProgram) -> tuple[fx.Graph, fx.Graph]:
    return program.forward.graph, program.backward.graph


def starts(program: StageProgram) -> list[fx.Node]:
    return [node for graph in graphs(program) for node in graph.nodes if node.target is steps.start]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "seed"), CASES)
def test_a_random_plan_matches_the_model_for_any_overlap(model: str, mesh: str, seed: int) -> None:
    ready, plain, batch = prepared(model, mesh)
    plan, program = random_plan(ready, seed)
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}  # type: ignore[attr-defined]
    held = 0
    for slowdown, num_bytes in ((0.4, AMPLE), (0.0, AMPLE), (0.9, 20_000)):
        early = emit_stage(ready.trace, beside(plan, slowdown, num_bytes))
        held = max(held, len(starts(early)))

        # The program matches the model and has the same collectives.
        assert verify_program(ready.trace, whole(ready, early), plain, (), batch).ok
        ran = run_lockstep(
            whole(ready, early), tensors, tensors, [batch[i.path] for i in ready.trace.inputs]
        )
        assert Counter((p, str(c)) for p, _, c in ran.records) == Counter(
            (p, str(c)) for p, _, c in program.stages[0].collectives
        )

        # Each start is finished once, later, and with the same settings.
        for graph in graphs(early):
            graph.lint()  # type: ignore[no-untyped-call]
            finishes = [node for node in graph.nodes if node.target is steps.finish]
            begun = [node for node in graph.nodes if node.target is steps.start]
            assert [list(node.users) for node in begun] == [
                [f for f in finishes if f.args[0] is node] for node in begun
            ]
            assert all(
                len(node.users) == 1 and next(iter(node.users)).args[1:] == node.args[1:]
                for node in begun
            )
            assert len(finishes) == len(begun)

        # All ranks issue the same steps in the same order.
        places = map(ready.mesh.coordinate, range(ready.mesh.num_devices))
        assert len({tuple(issued(early, place)) for place in places}) == 1
    assert held > 0


def issued(program: StageProgram, coordinate: tuple[int, ...]) -> list[str]:
    """Return the steps that a rank issues, in order."""
    groups = steps.fake_groups(program.mesh, coordinate)
    found = []
    for module in (program.forward, program.backward):
        for node in bind(module, groups).graph.nodes:
            if "collective" in node.meta and node.meta["collective"].kind != "slice":
                found.append(f"{node.target.__name__} {node.meta['collective']}")
    return found


@pytest.mark.slow
def test_the_priced_slack_equals_that_of_the_emitted_graph() -> None:
    """Pricing derives the slack from choices. The test derives it from the readers of the graph."""
    ready, _, _ = prepared("tiny-gpt2", "a=2,b=2")
    seen: Counter[str] = Counter()
    for seed in range(4):
        _, program = random_plan(ready, seed, recompute_share=0.5 if seed % 2 else 0.0)
        for node in (
            node
            for graph in graphs(program.stages[0])
            for node in graph.nodes
            if "collective" in node.meta
        ):
            assert node.meta["slack"] == shown(node), node.meta["key"]
            seen[node.meta["slack"]] += 1
    assert seen["prefetchable"] and seen["deferrable"] and seen["critical"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "seed"), CASES)
def test_overlapped_communication_has_slack_and_no_emitted_order_is_faster(
    model: str, mesh: str, seed: int
) -> None:
    ready, _, _ = prepared(model, mesh)
    s = ready.profile.overlap_slowdown
    plan, _ = random_plan(ready, seed, recompute_share=0.5 if seed % 2 else 0.0)
    counted = [c for c in plan.communications if c.beside]
    assert counted and all(c.slack != "critical" and c.collective.kind != "slice" for c in counted)
    gathered = [
        c
        for c in plan.communications
        if c.node.endswith("/parameter") and c.collective.kind != "slice"
    ]
    assert all(c.beside for c in gathered), "what rests is there when each phase begins"
    assert load_of(plan).least_s(s) == pytest.approx(plan.prediction.step_s)

    slack = [
        replace(c, beside=c.slack != "critical" and c.collective.kind != "slice")
        for c in plan.communications
    ]
    least_s = load_of(replace(plan, communications=tuple(slack))).least_s(s)
    early = beside(plan, s)
    seen = timed_beside(plan.prediction, emit_stage(ready.trace, early), early)
    assert seen.simulated_s >= least_s * (1 - 1e-9)
    assert seen.simulated_s <= (plan.prediction.serial_s + plan.prediction.beyond_shares_s) * (
        1 + 1e-9
    )


def shown(node: fx.Node) -> str:
    def moves(other: fx.Node) -> bool:
        return "slack" in other.meta

    def is_there(other: fx.Node) -> bool:
        return other.op == "placeholder" or (
            moves(other) and all(map(is_there, other.all_input_nodes))
        )

    def is_last(other: fx.Node) -> bool:
        return all(user.op == "output" or (moves(user) and is_last(user)) for user in other.users)

    return "prefetchable" if is_there(node) else "deferrable" if is_last(node) else "critical"


@pytest.mark.slow
def test_without_overlap_or_memory_for_it_the_program_is_unchanged() -> None:
    ready, _, _ = prepared("tiny-gpt2", "a=2,b=2")
    plan, program = random_plan(ready, 0)
    text = [str(graph) for graph in graphs(program.stages[0])]
    for other in (beside(plan, 1.0), beside(plan, 0.4, 0)):
        assert [str(graph) for graph in graphs(emit_stage(ready.trace, other))] == text
    assert [str(graph) for graph in graphs(emit_stage(ready.trace, beside(plan)))] != text
    assert Plan.loads(beside(plan).dumps()) == beside(plan)


@pytest.mark.parametrize(("model", "mesh", "seed"), CASES)
def test_the_stated_time_and_memory_of_an_order_are_those_of_its_graphs(
    model: str, mesh: str, seed: int
) -> None:
    ready, _, _ = prepared(model, mesh)
    plan, serial = random_plan(ready, seed)
    orders, begun = Orders(serial.stages[0], plan), 0
    for limit in (AMPLE, 20_000, AMPLE):
        wanted = Overlap(0.4, limit, limit)
        found, held = orders.within(wanted)
        early, plainly_held = apply_overlap(serial.stages[0], replace(plan, overlap=wanted))
        assert not early.orders and [str(g) for g in graphs(write_order(found))] == [
            str(g) for g in graphs(early)
        ]
        assert held == plainly_held and orders.least(wanted) == least_overlap(
            serial.stages[0], replace(plan, overlap=wanted)
        )
        begun += len(starts(early))
        priced = replace(plan, overlap=held)
        for ordered, phase in zip(
            simulate_program(found, priced), simulate_program(early, priced), strict=True
        ):
            assert (ordered.time_s, ordered.hidden_s, ordered.spans) == (
                phase.time_s,
                phase.hidden_s,
                phase.spans,
            )
            assert ordered.missing_s == pytest.approx(phase.missing_s, rel=1e-6)
        assert trace_peak(found) == trace_peak(early)
        assert [(p.phase, p.peak_bytes) for p in node_peaks(found)] == [
            (p.phase, p.peak_bytes) for p in node_peaks(early)
        ]
    assert begun > 0


def with_least(program: StageProgram, plan: Plan) -> tuple[StageProgram, Overlap]:
    """Return the program and the overlap that gives the same program with a small limit of
    bytes."""
    return apply_overlap(program, plan)[0], least_overlap(program, plan)


def test_early_steps_stay_within_their_memory_which_the_program_states() -> None:
    ready, _, _ = prepared("tiny-gpt2", "a=2,b=2")
    plan, program = random_plan(ready, 2)
    _, free = with_least(program.stages[0], beside(plan))
    assert min(free.forward_bytes, free.backward_bytes) > 0
    plain_peak = trace_peak(program.stages[0]).peak_bytes
    previous = len(starts(emit_stage(ready.trace, beside(plan)))) + 1
    for limit in (AMPLE, free.backward_bytes // 2, free.backward_bytes // 8, 0):
        early, held = with_least(program.stages[0], beside(plan, 0.4, limit))
        assert max(held.forward_bytes, held.backward_bytes) <= limit
        again = emit_stage(
            ready.trace, replace(plan, overlap=held)
        )  # the smallest limit gives the same program
        assert [str(g) for g in graphs(again)] == [str(g) for g in graphs(early)]
        # Bytes held by early steps are added to the peak. Copies of sent tensors count in both.
        assert plain_peak <= trace_peak(early).peak_bytes + limit
        assert trace_peak(early).peak_bytes <= plain_peak + limit
        assert len(starts(early)) <= previous
        previous = len(starts(early))
    assert previous == 0


def rising(program: StageProgram, seed: int, most: int) -> dict[str, tuple[Piece, ...]]:
    """Return limits that vary within each phase."""
    rng = random.Random(seed)
    lengths = {
        phase: max(place for _, place in places(getattr(program, phase).graph))
        for phase in ("forward", "backward")
    }
    cuts = {phase: sorted(rng.sample(range(length), 9)) for phase, length in lengths.items()}
    return {phase: tuple((cut, int(most * rng.random())) for cut in cuts[phase]) for phase in cuts}


@pytest.mark.parametrize("seed", range(6))
def test_early_steps_stay_within_the_room_at_their_place(seed: int) -> None:
    ready, plain, batch = prepared("tiny-gpt2", "a=2,b=2")
    plan, serial = random_plan(ready, seed)
    _, free = with_least(serial.stages[0], beside(plan))
    begun = 0
    for share in (1.0, 0.5):
        forward, backward = int(free.forward_bytes * share), int(free.backward_bytes * share)
        left = {
            "forward": rising(serial.stages[0], seed, forward)["forward"],
            "backward": rising(serial.stages[0], seed + 1, backward)["backward"],
        }
        wanted = Overlap(0.4, forward, backward, left["forward"], left["backward"])
        early, held = with_least(serial.stages[0], replace(plan, overlap=wanted))
        for phase, most in (("forward", forward), ("backward", backward)):
            room = Room(most, left[phase])
            for place, size in started(early, phase):
                assert size <= room.at(place), (phase, place)
        begun += len(starts(early))
        assert len(starts(early)) <= len(starts(apply_overlap(serial.stages[0], beside(plan))[0]))

        again, same = with_least(
            serial.stages[0], replace(plan, overlap=held)
        )  # emitted like in a certificate
        assert same == held and [str(g) for g in graphs(again)] == [str(g) for g in graphs(early)]
        assert Plan.loads(replace(plan, overlap=held).dumps()).overlap == held
        assert verify_program(ready.trace, whole(ready, early), plain, (), batch).ok
    assert begun


def started(program: StageProgram, phase: str) -> Iterator[tuple[int, int]]:
    """Iterate over the places of the spine with the bytes of steps that are started and not
    finished."""
    held = dict[fx.Node, int]()
    place = -1
    for node in getattr(program, phase).graph.nodes:
        if node.target is steps.start:
            c = node.meta["collective"]
            rests = c.kind == "all_gather" and node.meta["slack"] == "prefetchable"
            held[node] = c.output_bytes(program.mesh.shape[c.axis]) + (0 if rests else c.bytes)
        elif node.target is steps.finish:
            del held[node.args[0]]
        elif not follows(node) and node.op != "placeholder":
            place += 1
            yield place, sum(held.values())


def early_program() -> tuple[Trace, Prepared, Plan, StageProgram, object, Batch]:
    ready, plain, batch = prepared("tiny-gpt2", "a=2,b=2")
    plan, _ = random_plan(ready, 0)
    return ready.trace, ready, plan, emit_stage(ready.trace, beside(plan)), plain, batch


def run(ready: Prepared, program: StageProgram, plain: object, batch: Batch) -> None:
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}  # type: ignore[attr-defined]
    run_lockstep(
        whole(ready, program), tensors, tensors, [batch[i.path] for i in ready.trace.inputs]
    )


@pytest.mark.parametrize("seed", range(4))
def test_emission_with_the_stated_bytes_gives_the_same_program(seed: int) -> None:
    """A certificate emits the program again with the stated limit. A smaller limit may give another
    order of steps, which is then stated."""
    ready, _, _ = prepared("tiny-gpt2", "a=2,b=2")
    plan, program = random_plan(ready, seed)
    _, free = with_least(program.stages[0], beside(plan))
    for share in (2.0, 1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2):
        some = Overlap(0.4, int(share * free.forward_bytes), int(share * free.backward_bytes))
        early, held = with_least(program.stages[0], replace(plan, overlap=some))
        again, same = with_least(program.stages[0], replace(plan, overlap=held))
        assert same == held
        assert [str(g) for g in graphs(again)] == [str(g) for g in graphs(early)]


def test_a_finish_before_its_start_is_refused() -> None:
    _, _, _, program, _, _ = early_program()
    start = starts(program)[0]
    finish = next(iter(start.users))
    start.prepend(finish)
    with pytest.raises(RuntimeError, match="used before it has been defined"):
        start.graph.lint()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("how", ["another start", "other settings", "twice", "not started"])
def test_the_interpreter_refuses_a_finish_with_other_settings_than_its_start(how: str) -> None:
    _, ready, _, program, plain, batch = early_program()
    run(ready, program, plain, batch)
    first, *others = [node for node in program.forward.graph.nodes if node.target is steps.start]
    finish = next(iter(first.users))
    if how == "another start":
        other = next(
            o for o in others if o.args[1:] != first.args[1:] and o.args[0].op == "placeholder"
        )
        finish.prepend(other)
        finish.args = (other, *finish.args[1:])
    elif how == "other settings":
        finish.args = (first, "all_reduce", "sum", 0)
    elif how == "twice":
        with program.forward.graph.inserting_after(finish):
            program.forward.graph.call_function(steps.finish, finish.args, dict(finish.kwargs))
    else:
        finish.args = (first.args[0], *finish.args[1:])
    with pytest.raises(AutoparError):
        run(ready, program, plain, batch)


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_slack_costs_time_and_changes_no_result(seed: int) -> None:
    ready, plain, batch = prepared("tiny-gpt2", "a=2,b=2")
    plan, _ = random_plan(ready, 2)
    rng = random.Random(seed)
    wrong = tuple(
        replace(c, slack=rng.choice(["critical", "prefetchable", "deferrable"]))
        for c in plan.communications
    )
    program = emit_stage(ready.trace, beside(replace(plan, communications=wrong)))
    assert starts(program)
    assert verify_program(ready.trace, whole(ready, program), plain, (), batch).ok
