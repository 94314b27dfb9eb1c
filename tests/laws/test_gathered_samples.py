"""If an op couples samples, the data parallelism presets gather the operands of that op and log it.
The results match the model."""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.constraints import Constraint, ddp, fsdp, megatron
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError

B, WIDTH, HIDDEN, KINDS = 6, 12, 20, 4
LINE, THREE, SQUARE = Mesh(2), Mesh(3), Mesh({"data": 2, "tensor": 2})
SAYS = "gathers the batch for ops that cannot compute on a shard of it"


class Contrasted(nn.Module):
    """A symmetric contrastive loss in which each sample should be closest to its partner in the
    batch (Radford et al., 2021, figure 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        target = torch.arange(len(x))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Turned(nn.Module):
    """Each sample is mixed with another sample of the batch, as in manifold mixup (Verma et al.,
    2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x).flip(0))).pow(2).mean() + y.mean()


class Routed(nn.Module):
    """A balancing loss of routers: counts and weights of picks, summed over all samples (Fedus et
    al., 2021, section 2.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(WIDTH, KINDS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gates, picks = self.router(x).softmax(-1).topk(2)
        load = torch.zeros(KINDS).scatter_add(0, picks.reshape(-1), gates.reshape(-1))
        return F.mse_loss(self.out(x), y) + load.pow(2).mean()


class Placed(nn.Module):
    """Looks up positions for each sample and selects the last valid token of each."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(WIDTH, HIDDEN)), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(WIDTH).unsqueeze(0).repeat(len(x), 1)
        tokens = torch.tanh(self.table[places] + x.unsqueeze(-1))
        return F.mse_loss(self.out(tokens[torch.arange(len(x)), y.argmax(-1)]), y)


class Joined(nn.Module):
    """The attention of torch with a mask per sample, which merges samples and heads, and a view of
    all tokens together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, 1)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = self.up(x.unsqueeze(-1))
        mixed, _ = self.attention(
            tokens, tokens, tokens, key_padding_mask=y > 1, need_weights=False
        )
        return F.mse_loss(self.out((tokens + mixed).view(-1, HIDDEN)).view(len(x), -1), x)


class Alone(Turned):
    """A model without dependencies between samples."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


class Centred(Turned):
    """Subtracts the batch mean from the result of the last op, as in covariance losses (Bardes et
    al., 2022, equation 3)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.last(torch.tanh(self.first(x)))
        return (made - made.mean(0)).pow(3).sum() + y.mean()


class Spaced(Turned):
    """The distances between all pairs of samples: one tensor is read twice."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.first(x)
        return torch.cdist(made, made).mean() + F.mse_loss(self.last(made), y)


