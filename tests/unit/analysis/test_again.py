"""Which nodes backward can have a use for running again, of a loss of few ops and of a stage."""

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
    """Logits, of which the loss picks some, and weights that the loss is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.up(x).tanh(), labels)


@cache
def traced() -> Trace:
    return capture(
        Head(), (), {"x": torch.ones(64, 8), "labels": torch.ones(64, dtype=torch.int64)}
    )


@cache
def priced() -> Priced:
    mesh, profile = Mesh.parse("a=2,b=2"), HardwareProfile.load("cpu-gloo")
    return price(traced(), classes_of(traced(), mesh.shape), mesh, profile, budget_bytes=2**40)


def test_what_backward_reads_is_run_again_with_all_that_makes_it_and_what_only_the_loss_is_made_of_is_not() -> (  # noqa: E501
    None
):
    keys = {
        node.meta["key"]
        for node in traced().graph.nodes
        if node.name in needed_by_backward(traced())
    }
    forward = {
        node.meta["key"] for node in traced().graph.nodes if node.meta.get("phase") == "forward"
    }
    assert {"up/dot/forward/0", "/tanh/forward/0", "/sum_exp/forward/0"} <= keys < forward
    assert {"/pick/forward/0", "/log/forward/0"} <= forward - keys


def test_the_certificate_finds_the_same_by_itself() -> None:
    facts = Facts.of(traced())
    named = {
        node.meta["key"]
        for node in traced().graph.nodes
        if node.name in needed_by_backward(traced())
    }
    assert {key for key in facts.asked if key in facts.nodes} == named


def test_an_op_that_runs_again_does_not_read_what_only_those_of_its_nodes_read_that_do_not() -> (
    None
):
    p = priced()
    unread = {
        (p.problem.values[x.value].key, p.problem.ops[u.op].key)
        for x in p.problem.variants
        for u in x.uses
        if not u.again
    }
    picks = {
        n
        for n, s in enumerate(p.sources)
        if s.cluster and any(m.key == "/pick/forward/0" for m in s.cluster.first.members)
    }
    (pick,) = picks
    assert p.problem.ops[pick].key == "/tanh/forward/0", (
        "it is part of the op that makes the logits, which backward reads"
    )
    made = {value for value, op in unread if op == "/tanh/forward/0"}
    assert len(made) == 1 and "up/dot" not in made.pop()
