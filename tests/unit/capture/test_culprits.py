"""Errors name the cause (what forward calls, raises or returns), the line and a remedy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CallError, CaptureError


class Net(nn.Module):
    def __init__(self, does: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self.layer(x))


class OwnError(Exception):
    pass


def _raises(x: Tensor) -> Tensor:
    raise ValueError("user error")


def _raises_its_own(x: Tensor) -> Tensor:
    raise OwnError("of a class of its own")


def _asserts(x: Tensor) -> Tensor:
    assert x.shape[1] == 5, "five columns"
    return x


def _misses_a_name(x: Tensor) -> Tensor:
    return x * scale  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _ctc(x: Tensor) -> Tensor:
    return torch.ctc_loss(
        x.view(4, 1, 4).log_softmax(-1),
        torch.tensor([[1, 2]]),
        torch.tensor([4]),
        torch.tensor([2]),
    ).mean()


def _packs(x: Tensor) -> Tensor:
    return nn.utils.rnn.pack_padded_sequence(
        x.unsqueeze(-1), torch.tensor([4, 3, 2, 1]), batch_first=True
    ).data


def _refusal(model: nn.Module) -> Any:
    with pytest.raises(CaptureError) as refused:
        capture(model, (torch.randn(4, 4),))
    return refused.value


@pytest.mark.parametrize(
    ("does", "what", "line", "remedy"),
    [
        (
            lambda x: x * random.random(),
            "Python's generator (random",
            "random.random()",
            "torch.rand",
        ),
        (
            lambda x: x * random.randint(1, 9),
            "Python's generator (random)",
            "random.randint(1, 9)",
            "torch.rand",
        ),
        (
            lambda x: x * time.time(),
            "forward calls time.time",
            "time.time()",
            "outside the model",
        ),
        (
            _packs,
            "forward calls pack_padded_sequence",
            "pack_padded_sequence(",
            "run the recurrent layer on the padded batch",
        ),
        (_ctc, "torch.ctc_loss", "torch.ctc_loss(", "call F.ctc_loss"),
    ],
    ids=["random", "randint", "time", "packed", "ctc"],
)
def test_an_unsupported_call_of_forward_is_named(
    does: Callable[[Tensor], Any], what: str, line: str, remedy: str
) -> None:
    refusal = _refusal(Net(does))
    assert what in refusal.what and line in refusal.where.source and remedy in refusal.remedy
    assert not isinstance(refusal, CallError)


@pytest.mark.parametrize(
    ("does", "what", "line"),
    [
        (_raises, "forward raises ValueError: user error", 'raise ValueError("user error")'),
        (
            _raises_its_own,
            "forward raises OwnError: of a class of its own",
            "raise OwnError(",
        ),
        (_asserts, "forward raises AssertionError: five columns", "assert x.shape[1] == 5"),
        (
            _misses_a_name,
            "forward raises NameError: name 'scale' is not defined",
            "return x * scale",
        ),
    ],
)
def test_an_exception_of_forward_is_reported_with_its_line(
    does: Callable[[Tensor], Any], what: str, line: str
) -> None:
    refusal = _refusal(Net(does))
    assert isinstance(refusal, CallError) and what == refusal.what
    assert line in str(refusal.where) and "x (4, 4)" in refusal.remedy


@pytest.mark.parametrize("returned", [None, (None,), "text", 3.0])
def test_a_forward_that_returns_no_tensor_is_refused(returned: Any) -> None:
    refusal = _refusal(Net(lambda x: returned))
    assert refusal.what == "forward returns no tensor" and "loss" in refusal.remedy


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(4, 4))]
)
@pytest.mark.parametrize("path", ["", "1"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_module_is_refused_with_its_path(
    make: Callable[[nn.Module], nn.Module], path: str
) -> None:
    scripted = make(nn.Linear(4, 4))
    refusal = _refusal(nn.Sequential(nn.Linear(4, 4), scripted) if path else scripted)
    assert (
        "TorchScript" in refusal.what
        and refusal.where.module == path
        and "nn.Module" in refusal.remedy
    )


def test_a_compiled_model_is_refused_and_compiled_submodules_are_captured() -> None:
    assert "model._orig_mod" in _refusal(torch.compile(nn.Linear(4, 4))).remedy
    assert capture(
        nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.Linear(4, 4)), (torch.randn(4, 4),)
    ).graph.nodes
