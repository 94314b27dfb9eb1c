"""Losses over microbatches: all losses and reductions of torch, and quotients with sums and
averages of the full batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CoupledError

Loss = Callable[[Tensor, Tensor, str], Tensor]
LOSSES: dict[str, Loss] = {
    "mse": lambda z, t, r: F.mse_loss(z, t, reduction=r),
    "smooth l1": lambda z, t, r: F.smooth_l1_loss(z, t, reduction=r),
    "huber": lambda z, t, r: F.huber_loss(z, t, reduction=r),
    "soft margin": lambda z, t, r: F.soft_margin_loss(z, t * 2 - 1, reduction=r),
    "bce": lambda z, t, r: F.binary_cross_entropy(z.sigmoid(), t, reduction=r),
    "bce with logits": lambda z, t, r: F.binary_cross_entropy_with_logits(z, t, reduction=r),
    "bce with weights": lambda z, t, r: F.binary_cross_entropy_with_logits(
        z, t, t + 0.5, pos_weight=torch.full((3,), 2.0), reduction=r
    ),
    "l1": lambda z, t, r: F.l1_loss(z, t, reduction=r),
    "kl": lambda z, t, r: F.kl_div(
        z.log_softmax(-1), t, reduction="batchmean" if r == "mean" else r
    ),
}


class Net(nn.Module):
    """A linear layer and a loss of its result."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y)


def planned(
    loss: Callable[[Tensor, Tensor], Tensor], num: int = 2
) -> tuple[nn.Module, dict[str, Tensor], autopar.Plan]:
    torch.manual_seed(0)
    model = Net(loss).double()
    batch = {
        "x": torch.randn(6, 4, dtype=torch.float64),
        "y": torch.eye(3, dtype=torch.float64).repeat(2, 1),
    }
    plan = autopar.plan(
        model,
        autopar.Mesh({"gpu": 1}),
        example_inputs=batch,
        hardware="cpu-gloo",
        num_microbatches=num,
    )
    assert plan.num_microbatches == num
    return model, batch, plan


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_microbatches_equals_that_of_the_batch(name: str, reduction: str) -> None:
    model, batch, plan = planned(lambda z, t: LOSSES[name](z, t, reduction), num=3)
    assert_equal(plan, model, batch)


def mask(t: Tensor) -> Tensor:
    return (t > 0).to(torch.float64)


QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a factor": lambda z, t: (z.square() * mask(t)).sum() / mask(t).sum(),
    "a factor of each term": lambda z, t: (z * mask(t) - z.sin() * (t > 0)).sum() / (t > 0).sum(),
    "filled": lambda z, t: z.square().masked_fill(~(t > 0), 0.0).sum() / (t > 0).sum(),
    "filled by the opposite": lambda z, t: (
        z.square().masked_fill(t <= 0, 0.0).sum() / (t > 0).sum()
    ),
    "chosen": lambda z, t: torch.where(t > 0, z, 0.0).sum() / (t > 0).sum(),
    "not a number elsewhere": lambda z, t: (
        torch.where(t > 0, z.square(), torch.nan).nan_to_num().sum() / (t > 0).sum()
    ),
    "chosen elsewhere": lambda z, t: torch.where(t <= 0, 0.0, z).sum() / (t > 0).sum(),
    "of rows": lambda z, t: (z.square().mean(-1) * mask(t[:, 0])).sum() / mask(t[:, 0]).sum(),
    "free": lambda z, t: z.square().sum() / (t > 0).sum(),
    "one term is free": lambda z, t: (z * mask(t) + z.sin()).sum() / mask(t).sum(),
    "filled with ones": lambda z, t: z.masked_fill(~(t > 0), 1.0).sum() / (t > 0).sum(),
    "filled where it counts": lambda z, t: z.masked_fill(t > 0, 0.0).sum() / (t > 0).sum(),
    "chosen where it does not count": lambda z, t: torch.where(t > 0, 0.0, z).sum() / (t > 0).sum(),
    "another mask": lambda z, t: (z * (t > 0.5)).sum() / (t > 0).sum(),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_sum_is_divided_by_the_count_of_the_whole_batch(name: str) -> None:
    model, batch, plan = planned(QUOTIENTS[name])
    assert_equal(plan, model, batch)
    batch["y"][:3] = 0.0  # the first microbatch has no valid labels
    assert_equal(plan, model, batch)


