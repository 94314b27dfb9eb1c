"""The forward nodes whose recomputation backward can use."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from autopar.analysis.gradients import needed_by_backward
from autopar.capture import capture
from autopar.capture.trace import Trace
from autopar.certificate.facts import Facts
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.sharding import classes_of


class Head(nn.Module):
    """A linear layer with a cross-entropy loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.up(x).tanh(), labels)


@cache
def head_trace() -> Trace:
    return capture(
        Head(), (), {"x": torch.ones(64, 8), "labels": torch.ones(64, dtype=torch.int64)}
    )


@cache
def head_prices() -> Priced:
    mesh, profile = Mesh.parse("a=2,b=2"), HardwareProfile.load("cpu-gloo")
    return price(
        head_trace(), classes_of(head_trace(), mesh.shape), mesh, profile, budget_bytes=2**40
    )


def test_recomputable_nodes_include_all_inputs_of_backward_but_not_the_loss() -> None:
    keys = {
        node.meta["key"]
        for node in head_trace().graph.nodes
        if node.name in needed_by_backward(head_trace())
    }
    forward = {
        node.meta["key"] for node in head_trace().graph.nodes if node.meta.get("phase") == "forward"
    }
    assert {"up/dot/forward/0", "/tanh/forward/0", "/sum_exp/forward/0"} <= keys < forward
    assert {"/pick/forward/0", "/log/forward/0"} <= forward - keys


def test_certificate_derives_the_same_nodes() -> None:
    facts = Facts.of(head_trace())
    keys = {
        node.meta["key"]
        for node in head_trace().graph.nodes
        if node.name in needed_by_backward(head_trace())
    }
    assert {key for key in facts.needed if key in facts.nodes} == keys


def test_recomputed_op_does_not_read_operands_of_nodes_that_do_not_run_again() -> None:
    p = head_prices()
    unread = {
        (p.problem.values[x.value].key, p.problem.ops[u.op].key)
        for x in p.problem.variants
        for u in x.uses
        if not u.read_again
    }
    picks = {
        n
        for n, s in enumerate(p.sources)
        if s.cluster and any(m.key == "/pick/forward/0" for m in s.cluster.first.members)
    }
    (pick,) = picks
    assert p.problem.ops[pick].key == "/tanh/forward/0", (
        "the pick belongs to the op that computes the logits, which backward reads"
    )
    values = {value for value, op in unread if op == "/tanh/forward/0"}
    assert len(values) == 1 and "up/dot" not in values.pop()
