"""Training with a loss computed outside the model, and evaluation of a model that was compiled
with a loss, on one device."""

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
from autopar.errors import ConstraintError, InfeasibleError, RuntimeStateError


def pair(kind: str = "several", **options: Any) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    plain, batch = getattr(no_loss, kind)()
    return (
        plain,
        autopar.compile(copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo", **options),
        batch,
    )


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_gradients(plain: nn.Module, module: Any) -> None:
    for (name, wanted), (same, found) in zip(
        plain.named_parameters(), module.named_parameters(), strict=True
    ):
        assert name == same
        if wanted.grad is None:
            assert found.grad is None
        else:
            torch.testing.assert_close(full(found.grad), wanted.grad)


@pytest.mark.parametrize("outputs", ["auto", "full", "dtensor", "local"])
def test_a_training_loop_with_an_outer_loss_matches_the_plain_model(outputs: str) -> None:
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
    torch.testing.assert_close(
        dict(module.named_buffers())["body.1.running_mean"], plain.body[1].running_mean
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out["out"].sum(),  # its gradient is an expanded scalar
        lambda out: (out["out"] * out["same"]).sum() + out["flat"].pow(2).sum(),
        lambda out: out["total"].exp().mean(),  # it does not use the last layer
        lambda out: (out["weight"] ** 2).sum() + out["out"].t().contiguous().view(-1)[3],
        lambda out: out["out"].sum() + 2 * out["out"].detach().sum(),
    ],
    ids=["sum", "several", "one of several", "a parameter", "detached"],
)
def test_any_loss_of_the_outputs_has_the_gradients_of_the_plain_model(loss: Any) -> None:
    plain, module, batch = pair()
    for model in (plain, module):
        loss(model(**batch)).backward()
    check_gradients(plain, module)


def test_integer_outputs_require_no_gradient_and_constants_are_returned_unchanged() -> None:
    _, module, batch = pair()
    found = module(**batch)
    assert (
        found["n"] == 3 and found["best"].dtype == torch.int64 and not found["best"].requires_grad
    )
    assert all(found[name].requires_grad for name in ("out", "same", "flat", "weight", "total"))
    with torch.no_grad():
        assert not module(**batch)["out"].requires_grad


def test_gradients_of_two_calls_accumulate_and_each_call_allows_one_backward() -> None:
    plain, module, batch = pair()
    for model in (plain, module):
        first, second = model(**batch), model(x=batch["x"] + 1)
        (first["out"].sum() + second["flat"].sum()).backward()
    check_gradients(plain, module)
    found = module(**batch)
    found["out"].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeStateError, match="a second time"):
        found["out"].sum().backward()


def test_backward_refuses_a_saved_output_that_was_changed_in_place() -> None:
    class Squashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.linear(x))

    module: Any = autopar.compile(
        Squashed(), example_inputs=(torch.randn(4, 8),), hardware="cpu-gloo"
    )
    found = module(torch.randn(4, 8))
    loss = (found * torch.randn(4, 4)).sum()
    with torch.no_grad():
        found.mul_(2)
    with pytest.raises(
        RuntimeStateError, match="the value that the call returned was changed in place"
    ):
        loss.backward()


@pytest.mark.slow
def test_a_module_compiled_with_a_loss_can_be_evaluated_without_labels() -> None:
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
    assert (
        alone.only_forward
        and alone.plan.options["inference"]
        and alone.plan.options["outputs"] == "full"
    )
    assert alone.program.stages[0].num_saved == 0