class Masked(Turned):
    """Each sample is weighed by the labels of another sample, without parameters."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.sigmoid(y.flip(0)) * self.last(torch.tanh(self.first(x))), y)


COUPLED: dict[type[nn.Module], str] = {
    Contrasted: "/dot",
    Turned: "/flip",
    Routed: "/scatter_add",
    Spaced: "/_cdist_forward",
}


@cache
def planned(
    kind: type[nn.Module], mesh: Mesh, forced: Constraint, num: int = B
) -> tuple[autopar.Plan, nn.Module, dict[str, Tensor]]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, batch = kind(), {"x": torch.randn(num, WIDTH), "y": torch.randn(num, WIDTH)}
    return (
        autopar.plan(model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=(forced,)),
        model,
        batch,
    )


def moved(plan: autopar.Plan, kind: str) -> Counter[int]:
    """Return the number of elements that collectives of a kind gather, and the number of
    collectives."""
    found = [step.collective for _, step in plan.steps() if step.collective.kind == kind]
    return Counter(max(c.bytes, c.output_bytes(plan.mesh.shape[0])) // 4 for c in found)


@pytest.mark.parametrize("kind", [*COUPLED, Placed, Masked, Centred])
@pytest.mark.parametrize("mesh", [LINE, THREE], ids=str)
@pytest.mark.parametrize("forced", [ddp(), fsdp()], ids=str)
def test_models_with_coupled_samples_match_the_plain_model(
    kind: type[nn.Module], mesh: Mesh, forced: Constraint
) -> None:
    plan, model, batch = planned(kind, mesh, forced)
    assert autopar.verify(plan, model, batch).ok and autopar.check(plan, model, batch).ok


@pytest.mark.parametrize("kind", [Joined, Contrasted, Placed])
@pytest.mark.parametrize("forced", [ddp(), fsdp()], ids=str)
def test_an_indivisible_batch_is_gathered_for_ops_that_join_samples_with_other_dims(
    kind: type[nn.Module], forced: Constraint
) -> None:
    plan, model, batch = planned(kind, THREE, forced, 8)
    assert autopar.verify(plan, model, batch).ok and autopar.check(plan, model, batch).ok
    said = [line for line in plan.proof.covers if SAYS in line]
    assert len(said) == (kind is not Placed)
    if kind is Joined:
        assert "/view" in said[0] and "8 samples in 3 shards" in said[0]
        assert not any(SAYS in line for line in planned(kind, THREE, forced)[0].proof.covers), (
            "of six nothing is"
        )


@pytest.mark.parametrize(
    ("num", "mesh", "why"),
    [
        (4, THREE, "with at most 2 per shard, 1 of the devices would have none"),
        (2, THREE, "with at most 1 per shard, 1 of the devices would have none"),
        (6, SQUARE, "shards over several axes must be equal"),
    ],
)
def test_a_batch_with_fewer_samples_than_devices_is_refused_with_the_needed_size(
    num: int, mesh: Mesh, why: str
) -> None:
    with pytest.raises(ConstraintError, match=f"a batch of {num} cannot be split.*{why}") as caught:
        planned(Alone, mesh, ddp(), num)
    assert f"a multiple of {mesh.num_devices}" in caught.value.remedy


def test_coupled_samples_with_tensor_parallelism_match_the_plain_model() -> None:
    plan, model, batch = planned(Contrasted, SQUARE, megatron(tp=2, dp=2, zero=3))
    assert autopar.verify(plan, model, batch).ok and autopar.check(plan, model, batch).ok


@pytest.mark.parametrize("kind", COUPLED)
def test_the_plan_and_the_log_name_the_op(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    planned.cache_clear()
    plan = planned(kind, LINE, ddp())[0]
    said = [line for line in plan.proof.covers if SAYS in line]
    assert len(said) == 1 and said[0].startswith("ddp") and COUPLED[kind] in said[0]
    assert any(
        record.message == said[0] and record.levelno == logging.WARNING for record in caplog.records
    )


@pytest.mark.parametrize("kind", [Alone, Placed])
def test_nothing_is_gathered_or_reported_for_independent_samples(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(kind, LINE, ddp())[0]
    assert not moved(plan, "all_gather")
    assert not any(
        SAYS in line
        for line in (*plan.proof.covers, *(record.message for record in caplog.records))
    )


def test_a_mean_over_samples_is_reduced_without_a_gather_or_a_report() -> None:
    plan = planned(Centred, LINE, ddp())[0]
    assert not moved(plan, "all_gather") and not any(SAYS in line for line in plan.proof.covers)
    dots = [
        n.strategy
        for e in plan.entries
        if e.phase == "forward"
        for n in e.nodes
        if "/dot/" in n.node
    ]
    assert len(dots) == 2 and all(str(s.inputs[0]) == str(s.outputs[0]) == "S(0)" for s in dots)


def test_a_contrastive_loss_gathers_embeddings_and_scores_rows() -> None:
    """The embeddings of one side are gathered in forward and again or still kept in backward, those
    of the other side for their gradient. The B² scores are never gathered."""
    plan = planned(Contrasted, LINE, ddp())[0]
    gathered = moved(plan, "all_gather")
    assert gathered and set(gathered) == {B * WIDTH} and gathered.total() <= 3
    scores = [
        n.strategy
        for e in plan.entries
        if e.phase == "forward"
        for n in e.nodes
        if n.node == "/dot/forward/0"
    ]
    assert [(*map(str, s.inputs), str(s.outputs[0])) for s in scores] == [("S(0)", "R", "S(0)")]
    assert moved(plan, "reduce_scatter") == {B * WIDTH: 1}, "the gathered side's gradient"


def test_after_an_op_that_needs_all_samples_each_device_continues_with_its_own() -> None:
    plan = planned(Turned, LINE, ddp())[0]
    dots = [
        n.strategy
        for e in plan.entries
        if e.phase == "forward"
        for n in e.nodes
        if "/dot/" in n.node
    ]
    assert len(dots) == 2 and all(str(s.inputs[0]) == str(s.outputs[0]) == "S(0)" for s in dots)
