"""Models whose forward reads whether gradients are enabled: each call runs a program for its
mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import RuntimeStateError


class Net(nn.Module):
    """A model whose factor is that of `read`."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.read()).square().mean()


def by_mode() -> float:
    return 2.0 if torch.is_grad_enabled() else 3.0


def by_mode_within() -> float:
    with torch.no_grad():
        return 2.0 if torch.is_grad_enabled() else 3.0


def constant() -> float:
    return 2.0


X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


def compiled(model: nn.Module, **options: object) -> nn.Module:
    """Compile a model for one process."""
    return autopar.compile(  # type: ignore[call-overload, no-any-return]
        model, 1, example_inputs=(X,), hardware="cpu-gloo", **options
    )


@pytest.mark.parametrize("read", [by_mode, by_mode_within, constant])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_each_call_equals_the_plain_model(
    read: Callable[[], float], training: bool, mode: Callable[[], contextlib.AbstractContextManager]
) -> None:
    model = Net(read)
    module = compiled(model)
    for each in (model, module):
        each.train(training)
    with mode():
        assert torch.equal(module(X), model(X))
    loss, expected = module(X), model(X)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    assert model.layer.weight.grad is not None
    gradient = module.layer.weight.grad.full_tensor()
    torch.testing.assert_close(gradient, model.layer.weight.grad)


@pytest.mark.parametrize(
    ("read", "inference", "is_noted"),
    [(by_mode, True, True), (by_mode, False, True), (by_mode_within, False, False)],
)
def test_a_read_of_the_mode_of_the_call_is_noted(
    read: Callable[[], float], inference: bool, is_noted: bool
) -> None:
    trace = capture(Net(read), (X,), inference=inference)
    values = [each.value for each in trace.attributes if getattr(each, "is_gradient_mode", False)]
    assert values == [not inference] * is_noted


def test_a_read_in_repeated_layers_is_noted() -> None:
    trace = capture(nn.Sequential(*(Net(by_mode).layer for _ in range(2)), _Stack()), (X,))
    assert any(getattr(each, "is_gradient_mode", False) for each in trace.attributes)


class _Stack(nn.Module):
    """Equal layers that read the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * by_mode()
        return result


def test_microbatches_and_inference_follow_the_mode() -> None:
    model = Net(by_mode)
    module = compiled(model, num_microbatches=2)
    torch.testing.assert_close(module(X), model(X))
    with torch.no_grad():
        torch.testing.assert_close(module(X), model(X))
    module = compiled(model, inference=True)
    with torch.no_grad():
        assert torch.equal(module(X), model(X))
    with pytest.raises(RuntimeStateError, match=r"forward reads torch\.is_grad_enabled"):
        module(X)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of this test."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPAR_CACHE")
    yield tmp_path / "cache"


def test_cached_captures_keep_the_mode(cache: Path) -> None:
    model = Net(by_mode)
    for _ in range(2):
        module = compiled(model)
        with torch.no_grad():
            assert torch.equal(module(X), model(X))
        assert torch.equal(module(X), model(X))
    assert list(cache.iterdir())
