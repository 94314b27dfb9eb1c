"""Distributions in forward are captured independently of earlier calls in the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    LogNormal,
    Normal,
    kl,
    kl_divergence,
)

import autopar

MESH = autopar.Mesh({"data": 2})


class Encoder(nn.Module):
    """A model that computes a mean and a deviation per sample and passes them to `loss`."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mean, self.deviation, self.loss = nn.Linear(4, 4), nn.Linear(4, 4), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.mean(x), self.deviation(x).exp(), x)


class Peaked(Normal):
    """A custom distribution with the divergence of its base class."""


def _elbo(mean: Tensor, deviation: Tensor, x: Tensor) -> Tensor:
    latent, prior = Normal(mean, deviation), Normal(torch.zeros_like(x), torch.ones_like(x))
    return kl_divergence(latent, prior).mean() + (latent.rsample() - x).square().mean()


def _likelihoods(mean: Tensor, deviation: Tensor, x: Tensor) -> Tensor:
    classes = Categorical(logits=mean).log_prob((x[:, 0] > 0).long())
    return -(Independent(Normal(mean, deviation), 1).log_prob(x) + classes).mean()


def _of_subclasses(mean: Tensor, deviation: Tensor, x: Tensor) -> Tensor:
    logarithms = kl_divergence(LogNormal(mean, deviation), LogNormal(0.0, 1.0))
    return (logarithms + kl_divergence(Peaked(mean, deviation), Normal(0.0, 1.0))).mean()


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """Reset the argument validation, which torch.compile switches off permanently, and the cache of
    divergences."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    kl._KL_MEMOIZE.clear()
    yield
    Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("loss", [_elbo, _likelihoods, _of_subclasses])
def test_a_model_with_distributions_matches_the_plain_model(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model, batch = Encoder(loss).double(), (torch.randn(4, 4, dtype=torch.float64),)
    plan = autopar.plan(model, MESH, example_inputs=batch)
    report = autopar.verify(plan, model, batch)
    assert report.ok, report


def test_capture_does_not_change_the_global_state_of_distributions() -> None:
    autopar.plan(Encoder(_elbo), MESH, example_inputs=(torch.randn(4, 4),))
    assert not kl._KL_MEMOIZE
    with pytest.raises(ValueError, match="constraint"):
        Normal(0.0, -1.0)
