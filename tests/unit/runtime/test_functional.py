"""torch.func: a program accepts other parameters with the same placement and refuses
transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import autopar
from autopar.errors import RuntimeStateError
from autopar.runtime import rank_consistency

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Net(nn.Module):
    def __init__(self, *, loss: bool = True) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        return hidden.pow(2).mean() if self.loss else hidden


def pair(*, loss: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    plain = Net(loss=loss)
    return plain, autopar.compile(
        copy.deepcopy(plain), example_inputs=(X,), hardware="cpu-gloo", **options
    )


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda module: grad(lambda x: module(x).sum())(X),
    "vjp": lambda module: vjp(module, X),
    "jvp": lambda module: jvp(module, (X,), (X,)),
    "vmap": lambda module: vmap(module)(torch.stack([X, X])),
    "jacrev": lambda module: jacrev(module)(X),
    "grad of parameters": lambda module: grad(lambda p: functional_call(module, p, (X,)).sum())(
        dict(module.named_parameters())
    ),
    "around it": lambda module: vmap(lambda y: module(X) + y)(torch.ones(3)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 2}, {"loss": False}],
    ids=["whole", "microbatches", "no loss"],
)
def test_torch_func_transforms_are_refused(name: str, options: dict[str, Any]) -> None:
    _, module = pair(**options)
    with pytest.raises(
        RuntimeStateError, match=r"under a transform of torch\.func[\s\S]*torch\.autograd\.grad"
    ):
        TRANSFORMS[name](module)
    module(X)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_before_ranks_compare_their_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = pair()
    module(X)
    # Several ranks read their parameters in calls 2, 4, 8, which a transform does not support.
    with monkeypatch.context() as patch:
        two_ranks = SimpleNamespace(get_world_size=lambda: 2)
        patch.setattr(rank_consistency, "dist", two_ranks)
        with pytest.raises(RuntimeStateError, match=r"under a transform of torch\.func"):
            TRANSFORMS[name](module)
    module(X)


def test_a_deferred_module_refuses_transforms_before_it_plans() -> None:
    module: Any = autopar.compile(Net(), hardware="cpu-gloo")
    with pytest.raises(RuntimeStateError, match=r"under a transform of torch\.func"):
        vmap(module)(torch.stack([X, X]))
    module(X)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_microbatches": 2}, {"loss": False}],
    ids=["whole", "microbatches", "no loss"],
)
def test_parameters_passed_by_functional_call_get_the_gradients_of_the_plain_model(
    options: dict[str, Any], whole: bool
) -> None:
    plain, module = pair(**options)
    values = {
        name: torch.linspace(0.0, 1.0, p.numel()).reshape(p.shape)
        for name, p in plain.named_parameters()
    }
    others = {
        name: value.clone() if whole else module.get_parameter(name).detach().clone()
        for name, value in values.items()
    }
    for name, value in values.items():
        if not whole:
            others[name].to_local().copy_(value)
        value.requires_grad_()
        others[name].requires_grad_()
    before = functional_call(plain, values, (X,)).sum()
    found = functional_call(module, others, (X,)).sum()
    torch.testing.assert_close(found, before)
    before.backward()
    found.backward()
    for name, p in others.items():
        assert p.grad is not None and isinstance(p.grad, DTensor) == (not whole)
        torch.testing.assert_close(
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, values[name].grad
        )
    torch.optim.SGD(others.values(), 0.1).step()
    assert all(p.grad is None for p in module.parameters())
