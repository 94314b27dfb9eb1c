"""Additional states in a checkpoint on one process: other kinds of optimizers, modules before their
first call, and refused states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
Make = Callable[[Any], torch.optim.Optimizer]


def compile_net(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return autopar.compile(
        net, hardware="cpu-gloo", outputs="full", **{"example_inputs": (X,), **options}
    )


def step(module: Any, optimizer: torch.optim.Optimizer) -> float:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(X).square().mean()
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())  # type: ignore[call-overload]


KINDS: dict[str, Make] = {
    "with names": lambda module: torch.optim.AdamW(module.named_parameters(), 0.1),
    "of lists": lambda module: torch.optim.LBFGS(module.parameters(), 0.1, max_iter=2),
    "of a part": lambda module: torch.optim.SGD(
        module.get_submodule("0").parameters(), 0.1, momentum=0.9
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_optimizer_saved_as_an_additional_state_continues(
    kind: str, num_steps: int, tmp_path: Path
) -> None:
    module, other = compile_net(), compile_net(1)
    optimizer, fresh = KINDS[kind](module), KINDS[kind](other)
    for _ in range(num_steps):
        step(module, optimizer)
    autopar.Checkpoints(tmp_path).save(num_steps, module, own=optimizer)
    assert autopar.Checkpoints(tmp_path).load(other, own=fresh) == num_steps
    assert [step(other, fresh) for _ in range(3)] == pytest.approx(
        [step(module, optimizer) for _ in range(3)], rel=1e-6
    )


def test_optimizer_with_list_states_is_refused_and_the_remedy_works(
    tmp_path: Path,
) -> None:
    module = compile_net()
    optimizer = KINDS["of lists"](module)
    with pytest.raises(
        RuntimeStateError,
        match=r"LBFGS has lists of tensors[\s\S]*save\(step, pm, lbfgs=optimizer\)",
    ):
        autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    assert not list(tmp_path.iterdir())
    autopar.Checkpoints(tmp_path).save(1, module, lbfgs=optimizer)


def test_optimizer_state_is_loaded_over_gradients_and_partial_state(tmp_path: Path) -> None:
    module, other = compile_net(), compile_net(1)
    optimizer, other_optimizer = (
        torch.optim.Adam(each.parameters(), 0.1) for each in (module, other)
    )
    step(module, optimizer)
    autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    other(X).square().mean().backward()
    gradient = other.get_parameter("0.weight").grad
    assert autopar.Checkpoints(tmp_path).load(other, other_optimizer) == 1
    assert other.get_parameter("0.weight").grad is gradient and len(other_optimizer.state) == 4
    del other_optimizer.state[other.get_parameter("0.bias")]
    assert (
        autopar.Checkpoints(tmp_path).load(other, other_optimizer) == 1
        and len(other_optimizer.state) == 4
    )
    assert [step(other, other_optimizer) for _ in range(2)] == [
        step(module, optimizer) for _ in range(2)
    ]


def test_lazily_planned_additional_module_can_be_saved_after_its_first_call(tmp_path: Path) -> None:
    module, critic = compile_net(), compile_net(1, example_inputs=None)
    with pytest.raises(RuntimeStateError, match="before the first call"):
        autopar.Checkpoints(tmp_path).save(1, module, critic=critic)
    critic(X).sum().backward()
    autopar.Checkpoints(tmp_path).save(
        1, module, critic=critic, of_critic=torch.optim.SGD(critic.parameters(), 0.1)
    )
    other = compile_net(2)
    assert autopar.Checkpoints(tmp_path).load(module, critic=other) == 1
    assert other(X).equal(critic(X))


def test_states_of_another_kind_or_shape_are_refused_without_side_effects(tmp_path: Path) -> None:
    module, critic = compile_net(), compile_net(1)
    autopar.Checkpoints(tmp_path).save(
        1, module, critic=critic, values={"a": module.get_parameter("0.weight").detach(), "b": 1}
    )
    values = {"kept": True}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "kind": (
            {"critic": values},
            "'critic' of the checkpoint is the state of a module, not of a dict",
        ),
        "shape": ({"values": values, "critic": nn.Linear(3, 3)}, "weight of critic is missing"),
        "name": ({"values": values, "other": critic}, "has no 'other'; it has values, critic"),
    }
    before = module.get_parameter("0.weight").full_tensor().clone()
    with torch.no_grad():
        module.get_parameter("0.weight").add_(1)
    for others, words in cases.values():
        with pytest.raises(RuntimeStateError, match=words):
            autopar.Checkpoints(tmp_path).load(module, **others)
        assert values == {"kept": True} and module.get_parameter("0.weight").full_tensor().equal(
            before + 1
        )
    autopar.Checkpoints(tmp_path).load(module, values=values)
    assert values["a"].equal(before) and values["b"] == 1 and len(values) == 2


def test_module_without_values_is_not_saved(tmp_path: Path) -> None:
    with autopar.weights_on_meta():
        empty = nn.Linear(4, 4)
    critic = autopar.compile(empty, example_inputs=(X,), hardware="cpu-gloo", outputs="full")
    with pytest.raises(RuntimeStateError, match="load_weights"):
        autopar.Checkpoints(tmp_path).save(1, compile_net(), critic=critic)


class Counted(nn.Linear):
    """A linear layer with an extra state that is not a tensor."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_plain_module_is_saved_with_its_extra_state(tmp_path: Path) -> None:
    module, head, other = compile_net(), Counted(4, 4), Counted(4, 4)
    head.seen = 3
    autopar.Checkpoints(tmp_path).save(1, module, head=head)
    assert autopar.Checkpoints(tmp_path).load(module, head=other) == 1
    assert other.seen == 3 and other.weight.equal(head.weight)
