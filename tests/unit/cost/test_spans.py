"""From when to when tensors are live, with and without ops that could run again."""

from __future__ import annotations

from mlp import traced

from autopar.cost.spans import NEVER, find_spans


def test_an_op_that_could_run_again_asks_for_its_operands_before_what_reads_its_result() -> None:
    trace = traced(32, 64, 64)
    nodes = [node for node in trace.graph.nodes if node.op == "call_function"]
    forward = {node.name for node in nodes if node.meta["phase"] == "forward"}
    kept, repeated = find_spans(trace, (), ()), find_spans(trace, forward, ())
    assert list(kept) == list(repeated) == [n.name for n in reversed(list(trace.graph.nodes))][1:]
    later = []
    for name, span in kept.items():
        again = repeated[name]
        assert (span.producer, span.last_forward, span.first_read) == (
            again.producer,
            again.last_forward,
            again.first_read,
        )
        assert span.first_reread == NEVER, "nothing runs again"
        if span.earliest != NEVER:
            assert 0 <= again.earliest <= span.earliest <= span.latest <= again.latest
        later.append(again.latest > span.latest)
    assert any(later), "some operands are read again in backward alone"


def test_gradients_of_parameters_are_those_that_are_named() -> None:
    trace = traced(32, 64, 64)
    name = next(node.name for node in trace.graph.nodes if node.op == "call_function")
    found = find_spans(trace, (), {name})
    assert [node for node, span in found.items() if span.is_gradient] == [name]
