"""Calls with inputs that require a gradient."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import given_back
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import autopar
from autopar.errors import RuntimeStateError


def compiled(model: nn.Module, *batch: Any, **options: Any) -> Any:
    return autopar.compile(
        copy.deepcopy(model), 1, example_inputs=batch, hardware="cpu-gloo", **options
    )


def asking(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(
    use: Callable[..., torch.Tensor], model: Any, *inputs: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of the inputs of `use(model(*inputs))`."""
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    use(model(*given)).backward()
    return [x.grad for x in given]


def square(x: Any) -> torch.Tensor:
    return (x["out"] if isinstance(x, dict) else x).square().sum()


def test_gradients_of_inputs_match_the_plain_model() -> None:
    model, batch = given_back.several()
    module = compiled(model, *batch.values())
    ours, theirs = (gradients(square, each, *batch.values()) for each in (module, model))
    assert theirs[2] is None and ours[2] is None  # the model only compares this input
    torch.testing.assert_close(ours[:2], theirs[:2])
    for parameter, plain in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.grad)


def test_an_input_that_the_loss_does_not_depend_on_has_no_gradient() -> None:
    model, batch = given_back.several()
    module = compiled(model, *batch.values())
    ours, theirs = (
        gradients(lambda found: found["x"].sum(), each, *batch.values()) for each in (module, model)
    )
    assert ours[1] is None and theirs[1] is None
    torch.testing.assert_close(ours[0], theirs[0])


def test_input_gradients_accumulate_and_autograd_grad_can_request_them_alone() -> None:
    model, x = nn.Linear(4, 4), asking(2, 4)
    module, alone = compiled(model, x), x.detach().clone().requires_grad_()
    for _ in range(2):
        square(module(x)).backward()
    (found,) = torch.autograd.grad(square(model(alone)), alone)
    torch.testing.assert_close(x.grad, 2 * found)
    (ours,) = torch.autograd.grad(square(module(alone)), alone)
    torch.testing.assert_close(ours, found)


def test_a_call_without_input_gradients_runs_the_same_program() -> None:
    model, x = nn.Linear(4, 4), asking(2, 4)
    module = compiled(model, x)
    assert module(x.detach()).requires_grad
    with torch.no_grad():
        assert not module(x).requires_grad
    assert not module.variants.known


def test_a_second_program_is_planned_if_the_first_computes_no_input_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = nn.Linear(4, 4), asking(2, 4)
    module = compiled(model, x.detach())
    with caplog.at_level(logging.WARNING, "autopar"):
        ours, theirs = gradients(square, module, x), gradients(square, model, x)
        again = gradients(square, module, x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(again, theirs)
    assert [r.message for r in caplog.records if "requires a gradient" in r.message] == [
        "argument '0' requires a gradient, but the program does not compute one: planning again"
        " for this call; the new program is kept for later calls"
    ]
    assert len(module.variants.known) == 1 and module(x.detach()).requires_grad
    torch.testing.assert_close(module.weight.grad.full_tensor(), 2 * model.weight.grad)


def test_a_second_program_with_input_gradients_is_planned_for_batch_local_too() -> None:
    model, batch = given_back.shifted()
    module = compiled(model, *(x.detach() for x in batch.values()), batch="local")
    ours, theirs = (gradients(lambda loss: loss, each, *batch.values()) for each in (module, model))
    torch.testing.assert_close(ours, theirs)
    assert len(module.variants.known) == 1


def test_two_compiled_modules_in_sequence_train_as_the_plain_modules() -> None:
    torch.manual_seed(0)
    first, second, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3), torch.randn(5, 6)
    pair = compiled(first, x), compiled(second, asking(5, 8))
    square(pair[1](pair[0](x))).backward()
    square(second(first(x))).backward()
    for module, plain in zip(pair, (first, second), strict=True):
        for parameter, reference in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad)


def test_a_frozen_model_computes_input_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False), asking(2, 4)
    module = compiled(model, x)
    torch.testing.assert_close(gradients(square, module, x), gradients(square, model, x))
    assert all(p.grad is None for p in module.parameters())
    assert not module(x.detach()).requires_grad


def test_a_frozen_model_computes_input_gradients_if_a_later_call_needs_them() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False), asking(2, 4)
    module = compiled(model, x.detach())
    assert not module(x.detach()).requires_grad
    torch.testing.assert_close(gradients(square, module, x), gradients(square, model, x))
    assert len(module.variants.known) == 1


def test_a_model_without_parameters_computes_input_gradients() -> None:
    model, x = nn.Softmax(-1), asking(2, 4)
    torch.testing.assert_close(
        gradients(square, compiled(model, x), x), gradients(square, model, x)
    )


def test_complex_inputs_have_the_gradients_that_torch_defines() -> None:
    class Rotated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = (x * (1 + 2j)).abs().square().sum() + x.real.sum()
            return found

    x = torch.randn(
        3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    torch.testing.assert_close(
        gradients(lambda y: y, compiled(Rotated(), x), x), gradients(lambda y: y, Rotated(), x)
    )


def test_second_derivatives_are_refused() -> None:
    x = asking(2, 4)
    with pytest.raises(RuntimeStateError, match="first derivatives only"):
        torch.autograd.grad(square(compiled(nn.Linear(4, 4), x)(x)), x, create_graph=True)


def test_an_input_with_a_forward_mode_tangent_is_refused() -> None:
    x = asking(2, 4)
    module = compiled(nn.Linear(4, 4).requires_grad_(False), x)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeStateError, match="argument '0' has a forward-mode tangent"),
    ):
        module(forward_ad.make_dual(x.detach(), torch.ones(2, 4)))


def test_a_dtensor_input_is_refused() -> None:
    x = torch.randn(2, 4)
    first, second = compiled(nn.Linear(4, 4), x, outputs="dtensor"), compiled(nn.Linear(4, 4), x)
    for _ in range(3):
        with pytest.raises(
            RuntimeStateError, match=r"argument '0' is a DTensor[\s\S]*outputs='full'"
        ):
            second(first(x))


def test_a_module_compiled_for_inference_refuses_inputs_that_require_a_gradient() -> None:
    x = asking(2, 4)
    module = compiled(nn.Linear(4, 4), x, inference=True)
    with torch.no_grad():
        module(x)
    with pytest.raises(
        RuntimeStateError,
        match="but the program does not compute one: the program was compiled for inference",
    ):
        module(x)


def test_an_input_that_changes_before_backward_is_detected() -> None:
    model, x = nn.Linear(4, 4), asking(2, 4)
    loss = square(compiled(model, x)(x))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeStateError, match="input '0'"):
        loss.backward()
