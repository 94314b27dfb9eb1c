"""Losses of practice in microbatches and stages: equal to the plain model in float64, or refused
with the line of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.constraints import pipeline
from autopar.errors import CoupledError

CLASSES = 5
Batch = dict[str, Tensor]
Loss = Callable[["Net", Tensor, Tensor, Batch], Tensor]
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=torch.float64)


class Net(nn.Module):
    """Three layers, a head, a frozen teacher, and parameters and buffers of losses."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.teacher, self.loss = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES), loss
        self.teacher.requires_grad_(False)
        self.log_variances = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.prototypes = nn.Parameter(torch.randn(CLASSES, 8))
        self.register_buffer("average", torch.zeros(8))

    def forward(
        self, x: Tensor, y: Tensor, labels: Tensor, weight: Tensor, mask: Tensor, value: Tensor
    ) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        batch = {
            "x": x,
            "y": y,
            "labels": labels,
            "weight": weight,
            "mask": mask,
            "value": value,
        }
        return self.loss(self, self.head(hidden), hidden, batch)


def make_batch(seed: int = 0) -> Batch:
    """Return 12 samples: features, labels of which some are ignored, all labels, positive weights,
    the mask of counted samples, and values. Early samples are counted less often."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (12,), generator=made)
    mask = torch.rand(12, generator=made) < torch.linspace(0.2, 1.0, 12)
    mask[0], mask[-1] = False, True
    return {
        "x": torch.randn(12, 8, generator=made, dtype=torch.float64),
        "y": torch.where(mask, labels, -100),
        "labels": labels,
        "weight": torch.rand(12, generator=made, dtype=torch.float64) + 0.1,
        "mask": mask,
        "value": torch.randn(12, generator=made, dtype=torch.float64),
    }


def each(z: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(z, b["labels"], reduction="none")


def picked(z: Tensor, b: Batch) -> Tensor:
    return z.log_softmax(-1).gather(-1, b["labels"][:, None])[:, 0]


def distillation(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    with torch.no_grad():
        target = (net.teacher(h) / 2).softmax(-1)
    return 4 * F.kl_div((z / 2).log_softmax(-1), target, reduction="batchmean") + F.cross_entropy(
        z, b["y"]
    )


def preferences(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    with torch.no_grad():
        reference = picked(net.teacher(b["x"]), b)
    gain = (picked(z, b) - reference).view(-1, 2)
    return -F.logsigmoid(0.1 * (gain[:, 0] - gain[:, 1])).mean()


def odds_ratio(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    good, bad = picked(z, b), picked(z.flip(-1), b)
    odds = good - bad - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
    return -good.mean() - 0.1 * F.logsigmoid(odds).mean()


def negatives(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    query, key = F.normalize(h, dim=-1), F.normalize(net.layers[0](b["x"]), dim=-1).detach()
    scores = torch.cat(
        [(query * key).sum(-1, keepdim=True), query @ F.normalize(net.prototypes, dim=-1).T], 1
    )
    return F.cross_entropy(scores / 0.2, torch.zeros(len(query), dtype=torch.long))


def mixture(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    scale = h[:, 3:6].clamp(-2, 2)
    distance = ((b["value"][:, None] - h[:, :3]) * (-scale).exp()).square()
    return -(z[:, :3].log_softmax(-1) - 0.5 * distance - scale).logsumexp(-1).mean()


def uncertainty(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    squares = (h[:, 0] - b["value"]).square()
    terms = torch.stack(
        [F.cross_entropy(z, b["y"]), (squares * b["weight"]).sum() / b["weight"].sum()]
    )
    return (terms * (-net.log_variances).exp() + net.log_variances).sum()


def detection(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    positive = b["y"] >= 1
    target = F.one_hot(b["y"].clamp(min=0), CLASSES).to(z)
    scores = F.binary_cross_entropy_with_logits(z, target, reduction="none")
    count = positive.sum().clamp(min=1)
    boxes = F.smooth_l1_loss(h[positive], b["x"][positive], reduction="sum")
    return (scores * b["mask"][:, None]).sum() / count + boxes / count


def whitened(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    value, mask = b["value"], b["mask"]
    mean = (value * mask).sum() / mask.sum()
    variance = ((value - mean).square() * mask).sum() / mask.sum()
    return -(picked(z, b) * (value - mean) * torch.rsqrt(variance + 1e-8) * mask).sum() / mask.sum()


def either_branch(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    mask, weight = b["mask"], b["weight"]
    return torch.where(
        mask.sum() > 3, (each(z, b) * mask).mean(), (each(z, b) * weight).sum() / weight.sum()
    )


def prior(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    share = F.one_hot(b["labels"], CLASSES).to(z).mean(0)
    return F.cross_entropy(z + (share + 1e-3).log(), b["labels"])


def straight_through(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(net.head(h + (h.round() - h).detach()), b["y"])


EXACT: dict[str, Loss] = {
    "temperature": lambda n, z, h, b: (
        F.cross_entropy(
            z * n.log_variances[0].exp(), b["y"], WEIGHT, ignore_index=-100, label_smoothing=0.2
        )
        + n.log_variances[0].square()
    ),
    "whitened advantages": whitened,
    "detection": detection,
    "a branch by a count": either_branch,
    "distillation": distillation,
    "preferences of neighbours": preferences,
    "odds ratio": odds_ratio,
    "negatives of the model": negatives,
    "mixture density": mixture,
    "uncertainties of tasks": uncertainty,
    "prior of the batch": prior,
    "straight through": straight_through,
    "nearest prototype": lambda n, z, h, b: torch.cdist(h, n.prototypes).amin(-1).mean(),
    "masked_select": lambda n, z, h, b: each(z, b).masked_select(b["mask"]).mean(),
    "indexed by a mask": lambda n, z, h, b: F.cross_entropy(z[b["mask"]], b["labels"][b["mask"]]),
    "nansum": lambda n, z, h, b: (
        torch.where(b["mask"], each(z, b), torch.nan).nansum() / b["mask"].sum()
    ),
    "numbers for NaN": lambda n, z, h, b: torch.nan_to_num(each(z, b) / b["weight"]).mean(),
    "class counts": lambda n, z, h, b: (
        each(z, b) / F.one_hot(b["labels"], CLASSES).sum(0).to(z)[b["labels"]]
    ).sum(),
    "product with weights": lambda n, z, h, b: (b["weight"] / b["weight"].sum()) @ each(z, b),
    "explained variance": lambda n, z, h, b: (
        (z[:, 0] - b["value"]).square().sum() / (b["value"] - b["value"].mean()).square().sum()
    ),
    "pinball": lambda n, z, h, b: torch.maximum(
        0.3 * (b["value"][:, None] - z), -0.7 * (b["value"][:, None] - z)
    ).mean(),
    "repeated samples": lambda n, z, h, b: F.cross_entropy(
        z.repeat_interleave(3, 0), b["labels"].repeat_interleave(3, 0)
    ),
    "a function of a count": lambda n, z, h, b: (
        F.cross_entropy(z, b["y"]) * torch.log(b["mask"].sum() + 1.0)
    ),
    "sum divided in one op": lambda n, z, h, b: torch.addcdiv(
        F.cross_entropy(z, b["y"]), h.square().sum(), b["mask"].sum().to(z), value=0.2
    ),
}


def moving_average(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    net.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return (h - net.average).square().mean()


def in_batch(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(h @ net.layers[0](b["x"]).T, torch.arange(len(h)))


def by_branch(net: Net, z: Tensor, h: Tensor, b: Batch) -> Tensor:
    return h.square().mean() * (2.0 if len(h) > 4 else 1.0)


REFUSED: dict[str, Loss] = {
    "moving average": moving_average,
    "other samples as negatives": in_batch,
    "a branch by the batch size": by_branch,
    "mask of the model": lambda n, z, h, b: (
        (each(z, b) * (z.argmax(-1) != b["labels"])).sum() / (z.argmax(-1) != b["labels"]).sum()
    ),
    "worst samples": lambda n, z, h, b: each(z, b).topk(4).values.mean(),
    "order of values": lambda n, z, h, b: (
        z[b["value"].argsort(), 0] - z[b["value"].argsort(), 0].logcumsumexp(0)
    ).mean(),
    "nanmean": lambda n, z, h, b: torch.where(b["mask"], each(z, b), torch.nan).nanmean(),
    "a first part": lambda n, z, h, b: each(z, b)[:4].mean(),
    "root of the batch size": lambda n, z, h, b: each(z, b).sum() / len(z) ** 0.5,
    "flooding": lambda n, z, h, b: (each(z, b).mean() - 0.3).abs() + 0.3,
    "batch statistics": lambda n, z, h, b: F.relu(1 - (h.var(0) + 1e-4).sqrt()).mean(),
    "shared rows": lambda n, z, h, b: F.mse_loss(h, h.roll(1, 0)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "microbatches": {"num_microbatches": 3},
    "stages": {"constraints": [pipeline("gpu", microbatches=3)]},
}
FAST = ("temperature", "whitened advantages", "detection", "nansum")


def make_plan(loss: Loss, how: str) -> tuple[autopar.Plan, Net]:
    torch.manual_seed(0)
    net, mesh = Net(loss).double(), autopar.Mesh({"gpu": 2 if how == "stages" else 1})
    options = {"hardware": "cpu-gloo", "outputs": "loss", **OPTIONS.get(how, {})}
    return autopar.plan(net, mesh, example_inputs=make_batch(), **options), net


def assert_equal(plan: autopar.Plan, net: Net) -> None:
    for seed in (0, 5):
        found = autopar.verify(plan, net, make_batch(seed))
        assert found.ok and found.max_error < 1e-12, str(found)


@pytest.mark.parametrize("name", FAST)
def test_a_loss_of_microbatches_equals_that_of_the_batch(name: str) -> None:
    plan, net = make_plan(EXACT[name], "microbatches")
    assert plan.num_microbatches == 3
    assert_equal(plan, net)


@pytest.mark.slow
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", EXACT)
def test_every_loss_of_microbatches_and_of_stages_equals_that_of_the_batch(
    name: str, how: str
) -> None:
    assert_equal(*make_plan(EXACT[name], how))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number < 3 else pytest.mark.slow)
        for number, name in enumerate(REFUSED)
    ],
)
def test_a_loss_that_couples_samples_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(CoupledError) as refusal:
        make_plan(REFUSED[name], "microbatches")
    where, remedy = refusal.value.where, refusal.value.remedy
    assert where is not None and "test_losses_in_microbatches.py" in where.source
    assert remedy is not None and "num_microbatches=1" in remedy
    assert_equal(*make_plan(REFUSED[name], "the whole batch"))
