"""Programs compute first derivatives. Second derivatives are refused, and all other uses of
backward work."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
SECOND = r"create_graph=True: a program computes first derivatives only"


class Net(nn.Module):
    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.layer(x))
        return {"loss": hidden.pow(2).mean(), "hidden": hidden} if self.loss else hidden


def pair(*, loss: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    plain = Net(loss=loss)
    return plain, autopar.compile(
        copy.deepcopy(plain), example_inputs=(X,), hardware="cpu-gloo", **options
    )


def loss_of(found: Any) -> Tensor:
    loss: Tensor = found["loss"] if isinstance(found, dict) else (2 * found).pow(2).sum()
    return loss


@pytest.mark.parametrize("scale", [1, 3])  # the gradient of a scaled loss has a graph
@pytest.mark.parametrize(("loss", "microbatches"), [(True, 1), (True, 2), (False, 1)])
def test_second_derivatives_are_refused(loss: bool, microbatches: int, scale: int) -> None:
    plain, module = pair(
        loss=loss, **({"num_microbatches": microbatches} if microbatches > 1 else {})
    )
    assert all(
        g.requires_grad
        for g in torch.autograd.grad(
            loss_of(plain(X)) * scale, list(plain.parameters()), create_graph=True
        )
    )
    with pytest.raises(RuntimeStateError, match=SECOND):
        torch.autograd.grad(
            loss_of(module(X)) * scale, list(module.parameters()), create_graph=True
        )
    with pytest.raises(RuntimeStateError, match=SECOND):
        (loss_of(module(X)) * scale).backward(create_graph=True)


def test_second_derivatives_through_another_output_are_refused() -> None:
    _, module = pair(outputs="full")
    with pytest.raises(RuntimeStateError, match=SECOND):
        torch.autograd.grad(module(X)["hidden"].sum(), list(module.parameters()), create_graph=True)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("loss", [True, False])
def test_gradients_under_checkpoint_or_with_retain_graph_match_the_plain_model(
    loss: bool, reentrant: bool
) -> None:
    plain, module = pair(loss=loss)
    loss_of(plain(X)).backward()
    held = X.clone().requires_grad_()  # a reentrant checkpoint needs an input that requires grad

    def called(x: Tensor) -> Tensor:
        return loss_of(module(x.detach()))

    ways = [
        lambda: checkpoint(called, held, use_reentrant=reentrant).backward(),
        lambda: called(X).backward(retain_graph=True),
        lambda: torch.autograd.backward([called(X)]),
    ]
    for way in ways:
        module.zero_grad()
        way()
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


TRACERS: dict[str, Any] = {
    "torch.export": lambda module, batch: torch.export.export(module, batch),
    "torch.fx": lambda module, batch: torch.fx.symbolic_trace(module),
    "torch.jit": lambda module, batch: torch.jit.trace(module, batch),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_tracing_a_compiled_module_is_refused(tracer: str) -> None:
    _, module = pair(loss=True)
    with pytest.raises(
        RuntimeStateError, match=rf"a compiled module cannot [\s\S]*by {tracer.replace('.', '[.]')}"
    ):
        TRACERS[tracer](module, (X,))
