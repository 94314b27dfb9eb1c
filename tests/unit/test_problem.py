"""The problem of a real model: the invariants that the solver relies on, and the gap of its
solution."""

from __future__ import annotations

from collections import Counter

import pytest
import zoo_small

from autopar.capture import capture
from autopar.capture.trace import Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.core.solution import Solution
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.sharding import classes_of

MESH = Mesh({"a": 2, "b": 2})
BUDGET = 10**9


@pytest.fixture(scope="module")
def trace() -> Trace:
    model, batch = zoo_small.gpt2(num_layers=3)
    return capture(model, (), batch)


@pytest.fixture(scope="module")
def priced(trace: Trace) -> Priced:
    return price(
        trace,
        classes_of(trace, MESH.shape),
        MESH,
        HardwareProfile.load("cpu-gloo"),
        budget_bytes=BUDGET,
    )


@pytest.fixture(scope="module")
def problem(priced: Priced) -> Problem:
    return priced.problem


def test_values_and_their_producers_refer_to_each_other(problem: Problem) -> None:
    for n, op in enumerate(problem.ops):
        assert all(problem.values[v].op == n for v in op.results)
        assert len({problem.values[v].result for v in op.results}) == len(op.results)
    for v, value in enumerate(problem.values):
        assert v in problem.ops[value.op].results
        assert value.phase == problem.ops[value.op].phase
    assert len({value.key for value in problem.values}) == len(problem.values)


def test_every_layout_in_which_a_value_is_produced_or_read_is_in_its_layout_graph(
    problem: Problem,
) -> None:
    for variant in problem.variants:
        value = problem.values[variant.value]
        made = {s.layouts.outputs[value.result] for s in problem.ops[value.op].strategies}
        wanted = {
            s.layouts.inputs[u.operand] for u in variant.uses for s in problem.ops[u.op].strategies
        }
        assert made | wanted <= set(value.graph.index)
        assert {arc.src for arc in value.graph.arcs} | {arc.dst for arc in value.graph.arcs} <= set(
            range(len(value.graph.layouts))
        )
        assert all(arc.time_s >= 0 for arc in value.graph.arcs)


def test_every_operand_of_every_instance_reads_exactly_one_tensor(problem: Problem) -> None:
    read: Counter[tuple[int, int]] = Counter()
    for variant in problem.variants:
        assert variant.count > 0 and len(set(variant.uses)) == len(variant.uses) > 0
        for use in variant.uses:
            read[use.op, use.operand] += variant.count
    for n, op in enumerate(problem.ops):
        num_operands = {len(s.layouts.inputs) for s in op.strategies}
        assert len(num_operands) == 1
        for operand in range(num_operands.pop()):
            # an op may have more instances than tensors, because one tensor can have several
            # readers, but not the reverse
            assert 0 < read[n, operand] <= op.count


def test_values_of_backward_are_read_in_backward_and_gradients_by_their_parameters(
    problem: Problem,
) -> None:
    gradients = set()
    for variant in problem.variants:
        value = problem.values[variant.value]
        for use in variant.uses:
            reader = problem.ops[use.op]
            assert (value.phase, use.phase) != ("backward", "forward")
            if reader.kind == "parameter":
                gradients.add(use.op)
                assert use.phase == "backward"
            elif reader.kind == "compute":
                assert use.phase == reader.phase
    assert gradients == {n for n, op in enumerate(problem.ops) if op.kind == "parameter"}


def test_a_parameter_and_its_gradient_are_stored_in_one_layout_and_cost_their_share(
    problem: Problem, trace: Trace
) -> None:
    sizes = {op.key: op for op in problem.ops if op.kind == "parameter"}
    assert sum(op.count for op in sizes.values()) == len(trace.parameters)
    for op in sizes.values():
        whole = max(s.gradient_bytes for s in op.strategies)
        for s in op.strategies:
            assert s.layouts.inputs == s.layouts.outputs and not s.layouts.outputs[0].has_partial
            assert s.static_bytes == 3 * s.gradient_bytes, "itself and two moments of AdamW"
            assert whole / 4 <= s.gradient_bytes <= whole


def test_only_forward_compute_is_recomputed_and_nothing_that_another_layer_reads(
    problem: Problem, priced: Priced
) -> None:
    again = [n for n, op in enumerate(problem.ops) if op.recomputable]
    assert again and all(
        problem.ops[n].kind == "compute" and problem.ops[n].phase == "forward" for n in again
    )
    layer = {}
    for n, source in enumerate(priced.sources):
        for cluster in source.cluster.instances if source.cluster else ():
            layer |= {ref: (n, cluster.indices) for ref in cluster.results}
    for source in priced.sources:
        for cluster in (
            source.cluster.instances
            if source.cluster and source.cluster.first.phase == "forward"
            else ()
        ):
            for ref in cluster.operands:
                if ref in layer and layer[ref][1] != cluster.indices:
                    assert layer[ref][0] not in again


def test_values_that_exist_before_the_step_are_resident_and_results_are_not(
    problem: Problem,
) -> None:
    for value in problem.values:
        assert value.resident is (problem.ops[value.op].kind != "compute")
    assert problem.budget_bytes == BUDGET


def test_all_instances_of_an_op_are_counted(problem: Problem, priced: Priced, trace: Trace) -> None:
    nodes = sum(
        op.count * len(s.cluster.first.members)
        for op, s in zip(problem.ops, priced.sources, strict=True)
        if s.cluster
    )
    assert nodes == sum(n.op == "call_function" for n in trace.graph.nodes)
    for op, source in zip(problem.ops, priced.sources, strict=True):
        assert op.count == len(source.cluster.instances if source.cluster else source.names)
    assert [sum(1 for _ in refs) for refs in priced.refs] == [
        variant.count for variant in problem.variants
    ]


@pytest.mark.parametrize(
    ("objective", "bound", "gap"), [(2.0, 1.5, 0.25), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_the_gap_is_the_relative_difference_of_objective_and_bound(
    objective: float, bound: float, gap: float
) -> None:
    assert Solution((), {}, {}, objective, bound).gap == gap
