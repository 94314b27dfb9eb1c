"""What is saved beside a model, on one process: optimizers of other forms, modules that were not
called yet, and what is refused."""

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


def compiled(seed: int = 0, **options: Any) -> Any:
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
def test_an_optimizer_beside_goes_on(kind: str, num_steps: int, tmp_path: Path) -> None:
    module, other = compiled(), compiled(1)
    optimizer, fresh = KINDS[kind](module), KINDS[kind](other)
    for _ in range(num_steps):
        step(module, optimizer)
    autopar.Checkpoints(tmp_path).save(num_steps, module, own=optimizer)
    assert autopar.Checkpoints(tmp_path).load(other, own=fresh) == num_steps
    assert [step(other, fresh) for _ in range(3)] == pytest.approx(
        [step(module, optimizer) for _ in range(3)], rel=1e-6
    )


def test_the_models_own_optimizer_with_lists_is_refused_and_what_to_do_works(
    tmp_path: Path,
) -> None:
    module = compiled()
    optimizer = KINDS["of lists"](module)
    with pytest.raises(
        RuntimeStateError,
        match=r"LBFGS has lists of tensors[\s\S]*save\(step, pm, lbfgs=optimizer\)",
    ):
        autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    assert not list(tmp_path.iterdir())
    autopar.Checkpoints(tmp_path).save(1, module, lbfgs=optimizer)


def test_state_is_read_also_where_gradients_are_there_or_part_of_it_is(tmp_path: Path) -> None:
    module, other = compiled(), compiled(1)
    optimizer, partly = (torch.optim.Adam(each.parameters(), 0.1) for each in (module, other))
    step(module, optimizer)
    autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    other(X).square().mean().backward()
    gradient = other.get_parameter("0.weight").grad
    assert autopar.Checkpoints(tmp_path).load(other, partly) == 1
    assert other.get_parameter("0.weight").grad is gradient and len(partly.state) == 4
    del partly.state[other.get_parameter("0.bias")]
    assert autopar.Checkpoints(tmp_path).load(other, partly) == 1 and len(partly.state) == 4
    assert [step(other, partly) for _ in range(2)] == [step(module, optimizer) for _ in range(2)]


def test_a_module_that_is_planned_at_its_first_call_is_saved_from_then_on(tmp_path: Path) -> None:
    module, critic = compiled(), compiled(1, example_inputs=None)
    with pytest.raises(RuntimeStateError, match="before the first call"):
        autopar.Checkpoints(tmp_path).save(1, module, critic=critic)
    critic(X).sum().backward()
    autopar.Checkpoints(tmp_path).save(
        1, module, critic=critic, of_critic=torch.optim.SGD(critic.parameters(), 0.1)
    )
    other = compiled(2)
    assert autopar.Checkpoints(tmp_path).load(module, critic=other) == 1
    assert other(X).equal(critic(X))


def test_what_is_of_another_kind_or_shape_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    module, critic = compiled(), compiled(1)
    autopar.Checkpoints(tmp_path).save(
        1, module, critic=critic, values={"a": module.get_parameter("0.weight").detach(), "b": 1}
    )
    values = {"kept": True}
    wrong: dict[str, tuple[dict[str, Any], str]] = {
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
    for others, words in wrong.values():
        with pytest.raises(RuntimeStateError, match=words):
            autopar.Checkpoints(tmp_path).load(module, **others)
        assert values == {"kept": True} and module.get_parameter("0.weight").full_tensor().equal(
            before + 1
        )
    autopar.Checkpoints(tmp_path).load(module, values=values)
    assert values["a"].equal(before) and values["b"] == 1 and len(values) == 2


def test_a_module_without_values_is_not_saved(tmp_path: Path) -> None:
    with autopar.weights_on_meta():
        empty = nn.Linear(4, 4)
    critic = autopar.compile(empty, example_inputs=(X,), hardware="cpu-gloo", outputs="full")
    with pytest.raises(RuntimeStateError, match="load_weights"):
        autopar.Checkpoints(tmp_path).save(1, compiled(), critic=critic)


class Counted(nn.Linear):
    """With a state that is no tensor."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_a_plain_module_beside_has_its_other_states_too(tmp_path: Path) -> None:
    module, head, other = compiled(), Counted(4, 4), Counted(4, 4)
    head.seen = 3
    autopar.Checkpoints(tmp_path).save(1, module, head=head)
    assert autopar.Checkpoints(tmp_path).load(module, head=other) == 1
    assert other.seen == 3 and other.weight.equal(head.weight)
