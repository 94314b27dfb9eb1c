"""Outputs and buffers that are zero up to rounding errors are equal, and larger differences are
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verification import check
from autopar.verification.comparison import Results


class Centred(nn.Module):
    """A batch norm of channels that sum to zero, so that its running mean is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(self.norm(hidden - hidden.mean(0)).relu()).square().mean()


class Sums(nn.Module):
    """Returns its loss and values that are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        share = self.layer(x).softmax(-1)
        rest, centred = share.sum(-1) - 1, (x - x.mean(0)).mean(0)
        return {"loss": (share * x).sum(), "rest": rest, "centred": 10 * centred + 0.1 * centred}


@pytest.mark.parametrize("model", [Centred(), Sums()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("plan", [autopar.constraints.ddp(), autopar.constraints.fsdp()], ids=str)
def test_values_that_are_zero_up_to_rounding_are_equal(model: nn.Module, plan: Any) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"hardware": "cpu-gloo", "outputs": "full"}
    found = autopar.plan(model, 2, example_inputs=(x,), constraints=[plan], **options)
    assert autopar.verify(found, model, (x,)).ok


@pytest.mark.parametrize(("model", "name"), [(Centred(), "norm.running_mean"), (Sums(), "rest")])
def test_larger_differences_from_zero_are_not_equal(
    model: nn.Module, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"hardware": "cpu-gloo", "outputs": "full"}
    found = autopar.plan(model, 2, example_inputs=(x,), **options)
    judge = check.compare

    def off(ours: Results, reference: Results, *rest: Any) -> Any:
        moved = {
            kind: {n: y + 1e-9 if n == name else y for n, y in getattr(ours, kind).items()}
            for kind in ("outputs", "buffers")
        }
        return judge(Results(moved["outputs"], moved["buffers"], ours.gradients), reference, *rest)

    monkeypatch.setattr(check, "compare", off)
    with pytest.raises(autopar.errors.VerificationError):
        autopar.verify(found, model, (x,))


class NormedTwice(nn.Module):
    """A batch norm followed by two instance norms. The gradient of the first bias consists of
    rounding errors only."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.first = nn.Dropout2d(0.2), nn.BatchNorm2d(3)
        self.second = nn.InstanceNorm2d(3, affine=True)
        self.third = nn.InstanceNorm2d(3, affine=True)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.third(self.second(self.first(self.drop(x))))
        pooled = nn.functional.max_pool2d(hidden, 3, stride=2, padding=1)
        return self.head(pooled.mean((2, 3))).square().mean()


def normed_twice() -> tuple[Any, nn.Module, Tensor]:
    """Return a plan of the model above on two devices, the model and its batch."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = NormedTwice()
    x = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"hardware": "cpu-gloo", "outputs": "full"}
    return autopar.plan(model, 2, example_inputs=(x,), **options), model, x


def test_noise_gradients_are_compared_with_the_effect_of_one_rounding_of_weights() -> None:
    plan, model, x = normed_twice()
    assert autopar.verify(plan, model, (x,)).ok


@pytest.mark.parametrize("name", ["first.bias", "first.weight", "head.bias"])
def test_a_gradient_with_an_error_larger_than_its_noise_is_not_equal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, model, x = normed_twice()
    judge = check.compare

    def off(ours: Results, reference: Results, *rest: Any) -> Any:
        moved = {n: y + 1e-8 * (n == name) for n, y in ours.gradients.items()}
        return judge(Results(ours.outputs, ours.buffers, moved), reference, *rest)

    monkeypatch.setattr(check, "compare", off)
    with pytest.raises(autopar.errors.VerificationError):
        autopar.verify(plan, model, (x,))


def test_noise_does_not_hide_errors_of_the_size_of_the_largest_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, model, x = normed_twice()
    judge = check.compare

    def off(ours: Results, reference: Results, *rest: Any) -> Any:
        moved = {n: y + 1e-8 * (n == "first.bias") for n, y in ours.gradients.items()}
        return judge(Results(ours.outputs, ours.buffers, moved), reference, *rest)

    monkeypatch.setattr(check, "compare", off)
    monkeypatch.setattr(check, "noise_of_rounding", lambda _: {"first.bias": 1.0})
    with pytest.raises(autopar.errors.VerificationError):
        autopar.verify(plan, model, (x,))
