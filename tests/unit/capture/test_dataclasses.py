"""Plain dataclasses as inputs and outputs of a model."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import autopar
from autopar.capture import capture, execute
from autopar.capture.trees import unflatten
from autopar.errors import CaptureError


@dataclass
class Batch:
    """The input of the model."""

    x: Tensor
    y: Tensor
    factor: int = 2


@dataclass
class Parts:
    """A nested part of the output."""

    hidden: list[Tensor]


@dataclass(frozen=True)
class Result:
    """The output of the model."""

    logits: Tensor
    loss: Tensor
    number: int
    parts: Parts | None = None
    missing: Any = None


@dataclass
class Derived:
    """A dataclass that computes one of its fields."""

    loss: Tensor
    double: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.double = self.loss * 2


class Classifier(nn.Module):
    """A model with two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, batch: Batch) -> Result:
        hidden = self.first(batch.x)
        logits = self.second(hidden)
        return Result(
            logits, F.cross_entropy(logits, batch.y) * batch.factor, 3, Parts([hidden, hidden * 2])
        )


def test_dataclasses_are_flattened_by_fields_and_rebuilt() -> None:
    model, batch = Classifier(), Batch(torch.randn(3, 6), torch.tensor([0, 2, 3]))
    trace = capture(model, (batch,))
    assert [entry.path for entry in trace.inputs] == ["0.x", "0.y"]
    assert {entry.path for entry in trace.outputs} == {
        "logits",
        "loss",
        "parts.hidden.0",
        "parts.hidden.1",
    }
    assert [entry.path for entry in trace.outputs if entry.is_loss] == ["loss"]
    outputs, gradients, _ = execute(trace, dict(model.named_parameters()), {}, (batch.x, batch.y))
    expected = model(batch)
    expected.loss.backward()
    tensors = {entry.path: value for entry, value in zip(trace.outputs, outputs, strict=True)}
    leaves = [tensors[path] for path in ("logits", "loss")] + [
        trace.constants[2],
        *(tensors[f"parts.hidden.{i}"] for i in (0, 1)),
    ]
    made = unflatten(leaves, trace.out_spec)
    assert (
        type(made) is Result
        and type(made.parts) is Parts
        and made.number == 3
        and made.missing is None
    )
    torch.testing.assert_close(
        [made.loss, made.logits, *made.parts.hidden],
        [expected.loss, expected.logits, *expected.parts.hidden],
    )  # type: ignore[union-attr]
    torch.testing.assert_close(
        gradients, {name: parameter.grad for name, parameter in model.named_parameters()}
    )


class Named(OrderedDict[str, Any]):
    """A mapping registered with torch by its values only, so that torch does not know its keys."""


class Row:
    """A registered container without names."""

    def __init__(self, *items: Any) -> None:
        self.items = items


pytree.register_pytree_node(
    Named,
    lambda x: (list(x.values()), list(x)),
    lambda values, names: Named(zip(names, values, strict=True)),
)
pytree.register_pytree_node(Row, lambda x: (list(x.items), None), lambda values, _: Row(*values))


def test_registered_containers_are_flattened_by_keys_or_positions_and_rebuilt() -> None:
    class Rows(nn.Linear):
        def forward(self, given: Named) -> Named:
            hidden = super().forward(given["x"])
            return Named(logits=hidden, rows=Row(hidden * 2, {"sum": hidden.sum()}), kind="linear")

    model, given = Rows(4, 3), Named(x=torch.randn(2, 4))
    trace = capture(model, (given,))
    assert [entry.path for entry in trace.inputs] == ["0.x"]
    assert {entry.path for entry in trace.outputs} == {"logits", "rows.0", "rows.1.sum"}
    expected = model(given)
    made = autopar.compile(model, example_inputs=(given,))(given)
    assert type(made) is Named and type(made["rows"]) is Row and made["kind"] == "linear"
    torch.testing.assert_close(made["logits"], expected["logits"])
    torch.testing.assert_close(made["rows"].items, expected["rows"].items)


def test_a_dataclass_that_cannot_be_rebuilt_from_its_fields_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Derived(super().forward(x).sum())

    with pytest.raises(CaptureError, match=r"the dataclass Derived(.|\n)*init=False"):
        capture(Doubled(6, 4), (torch.randn(3, 6),))
