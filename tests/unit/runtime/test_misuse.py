"""Uses that would silently train something other than intended are refused."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RuntimeStateError

BATCH = {"x": torch.linspace(-1.0, 1.0, 32).reshape(4, 8)}


class Net(nn.Module):
    """A model with two losses, and outputs with and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.drop, self.settings = 2.0, nn.Dropout(0.0), {"factor": 1.0}
        self.bound = self.forward
        self.program, self.plan, self.loss_scale = "a name", "that the compiled module", "has too"
        self.body, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.drop(torch.tanh(self.body(x))) * self.factor * self.settings["factor"]
        scores = self.two(hidden)
        more = {"best": scores.detach(), "which": scores > 0}
        return {
            "loss": self.one(hidden).pow(2).mean(),
            "other": scores.mean(),
            "scores": scores,
            **more,
        }


def pair(**options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net()
    return plain, autopar.compile(
        copy.deepcopy(plain), example_inputs=BATCH, hardware="cpu-gloo", **options
    )


@pytest.mark.parametrize("outputs", ["full", "dtensor"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ["other", "scores"])
def test_backward_through_another_output_than_the_loss_is_refused(
    outputs: str, microbatches: int, name: str
) -> None:
    if microbatches == 2 and outputs == "dtensor":
        return  # not available
    _, module = pair(outputs=outputs, num_microbatches=microbatches)
    found = module(**BATCH)
    with pytest.raises(RuntimeStateError, match=f"backward runs through the output '{name}'"):
        (found["loss"] + found[name].sum()).backward()


@pytest.mark.parametrize("outputs", ["full", "dtensor"])
def test_outputs_require_a_gradient_exactly_if_those_of_the_plain_model_do(
    outputs: str,
) -> None:
    plain, module = pair(outputs=outputs)
    wanted, found = plain(**BATCH), module(**BATCH)
    assert {name: x.requires_grad for name, x in found.items()} == {
        name: x.requires_grad for name, x in wanted.items()
    }
    found["scores"].detach().add_(0.0)
    found["loss"].backward()
    wanted["loss"].backward()
    torch.testing.assert_close(module.body.weight.grad.full_tensor(), plain.body.weight.grad)
    with torch.no_grad():
        assert not any(x.requires_grad for x in module(**BATCH).values())


def test_an_optimizer_built_before_compile_is_refused_unless_it_trains_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = Net()
    before = torch.optim.AdamW(plain.parameters())
    module: Any = autopar.compile(plain, example_inputs=BATCH, hardware="cpu-gloo")
    module(**BATCH)["loss"].backward()
    with pytest.raises(
        RuntimeStateError, match=r"holds parameters of the plain model[\s\S]*pm\.parameters"
    ):
        before.step()
    plain(**BATCH)["loss"].backward()
    before.step()
    torch.optim.AdamW(module.parameters()).step()


@pytest.mark.parametrize("begun", [False, True])
def test_training_continues_with_the_optimizer_state_of_the_plain_model(begun: bool) -> None:
    plain, module = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, module)]

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(**BATCH)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(plain, optimizers[0])
    if begun:
        step(module, optimizers[1])
    module.load_state_dict(plain.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for _ in range(2):
        step(plain, optimizers[0])
        step(module, optimizers[1])
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name))
        state = optimizers[1].state[parameter]
        assert all(isinstance(x, DTensor) for x in state.values() if x.dim())
        assert bool(state) == (plain.get_parameter(name).grad is not None)


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_that_would_never_run_are_refused(kind: str) -> None:
    _, module = pair()
    with pytest.raises(RuntimeStateError, match="would never run"):
        getattr(module.body, f"register_{kind}")(print)
    with pytest.raises(RuntimeStateError, match="cannot be called alone"):
        module.body(BATCH["x"])
    getattr(module, f"register_{kind}")(lambda *_: None)  # hooks of the root module run