def test_a_module_compiled_with_a_loss_can_be_trained_with_an_outer_loss() -> None:
    plain, batch = zoo_small.bert()
    module: Any = autopar.compile(copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo")
    asked = {name: x for name, x in batch.items() if name != "labels"}
    for model in (plain, module):
        model(**asked).logits.pow(2).mean().backward()
    check_gradients(plain, module)


def test_a_module_compiled_for_inference_has_no_gradients() -> None:
    plain, batch = no_loss.several()
    module: Any = autopar.compile(
        copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo", inference=True
    )
    found = module(**batch)
    torch.testing.assert_close(found["out"], plain(**batch)["out"])
    assert not found["out"].requires_grad and not any(p.requires_grad for p in module.parameters())
    torch.testing.assert_close(module(x=batch["x"][:3])["out"], plain(x=batch["x"][:3])["out"])
    assert (
        all(each.plan.options["inference"] for each in module.variants.known)
        and not module.variants.known[0].only_forward
    )
    module.first.weight.requires_grad_(True)
    with pytest.raises(RuntimeStateError, match="frozen when the model was compiled"):
        module(**batch)


def test_a_fully_frozen_model_warns_that_it_is_planned_for_inference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, batch = no_loss.several()
    with caplog.at_level(logging.WARNING, "autopar"):
        module: Any = autopar.compile(
            plain.requires_grad_(False), example_inputs=batch, hardware="cpu-gloo"
        )
        assert "planning inference" in caplog.text
    assert not module(**batch)["out"].requires_grad


def test_a_deferred_module_plans_for_an_outer_loss_at_its_first_call() -> None:
    plain, batch = no_loss.convolutions()
    module: Any = autopar.compile(copy.deepcopy(plain), hardware="cpu-gloo")
    for model in (plain, module):
        model(**batch).pow(2).sum().backward()
    check_gradients(plain, module)


def test_a_module_compiled_from_an_inference_plan_has_no_gradients() -> None:
    plain, batch = no_loss.several()
    plan = autopar.plan(plain, 1, example_inputs=batch, hardware="cpu-gloo", inference=True)
    module: Any = autopar.compile(copy.deepcopy(plain), 1, example_inputs=batch, plan=plan)
    assert not module(**batch)["out"].requires_grad


class Saturated(nn.Module):
    """A model with an output whose derivative is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.body(x))
        return {
            "y": self.head(hidden),
            "log": torch.softmax(hidden * 2000, -1).log(),
            "other": self.other(hidden),
        }


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_an_output_that_the_loss_does_not_use_gives_no_gradient_and_no_nan(backend: str) -> None:
    torch.manual_seed(0)
    plain, x = Saturated(), torch.randn(8, 8)
    module: Any = autopar.compile(
        copy.deepcopy(plain), example_inputs=(x,), hardware="cpu-gloo", backend=backend
    )
    for names in (("y",), ("other", "y"), ("other",), ("y",)):
        for model in (plain, module):
            model.zero_grad()
            found = model(x)
            sum(found[name].pow(2).sum() for name in names).backward()
        check_gradients(plain, module)
        assert all(
            p.grad is None or bool(full(p.grad).isfinite().all()) for p in module.parameters()
        )
    assert module.other.weight.grad is None and module.head.weight.grad is not None


class Embedder(nn.Module):
    """A model that returns features and a scalar logit scale, as CLIP. The scale is not a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.scale.exp(), x.mean()


def test_a_scalar_scale_and_a_batch_statistic_are_not_taken_for_the_loss() -> None:
    torch.manual_seed(0)
    plain, x = Embedder(), torch.randn(6, 8)
    module: Any = autopar.compile(copy.deepcopy(plain), example_inputs=(x,), hardware="cpu-gloo")
    for model in (plain, module):
        features, scale, _ = model(x)
        nn.functional.cross_entropy(scale * features, torch.arange(6) % 4).backward()
    check_gradients(plain, module)
    with torch.no_grad():
        features, scale, mean = module.eval()(x)
    assert type(features) is type(scale) is type(mean) is Tensor


class Detector(nn.Module):
    """A model that returns its loss in training and indices without a gradient in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        return found.pow(2).mean() if self.training else found.argmax(-1)


def test_a_model_that_returns_indices_in_eval_mode_is_planned_for_inference() -> None:
    torch.manual_seed(0)
    plain, x = Detector(), torch.randn(6, 8)
    plan = autopar.plan(
        copy.deepcopy(plain).eval(), autopar.Mesh(2), example_inputs=(x,), hardware="cpu-gloo"
    )
    assert plan.options["inference"] and autopar.check(plan, copy.deepcopy(plain).eval(), (x,)).ok
    assert autopar.verify(plan, copy.deepcopy(plain).eval(), (x,)).ok
    module: Any = autopar.compile(copy.deepcopy(plain), example_inputs=(x,), hardware="cpu-gloo")
    module(x).backward()
    module.eval()
    plain.eval()
    for _ in range(2):
        assert torch.equal(module(x), plain(x))  # gradients are enabled, but no output has one
    assert len(module.variants.known) == 1
    module.train()(x).backward()


class Wide(nn.Module):
    """A model with small weights and large activations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)


