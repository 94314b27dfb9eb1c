"""Moments: the memory that the problem counts while an op runs, compared with the memory of an
emitted program."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from shown import shown
from torch import nn

from autopar.capture import capture
from autopar.capture.chunked_loss import loss_by_rows, with_loss_only
from autopar.core.mesh import Mesh
from autopar.core.problem import MemoryPoint
from autopar.core.solution import Solution
from autopar.cost.gradient_dtypes import WIDENED
from autopar.cost.memory import Liveness
from autopar.planner.learned_moments import Measurements, by_trace_node, explain_peaks, over_budget
from autopar.planner.min_memory import certain_moments
from autopar.plans import Plan
from autopar.program.peak_memory import node_peaks, trace_peak
from autopar.solve import Evaluation
from autopar.solve.memory_rows import budget_rows
from benchmarks import zoo
from benchmarks.common import load_profile
from benchmarks.random_plans import Prepared, finish, prepare, prepared_trace, random_choices

BY_ROWS = "llama, its loss by rows"  # its gradient of many classes is scaled in place
CAST = "a cast"  # recomputed from a tensor kept in 16 bits, and read by one op
SHOWN = "a head"  # a 16-bit head that returns more than the loss
NARROW = "gpt2, read in 16 bits"  # copies of its weights exist until their last reader
CASES = (
    ("llama", "1"),
    (CAST, "1"),
    ("mixtral", "1"),
    ("bert", "a=2,b=2"),
    ("cnn", "a=2,b=2"),
    (BY_ROWS, "1"),
    (SHOWN, "a=2,b=2"),
    (NARROW, "1"),
    (NARROW, "a=2,b=2"),
)


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.up(x).float().sin().sum()
        )  # backward reads only the cast, which then exists at the same time as its cosine


@cache
def prepared(name: str, mesh: str) -> tuple[Prepared, Liveness]:
    grid, profile = Mesh.parse(mesh), load_profile("cpu-gloo-frictionless")
    if name == CAST:
        made = prepare(
            Cast().bfloat16(), {"x": torch.ones(64, 8, dtype=torch.bfloat16)}, grid, profile
        )
    elif name == NARROW:
        model, batch = zoo.build("gpt2")
        made = prepared_trace(capture(model, (), batch, precision=torch.bfloat16), grid, profile)
    elif name == SHOWN:
        made = prepare(*shown(64), grid, profile)
    elif name != BY_ROWS:
        made = prepare(*zoo.build(name), grid, profile)
    else:
        model, batch = zoo.build("llama", vocab_size=4096)
        made = prepared_trace(
            loss_by_rows(with_loss_only(capture(model, (), batch)), 8), grid, profile
        )
    return made, Liveness(made.trace, made.priced)


def sizes(
    made: Prepared,
    moments: tuple[MemoryPoint, ...],
    choices: Solution,
    evaluation: Evaluation,
    uncounted: set[int],
) -> list[int]:
    """Return the left sides of the rows of the moments. Kept tensors of the variants `uncounted` do
    not count."""
    problem = replace(made.priced.problem, moments=moments)
    held = {}
    for v, layouts in evaluation.kept.items():
        value = problem.values[problem.variants[v].value]
        own = evaluation.forward[v].sources if value.resident else ()
        held[v] = (
            0 if v in uncounted else sum(value.graph.bytes[n] for n in layouts if n not in own)
        )
    rows = budget_rows(problem)[2:]
    return [
        row.size(evaluation.static_bytes, choices.strategies, choices.recomputed, held)
        for row in rows
    ]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_the_certain_memory_of_a_moment_is_at_most_the_measured_memory(
    name: str, mesh: str
) -> None:
    made, liveness = prepared(name, mesh)
    certain = (*liveness.certain, *certain_moments(liveness))
    assert len(certain) > 2 * len(liveness.certain) > 0
    num_widened = 0
    keys = {n.name: n.meta["key"] for n in made.trace.graph.nodes if n.op == "call_function"}
    for seed, share in enumerate((0.0, 0.5, 1.0, 1.0, 0.9, 0.8)):
        choices, evaluation = random_choices(
            made, seed, recompute_share=share, recompute_otherwise=seed == 3
        )
        plan, program = finish(made, choices, evaluation, "random")
        seen: dict[str, int] = {}  # while a node runs, without the ops recomputed for it
        for peak in node_peaks(program.stages[0], outputs="dtensor"):
            if "collective" not in peak.node.meta and not peak.node.meta.get("recomputed"):
                key = peak.node.meta.get("key", "")
                seen[key] = max(
                    seen.get(key, 0), peak.peak_bytes + plan.prediction.memory_bytes["optimizer"]
                )
        # if a value and a view of it are both kept, only one has memory; the planner's own
        # plans make the view again
        views = {
            v
            for v, refs in enumerate(made.priced.refs)
            if any(liveness.is_view(name) for name, _ in refs)
        }
        rows = sizes(made, certain, choices, evaluation, views)
        for moment, size in zip(certain, rows, strict=True):
            node = moment.key.removesuffix(WIDENED)
            if (
                moment.key == node
                or not liveness.widened[node][1][choices.strategies[liveness.owner[node]]]
            ):
                assert size <= seen[keys[node]], f"{moment.key} under seed {seed}"
            else:
                num_widened += 1
                assert size <= seen[keys[node] + WIDENED], f"{moment.key} under seed {seed}"
    assert (num_widened > 0) == (name == SHOWN)


@pytest.mark.slow
def test_the_peak_of_a_step_is_the_maximum_over_its_nodes() -> None:
    made, _ = prepared("llama", "a=2,b=2")
    for seed in range(3):
        _, program = finish(made, *random_choices(made, seed), "random")
        peaks = node_peaks(program.stages[0], outputs="dtensor")
        assert (
            max(p.peak_bytes for p in peaks)
            == trace_peak(program.stages[0], outputs="dtensor").peak_bytes
        )
        named = [(p.phase, p.node.name) for p in peaks]
        assert len(set(named)) == len(named), "each node once"
        order = [n.name for n in program.stages[0].forward.graph.nodes if n.op == "call_function"]
        assert [name for phase, name in named if phase == "forward"][: len(order)] == order


def seen_under(
    made: Prepared, liveness: Liveness, choices: Solution, evaluation: Evaluation
) -> tuple[Plan, Measurements, int]:
    """Return the plan, the memory of its program at each node, and the peak."""
    plan, program = finish(made, choices, evaluation, "random")
    seen = by_trace_node(
        liveness,
        node_peaks(program.stages[0], outputs="dtensor"),
        plan.prediction.memory_bytes["optimizer"],
    )
    return plan, seen, max(sight.peak_bytes for sight in seen.values())


@pytest.mark.slow
def test_a_learned_moment_gives_the_measured_memory_of_its_plan() -> None:
    made, liveness = prepared("bert", "a=2,b=2")
    choices, evaluation = random_choices(made, 1, recompute_share=0.5)
    plan, seen, largest = seen_under(made, liveness, choices, evaluation)
    assert largest == plan.prediction.peak_bytes
    nodes = over_budget(liveness, seen, int(largest * 0.9))
    assert nodes and all(seen[node].peak_bytes > largest * 0.9 for node in nodes)
    assert len({liveness.owner[node] for node in nodes}) == len(nodes), "of equal nodes the worst"
    moments = explain_peaks(liveness, choices, seen, nodes)
    rows = sizes(made, tuple(moments.values()), choices, evaluation, set())
    assert rows == [seen[node].peak_bytes for node in moments]


def test_recomputed_values_are_attributed_to_ops_that_are_not_retained() -> None:
    made, liveness = prepared("llama", "1")
    choices, evaluation = random_choices(made, 1, recompute_share=1.0)
    _, seen, largest = seen_under(made, liveness, choices, evaluation)
    nodes = [
        node
        for node in over_budget(liveness, seen, int(largest * 0.7))
        if seen[node].phase == "backward"
    ]
    assert len(nodes) > 20 and all(
        liveness.trace.node(n).meta["phase"] == "forward"
        for node in nodes
        for n in seen[node].recomputed
    )

    def held_back(sights: Measurements) -> float:
        return (
            max(
                moment.reserve_bytes
                for moment in explain_peaks(liveness, choices, sights, nodes).values()
            )
            / largest
        )

    without = held_back(
        {node: sight._replace(recomputed=frozenset()) for node, sight in seen.items()}
    )
    assert held_back(seen) < 0.1 and without > 0.15, (
        "most of a layer runs again before its first reader does"
    )


def test_kept_values_count_until_their_last_reader_and_recomputed_ones_from_the_first() -> None:
    made, liveness = prepared("llama", "1")
    problem = made.priced.problem
    backward = [
        n.name
        for n in made.trace.graph.nodes
        if n.op == "call_function" and n.meta["phase"] == "backward" and n.name in liveness.owner
    ]
    first, last = (
        liveness.moment(backward[0], "backward"),
        liveness.moment(backward[-1], "backward"),
    )
    kept = sum(n for v, n in first.kept if not problem.values[problem.variants[v].value].resident)
    left = sum(n for v, n in last.kept if not problem.values[problem.variants[v].value].resident)
    assert kept > 10 * max(left, 1), "little of what was kept is left when the last op runs"
    assert not any(problem.ops[op].kind == "parameter" for op, _ in first.live), "no gradient yet"
    gradients = {op for op, _ in last.live if problem.ops[op].kind == "parameter"}
    trained = {i for i, op in enumerate(problem.ops) if op.kind == "parameter"}
    assert len(gradients) >= len(trained) - 2, "all gradients but those that the last ops make"
    middle = [
        liveness.moment(name, "backward")
        for name in backward[len(backward) // 3 : -len(backward) // 3]
    ]
    assert any(moment.recomputed for moment in middle)
    assert all(problem.ops[op].recomputable for moment in middle for op, _ in moment.recomputed)