def assert_equal(plan: autopar.Plan, model: nn.Module, batch: dict[str, Tensor]) -> None:
    found = autopar.verify(plan, model, batch)
    assert found.ok and found.max_error < 1e-12, str(found)


def count(t: Tensor) -> Tensor:
    return (t > 0).sum()


MADE_OF_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no less than one": lambda z, t: (z.square() * mask(t)).sum() / count(t).clamp(min=1),
    "no less than many": lambda z, t: (z.square() * mask(t)).sum() / mask(t).sum().clamp(min=2.5),
    "no less than little": lambda z, t: (
        (z.square() * mask(t)).sum() / mask(t).sum().clamp(min=1e-6)
    ),
    "between two": lambda z, t: (z.square() * mask(t)).sum() / mask(t).sum().clamp(0.5, 3.5),
    "the greater": lambda z, t: (
        (z.square() * mask(t)).sum() / torch.maximum(mask(t).sum(), torch.tensor(2.0))
    ),
    "and a little": lambda z, t: (z.square() * mask(t)).sum() / (mask(t).sum() + 1e-8),
    "of two sums": lambda z, t: (
        (z.square() * mask(t)).sum()
        / torch.maximum(mask(t).sum(), t.square().sum() * 0.75).clamp(min=1)
    ),
    "not only what counts": lambda z, t: z.square().sum() / count(t).clamp(min=1),
    "of two terms": lambda z, t: (
        (z * mask(t)).sum() / (n := count(t).clamp(min=1)) - 0.5 * (z.sin().sum() / n)
    ),
}


@pytest.mark.parametrize("num", [2, 6])
@pytest.mark.parametrize("name", MADE_OF_SUMS)
def test_a_sum_is_divided_by_a_function_of_sums_of_the_batch(name: str, num: int) -> None:
    model, batch, plan = planned(MADE_OF_SUMS[name], num)
    for counted in (
        range(6),
        (1, 3, 4),
        (4,),
        (),
    ):  # in the last three cases, the first of six microbatches has nothing to count
        labels = torch.zeros_like(batch["y"])
        for sample in counted:
            labels[sample, sample % 3] = 1.0
        assert_equal(plan, model, {**batch, "y": labels})


def entropy(z: Tensor, labels: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(z, labels, ignore_index=2, **how)


JOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two counts": lambda z, t: (
        (z * mask(t)).sum() / mask(t).sum() + (z.square() * (t < 0.5)).sum() / (t < 0.5).sum()
    ),
    "two entropies": lambda z, t: entropy(z, t.argmax(-1)) + 0.3 * entropy(z.sin(), t.argmin(-1)),
    "entropies of classes that weigh otherwise": lambda z, t: (
        entropy(z, t.argmax(-1), weight=torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64))
        + entropy(z.sin(), t.argmin(-1))
    ),
    "a count and what is clamped": lambda z, t: (
        (z * mask(t)).sum() / count(t).clamp(min=1) + z.sum() / count(t)
    ),
    "a count and a sum": lambda z, t: (z * mask(t)).sum() / mask(t).sum() + z.square().sum(),
    "a count and an average": lambda z, t: entropy(z, t.argmax(-1)) + 0.1 * F.mse_loss(z, t),
    "what is clamped, and whole": lambda z, t: (
        (z * mask(t)).sum() / count(t).clamp(min=1) + torch.ones(3).sum()
    ),
    "two counts, an average and what is whole": lambda z, t: (
        entropy(z, t.argmax(-1)) - (z * t).sum() / (t.sum() + 1) + z.sin().mean() + 2.0
    ),
    "times a count": lambda z, t: (
        (z * mask(t)).sum() / count(t).clamp(min=1) * count(t).clamp(min=1)
    ),
    "times one over a count": lambda z, t: (z * mask(t)).sum() * (1.0 / mask(t).sum()) + z.mean(),
    "each element by a count": lambda z, t: (
        (z * mask(t) / mask(t).sum()).sum() + (z.square() / count(t)).sum()
    ),
    "0 where nothing counts": lambda z, t: (
        torch.where(count(t) > 0, (z * mask(t)).sum() / count(t), 0.0 * z.sum()) + z.square().sum()
    ),
    "classes that are rare weigh more": lambda z, t: (
        F.cross_entropy(z, t.argmax(-1), reduction="none") * (t / t.sum(0)).sum(-1)
    ).sum(),
    "a count for each class": lambda z, t: (z.sum(0) / t.sum(0)).sum(),
    "less the batch's average of labels": lambda z, t: F.mse_loss(z, t - t.mean(0)),
    "by the batch's deviation of labels": lambda z, t: (
        z.square() / (t - t.mean(0)).square().mean()
    ).sum(),
    "a sum and a number": lambda z, t: (z * mask(t)).sum() + 3.0,
    "a number less a sum": lambda z, t: 3.0 - (z * mask(t)).sum(),
    "a sum and two averages": lambda z, t: z.sum() + z.mean() + t.sum() * t.mean(),
    "a sum by a count, a sum and an average": lambda z, t: (
        (z * mask(t)).sum() / count(t) + z.sum() + z.mean()
    ),
    "a sum and an average by a count": lambda z, t: (
        (z * mask(t)).sum() / count(t) + z.mean() / count(t)
    ),
    "what does not count": lambda z, t: z.square().sum() / (t.numel() - count(t)) + z.mean(),
}