@pytest.mark.slow
def test_evaluation_runs_in_microbatches_if_forward_does_not_fit_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    plain, batch = Wide(), {"x": torch.randn(256, 8), "y": torch.arange(256) % 4}
    module: Any = autopar.compile(
        copy.deepcopy(plain), 1, example_inputs=batch, hardware="cpu-gloo", memory_bytes=240_000
    )
    assert module.plan.pipeline is not None
    module.eval()
    with torch.no_grad():
        assert module(**batch).item() == pytest.approx(plain(**batch).item(), rel=1e-5)
        smaller = {name: x[:128] for name, x in batch.items()}
        assert module(**smaller).item() == pytest.approx(plain(**smaller).item(), rel=1e-5)
    last = module.variants.known[-1].plan
    assert last.pipeline is not None and last.options["inference"]
    assert "sequential microbatches, because all at once" in caplog.text


@pytest.mark.parametrize("outputs", ["full", "local", "dtensor"])
def test_outputs_have_the_form_of_the_given_plan_in_every_call(outputs: str) -> None:
    plain, batch = no_loss.several()
    plan = autopar.plan(plain, 1, example_inputs=batch, hardware="cpu-gloo", outputs=outputs)
    module: Any = autopar.compile(copy.deepcopy(plain), 1, example_inputs=batch, plan=plan)
    first, second = (module(x=batch["x"][:samples])["out"] for samples in (8, 3))
    assert isinstance(first, DTensor) == isinstance(second, DTensor) == (outputs == "dtensor")


def test_with_outputs_loss_a_call_without_labels_returns_the_logits() -> None:
    plain, batch = zoo_small.bert()
    module: Any = autopar.compile(
        copy.deepcopy(plain), example_inputs=batch, hardware="cpu-gloo", outputs="loss"
    )
    assert module(**batch).logits is None
    asked = {name: x for name, x in batch.items() if name != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(module(**asked).logits, plain(**asked).logits)


def test_batch_local_without_a_loss_is_refused_with_a_plan_too() -> None:
    plain, batch = no_loss.several()
    plan = autopar.plan(plain, 1, example_inputs=batch, hardware="cpu-gloo")
    with pytest.raises(ConstraintError, match="weight of each rank's loss in the total is unknown"):
        autopar.compile(copy.deepcopy(plain), 1, example_inputs=batch, plan=plan, batch="local")


@pytest.mark.parametrize(
    ("options", "says"), [({}, "return the loss from forward"), ({"inference": True}, "")]
)
def test_the_remedy_of_an_infeasible_budget_does_not_suggest_impossible_stages(
    options: dict[str, Any], says: str
) -> None:
    plain, batch = no_loss.several()
    with pytest.raises(InfeasibleError) as error:
        autopar.plan(
            plain,
            autopar.Mesh(2),
            example_inputs=batch,
            hardware="cpu-gloo",
            memory_bytes=600,
            **options,
        )
    assert says in error.value.remedy and "pipeline" not in error.value.remedy
