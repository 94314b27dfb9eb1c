"""Optimizer steps on local tensors have the values, the state and the version counters of steps on
the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime import optimizers
from autopar.runtime.dtensor import HeldTensor
from autopar.runtime.module import ParallelModule

BATCH = torch.arange(24.0).reshape(4, 6) / 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.second(self.first(x).tanh()) * self.scale).square().mean()}


@pytest.fixture(scope="module")
def compiled() -> ParallelModule:
    made = autopar.compile(Net(), autopar.Mesh({"gpu": 1}), example_inputs=(BATCH,))
    assert isinstance(made, ParallelModule)
    return made


@pytest.fixture
def module(compiled: ParallelModule) -> ParallelModule:
    compiled.load_state_dict(Net().state_dict())
    compiled.zero_grad()
    return compiled


@pytest.fixture
def on_parameters(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions called on parameters."""
    called: list[str] = []
    own = HeldTensor._run_function

    def note(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        called.append(func.__name__)
        return own(func, types, args, kwargs)

    monkeypatch.setattr(HeldTensor, "_run_function", note)
    return called


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(BATCH)["loss"].backward()
    optimizer.step()


OPTIMIZERS = [
    *((cls, {}) for cls in optimizers.ELEMENTWISE),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
]


@pytest.mark.parametrize(("cls", "settings"), OPTIMIZERS)
def test_steps_on_local_tensors_equal_those_of_the_plain_model(
    module: ParallelModule,
    on_parameters: list[str],
    cls: type[torch.optim.Optimizer],
    settings: dict[str, Any],
) -> None:
    plain = Net()
    pair: list[tuple[nn.Module, torch.optim.Optimizer]] = [
        (model, cls(model.parameters(), lr=0.05, **settings))  # type: ignore[call-arg]
        for model in (plain, module)
    ]
    for number in range(4):
        for model, optimizer in pair:
            on_parameters.clear()
            advance(model, optimizer)
        if number:  # the first step creates the state
            assert not {"add_", "mul_", "addcdiv_", "addcmul_", "lerp_", "add"} & {*on_parameters}
    for name, parameter in plain.named_parameters():
        assert torch.equal(module.get_parameter(name).to_local(), parameter), name  # type: ignore[attr-defined]
    states = [optimizer.state_dict()["state"] for _, optimizer in pair]
    for number, state in states[0].items():
        for name, value in state.items():
            other = states[1][number][name]
            assert torch.equal(torch.as_tensor(getattr(other, "_local_tensor", other)), value)


def test_a_step_increments_the_version_of_every_parameter_and_keeps_no_local_gradient(
    module: ParallelModule,
) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    advance(module, optimizer)
    before = {name: p._version for name, p in module.named_parameters()}
    advance(module, optimizer)
    assert all(p._version > before[name] for name, p in module.named_parameters())
    assert all(p._local_tensor.grad is None for p in module.parameters())  # type: ignore[attr-defined]


def test_state_created_by_a_later_step_is_distributed_like_its_parameter(
    module: ParallelModule, on_parameters: list[str]
) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    advance(module, optimizer)
    for state in optimizer.state.values():
        state["momentum_buffer"] = None  # as torch saves it after steps without momentum
    on_parameters.clear()
    advance(module, optimizer)
    assert "add_" not in on_parameters
    held = optimizer.state[module.get_parameter("first.weight")]["momentum_buffer"]
    assert isinstance(held, HeldTensor)
    assert held.shape == (5, 6)


@pytest.mark.parametrize("why", ["a hook", "a closure", "a tensor as the rate", "another gradient"])
def test_steps_that_need_distributed_parameters_do_not_run_on_local_tensors(
    module: ParallelModule, on_parameters: list[str], why: str
) -> None:
    rate: Any = torch.tensor(0.05) if why == "a tensor as the rate" else 0.05
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate)
    advance(module, optimizer)
    module.zero_grad()
    module(BATCH)["loss"].backward()
    given: list[Any] = []
    if why == "a hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    if why == "a closure":
        given.append(lambda: module(BATCH)["loss"])
    if why == "another gradient":
        weight = module.get_parameter("first.weight")
        weight.grad = None
        weight.grad = torch.zeros(5, 6)
    on_parameters.clear()
    assert optimizers.take(optimizer, (optimizer, *given), {}) is None