@pytest.mark.parametrize("num", [2, 6])
@pytest.mark.parametrize("name", JOINED)
def test_terms_with_different_counts_are_combined_as_in_the_whole_batch(
    name: str, num: int
) -> None:
    model, batch, plan = planned(JOINED[name], num)
    batch["y"] = torch.eye(3, dtype=torch.float64)[
        torch.tensor([0, 0, 1, 2, 0, 2])
    ]  # different numbers of each class
    assert_equal(plan, model, batch)


def test_a_divisor_known_only_after_the_microbatches_is_refused() -> None:
    with pytest.raises(
        CoupledError, match=r"the value of the batch depends on parameter 'linear\.weight'"
    ):
        planned(lambda z, t: (z * mask(t)).sum() / z.square().sum().clamp(min=1))


class Penalised(Net):
    """A loss of samples plus a penalty of parameters."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.linear(x), y) + 0.1 * self.linear.weight.square().sum()


def summed(z: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(z, t, reduction="sum")


@pytest.mark.parametrize(
    "loss", [F.mse_loss, JOINED["two entropies"], summed], ids=["mean", "counts", "sum"]
)
@pytest.mark.parametrize("num", [2, 6])
def test_a_parameter_penalty_can_be_added_to_averages_quotients_and_sums(
    loss: Callable[[Tensor, Tensor], Tensor], num: int
) -> None:
    model = Penalised(loss).double()
    batch = {
        "x": torch.randn(6, 4, dtype=torch.float64),
        "y": torch.eye(3, dtype=torch.float64).repeat(2, 1),
    }
    plan = autopar.plan(model, 1, example_inputs=batch, hardware="cpu-gloo", num_microbatches=num)
    assert_equal(plan, model, batch)


def test_the_error_names_the_operands_of_the_op_its_line_and_a_remedy() -> None:
    with pytest.raises(CoupledError) as refused:
        planned(lambda z, t: (z - z.mean(0)).square().sum())
    said = str(refused.value)
    assert (
        "reads a slice of the samples, along dim 0 and an average over samples" in said
        and "sub" in said
    )
    assert (
        "test_microbatch_quotients.py:" in said
        and "what to do: pass microbatches=1 or num_microbatches=1" in said
    )
    with pytest.raises(
        CoupledError, match="its result depends on the number of samples"
    ) as refused:
        planned(lambda z, t: (z.sum(1) * torch.linspace(0, 1, len(z))).sum())
    assert "test_microbatch_quotients.py:" in str(refused.value)


def test_floats_computed_from_integers_are_verified_in_float64() -> None:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        return F.smooth_l1_loss(z, (t.to(torch.int64) * 0.3 - 0.5).softmax(-1))

    model, batch, plan = planned(loss, num=1)
    assert autopar.verify(plan, model, batch).ok
