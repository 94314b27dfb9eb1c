"""Training with a loss that is computed outside of the model, and evaluating what was compiled with one, on one device."""

from __future__ import annotations

import copy
import logging
from typing import Any

import no_loss
import pytest
import torch
import zoo_small
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RuntimeStateError


def pair(kind: str = "several", **options: Any) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    plain, batch = getattr(no_loss, kind)()
    return plain, autopar.compile(copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo", **options), batch


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_gradients(plain: nn.Module, module: Any) -> None:
    for (name, wanted), (same, found) in zip(plain.named_parameters(), module.named_parameters(), strict=True):
        assert name == same
        if wanted.grad is None:
            assert found.grad is None or not full(found.grad).any()
        else:
            torch.testing.assert_close(full(found.grad), wanted.grad)


@pytest.mark.parametrize("outputs", ["auto", "full", "dtensor", "local"])
def test_the_ordinary_loop_is_the_plain_models(outputs: str) -> None:
    plain, module, batch = pair("convolutions", outputs=outputs)
    target = torch.arange(8) % 5
    losses: list[list[float]] = [[], []]
    for model, seen in zip((plain, module), losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            found = model(**batch)
            assert isinstance(found, DTensor) == (model is module and outputs == "dtensor")
            loss = nn.functional.cross_entropy(full(found), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0][-1] < losses[0][0]
    torch.testing.assert_close(dict(module.named_buffers())["body.1.running_mean"], plain.body[1].running_mean)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out["out"].sum(),  # whose gradient is one number, expanded
        lambda out: (out["out"] * out["same"]).sum() + out["flat"].pow(2).sum(),
        lambda out: out["total"].exp().mean(),  # the last layer has no part in it
        lambda out: (out["weight"] ** 2).sum() + out["out"].t().contiguous().view(-1)[3],
        lambda out: out["out"].sum() + 2 * out["out"].detach().sum(),
    ],
    ids=["sum", "several", "one of several", "a parameter", "detached"],
)
def test_any_loss_of_the_outputs_has_the_plain_models_gradients(loss: Any) -> None:
    plain, module, batch = pair()
    for model in (plain, module):
        loss(model(**batch)).backward()
    check_gradients(plain, module)


def test_what_has_no_gradient_has_none_and_constants_come_as_they_are() -> None:
    _, module, batch = pair()
    found = module(**batch)
    assert found["n"] == 3 and found["best"].dtype == torch.int64 and not found["best"].requires_grad
    assert all(found[name].requires_grad for name in ("out", "same", "flat", "weight", "total"))
    with torch.no_grad():
        assert not module(**batch)["out"].requires_grad


def test_gradients_of_two_calls_add_up_and_each_call_has_one_backward() -> None:
    plain, module, batch = pair()
    for model in (plain, module):
        first, second = model(**batch), model(x=batch["x"] + 1)
        (first["out"].sum() + second["flat"].sum()).backward()
    check_gradients(plain, module)
    found = module(**batch)
    found["out"].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeStateError, match="a second time"):
        found["out"].sum().backward()


def test_an_output_that_backward_reads_and_that_was_changed_is_refused() -> None:
    class Squashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.linear(x))

    module: Any = autopar.compile(Squashed(), example_inputs=(torch.randn(4, 8),), hardware="cpu-gloo")
    found = module(torch.randn(4, 8))
    loss = (found * torch.randn(4, 4)).sum()
    with torch.no_grad():
        found.mul_(2)
    with pytest.raises(RuntimeStateError, match="what the call returned was changed in place"):
        loss.backward()


def test_a_module_with_a_loss_is_evaluated_without_labels() -> None:
    plain, batch = zoo_small.bert()
    module: Any = autopar.compile(copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo")
    module(**batch).loss.backward()
    asked = {name: x for name, x in batch.items() if name != "labels"}
    module.eval()
    plain.eval()
    with torch.no_grad():
        found, wanted = module(**asked), plain(**asked)
    assert type(found.logits) is Tensor and found.loss is None
    torch.testing.assert_close(found.logits, wanted.logits)
    (alone,) = module.variants.known
    assert alone.only_forward and alone.plan.options["inference"] and alone.plan.options["outputs"] == "full"
    assert alone.program.num_saved == 0


def test_a_module_with_a_loss_is_trained_with_another_outside() -> None:
    plain, batch = zoo_small.bert()
    module: Any = autopar.compile(copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo")
    asked = {name: x for name, x in batch.items() if name != "labels"}
    for model in (plain, module):
        model(**asked).logits.pow(2).mean().backward()
    check_gradients(plain, module)


def test_what_is_compiled_for_inference_trains_nothing() -> None:
    plain, batch = no_loss.several()
    module: Any = autopar.compile(copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo", inference=True)
    found = module(**batch)
    torch.testing.assert_close(found["out"], plain(**batch)["out"])
    assert not found["out"].requires_grad and not any(p.requires_grad for p in module.parameters())
    torch.testing.assert_close(module(x=batch["x"][:3])["out"], plain(x=batch["x"][:3])["out"])
    assert all(each.plan.options["inference"] for each in module.variants.known) and not module.variants.known[0].only_forward
    module.first.weight.requires_grad_(True)
    with pytest.raises(RuntimeStateError, match="frozen when the program was made"):
        module(**batch)


def test_a_model_in_which_nothing_is_trained_says_that_it_is_planned_for_inference(caplog: pytest.LogCaptureFixture) -> None:
    plain, batch = no_loss.several()
    with caplog.at_level(logging.WARNING, "autopar"):
        module: Any = autopar.compile(plain.requires_grad_(False), example_inputs=batch, hardware="cpu-gloo")
        assert "planned for inference" in caplog.text
    assert not module(**batch)["out"].requires_grad


def test_a_first_call_plans_for_outputs_too() -> None:
    plain, batch = no_loss.convolutions()
    module: Any = autopar.compile(copy.deepcopy(plain), hardware="cpu-gloo")
    for model in (plain, module):
        model(**batch).pow(2).sum().backward()
    check_gradients(plain, module)


def test_a_plan_is_for_the_use_that_it_was_made_for() -> None:
    plain, batch = no_loss.several()
    plan = autopar.plan(plain, 1, example_inputs=batch, hardware="cpu-gloo", inference=True)
    module: Any = autopar.compile(copy.deepcopy(plain), 1, example_inputs=batch, plan=plan)
    assert not module(**batch)["out"].requires_grad
