"""A value that forward reads and a program has as a constant must not change silently between
calls."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
FACTOR = 1.0
TABLE: dict[str, Any] = {"weight": 1.0, "unread": 1.0}
BIAS = torch.zeros(4)
ARRAY = np.ones(4, np.float32)
UNREAD = 1.0


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR * TABLE["weight"] + BIAS


class Scaled(nn.Module):
    size = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.center, self.held = nn.Linear(4, 4), torch.zeros(4), [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.layer(x) - self.center) * self.held[0] * self.size


def made() -> tuple[Any, Any]:
    """Return a model and a function that sets the closure variables of its forward."""
    weights, beta, unread = torch.ones(4), 1.0, 1.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.settings = Scaled(), SimpleNamespace(shift=torch.zeros(4), depth=1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x) * weights * beta + self.settings.shift
            if not self.training:
                hidden = hidden * self.settings.depth
            return hidden.pow(2).mean()

        def other(self) -> float:
            return unread

    def around(**values: Any) -> None:
        nonlocal weights, beta, unread
        weights, beta, unread = (
            values.get("weights", weights),
            values.get("beta", beta),
            values.get("unread", unread),
        )

    torch.manual_seed(0)
    return Net(), around


def _set(place: str, value: Any) -> Callable[[Any, Any, pytest.MonkeyPatch], None]:
    def change(model: Any, around: Any, patch: pytest.MonkeyPatch) -> None:
        exec(f"{place} = value", {"model": model, "value": value})

    return change


CHANGES: dict[str, tuple[Callable[[Any, Any, pytest.MonkeyPatch], Any], str]] = {
    "a tensor set": (
        _set("model.body.center", torch.ones(4)),
        r"the model's body\.center was replaced since",
    ),
    "a tensor written": (
        lambda model, *_: model.body.center.add_(1.0),
        r"the model's body\.center was written since",
    ),
    "in a list": (
        _set("model.body.held[0]", torch.zeros(4)),
        r"the model's body\.held\[0\] was replaced since",
    ),
    "of an object": (
        lambda model, *_: model.settings.shift.add_(1.0),
        r"the model's settings\.shift was written since",
    ),
    "of the class": (_set("model.body.size", 3.0), r"the model's body\.size is 3\.0, but was 2\.0"),
    "a variable": (
        lambda _, around, __: around(beta=2.0),
        r"the variable beta around \S+Net\.forward is 2\.0, but was 1\.0",
    ),
    "a variable's tensor": (
        lambda _, around, __: around(weights=torch.zeros(4)),
        r"the variable weights around \S+ was replaced since",
    ),
    "a global": (
        lambda *given: given[2].setitem(globals(), "FACTOR", 2.0),
        r"the global variable FACTOR of \S*test_frozen is 2\.0",
    ),
    "in a global": (
        lambda *given: given[2].setitem(TABLE, "weight", 3.0),
        r"the global variable TABLE\['weight'\] of \S+ is 3\.0",
    ),
    "a global tensor": (
        lambda *given: given[2].setitem(globals(), "BIAS", torch.ones(4)),
        r"variable BIAS of \S+ was replaced since",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_constant_is_refused_wherever_it_is_stored(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, around = made()
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    before = model(X).item()
    assert module(X).item() == pytest.approx(before)
    change, says = CHANGES[what]
    change(model, around, monkeypatch)
    assert model(X).item() != pytest.approx(before)
    with pytest.raises(RuntimeStateError, match=says):
        module(X)
    monkeypatch.undo()
    if "global" in what:
        module(X)


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.array = nn.Linear(4, 4), np.ones(4, np.float32)
        self.held = {"arrays": [np.ones(4, np.float32)]}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) * torch.from_numpy(self.array) * torch.from_numpy(ARRAY)
        hidden = hidden * torch.from_numpy(self.held["arrays"][0])
        factor = 2.0 if os.environ.get("FACTOR_OF_TESTS") else 1.0
        return hidden.square().mean() * factor


def _fill(array: Any) -> None:
    array[0] = 5.0


READS: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    "array": (lambda m, _: _fill(m.array), "the model's array was written since"),
    "item": (lambda m, _: _fill(m.held["arrays"][0]), "the model's held.* was written since"),
    "global": (
        lambda _, patch: patch.setitem(globals(), "ARRAY", np.zeros(4, np.float32)),
        "ARRAY",
    ),
    "environment": (
        lambda _, patch: patch.setenv("FACTOR_OF_TESTS", "1"),
        "environment variable FACTOR_OF_TESTS is '1', but was None",
    ),
    "forward": (
        lambda m, _: setattr(m.layer, "forward", lambda x: x),
        "forward of the model's 'layer' was replaced since",
    ),
    "class": (
        lambda _, patch: patch.setattr(Read, "forward", lambda self, x: self.layer(x).sum()),
        "forward of the class Read was replaced since",
    ),
}


@pytest.mark.parametrize("what", READS)
def test_changed_arrays_variables_of_the_environment_and_methods_are_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Read()
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    before = model(X).item()
    assert module(X).item() == pytest.approx(before)
    monkeypatch.setenv("UNREAD_BY_TESTS", "1")
    module(X)
    change, says = READS[what]
    change(model, monkeypatch)
    assert model(X).item() != pytest.approx(before)
    with pytest.raises(RuntimeStateError, match=says):
        module(X)
    with pytest.raises(RuntimeStateError, match="forward of a part"):
        module.layer.forward = None
    monkeypatch.undo()
    if what in ("global", "environment", "class"):
        assert module(X).item() == pytest.approx(before)


def test_values_that_forward_does_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, around = made()
    model.unread = torch.zeros(4)
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    model.unread = torch.ones(4)
    model.settings.depth = 3
    around(unread=2.0)
    monkeypatch.setitem(globals(), "UNREAD", 2.0)
    monkeypatch.setitem(TABLE, "unread", 2.0)
    loss = module(X)
    loss.backward()
    assert loss.item() == pytest.approx(model(X).item())


def test_a_constant_may_be_set_back_to_its_value() -> None:
    model, around = made()
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    before, model.body.center = model.body.center, torch.ones(4)
    with pytest.raises(RuntimeStateError, match="was replaced"):
        module(X)
    model.body.center = before
    around(beta=float("1"))
    module(X)


def test_constants_of_the_other_mode_are_checked_in_that_mode() -> None:
    model, _ = made()
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    module.eval()
    module(X)
    model.settings.depth = 3
    with pytest.raises(RuntimeStateError, match=r"the model's settings\.depth is 3, but was 1"):
        module(X)
    module.train()
    module(X)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tensor_that_only_the_other_mode_reads_is_not_copied(when: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.offset = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            return (hidden if self.training else hidden + self.offset).pow(2).mean()

    torch.manual_seed(0)
    model: Any = Net()
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    module.eval()
    if when == "after":
        module(X)
    model.offset.add_(1.0)
    for _ in range(2):
        with pytest.raises(
            RuntimeStateError, match=r"the model's offset (was written|was replaced since)"
        ):
            module(X)
    module.train()
    module(X)


def test_constant_checks_keep_no_reference_to_the_model_and_work_in_copies() -> None:
    model, around = made()
    module: Any = autopar.compile(model, example_inputs=(X,), hardware="cpu-gloo")
    copied, held = copy.deepcopy(module), [weakref.ref(model), weakref.ref(model.body.center)]
    del model
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    copied(X)
    around(beta=2.0)
    with pytest.raises(RuntimeStateError, match="variable beta"):
        copied(X)
