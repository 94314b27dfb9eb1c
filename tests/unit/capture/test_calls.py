"""A call that the plain model does not accept is refused as a wrong call, not as a model that
cannot be captured."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CallError, CaptureError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        hidden = torch.relu(self.first(x))
        return F.cross_entropy(self.last(hidden) * scale, y)


class OfBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self.layer(batch["x"]), batch["t"])


class Reading(nn.Module):
    """A model that the capture refuses, but that runs eagerly."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def batch(samples: int = 8, width: int = 16, labels: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, width), torch.zeros(
        samples if labels is None else labels, dtype=torch.int64
    )


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (batch()[:1], {}, r"^forward\(\) is missing 'y'\n.*call it as forward\(x, y, …\)"),
    ((), {}, r"^forward\(\) is missing 'x', 'y'\n"),
    ((*batch(), 1), {}, r"^forward\(\) takes 2 positional arguments, but 3 were passed\n"),
    (batch(), {"scal": 2.0}, r"^forward\(\) has no argument 'scal'\n"),
    (batch(), {"x": batch()[0]}, r"^forward\(\): multiple values for argument 'x'"),
]


@pytest.mark.parametrize(("args", "kwargs", "says"), WRONG)
def test_arguments_that_do_not_match_the_signature_are_named(
    args: Any, kwargs: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CallError, match=says):
        capture(Net(), args, kwargs)
    module: Any = autopar.compile(Net(), 1, example_inputs=batch(), hardware="cpu-gloo")
    with pytest.raises(CallError, match=says):
        module(*args, **kwargs)
    assert not module.variants.known and "planning again for this call" not in caplog.text


def test_a_mapping_as_the_only_argument_must_be_passed_in_a_tuple() -> None:
    both = {"x": torch.randn(4, 4), "t": torch.randn(4, 4)}
    with pytest.raises(
        CallError, match=r"^forward\(\) has no argument 'x'; it takes 'batch'[\s\S]*pass \(batch,\)"
    ):
        autopar.compile(OfBatches(), 1, example_inputs=both, hardware="cpu-gloo")
    assert (
        autopar.compile(OfBatches(), 1, example_inputs=(both,), hardware="cpu-gloo")(both).ndim == 0
    )


@pytest.mark.parametrize(
    ("args", "says", "shapes"),
    [
        (
            batch(labels=7),
            r"Expected input batch_size \(8\) to match target batch_size \(7\)",
            "x (8, 16), y (7,)",
        ),
        (batch(width=15), r"\[8, 15\] X \[16, 8\]", "x (8, 15), y (8,)"),
    ],
)
def test_shapes_that_forward_refuses_are_reported_with_its_message_and_line(
    args: Any, says: str, shapes: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    with pytest.raises(
        CallError, match=rf"^forward does not accept this call: .*{says}"
    ) as refusal:
        capture(model, args)
    assert "test_calls.py" in str(refusal.value.where) and "hidden" in str(refusal.value.where)
    assert shapes in refusal.value.remedy and "rewrite the line" not in str(refusal.value)
    assert "Traceback" not in caplog.text and not caplog.records
    assert logging.getLogger("torch._subclasses.fake_tensor").level == logging.NOTSET
    assert isinstance(model(*batch()), Tensor), "the model is unchanged"


def test_an_exception_of_forward_is_reported_with_its_type() -> None:
    class Checks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] % 2:
                raise IndexError("an even number of samples, please")
            return super().forward(x)

    with pytest.raises(
        CallError, match=r"^forward raises IndexError: an even number of samples, please"
    ):
        capture(Checks(4, 4), (torch.randn(3, 4),))


def test_a_limit_of_capture_is_not_reported_as_a_wrong_call() -> None:
    with pytest.raises(CaptureError, match=r"cannot be captured|reads the value") as refusal:
        capture(Reading(), (torch.randn(4),))
    assert not isinstance(refusal.value, CallError)


def test_a_refused_call_leaves_the_attributes_of_the_model_unchanged() -> None:
    class Counts(Net):
        num, seen = 0, [0]

        def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
            self.num += 1
            self.seen.append(1)
            return super().forward(x, y, scale=scale)

    model = Counts()
    model.seen = [0]
    with pytest.raises(CallError):
        capture(model, batch(labels=7))
    assert model.num == 0 and model.seen == [0]


def test_an_error_of_shapes_names_the_module_and_the_shapes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(5, 4)))
    with pytest.raises(CallError, match=r"in module 1\.0[\s\S]*these were input \(8, 4\)"):
        capture(model, (torch.ones(8, 4),))


def test_a_model_that_fails_only_in_a_capture_is_not_said_to_return_no_tensor() -> None:
    class Printing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.ops.aten._print("x")
            return x * 2

    with pytest.raises(CaptureError) as raised:
        capture(Printing(), (torch.ones(8, 4),))
    assert "returns no tensor" not in str(raised.value)
