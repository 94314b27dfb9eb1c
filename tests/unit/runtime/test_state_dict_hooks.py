"""Full state dicts of a compiled module are those of the plain model with state dict hooks, and
both load each other's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import autopar
from autopar.runtime.state_dict_hooks import StateDictHooks

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Body(nn.Module):
    """A layer whose weight has another name and is transposed in state dicts."""

    def __init__(self, register: Callable[[Any], None]) -> None:
        super().__init__()
        self.linear, self.saved_as = nn.Linear(4, 4), "kernel"
        register(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + self.saved_as] = state.pop(f"{prefix}linear.weight").t()

    def load(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}linear.weight"] = state.pop(prefix + self.saved_as).t()


class Net(nn.Module):
    def __init__(self, register: Callable[[Any], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = Body(register), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


def with_methods(body: Any) -> None:
    body._register_state_dict_hook(body.save)
    body._register_load_state_dict_pre_hook(body.load)


def with_closures(body: Any) -> None:
    body.register_state_dict_post_hook(lambda *args: body.save(*args))
    body._register_load_state_dict_pre_hook(lambda *args: body.load(*args))


def with_modules(body: Any) -> None:
    body.register_state_dict_post_hook(lambda module, *rest: module.save(module, *rest))
    body.register_load_state_dict_pre_hook(lambda module, *rest: module.load(*rest))


@pytest.mark.parametrize("register", [with_methods, with_closures, with_modules])
def test_hooks_change_full_state_dicts_as_those_of_the_plain_model(
    register: Callable[[Any], None],
) -> None:
    plain = Net(register)
    module = autopar.compile(Net(register), example_inputs=(X,), hardware="cpu-gloo")
    for of in (module, copy.deepcopy(module)):
        state, expected = of.full_state_dict(), plain.state_dict()
        assert state.keys() == expected.keys() and "body.kernel" in state
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)

    other = {name: value + 1.0 for name, value in plain.state_dict().items()}
    assert str(module.load_state_dict(other)) == "<All keys matched successfully>"
    for name, value in module.full_state_dict().items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=0)
    assert str(module.load_state_dict(module.state_dict())) == "<All keys matched successfully>"
    assert "body.linear.weight" in module.state_dict()
    plain.load_state_dict(module.full_state_dict())
    torch.testing.assert_close(module(X), plain(X))


@pytest.mark.parametrize("register", [with_methods, with_closures, with_modules])
def test_hooks_do_not_keep_the_plain_model_alive(register: Callable[[Any], None]) -> None:
    plain = Net(register)
    hooks = StateDictHooks.of(plain)
    body, weight = weakref.ref(plain.body), weakref.ref(plain.body.linear.weight)
    del plain
    gc.collect()
    assert len(hooks.saving) == len(hooks.loading) == 1
    assert body() is None and weight() is None


def test_a_dict_that_a_hook_returns_replaces_that_of_the_whole_model_only() -> None:
    def register(body: Any) -> None:
        body._register_state_dict_hook(lambda *_: {})

    plain = Net(register)
    plain._register_state_dict_hook(
        lambda _, state, *rest: {f"model.{name}": x for name, x in state.items()}
    )
    module = autopar.compile(plain, example_inputs=(X,), hardware="cpu-gloo")
    assert module.full_state_dict().keys() == plain.state_dict().keys() != set()


def test_a_parametrized_model_loads_names_of_the_earlier_weight_norm() -> None:
    class Normed(nn.Module):
        def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
            super().__init__()
            self.layer = norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    g, v = torch.full((4, 1), 3.0), torch.arange(16.0).reshape(4, 4) + 1.0
    earlier = {"layer.bias": torch.ones(4), "layer.weight_g": g, "layer.weight_v": v}
    plain = Normed(parametrizations.weight_norm)
    module = autopar.compile(copy.deepcopy(plain), example_inputs=(X,), hardware="cpu-gloo")
    plain.load_state_dict(dict(earlier))
    module.load_state_dict(dict(earlier))
    torch.testing.assert_close(module(X), plain(X))
    assert module.full_state_dict().keys() == plain.state_dict().keys()


def test_saving_and_loading_of_shards_logs_hooks_that_do_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def register(body: Any) -> None:
        body._register_state_dict_hook(lambda *args: body.save(*args))
        body._register_load_state_dict_pre_hook(body.load)

    for hooked in (True, False):
        net = Net(register if hooked else lambda body: None)
        module = autopar.compile(net, example_inputs=(X,), hardware="cpu-gloo")
        caplog.clear()
        autopar.save_weights(module, tmp_path / "weights")
        autopar.load_weights(module, tmp_path / "weights")
        autopar.Checkpoints(tmp_path / f"run {hooked}").save(1, module)
        autopar.Checkpoints(tmp_path / f"run {hooked}").export(tmp_path / "exported")
        for words in ("save_weights does not run", "load_weights does not run"):
            assert (f"{words} the state dict hooks of body" in caplog.text) == hooked
        assert ("exported without the model's state dict hooks" in caplog.text) == hooked