def test_plain_attributes_can_be_read_and_captured_ones_cannot_be_set() -> None:
    _, module = pair()
    assert module.factor == 2.0 and module.drop.p == 0.0 and module.body.in_features == 8
    for part, name in ((module, "factor"), (module.drop, "p")):
        with pytest.raises(
            RuntimeStateError, match=f"'{name}' cannot be set: the model was captured"
        ):
            setattr(part, name, 3.0)
    module.factor, module.drop.p, module.drop.training = 2.0, 0.0, True  # the same values
    with pytest.raises(RuntimeStateError, match="mode of a part"):
        module.drop.training = False
    module.note = "whatever else"
    assert module.note == "whatever else" and module.factor == 2.0
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


def test_a_captured_attribute_changed_on_the_plain_model_is_refused() -> None:
    torch.manual_seed(0)
    plain = Net()
    plain.unread = 1.0  # type: ignore[assignment]
    module: Any = autopar.compile(plain, example_inputs=BATCH, hardware="cpu-gloo")
    plain.unread = 2.0  # type: ignore[assignment]
    loss = module(**BATCH)["loss"].item()
    plain.factor = 3.0
    with pytest.raises(
        RuntimeStateError,
        match=r"the model's factor is 3\.0, but was 2\.0 when the model was captured[\s\S]*buffer",
    ):
        module(**BATCH)
    plain.factor = 2.0
    assert module(**BATCH)["loss"].item() == loss
    plain.drop.p = 0.5
    with pytest.raises(RuntimeStateError, match=r"the model's drop\.p is 0\.5"):
        module(**BATCH)
    del plain
    gc.collect()
    assert module(**BATCH)["loss"].item() == loss
    module.settings["factor"] = 4.0
    with pytest.raises(RuntimeStateError, match="settings"):
        module(**BATCH)


def test_the_mode_of_a_submodule_can_be_set_only_on_the_plain_model() -> None:
    _, module = pair()
    for set_mode in (module.drop.eval, module.body.train):
        with pytest.raises(RuntimeStateError, match="mode of a part"):
            set_mode()
    assert not module.eval().drop.training and module.train().drop.training


def test_modes_are_restored_module_by_module_after_an_evaluation() -> None:
    plain = Net()
    plain.body.eval()  # the user keeps this part in eval mode
    module: Any = autopar.compile(plain, example_inputs=BATCH, hardware="cpu-gloo")
    before = {name: part.training for name, part in module.named_modules()}
    assert before["drop"] and not before["body"]
    module.eval()
    assert not any(part.training for part in module.modules())
    for name, part in module.named_modules():  # as Lightning does
        part.training = before[name]
    assert {name: part.training for name, part in module.named_modules()} == before
    module.training = False
    with pytest.raises(RuntimeStateError, match="mode of a part"):
        module.drop.training = True


def test_an_attribute_that_forward_initializes_is_not_a_changed_constant() -> None:
    class Guessing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kind = nn.Linear(8, 1), None

        def forward(self, x: Tensor) -> Tensor:
            if self.kind is None:
                self.kind = "mean"  # type: ignore[assignment]
            return self.layer(x).pow(2).mean()

    plain = Guessing()
    module: Any = autopar.compile(plain, example_inputs=BATCH, hardware="cpu-gloo")
    assert plain(**BATCH).item() == pytest.approx(module(**BATCH).item(), rel=1e-6)
    assert plain.kind == "mean" and module(**BATCH).item() == pytest.approx(
        plain(**BATCH).item(), rel=1e-6
    )


def test_bound_methods_of_the_plain_model_are_not_attributes_of_the_compiled_module() -> None:
    plain, module = pair()
    assert not hasattr(module, "bound") and hasattr(plain, "bound")


def test_optimizers_with_custom_state_entries_work() -> None:
    _, module = pair()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state["calls"] = 0  # type: ignore[index]
    before = module.body.weight.full_tensor().clone()
    module(**BATCH)["loss"].backward()
    optimizer.step()
    assert not torch.equal(module.body.weight.full_tensor(), before)
