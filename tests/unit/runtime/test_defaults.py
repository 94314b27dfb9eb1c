"""A call that passes the default value of an argument uses the same program as a call that
omits the argument."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self,
        x: Tensor,
        flip: bool = False,
        mask: Tensor | None = None,
        *,
        scales: tuple[float, ...] = (1.0, 2.0),
        **more: Any,
    ) -> Tensor:
        hidden = self.layer(-x if flip else x)
        hidden = hidden if mask is None else hidden * mask
        return (hidden * scales[1] + len(more)).pow(2).mean()


def compiled(model: nn.Module, example: Any, **options: Any) -> Any:
    return autopar.compile(model, example_inputs=example, hardware="cpu-gloo", **options)


WAYS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "left out": ((X,), {}),
    "by name": ((X,), {"flip": False}),
    "by position": ((X, False, None), {}),
    "a structure": ((X,), {"scales": (1.0, 2.0)}),
    "all": ((), {"scales": (1.0, 2.0), "mask": None, "x": X, "flip": False}),
}


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}], ids=["whole", "microbatches"])
@pytest.mark.parametrize("compiled_for", WAYS)
def test_all_ways_to_pass_default_values_use_one_program(
    compiled_for: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    args, kwargs = WAYS[compiled_for]
    model = Net()
    module = compiled(
        model, kwargs if not args else args if not kwargs else {"x": X, **kwargs}, **options
    )
    for args, kwargs in WAYS.values():
        torch.testing.assert_close(module(*args, **kwargs), model(X))
    assert not module.variants.known


OTHERS: list[dict[str, Any]] = [
    {"flip": True},
    {"mask": torch.full((8, 4), 2.0)},
    {"scales": (1.0, 3.0)},
    {"scales": (1.0, 2.0, 3.0)},
    {"other": None},
]


@pytest.mark.parametrize("given", OTHERS, ids=lambda given: next(iter(given)))
def test_a_value_other_than_the_default_has_its_own_program(
    given: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    model = Net()
    module = compiled(model, (X,))
    for more in ({}, {"flip": given.get("flip", False)}, {"mask": given.get("mask")}):
        torch.testing.assert_close(
            module(X, **given, **{n: x for n, x in more.items() if n not in given}),
            model(X, **given),
        )
    assert len(module.variants.known) == 1
    torch.testing.assert_close(module(X), model(X))


def wrapping(forward: Any) -> Any:
    """Wrap forward so that another value replaces an omitted `flip`, as decorators of models with
    configurations do."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{"flip": True, **kwargs})

    return wrapped


@pytest.mark.parametrize("how", ["wrapped", "hook"])
def test_a_default_that_a_wrapper_or_a_hook_replaces_is_not_used_as_the_default(how: str) -> None:
    torch.manual_seed(0)
    model: Any = (
        type("Wrapped", (Net,), {"forward": wrapping(Net.forward)})() if how == "wrapped" else Net()
    )
    if how == "hook":
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"flip": True, **kwargs}), with_kwargs=True
        )
    model.layer.bias.data.fill_(1.0)
    module = compiled(model, (X,))
    assert model(X).item() != pytest.approx(model(X, flip=False).item())
    for kwargs in ({}, {"flip": False}, {"mask": None}):
        torch.testing.assert_close(module(X, **kwargs), model(X, **kwargs))
    assert len(module.variants.known) == 1
